//! The `-o` options of a mount and of a format, with the kernel's names.

use std::fmt;
use std::str::FromStr;

/// The reaction to a device error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The whole file system becomes read-only.
    #[default]
    RemountRo,
    /// The file becomes read-only.
    ZoneRo,
    /// The file becomes unreadable and unwritable.
    ZoneOffline,
    /// The file's size is corrected, and it stays usable.
    Repair,
}

impl OnError {
    /// Every variant.
    pub const ALL: [OnError; 4] =
        [OnError::RemountRo, OnError::ZoneRo, OnError::ZoneOffline, OnError::Repair];

    /// The option value.
    pub const fn name(self) -> &'static str {
        match self {
            OnError::RemountRo => "remount-ro",
            OnError::ZoneRo => "zone-ro",
            OnError::ZoneOffline => "zone-offline",
            OnError::Repair => "repair",
        }
    }
}

/// An invalid option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid -o `{option}`: expected {wanted}")]
pub struct OptionError {
    /// The given option.
    pub option: String,
    /// The valid options.
    pub wanted: &'static str,
}

/// Mount options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountOptions {
    /// The reaction to a device error.
    pub errors: OnError,
    /// Whether the zone of a file is explicitly open while the file is open for writing.
    pub explicit_open: bool,
    /// Whether the file system is read-only from the start.
    pub read_only: bool,
    /// Whether other users may use the mount. Ignored without a mount.
    pub allow_other: bool,
}

const MOUNT_WANTED: &str = "errors=remount-ro, errors=zone-ro, errors=zone-offline, errors=repair, \
                            explicit-open, ro, rw or allow_other, with commas between them";

impl FromStr for MountOptions {
    type Err = OptionError;

    /// Parses options separated by commas; of contradictory options the last one applies.
    fn from_str(text: &str) -> Result<MountOptions, OptionError> {
        let mut options = MountOptions::default();
        for option in text.split(',').filter(|option| !option.is_empty()) {
            let wrong = || OptionError { option: shown(option), wanted: MOUNT_WANTED };
            match option.split_once('=') {
                Some(("errors", word)) => {
                    let found = OnError::ALL.into_iter().find(|errors| errors.name() == word);
                    options.errors = found.ok_or_else(wrong)?;
                }
                None if option == "explicit-open" => options.explicit_open = true,
                None if option == "ro" => options.read_only = true,
                None if option == "rw" => options.read_only = false,
                None if option == "allow_other" => options.allow_other = true,
                _ => return Err(wrong()),
            }
        }
        Ok(options)
    }
}

impl fmt::Display for MountOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.read_only { "ro" } else { "rw" })?;
        write!(f, ",errors={}", self.errors.name())?;
        if self.explicit_open {
            f.write_str(",explicit-open")?;
        }
        if self.allow_other {
            f.write_str(",allow_other")?;
        }
        Ok(())
    }
}

/// Options of a new file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FormatOptions {
    /// Whether contiguous conventional zones become one file.
    pub aggregate_conventional: bool,
    /// Owner of the files.
    pub uid: Option<u32>,
    /// Group of the files.
    pub gid: Option<u32>,
    /// Permissions of the files.
    pub permissions: Option<u16>,
}

const FORMAT_WANTED: &str = "aggr_cnv, uid=NUMBER, gid=NUMBER or perm=OCTAL (at most 777), with \
                             commas between them";

impl FromStr for FormatOptions {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<FormatOptions, OptionError> {
        let mut options = FormatOptions::default();
        for option in text.split(',').filter(|option| !option.is_empty()) {
            let wrong = || OptionError { option: shown(option), wanted: FORMAT_WANTED };
            match option.split_once('=') {
                Some(("uid", id)) => options.uid = Some(parse_id(id).ok_or_else(wrong)?),
                Some(("gid", id)) => options.gid = Some(parse_id(id).ok_or_else(wrong)?),
                Some(("perm", octal)) => {
                    let digits = !octal.is_empty() && octal.bytes().all(|b| b.is_ascii_digit());
                    let bits = u16::from_str_radix(octal, 8).ok();
                    let bits = bits.filter(|bits| digits && *bits <= 0o777);
                    options.permissions = Some(bits.ok_or_else(wrong)?);
                }
                None if option == "aggr_cnv" => options.aggregate_conventional = true,
                _ => return Err(wrong()),
            }
        }
        Ok(options)
    }
}

/// Parses a user or group ID; all ones is not a valid ID.
fn parse_id(text: &str) -> Option<u32> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|id| digits && *id != u32::MAX)
}

/// An option, shortened and escaped for a message.
fn shown(text: &str) -> String {
    text.chars().take(64).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_mount_options_parse_back() {
        let text = "rw,errors=zone-offline,explicit-open";
        assert_eq!(text.parse::<MountOptions>().unwrap().to_string(), text);
        assert_eq!("".parse(), Ok(MountOptions::default()));
        let last: MountOptions = "errors=repair,ro,errors=zone-ro".parse().unwrap();
        assert_eq!((last.errors, last.read_only), (OnError::ZoneRo, true));
        for wrong in ["errors", "errors=", "errors=panic", "explicit-open=1", "noexec", " ro"] {
            let error = wrong.parse::<MountOptions>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("invalid -o `{wrong}`")), "{error}");
        }
    }

    #[test]
    fn format_options_are_bounded() {
        let options: FormatOptions = "aggr_cnv,uid=1000,gid=0,perm=600".parse().unwrap();
        assert_eq!(options.permissions, Some(0o600));
        assert_eq!((options.uid, options.gid), (Some(1000), Some(0)));
        assert!(options.aggregate_conventional);
        for wrong in ["uid=-1", "uid=+1", "uid=4294967295", "uid=", "perm=888", "perm=1777", "x"] {
            assert!(wrong.parse::<FormatOptions>().is_err(), "{wrong}");
        }
    }
}
