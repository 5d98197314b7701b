//! Listening unix sockets: their paths, their permissions, and how they are made.
//!
//! ```text
//! PATH[?owner=USER&group=GROUP&mode=OCTAL]
//! ```
//!
//! A socket has its final mode before it listens, whatever the umask: at no moment can another user
//! connect.

use std::fmt;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, lchown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::nbd::endpoint::check_socket_path;
use crate::nbd::listener::ListenError;
use crate::nbd::sys;

/// The default mode of a socket: only its owner can connect.
const MODE: u32 = 0o600;

/// The default mode of a socket with a group: the group can connect too.
const GROUP_MODE: u32 = 0o660;

/// The users that can connect to a unix socket; root always can.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The name or number of the user that owns the socket; by default the server's.
    pub owner: Option<String>,
    /// The name or number of the socket's group; by default the server's.
    pub group: Option<String>,
    /// The permission bits; by default 0600, or 0660 with a group.
    pub mode: Option<u32>,
}

impl Access {
    /// The permission bits of the socket.
    pub fn mode(&self) -> u32 {
        self.mode.unwrap_or(if self.group.is_some() { GROUP_MODE } else { MODE })
    }
}

/// The path of a socket, and the users that can connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnixPlace {
    /// The socket's path.
    pub path: PathBuf,
    /// The users that can connect.
    pub access: Access,
}

impl UnixPlace {
    /// Parses `PATH[?owner=USER&group=GROUP&mode=OCTAL]`.
    ///
    /// # Errors
    /// The reason for which it is invalid.
    pub fn read(text: &str) -> Result<UnixPlace, &'static str> {
        let (path, options) = text.split_once('?').map_or((text, None), |(a, b)| (a, Some(b)));
        let mut place = UnixPlace::from(PathBuf::from(path));
        check_socket_path(&place.path)?;
        for option in options.into_iter().flat_map(|options| options.split('&')) {
            let access = &mut place.access;
            let twice = match option.split_once('=') {
                Some((_, "")) => return Err("an option of the socket has no value"),
                Some(("owner", name)) => access.owner.replace(name.to_owned()).is_some(),
                Some(("group", name)) => access.group.replace(name.to_owned()).is_some(),
                Some(("mode", digits)) => {
                    let octal = digits.bytes().all(|digit| matches!(digit, b'0'..=b'7'));
                    let mode = u32::from_str_radix(digits, 8).ok().filter(|_| octal);
                    let mode = mode.filter(|mode| *mode <= 0o777);
                    let mode = mode.ok_or("the mode must be octal, from 0 to 777")?;
                    access.mode.replace(mode).is_some()
                }
                _ => return Err("a socket's options are owner=USER, group=GROUP and mode=OCTAL"),
            };
            if twice {
                return Err("an option of the socket is given twice");
            }
        }
        Ok(place)
    }
}

impl From<PathBuf> for UnixPlace {
    fn from(path: PathBuf) -> UnixPlace {
        UnixPlace { path, access: Access::default() }
    }
}

impl fmt::Display for UnixPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Access { owner, group, mode } = &self.access;
        let given = [
            owner.as_ref().map(|name| format!("owner={name}")),
            group.as_ref().map(|name| format!("group={name}")),
            mode.map(|mode| format!("mode={mode:04o}")),
        ];
        write!(f, "{}", self.path.display())?;
        let separators = std::iter::once('?').chain(std::iter::repeat('&'));
        let mut given = given.into_iter().flatten().zip(separators);
        given.try_for_each(|(option, separator)| write!(f, "{separator}{option}"))
    }
}

