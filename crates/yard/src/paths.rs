//! The default paths of sockets and pools: one rule for the daemon and the commands.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// File name of the control socket.
pub const CONTROL_SOCKET: &str = "control.sock";

/// File name of the NBD socket.
pub const NBD_SOCKET: &str = "nbd.sock";

/// The environment variable with the control socket, for the commands and the daemon.
pub const CONTROL_VARIABLE: &str = "BLOCKYARD_CONTROL";

/// The environment variable with the state directory, for the commands and the daemon.
pub const STATE_VARIABLE: &str = "BLOCKYARD_STATE";

/// The state directory that was set for this process.
static STATE: OnceLock<PathBuf> = OnceLock::new();

/// The directory for data that survive a yard: the one that was set; `$BLOCKYARD_STATE`;
/// `$XDG_STATE_HOME/blockyard`; `~/.local/state/blockyard`; without a home `/var/lib/blockyard`.
pub fn state_dir() -> PathBuf {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|it| it.is_absolute());
    if let Some(path) = STATE.get().cloned().or_else(|| variable(STATE_VARIABLE)) {
        return path;
    }
    choose_state(variable("XDG_STATE_HOME"), variable("HOME"))
}

fn choose_state(xdg: Option<PathBuf>, home: Option<PathBuf>) -> PathBuf {
    let state = xdg.or_else(|| Some(home?.join(".local/state")));
    state.map_or_else(|| "/var/lib/blockyard".into(), |state| state.join("blockyard"))
}

/// Sets the state directory of this process, once.
///
/// # Errors
/// If the path is unusable.
pub fn set_state_dir(path: &Path) -> io::Result<()> {
    let path = std::path::absolute(path)?;
    match STATE.get_or_init(|| path.clone()) == &path {
        true => Ok(()),
        false => Err(io::Error::other("the state directory was set before")),
    }
}

/// The runtime directory, and whether it is only a fallback.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeDir {
    /// The directory.
    pub path: PathBuf,
    /// Whether neither `$XDG_RUNTIME_DIR` nor `/run` is usable.
    pub last_resort: bool,
}

/// The runtime directory: `$XDG_RUNTIME_DIR/blockyard`; for root `/run/blockyard`; otherwise
/// `blockyard-UID` in the directory for temporary files.
pub fn runtime_dir() -> RuntimeDir {
    let uid = rustix::process::geteuid().as_raw();
    choose(std::env::var_os("XDG_RUNTIME_DIR"), uid, &std::env::temp_dir())
}

fn choose(xdg: Option<OsString>, uid: u32, temp: &Path) -> RuntimeDir {
    let xdg = xdg.map(PathBuf::from).filter(|path| path.is_absolute() && path.is_dir());
    match xdg {
        Some(path) => RuntimeDir { path: path.join("blockyard"), last_resort: false },
        None if uid == 0 => {
            RuntimeDir { path: PathBuf::from("/run/blockyard"), last_resort: false }
        }
        None => RuntimeDir { path: temp.join(format!("blockyard-{uid}")), last_resort: true },
    }
}

/// Checks a control socket that a command connects to. In the directory for temporary files another
/// user may have made this user's runtime directory, with a socket of their own in it.
///
/// # Errors
/// If the socket is in such a directory, and another user can write to that.
pub(crate) fn check_control_socket(socket: &Path) -> io::Result<()> {
    check_socket_in(&runtime_dir(), socket)
}

fn check_socket_in(runtime: &RuntimeDir, socket: &Path) -> io::Result<()> {
    if !runtime.last_resort || socket.parent() != Some(&runtime.path) {
        return Ok(());
    }
    match check_private_dir(&runtime.path) {
        // The connection reports that.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        checked => checked,
    }
}

/// The control socket that the commands use by default.
pub fn control_socket() -> PathBuf {
    match std::env::var_os(CONTROL_VARIABLE).filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => runtime_dir().path.join(CONTROL_SOCKET),
    }
}

/// Makes a directory for its owner only, and checks an existing one: another user who owns the
/// directory could replace sockets in it.
///
/// # Errors
/// If it cannot be made, or belongs to another user, or other users may write to it.
pub fn make_private_dir(path: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        result => return result,
    }
    check_private_dir(path)
}

