//! How much of a pool a volume or snapshot refers to.

use crate::error::VolumeError;
use crate::format::catalogue::Traits;
use crate::running::Running;

/// What a volume or snapshot refers to, what it shares with others included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The volume.
    pub traits: Traits,
    /// Blocks that are somewhere.
    pub blocks: u64,
    /// Their bytes as they are stored.
    pub stored_bytes: u64,
}

impl Running {
    /// Counts what a volume or snapshot refers to: a walk through its map.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn usage(&self, name: &str) -> Result<Usage, VolumeError> {
        let live = self.pool().find(name)?;
        self.pool().settle();
        let mut usage = Usage { traits: live.listed(), blocks: 0, stored_bytes: 0 };
        for node in live.map.freeze().iter().flatten() {
            for (_, leaf) in node.leaves() {
                let page = self.pool().segments().page(leaf)?;
                for entry in page.entries().iter().filter(|entry| !entry.is_hole()) {
                    usage.blocks += 1;
                    usage.stored_bytes += u64::from(entry.stored_bytes());
                }
            }
        }
        Ok(usage)
    }
}
