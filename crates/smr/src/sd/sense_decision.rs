//! The decision on a finished command: its request succeeded, failed with a status, or is to be
//! retried. A table of the decisions of Linux's `scsi_check_sense` and `scsi_io_completion`.

use blockyard_core::Status;

use crate::sense::{ScsiStatus, Sense, SenseKey};
use crate::transport::{Outcome, TransportError};

/// What to do about a finished command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SenseDecision {
    /// The command succeeded.
    Done,
    /// The command failed, and a retry would fail too.
    Failed(Status),
    /// The command met a transient condition; retry it at once.
    Retry(Status),
    /// The disk is busy or not ready yet; retry the command later.
    Later(Status),
}

/// The decision on the result of a transport.
pub fn decide(ended: &Result<Outcome, TransportError>) -> SenseDecision {
    match ended {
        Ok(outcome) => decide_by_outcome(outcome),
        Err(TransportError::Timeout) => SenseDecision::Failed(Status::Timeout),
        Err(TransportError::Gone) => SenseDecision::Failed(Status::Offline),
        Err(TransportError::Link { .. }) => SenseDecision::Failed(Status::Transport),
        Err(_) => SenseDecision::Failed(Status::IoErr),
    }
}

fn decide_by_outcome(outcome: &Outcome) -> SenseDecision {
    match outcome.status {
        ScsiStatus::Good => SenseDecision::Done,
        ScsiStatus::CheckCondition => match outcome.sense {
            Some(sense) => decide_by_sense(&sense),
            None => SenseDecision::Failed(Status::IoErr),
        },
        ScsiStatus::Busy | ScsiStatus::TaskSetFull => SenseDecision::Later(Status::DevResource),
        ScsiStatus::ReservationConflict => SenseDecision::Failed(Status::ResvConflict),
        ScsiStatus::TaskAborted => SenseDecision::Retry(Status::IoErr),
        _ => SenseDecision::Failed(Status::IoErr),
    }
}

/// The decision on sense data.
///
/// | sense | decision |
/// | --- | --- |
/// | none, recovered, completed | done |
/// | not ready, becoming so (04/01) and similar | later |
/// | not ready otherwise | IOERR |
/// | medium, unrecovered (11, 13, 14) | MEDIUM; other codes: retry |
/// | hardware | TARGET |
/// | illegal request: invalid command, field or address, write-protected | TARGET |
/// | illegal request: protection information (10) | PROTECTION |
/// | unit attention, aborted command | retry |
/// | data protect: zone resources (55/0E, 55/0F, 0C/12) | ZONE_OPEN_RESOURCE |
/// | data protect: space allocation failed (27/07) | NOSPC |
/// | data protect otherwise, blank check, overflow, miscompare | TARGET |
pub fn decide_by_sense(sense: &Sense) -> SenseDecision {
    let (asc, ascq) = (sense.asc, sense.ascq);
    match sense.key {
        SenseKey::NoSense | SenseKey::RecoveredError | SenseKey::Completed => SenseDecision::Done,
        SenseKey::NotReady => match (asc, ascq) {
            // Becoming ready, rebuilding, formatting and other transient states (SPC-5, table F).
            (0x04, 0x01 | 0x04..=0x09 | 0x0a | 0x11 | 0x14 | 0x1a | 0x24) => {
                SenseDecision::Later(Status::IoErr)
            }
            _ => SenseDecision::Failed(Status::IoErr),
        },
        SenseKey::MediumError => match asc {
            0x11 | 0x13 | 0x14 => SenseDecision::Failed(Status::Medium),
            _ => SenseDecision::Retry(Status::Medium),
        },
        SenseKey::HardwareError => SenseDecision::Failed(Status::Target),
        SenseKey::IllegalRequest => match asc {
            0x10 => SenseDecision::Failed(Status::Protection),
            0x20 | 0x21 | 0x22 | 0x24 | 0x26 | 0x27 => SenseDecision::Failed(Status::Target),
            _ => SenseDecision::Failed(Status::IoErr),
        },
        SenseKey::UnitAttention => SenseDecision::Retry(Status::IoErr),
        SenseKey::AbortedCommand if asc == 0x10 => SenseDecision::Failed(Status::Protection),
        SenseKey::AbortedCommand => SenseDecision::Retry(Status::IoErr),
        SenseKey::DataProtect => match (asc, ascq) {
            // Insufficient zone resources; for a host, 0C/12 (SBC, on a write) means the same.
            (0x55, 0x0e | 0x0f) | (0x0c, 0x12) => SenseDecision::Failed(Status::ZoneOpenResource),
            (0x27, 0x07) => SenseDecision::Failed(Status::NoSpc),
            _ => SenseDecision::Failed(Status::Target),
        },
        SenseKey::BlankCheck
        | SenseKey::CopyAborted
        | SenseKey::VolumeOverflow
        | SenseKey::Miscompare => SenseDecision::Failed(Status::Target),
        _ => SenseDecision::Failed(Status::IoErr),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(sense: Sense) -> Status {
        match decide(&Ok(Outcome::check(sense))) {
            SenseDecision::Failed(status) => status,
            other => panic!("{sense:?}: {other:?}"),
        }
    }

    #[test]
    fn zones_give_what_linux_gives() {
        assert_eq!(failed(Sense::INSUFFICIENT_ZONE_RESOURCES), Status::ZoneOpenResource);
        for sense in [
            Sense::UNALIGNED_WRITE,
            Sense::WRITE_BOUNDARY_VIOLATION,
            Sense::INVALID_FIELD_IN_CDB,
            Sense::LBA_OUT_OF_RANGE,
            Sense::GAP_ZONE_ACCESS,
            Sense::ZONE_IS_READ_ONLY,
            Sense::ZONE_IS_OFFLINE,
            Sense::INVALID_OPERATION_CODE,
        ] {
            assert_eq!(failed(sense), Status::Target, "{sense:?}");
        }
    }

    #[test]
    fn transient_sense_is_retried() {
        let of = |key, asc, ascq| decide_by_sense(&Sense::new(key, asc, ascq));
        assert_eq!(of(SenseKey::UnitAttention, 0x29, 0), SenseDecision::Retry(Status::IoErr));
        assert_eq!(of(SenseKey::AbortedCommand, 0, 0), SenseDecision::Retry(Status::IoErr));
        assert_eq!(
            of(SenseKey::AbortedCommand, 0x10, 1),
            SenseDecision::Failed(Status::Protection)
        );
        assert_eq!(of(SenseKey::NotReady, 4, 1), SenseDecision::Later(Status::IoErr));
        assert_eq!(of(SenseKey::NotReady, 0x3a, 0), SenseDecision::Failed(Status::IoErr));
        assert_eq!(of(SenseKey::MediumError, 0x11, 0), SenseDecision::Failed(Status::Medium));
        assert_eq!(of(SenseKey::MediumError, 0x0c, 0), SenseDecision::Retry(Status::Medium));
        assert_eq!(of(SenseKey::RecoveredError, 0x18, 0), SenseDecision::Done);
        let busy = Outcome { status: ScsiStatus::Busy, sense: None, transferred: 0 };
        assert_eq!(decide(&Ok(busy)), SenseDecision::Later(Status::DevResource));
        assert_eq!(decide(&Err(TransportError::Gone)), SenseDecision::Failed(Status::Offline));
    }
}
