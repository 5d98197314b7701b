//! The parameters of devices: URIs, TOML, the JSON schema and the help texts are all made from one
//! table.

use std::fmt;

use crate::size::{self, Bytes};
use crate::suggestion::suggestion;

mod table;

pub use table::{COMMON, KINDS, SCHEDULERS};

/// Older names of parameters, and their present names.
const RENAMED: &[(&str, &str)] = &[("sched", "scheduler")];

/// Synonyms for choices, and the word that is printed.
const SYNONYMS: &[(&str, &str)] = &[("deadline", "mq-deadline")];

/// A kind of device.
#[derive(Debug)]
pub struct DeviceKind {
    /// The kind's name: the scheme of the URI, and `kind` in TOML.
    pub name: &'static str,
    /// A description in one line.
    pub doc: &'static str,
    /// The kind's own parameters, in addition to [`COMMON`].
    pub params: &'static [Param],
    /// The kind's own faults, which `inject` takes as NAME=VALUE.
    pub faults: &'static [&'static str],
    /// Names from other programs, and what to write instead.
    pub hints: &'static [(&'static str, &'static str)],
}

/// One parameter.
#[derive(Debug)]
pub struct Param {
    /// The parameter's name in URIs and in TOML.
    pub name: &'static str,
    /// The form of its values.
    pub form: ValueForm,
    /// The default value, in the form of a URI.
    pub default: &'static str,
    /// The effect, in one line.
    pub doc: &'static str,
}

/// The form of a parameter's values. Bounds are inclusive.
#[derive(Clone, Copy, Debug)]
pub enum ValueForm {
    /// Bytes, with suffixes.
    Size {
        /// Least, in bytes.
        min: u64,
        /// Most, in bytes.
        max: u64,
    },
    /// One of these numbers of bytes, with suffixes.
    Sizes(&'static [u64]),
    /// A number.
    Count {
        /// Least.
        min: u64,
        /// Most.
        max: u64,
    },
    /// A number that may be negative.
    Int {
        /// Least.
        min: i32,
        /// Most.
        max: i32,
    },
    /// A time in milliseconds, as a number or with a unit.
    Millis {
        /// Least.
        min: u64,
        /// Most.
        max: u64,
    },
    /// On or off.
    Switch,
    /// One of these words, or its index in the list.
    Choice(&'static [&'static str]),
    /// Any text.
    Text {
        /// Most, in bytes.
        len_max: usize,
    },
    /// A path. A leading `~/` is the home directory of the user who runs this process.
    Path {
        /// Most, in bytes.
        len_max: usize,
    },
}

/// The value of a parameter, checked against its form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Bytes.
    Size(u64),
    /// A number, or a time in milliseconds.
    Count(u64),
    /// A number that may be negative.
    Int(i32),
    /// On or off.
    Switch(bool),
    /// Position in the list of choices.
    Choice(usize),
    /// A text.
    Text(String),
}

/// The reason for which a parameter was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParamError {
    /// The kind of device has no such parameter.
    #[error("`{kind}` devices have no parameter `{key}`{advice}")]
    UnknownKey {
        /// The kind of device.
        kind: &'static str,
        /// The given name, shortened.
        key: String,
        /// A suggestion: begins with a semicolon, or is empty.
        advice: String,
    },
    /// The value does not fit the parameter.
    #[error("invalid {key} `{value}`: {wanted}")]
    BadValue {
        /// The parameter.
        key: &'static str,
        /// The given value, shortened.
        value: String,
        /// What is expected.
        wanted: String,
    },
}

impl DeviceKind {
    /// The kind with this name.
    pub fn find(name: &str) -> Option<&'static DeviceKind> {
        KINDS.iter().find(|kind| kind.name == name)
    }

    /// The kind's own parameters, then the common ones.
    pub fn params(&self) -> impl Iterator<Item = &'static Param> + use<> {
        self.params.iter().chain(COMMON)
    }

    /// The parameter with this name, or with this older name.
    ///
    /// # Errors
    /// If there is none; the error suggests one.
    pub fn param(&'static self, key: &str) -> Result<&'static Param, ParamError> {
        let renamed = RENAMED.iter().find(|(older, _)| *older == key);
        let name = renamed.map_or(key, |(_, name)| name);
        self.params().find(|param| param.name == name).ok_or_else(|| {
            let hint = self.hints.iter().find(|(name, _)| *name == key);
            let advice = match hint {
                Some((_, hint)) => format!("; {hint}"),
                None => suggestion(key, self.params().map(|param| param.name)),
            };
            ParamError::UnknownKey { kind: self.name, key: shown(key), advice }
        })
    }
}

