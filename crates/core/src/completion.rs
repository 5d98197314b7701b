//! The completion of a bio.

use crate::status::Status;
use crate::units::Sector;

/// The end of one bio. Every pushed bio gets exactly one, on the channel that pushed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The user data of the bio.
    pub user_data: u64,
    /// For a zone append that succeeded: the first sector of the data. Otherwise the sector of the
    /// bio, or 0 if its operation ignores the sector.
    pub sector: Sector,
    /// The status of the bio.
    pub status: Status,
}
