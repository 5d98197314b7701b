//! REPORT SUPPORTED OPERATION CODES, SPC-5 6.35: reports the table of commands.

use crate::cdb::OperationFilter;
use crate::cdb::operations::{self, OPERATIONS, Operation};
use crate::config::DiskConfig;
use crate::sense::Sense;

/// The command has a service action.
const SERVACTV: u8 = 0x01;
/// A timeouts descriptor follows; in the list of all commands.
const CTDP: u8 = 0x02;
/// A timeouts descriptor follows; in the response about one command.
const CTDP_ONE: u8 = 0x80;
/// Supported in conformance with a standard.
const SUPPORTED: u8 = 0x03;
/// Not supported.
const NOT_SUPPORTED: u8 = 0x01;
/// Seconds after which a command that has not completed is considered stuck.
const TIMEOUT_S: u32 = 30;

/// Whether the disk supports UNMAP: only in conventional zones.
pub(crate) fn unmaps(config: &DiskConfig) -> bool {
    config.zone_nr_conv > 0
}

/// Whether the disk supports a command.
pub(crate) fn is_supported(config: &DiskConfig, operation: &Operation) -> bool {
    operation.opcode != operations::UNMAP.opcode || unmaps(config)
}

/// The response.
pub(crate) fn report(
    config: &DiskConfig,
    filter: OperationFilter,
    timeouts: bool,
) -> Result<Vec<u8>, Sense> {
    let known =
        |opcode| Operation::with_opcode(opcode).filter(|operation| is_supported(config, operation));
    let with_action = |opcode, action: u16| {
        known(opcode).find(|operation| operation.service_action.map(u16::from) == Some(action))
    };
    let has_actions = |opcode| known(opcode).any(|operation| operation.service_action.is_some());
    match filter {
        OperationFilter::All => Ok(all(config, timeouts)),
        // SPC-5 table 233: a query about a command with service actions must name one.
        OperationFilter::Opcode(opcode) if has_actions(opcode) => {
            Err(Sense::invalid_field(2, Some(2)))
        }
        OperationFilter::Opcode(opcode) => Ok(one(known(opcode).next(), timeouts)),
        OperationFilter::ServiceAction(opcode, action) => {
            // A query about a command without service actions must name none.
            if known(opcode).next().is_some() && !has_actions(opcode) {
                return Err(Sense::invalid_field(2, Some(2)));
            }
            Ok(one(with_action(opcode, action), timeouts))
        }
        OperationFilter::Either(opcode, action) => {
            let plain =
                known(opcode).find(|operation| operation.service_action.is_none() && action == 0);
            Ok(one(plain.or(with_action(opcode, action)), timeouts))
        }
    }
}

fn all(config: &DiskConfig, timeouts: bool) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    for operation in OPERATIONS.iter().filter(|operation| is_supported(config, operation)) {
        let action = u16::from(operation.service_action.unwrap_or(0)).to_be_bytes();
        let mut flags = 0;
        if operation.service_action.is_some() {
            flags |= SERVACTV;
        }
        if timeouts {
            flags |= CTDP;
        }
        let len = operation.usage.len() as u8;
        bytes.extend([operation.opcode, 0, action[0], action[1], 0, flags, 0, len]);
        if timeouts {
            bytes.extend(timeouts_descriptor());
        }
    }
    let len = (bytes.len() - 4) as u32;
    bytes[..4].copy_from_slice(&len.to_be_bytes());
    bytes
}

fn one(operation: Option<&Operation>, timeouts: bool) -> Vec<u8> {
    let Some(operation) = operation else { return vec![0, NOT_SUPPORTED, 0, 0] };
    let len = operation.usage.len();
    let mut bytes = vec![0, SUPPORTED, 0, len as u8];
    bytes.extend((0..len).map(|at| operation.usage_byte(at)));
    if timeouts {
        bytes[1] |= CTDP_ONE;
        bytes.extend(timeouts_descriptor());
    }
    bytes
}

/// SPC-5 6.35.4: only the recommended timeout is reported, not the nominal one.
fn timeouts_descriptor() -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[1] = 0x0a;
    bytes[8..].copy_from_slice(&TIMEOUT_S.to_be_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cdb::operations::SERVICE_ACTION;

    #[test]
    fn all_are_listed_but_what_the_disk_has_not() {
        let config = DiskConfig::default();
        for (timeouts, unit) in [(false, 8), (true, 20)] {
            let bytes = report(&config, OperationFilter::All, timeouts).unwrap();
            assert_eq!(bytes.len(), 4 + unit * OPERATIONS.len());
            assert_eq!(bytes[..4], ((bytes.len() - 4) as u32).to_be_bytes());
        }
        let without = DiskConfig { zone_nr_conv: 0, ..config };
        let bytes = report(&without, OperationFilter::All, false).unwrap();
        assert_eq!(bytes.len(), 4 + 8 * (OPERATIONS.len() - 1));
        let unmap = report(&without, OperationFilter::Opcode(0x42), true).unwrap();
        assert_eq!(unmap, [0, NOT_SUPPORTED, 0, 0]);
    }

    #[test]
    fn a_command_is_reported_with_its_cdb_usage_bits() {
        let config = DiskConfig::default();
        for operation in OPERATIONS {
            let filter = match operation.service_action {
                None => OperationFilter::Opcode(operation.opcode),
                Some(action) => OperationFilter::ServiceAction(operation.opcode, action.into()),
            };
            let bytes = report(&config, filter, true).unwrap();
            let len = operation.usage.len();
            assert_eq!(bytes[..4], [0, SUPPORTED | CTDP_ONE, 0, len as u8]);
            assert_eq!(bytes[4], operation.opcode);
            if let Some(action) = operation.service_action {
                assert_eq!(bytes[5] & SERVICE_ACTION, action);
            }
            assert_eq!(bytes[4 + len..][..2], [0, 0x0a]);
        }
    }

    #[test]
    fn a_service_action_is_asked_for_where_there_is_one() {
        let config = DiskConfig::default();
        let wrong = Err(Sense::invalid_field(2, Some(2)));
        assert_eq!(report(&config, OperationFilter::Opcode(0x94), false), wrong);
        assert_eq!(report(&config, OperationFilter::ServiceAction(0x28, 0), false), wrong);
        let either = |opcode, action| {
            report(&config, OperationFilter::Either(opcode, action), false).unwrap()[1]
        };
        assert_eq!(either(0x28, 0), SUPPORTED);
        assert_eq!(either(0x28, 1), NOT_SUPPORTED);
        assert_eq!(either(0x94, 4), SUPPORTED);
        assert_eq!(either(0x94, 5), NOT_SUPPORTED);
        assert_eq!(either(0xff, 0), NOT_SUPPORTED);
    }
}