impl Param {
    /// Whether its value is the path of a file, directory or device.
    pub fn is_path(&self) -> bool {
        matches!(self.form, ValueForm::Path { .. })
    }

    /// Parses a value in the form of a URI.
    ///
    /// # Errors
    /// If the text does not have the parameter's form, or is out of its bounds.
    pub fn parse(&self, text: &str) -> Result<Value, ParamError> {
        let value = match self.form {
            ValueForm::Size { .. } | ValueForm::Sizes(_) => size::parse(text).ok().map(Value::Size),
            ValueForm::Count { .. } => {
                let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
                plain.then(|| text.parse().ok().map(Value::Count)).flatten()
            }
            ValueForm::Int { .. } => int(text).map(Value::Int),
            ValueForm::Millis { .. } => millis(text).map(Value::Count),
            ValueForm::Switch => switch(text).map(Value::Switch),
            ValueForm::Choice(words) => {
                let synonym = SYNONYMS.iter().find(|(other, _)| *other == text);
                let text = synonym.map_or(text, |(_, word)| word);
                let is_meant =
                    |(index, word): (usize, &&str)| *word == text || index.to_string() == text;
                words.iter().enumerate().position(is_meant).map(Value::Choice)
            }
            ValueForm::Text { .. } => Some(Value::Text(text.to_owned())),
            ValueForm::Path { .. } => expand_home(text).map(Value::Text),
        };
        value.filter(|value| self.fits(value)).ok_or_else(|| self.refuse(text))
    }

    /// Whether a value has the parameter's form and is within its bounds.
    pub fn fits(&self, value: &Value) -> bool {
        match (self.form, value) {
            (ValueForm::Size { min, max }, Value::Size(value))
            | (
                ValueForm::Count { min, max } | ValueForm::Millis { min, max },
                Value::Count(value),
            ) => (min..=max).contains(value),
            (ValueForm::Sizes(sizes), Value::Size(value)) => sizes.contains(value),
            (ValueForm::Int { min, max }, Value::Int(value)) => (min..=max).contains(value),
            (ValueForm::Switch, Value::Switch(_)) => true,
            (ValueForm::Choice(words), Value::Choice(index)) => *index < words.len(),
            (ValueForm::Text { len_max } | ValueForm::Path { len_max }, Value::Text(text)) => {
                text.len() <= len_max && !text.chars().any(char::is_control)
            }
            _ => false,
        }
    }

    /// The error for an invalid value.
    pub fn refuse(&self, value: &str) -> ParamError {
        ParamError::BadValue { key: self.name, value: shown(value), wanted: self.wanted() }
    }

    /// What is expected, as the end of a sentence.
    pub fn wanted(&self) -> String {
        match self.form {
            ValueForm::Size { min, max } => {
                format!("expected {} from {} to {}", size::WANTED, Bytes(min), Bytes(max))
            }
            ValueForm::Sizes(sizes) => {
                let sizes: Vec<_> = sizes.iter().map(u64::to_string).collect();
                format!("expected one of {}", sizes.join(", "))
            }
            ValueForm::Count { min, max: u64::MAX } => format!("expected a number from {min} on"),
            ValueForm::Count { min, max } => format!("expected a number from {min} to {max}"),
            ValueForm::Int { min, max } => format!("expected a number from {min} to {max}"),
            ValueForm::Millis { min, max } => {
                format!("expected milliseconds from {min} to {max}, e.g. 500, 500ms or 5s")
            }
            ValueForm::Switch => format!("expected {SWITCH_WORDS}"),
            ValueForm::Choice(words) => {
                format!("expected one of {}, or its number from 0 on", words.join(", "))
            }
            ValueForm::Text { len_max } => {
                format!("expected at most {len_max} bytes of text without control characters")
            }
            ValueForm::Path { len_max } => format!(
                "expected a path of at most {len_max} bytes without control characters; `~/` at \
                 its beginning is $HOME, and `~USER` is not supported: write the whole path, or \
                 `./~USER` for a directory of that name"
            ),
        }
    }

