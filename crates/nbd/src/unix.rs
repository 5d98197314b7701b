//! Listening unix sockets: their paths, their permissions, and how they are made.
//!
//! ```text
//! PATH[?owner=USER&group=GROUP&mode=OCTAL]
//! ```
//!
//! A socket has its final mode before it listens, whatever the umask: at no moment can another user
//! connect.
#![allow(clippy::disallowed_types)] // A lock of the control plane.

use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, lchown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use blockyard_os::socket;

use crate::endpoint::{ListenError, SocketAccess, UnixPlace};

/// Held from the creation of a socket until it listens: meanwhile another thread would take it for
/// that of a server that has ended.
static LISTENING: Mutex<()> = Mutex::new(());

/// Listens at a path. The socket of a server that has ended is replaced; any other file is not.
///
/// # Errors
/// If another server listens there, the file there is no socket, the owner or group does not exist,
/// or the system refuses.
pub fn listen_unix(place: &UnixPlace) -> Result<UnixListener, ListenError> {
    let path = &place.path;
    let system =
        |source| ListenError::System { endpoint: format!("unix:{}", path.display()), source };
    let known = |what: &'static str, name: &str, id: Option<u32>| {
        id.ok_or_else(|| ListenError::Unknown { what, name: name.to_owned() })
    };
    let SocketAccess { owner, group, .. } = &place.access;
    let owner =
        owner.as_deref().map(|name| known("owner", name, socket::user_id(name))).transpose();
    let group =
        group.as_deref().map(|name| known("group", name, socket::group_id(name))).transpose();
    let ids = (owner?, group?);
    let _listening = LISTENING.lock().unwrap_or_else(PoisonError::into_inner);
    let mode = place.access.mode();
    let socket = match socket::bind_unix(path, mode) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            remove_stale(path)?;
            socket::bind_unix(path, mode)
        }
        bound => bound,
    };
    let socket = socket.map_err(system)?;
    let listening = settle(path, mode, ids).and_then(|()| socket::listen(&socket));
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
        assert!(
            error.contains("invalid group `no-such-group`: the system has no such group"),
            "{error}"
        );
        std::fs::remove_file(&path).unwrap();
    }
}
