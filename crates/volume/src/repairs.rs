//! Log lines about repaired blocks, limited in number. Each single one is logged at level debug.

use std::time::Instant;

use blockyard_os::LogLimit;

/// The repairs of a pool that are not in the log yet.
#[derive(Debug, Default)]
pub(crate) struct Repairs(LogLimit);

impl Repairs {
    /// Adds repairs of the data at an address of the pool.
    pub(crate) fn add(&self, count: u64, title: &str, address: u64) {
        tracing::debug!("{title}: repaired a block or page at {address} from the other copy");
        if let Some(count) = self.0.due(count, Instant::now()) {
            tracing::warn!(
                "{title}: repaired {count} damaged blocks or pages from the other copy, the last \
                 one at {address} of the pool; `blockyard volume show` counts them by copy"
            );
        }
    }

    /// The number of repairs since the pool was opened.
    pub(crate) fn count(&self) -> u64 {
        self.0.total()
    }

    /// Logs the repairs that are not in the log yet.
    pub(crate) fn log_rest(&self, title: &str) {
        let count = self.0.take();
        if count > 0 {
            tracing::warn!("{title}: repaired {count} more blocks or pages from the other copy");
        }
    }
}