    /// A word for the form, as in `size=SIZE`.
    pub fn placeholder(&self) -> String {
        match self.form {
            ValueForm::Size { .. } | ValueForm::Sizes(_) => "SIZE".to_owned(),
            ValueForm::Count { .. } | ValueForm::Int { .. } => "N".to_owned(),
            ValueForm::Millis { .. } => "MS".to_owned(),
            ValueForm::Switch => "0|1".to_owned(),
            ValueForm::Choice(words) => {
                // Levels, such as `zstd:1` to `zstd:19`, are shown as a range.
                let (levels, plain): (Vec<_>, Vec<_>) =
                    words.iter().copied().partition(|word| word.contains(':'));
                let range = levels.first().zip(levels.last());
                let range = range.map(|(first, last)| format!("{first}..{last}"));
                plain.into_iter().map(str::to_owned).chain(range).collect::<Vec<_>>().join("|")
            }
            ValueForm::Text { .. } => "TEXT".to_owned(),
            ValueForm::Path { .. } => "PATH".to_owned(),
        }
    }

    /// The default value.
    pub fn default_value(&self) -> Value {
        self.parse(self.default).expect("a test parses every default of the table")
    }

    /// Prints a value in the form of a URI, before percent-encoding.
    pub fn print(&self, value: &Value) -> String {
        match (self.form, value) {
            (ValueForm::Choice(words), Value::Choice(index)) => words[*index].to_owned(),
            (_, Value::Size(bytes)) => Bytes(*bytes).to_string(),
            (_, Value::Count(count)) => count.to_string(),
            (_, Value::Int(number)) => number.to_string(),
            (_, Value::Switch(on)) => u8::from(*on).to_string(),
            (_, Value::Text(text)) => text.clone(),
            (_, Value::Choice(index)) => index.to_string(),
        }
    }
}

impl fmt::Display for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.placeholder())
    }
}

/// The words for on and off, in URIs and in TOML.
pub(crate) const SWITCH_WORDS: &str = "1 or 0 (true or false, yes or no, on or off)";

/// Parses a switch.
pub(crate) fn switch(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "y" | "yes" | "on" | "true" => Some(true),
        "0" | "n" | "no" | "off" | "false" => Some(false),
        _ => None,
    }
}

/// Replaces a leading `~` by the home directory. `None` for another user's home directory, or if
/// this user's is not known.
pub(crate) fn expand_home(text: &str) -> Option<String> {
    expand_tilde(text, std::env::var("HOME").ok().as_deref())
}

fn expand_tilde(text: &str, home: Option<&str>) -> Option<String> {
    let Some(rest) = text.strip_prefix('~') else { return Some(text.to_owned()) };
    let is_own = rest.is_empty() || rest.starts_with('/');
    let home = home.filter(|home| is_own && home.starts_with('/'))?;
    Some(format!("{}{rest}", home.trim_end_matches('/')))
}

/// Parses a number with an optional minus sign.
fn int(text: &str) -> Option<i32> {
    text.parse().ok().filter(|_| !text.starts_with('+'))
}

/// Parses a time in milliseconds: a number, optionally followed by `ms` or `s`.
fn millis(text: &str) -> Option<u64> {
    let (digits, unit) = match text.strip_suffix("ms") {
        Some(digits) => (digits, 1),
        None => text.strip_suffix('s').map_or((text, 1), |digits| (digits, 1000)),
    };
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse::<u64>().ok().filter(|_| plain)?.checked_mul(unit)
}