/// Listens at a path. The socket of a server that has ended is replaced; any other file is not.
///
/// # Errors
/// If another server listens there, the file there is no socket, the owner or group does not exist,
/// or the system refuses.
pub fn listen_unix(place: &UnixPlace) -> Result<UnixListener, ListenError> {
    let path = &place.path;
    let system =
        |source| ListenError::System { endpoint: format!("unix:{}", path.display()), source };
    let known = |what: &str, name: &str, id: Option<u32>| {
        id.ok_or_else(|| io::Error::other(format!("{what} `{name}` does not exist")))
    };
    let Access { owner, group, .. } = &place.access;
    let owner = owner.as_deref().map(|name| known("user", name, sys::user_id(name))).transpose();
    let group = group.as_deref().map(|name| known("group", name, sys::group_id(name))).transpose();
    let ids = (owner.map_err(system)?, group.map_err(system)?);
    let mode = place.access.mode();
    let socket = match sys::bind_unix(path, mode) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            remove_stale(path)?;
            sys::bind_unix(path, mode)
        }
        bound => bound,
    };
    let socket = socket.map_err(system)?;
    let listening = settle(path, mode, ids).and_then(|()| sys::listen(&socket));
    match listening {
        Ok(()) => Ok(UnixListener::from(socket)),
        Err(error) => {
            // It was made just now, and does not listen yet.
            let _ = std::fs::remove_file(path);
            Err(system(error))
        }
    }
}

/// Sets the owner and group of a new socket, and the mode bits that the umask removed.
fn settle(path: &Path, mode: u32, (owner, group): (Option<u32>, Option<u32>)) -> io::Result<()> {
    if owner.is_some() || group.is_some() {
        lchown(path, owner, group)?;
    }
    if std::fs::symlink_metadata(path)?.mode() & 0o777 != mode {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode))?;
    }
    Ok(())
}

/// Removes the socket of a server that has ended.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let system =
        |source| ListenError::System { endpoint: format!("unix:{}", path.display()), source };
    let metadata = std::fs::symlink_metadata(path).map_err(system)?;
    if !metadata.file_type().is_socket() {
        return Err(ListenError::NotASocket(path.to_owned()));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(ListenError::InUse(path.to_owned())),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(system)
        }
        Err(error) => Err(system(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_socket_are_read_and_printed() {
        for text in ["/run/x", "/run/x?group=kvm", "/x?owner=a&group=7&mode=0640", "/x?mode=0666"] {
            assert_eq!(UnixPlace::read(text).unwrap().to_string(), text);
        }
        let cases = [
            ("/x?", "options are"),
            ("/x?groups=kvm", "options are"),
            ("/x?group=", "no value"),
            ("/x?group=a&group=b", "given twice"),
            ("/x?mode=8", "octal"),
            ("/x?mode=1777", "octal"),
            ("/x?mode=+7", "octal"),
            ("?mode=7", "path is missing"),
        ];
        for (text, wanted) in cases {
            let error = UnixPlace::read(text).unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    /// The bug: NBD sockets had the mode that the umask left: 0777 with a umask of 000, so that any
    /// local user could connect.
    #[test]
    fn a_socket_has_its_mode_and_group_and_no_other_access() {
        let name = format!("blockyard-unix-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let group = std::fs::metadata("/proc/self").unwrap().gid();
        let cases = [
            (String::new(), 0o600),
            (format!("?group={group}"), 0o660),
            (format!("?group={group}&mode=600"), 0o600),
            ("?mode=666".to_owned(), 0o666),
        ];
        for (options, mode) in cases {
            let place = UnixPlace::read(&format!("{}{options}", path.display())).unwrap();
            let listener = listen_unix(&place).unwrap();
            let found = std::fs::symlink_metadata(&path).unwrap();
            assert_eq!((found.mode() & 0o777, found.gid()), (mode, group), "{options}");
            let error = listen_unix(&place).unwrap_err();
            assert!(matches!(error, ListenError::InUse(_)), "{error}");
            UnixStream::connect(&path).unwrap();
            drop(listener);
        }
        let place = UnixPlace::read(&format!("{}?group=no-such-group", path.display())).unwrap();
        let error = listen_unix(&place).unwrap_err().to_string();
        assert!(error.contains("group `no-such-group` does not exist"), "{error}");
        std::fs::remove_file(&path).unwrap();
    }
}
