//! The key file of encrypted volumes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::OnceLock;

/// The environment variable that makes all volumes of these tests encrypted.
pub(crate) const ENCRYPTED: &str = "BLOCKYARD_CRASH_ENCRYPTED";

/// Whether a volume is encrypted that is so `by_default`.
pub(crate) fn is_encrypted(by_default: bool) -> bool {
    by_default || std::env::var_os(ENCRYPTED).is_some_and(|value| value == "1")
}

/// The parameter of a device that names the key file, which all tests share.
pub(crate) fn key_parameter() -> String {
    static KEY: OnceLock<String> = OnceLock::new();
    let path = KEY.get_or_init(|| {
        let name = format!("crash-key-{}", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::write(&path, [7; 32]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.display().to_string()
    });
    format!("&key_file={path}")
}

/// [`key_parameter`] if all volumes are encrypted.
pub(crate) fn key_if_all() -> String {
    if is_encrypted(false) { key_parameter() } else { String::new() }
}