/// Untrusted text for a message: without control characters, and shortened.
pub fn shown(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    let mut out: String = text.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(CHARS_MAX).is_some() {
        out.push_str("...");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn null() -> &'static DeviceKind {
        DeviceKind::find("null").unwrap()
    }

    #[test]
    fn every_default_fits_its_form_and_prints_back() {
        for kind in KINDS {
            for param in kind.params() {
                let value = param.parse(param.default).expect(param.name);
                assert_eq!(param.parse(&param.print(&value)), Ok(value), "{}", param.name);
            }
        }
    }

    #[test]
    fn no_name_stands_twice() {
        for kind in KINDS {
            let mut names: Vec<_> = kind.params().map(|param| param.name).collect();
            names.push("name");
            names.push("kind");
            names.sort_unstable();
            let count = names.len();
            names.dedup();
            assert_eq!(names.len(), count, "{}", kind.name);
        }
    }

    #[test]
    fn an_unknown_key_gets_advice() {
        let error = null().param("zonesize").unwrap_err().to_string();
        assert_eq!(error, "`null` devices have no parameter `zonesize`; did you mean `zone_size`?");
        let error = null().param("gb").unwrap_err().to_string();
        assert!(error.contains("size=10G"), "{error}");
        let error = null().param("frobnicate").unwrap_err().to_string();
        assert_eq!(error, "`null` devices have no parameter `frobnicate`");
    }

    #[test]
    fn values_are_bounded() {
        let bs = null().param("bs").unwrap();
        assert_eq!(bs.parse("4k"), Ok(Value::Size(4096)));
        let error = bs.parse("100").unwrap_err().to_string();
        assert!(
            error.starts_with("invalid bs `100`: expected one of 512, 1024, 2048, 4096"),
            "{error}"
        );
        let depth = null().param("hw_queue_depth").unwrap();
        for text in ["0", "-1", "+1", "", "1k", "99999999999999999999999"] {
            assert!(depth.parse(text).is_err(), "{text}");
        }
        let irqmode = null().param("irqmode").unwrap();
        assert_eq!(irqmode.parse("timer"), Ok(Value::Choice(2)));
        assert_eq!(irqmode.parse("2"), Ok(Value::Choice(2)));
        assert!(irqmode.parse("3").is_err());
        let zoned = null().param("zoned").unwrap();
        assert_eq!(zoned.parse("Y"), Ok(Value::Switch(true)));
        assert!(zoned.parse("2").is_err());
        let trace = null().param("trace").unwrap();
        assert!(trace.parse("a\nb").is_err());
    }

    /// The bug: `path=~/x` in a URI made a directory named `~`, because the shell expands `~` only
    /// at the beginning of a word.
    #[test]
    fn a_leading_tilde_is_the_home_directory() {
        let expand = |text: &str| expand_tilde(text, Some("/h"));
        for (text, path) in [
            ("~/x", "/h/x"),
            ("~", "/h"),
            ("/a/~/x", "/a/~/x"),
            ("./~me", "./~me"),
            ("x~", "x~"),
            ("", ""),
        ] {
            assert_eq!(expand(text).as_deref(), Some(path), "{text}");
        }
        assert_eq!(expand("~other/x"), None);
        for home in [None, Some(""), Some("h")] {
            assert_eq!(expand_tilde("~/x", home), None, "{home:?}");
        }
        let trace = null().param("trace").unwrap();
        let error = trace.parse("~other/x").unwrap_err().to_string();
        assert!(error.starts_with("invalid trace `~other/x`: expected a path"), "{error}");
        for kind in KINDS {
            for param in kind.params().filter(|param| matches!(param.form, ValueForm::Text { .. }))
            {
                let is_path = ["path", "file", "folder", "directory", "/dev/"];
                let is_path = is_path.into_iter().any(|word| param.doc.contains(word));
                assert!(!is_path || param.name == "commit", "{} takes a path", param.name);
            }
        }
    }

    #[test]
    fn a_time_is_a_number_or_has_a_unit() {
        let expire = null().param("read_expire").unwrap();
        for (text, millis) in [("0", 0), ("500", 500), ("500ms", 500), ("5s", 5000)] {
            assert_eq!(expire.parse(text), Ok(Value::Count(millis)), "{text}");
        }
        for text in ["", "ms", "s", "-1", "+1", "5 s", "5us", "5m", "2147483648", "2147484s"] {
            let error = expire.parse(text).unwrap_err().to_string();
            let wanted = "expected milliseconds from 0 to 2147483647, e.g. 500, 500ms or 5s";
            assert_eq!(error, format!("invalid read_expire `{text}`: {wanted}"));
        }
        assert!(expire.parse("99999999999999999999s").is_err());
    }

    #[test]
    fn a_number_may_be_negative_where_linux_takes_that() {
        let starved = null().param("writes_starved").unwrap();
        assert_eq!(starved.parse("-2147483648"), Ok(Value::Int(i32::MIN)));
        assert_eq!(starved.parse("5"), Ok(Value::Int(5)));
        for text in ["", "-", "+1", "1.5", "2147483648", "-2147483649", "--1"] {
            let error = starved.parse(text).unwrap_err().to_string();
            assert!(error.ends_with("a number from -2147483648 to 2147483647"), "{error}");
        }
    }

    #[test]
    fn the_scheduler_has_another_name_and_so_has_one_of_them() {
        let param = null().param("sched").unwrap();
        assert_eq!(param.name, "scheduler");
        assert_eq!(param.parse("deadline"), param.parse("mq-deadline"));
        assert_eq!(param.print(&param.parse("deadline").unwrap()), "mq-deadline");
        let error = param.parse("bfq").unwrap_err().to_string();
        assert!(error.ends_with("expected one of none, mq-deadline, or its number from 0 on"));
    }

    #[test]
    fn foreign_text_is_shown_short_and_clean() {
        assert_eq!(shown("a\x1b[31m"), "a\\u{1b}[31m");
        assert!(shown(&"x".repeat(10_000)).len() < 100);
    }
}
