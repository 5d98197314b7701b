//! What `before=` means: the same device as it was before a technique, for a comparison.

use std::sync::Arc;

use blockyard_core::Disk;
use blockyard_yard::param::shown;
use blockyard_yard::spec::DeviceSpec;

use crate::error::EngineError;

/// The baselines there are.
const KNOWN: &[&str] = &[];

/// Makes the device that `spec` asks for as the baseline of this name would.
///
/// # Errors
/// If there is no baseline of this name.
pub fn baseline(name: &str, spec: &DeviceSpec) -> Result<Arc<dyn Disk>, EngineError> {
    let _ = spec;
    let known = match KNOWN {
        [] => "there are none yet".to_owned(),
        known => format!("{} would do", known.join(", ")),
    };
    Err(EngineError::Baseline { name: shown(name), known })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_baseline_is_refused() {
        let spec = blockyard_yard::uri::parse("null:///n0").unwrap();
        let Err(error) = baseline("one-lok", &spec) else { panic!("it was made") };
        assert!(error.to_string().starts_with("before: `one-lok` is not a baseline; "), "{error}");
    }
}
