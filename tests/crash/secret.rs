//! The key file of encrypted volumes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::OnceLock;

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
