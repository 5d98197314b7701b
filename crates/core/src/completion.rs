//! What comes back for a bio.

use crate::status::Status;
use crate::units::Sector;

/// The end of one bio. Every pushed bio gets exactly one, on the channel that pushed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The bio's own user data.
    pub user_data: u64,
    /// For a zone append that succeeded: the first sector of the data. Otherwise the bio's sector,
    /// 0 where the operation ignores it.
    pub sector: Sector,
    /// How it ended.
    pub status: Status,
}