/// Checks that only this user can write to a directory.
///
/// # Errors
/// If it does not exist, or belongs to another user, or other users may write to it.
fn check_private_dir(path: &Path) -> io::Result<()> {
    let metadata = std::fs::symlink_metadata(path)?;
    let own = metadata.uid() == rustix::process::geteuid().as_raw();
    if !metadata.is_dir() || !own || metadata.mode() & 0o022 != 0 {
        let message = format!("{} must be a directory that only you can write to", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    Ok(())
}

/// A private directory for temporary sockets, removed when dropped.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    /// Makes a directory.
    ///
    /// # Errors
    /// If the directory for temporary files cannot be written to.
    pub fn new() -> io::Result<TempDir> {
        let base = std::env::temp_dir();
        let mut last = None;
        for number in 0..100 {
            let path = base.join(format!("blockyard-{}-{number}", std::process::id()));
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(TempDir(path)),
                Err(error) => last = Some(error),
            }
        }
        Err(last.expect("there was at least one attempt"))
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        // A directory that cannot be removed stays; the process is ending.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn state_lies_where_the_system_has_it() {
        let path = |text: &str| Some(PathBuf::from(text));
        let at = |xdg, home| choose_state(xdg, home).display().to_string();
        assert_eq!(at(path("/s"), path("/h")), "/s/blockyard");
        assert_eq!(at(None, path("/h")), "/h/.local/state/blockyard");
        assert_eq!(at(None, None), "/var/lib/blockyard");
    }

    #[test]
    fn the_rule_has_three_steps() {
        let temp = Path::new("/tmp");
        let at = |xdg: Option<&str>, uid| choose(xdg.map(OsString::from), uid, temp);
        assert_eq!(at(Some("/tmp"), 0).path, Path::new("/tmp/blockyard"));
        assert_eq!(at(Some("/tmp"), 5).path, Path::new("/tmp/blockyard"));
        assert_eq!(at(None, 0).path, Path::new("/run/blockyard"));
        assert_eq!(at(Some("relative"), 0).path, Path::new("/run/blockyard"));
        assert_eq!(at(Some("/no/such/place"), 0).path, Path::new("/run/blockyard"));
        let last = at(None, 5);
        assert_eq!((last.path.as_path(), last.last_resort), (Path::new("/tmp/blockyard-5"), true));
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_refused() {
        let temp = TempDir::new().unwrap();
        let path = temp.path().join("run");
        make_private_dir(&path).unwrap();
        make_private_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(make_private_dir(&path).is_err());
        std::fs::write(temp.path().join("file"), "").unwrap();
        assert!(make_private_dir(&temp.path().join("file")).is_err());
    }

    #[test]
    fn a_temporary_directory_goes_with_its_owner() {
        let temp = TempDir::new().unwrap();
        let path = temp.path().to_owned();
        std::fs::write(path.join("x"), "").unwrap();
        drop(temp);
        assert!(!path.exists());
    }

    /// The bug: a command sent its request to the socket of another user, who had made the runtime
    /// directory of this user in the directory for temporary files.
    #[test]
    fn control_socket_in_a_directory_of_others_is_refused() {
        let temp = TempDir::new().unwrap();
        let path = temp.path().join("blockyard-1");
        let socket = path.join(CONTROL_SOCKET);
        let runtime = RuntimeDir { path: path.clone(), last_resort: true };
        assert!(check_socket_in(&runtime, &socket).is_ok(), "there is no directory yet");
        make_private_dir(&path).unwrap();
        assert!(check_socket_in(&runtime, &socket).is_ok());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        let error = check_socket_in(&runtime, &socket).unwrap_err().to_string();
        assert!(error.contains("only you can write to"), "{error}");
        let named = Path::new("/elsewhere/control.sock");
        assert!(check_socket_in(&runtime, named).is_ok(), "the user has named it");
        let usual = RuntimeDir { last_resort: false, ..runtime };
        assert!(check_socket_in(&usual, &socket).is_ok());
        std::fs::remove_dir(&path).unwrap();
    }
}
