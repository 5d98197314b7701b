//! Probing: identifies a disk as Linux does (drivers/scsi: scsi_scan.c, sd.c, sd_zbc.c). It reads
//! INQUIRY data, TEST UNIT READY, the pages of vital product data, the capacity, the cache, and all
//! zones.

use blockyard_core::{Geometry, Limits, SECTOR_BYTES, Sector, ZoneGeometry};

use super::command;
use super::error::SdError;
use super::pages::{
    BlockLimits, Caching, Capacity, Inquiry, Provisioning, ZONE_DESCRIPTOR_LEN, ZoneReport,
    ZonedCharacteristics, is_supported, vital_product_data,
};
use super::sense_decision::{SenseDecision, decide};
use super::zone_scan::ZoneScan;
use crate::cdb::Command;
use crate::sense::SenseKey;
use crate::transport::{Data, Outcome, ScsiTransport, TransportError};

/// Maximum length of one zone report in bytes: 1023 zones.
const REPORT_BYTES: usize = 64 << 10;
/// Maximum length of any other response in bytes.
const ANSWER_BYTES_MAX: usize = 512;
/// Number of retries of a command that ended with a transient condition.
pub(super) const RETRIES_MAX: u32 = 5;
/// Longest request in bytes: each queue has a buffer of that length.
const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// Longest WRITE SAME(16) if the disk reports no limit, in blocks: Linux's `SD_MAX_WS16_BLOCKS`.
const WRITE_SAME_BLOCKS_MAX: u64 = 0x7f_ffff;
/// Commands of one queue that may be in flight: the limit of SATA drives.
const QUEUE_DEPTH: u16 = 32;
/// Peripheral type of a connected host-managed zoned disk.
const HOST_MANAGED: u8 = 0x14;
/// Peripheral type of a disk that is host-aware or not zoned.
const DIRECT_ACCESS: u8 = 0x00;
/// Operation code of WRITE SAME(16).
const WRITE_SAME_16: u8 = 0x93;
/// Allocation length for pages, in bytes: all pages that are parsed are shorter.
const PAGE_LEN: u16 = 255;

/// How a discard is sent to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Discard {
    /// Discards are not supported.
    None,
    /// By UNMAP.
    Unmap,
    /// By WRITE SAME(16) with the UNMAP bit.
    WriteSame,
}

/// A disk that this driver supports.
#[derive(Clone, Debug)]
pub(super) struct Probed {
    pub(super) inquiry: Inquiry,
    pub(super) geometry: Geometry,
    pub(super) limits: Limits,
    pub(super) discard: Discard,
}

/// Probes a disk.
pub(super) fn probe(transport: &impl ScsiTransport) -> Result<Probed, SdError> {
    let mut probe = Probe { transport, buffer: vec![0; report_bytes(transport)] };
    let inquiry = probe.inquiry()?;
    probe.wait_until_ready()?;
    let capacity = probe.capacity()?;
    let zoned = probe.zoned_characteristics()?;
    let block_limits = probe.page(0xb0)?.map(BlockLimits::read).unwrap_or_default();
    let provisioning = match capacity.provisioned {
        true => probe.page(0xb2)?.map(Provisioning::read).unwrap_or_default(),
        false => Provisioning::default(),
    };
    let caching = probe.caching()?;
    let write_same = probe.has_write_same()?;
    let (zones, blocks) = probe.zones(&capacity, &zoned)?;
    let block = u64::from(capacity.block_bytes) / SECTOR_BYTES;
    let discard = discard(&provisioning, &block_limits, write_same);
    let physical_block_bytes = capacity.block_bytes << capacity.physical_exponent;
    let geometry = Geometry {
        sectors: blocks * block,
        logical_block_bytes: capacity.block_bytes,
        physical_block_bytes,
        zones: Some(ZoneGeometry {
            zone_sectors: zones.zone_sectors * block,
            zone_capacity_sectors: zones.zone_capacity_sectors * block,
            ..zones
        }),
    };
    let bytes_max = (transport.bytes_max() as u64).min(REQUEST_BYTES_MAX);
    let transfer_max = not_zero(block_limits.transfer_blocks_max.into());
    let blocks_max = (bytes_max / u64::from(capacity.block_bytes)).min(transfer_max);
    if blocks_max * block * SECTOR_BYTES < u64::from(physical_block_bytes) {
        return Err(SdError::unfit(format!(
            "a command moves at most {blocks_max} blocks, which is less than a physical block of \
             {physical_block_bytes} bytes"
        )));
    }
    let write_same_max =
        not_zero(block_limits.write_same_blocks_max).min(WRITE_SAME_BLOCKS_MAX) * block;
    let limits = Limits {
        sectors_max: blocks_max * block,
        chunk_sectors: zones.zone_sectors * block,
        discard_sectors_max: match discard {
            Discard::None => 0,
            Discard::Unmap => u64::from(block_limits.unmap_blocks_max) * block,
            Discard::WriteSame => write_same_max,
        },
        write_zeroes_sectors_max: if write_same { write_same_max } else { 0 },
        write_cache: caching.write_cache,
        fua: caching.write_cache && caching.fua,
        read_only: caching.write_protected,
        ..Limits::unlimited(QUEUE_DEPTH)
    };
    Ok(Probed { inquiry, geometry, limits, discard })
}

/// Length of the zone reports to request: at most what the transport transfers at once.
pub(super) fn report_bytes(transport: &impl ScsiTransport) -> usize {
    let bytes = transport.bytes_max().clamp(ANSWER_BYTES_MAX, REPORT_BYTES);
    bytes / ZONE_DESCRIPTOR_LEN * ZONE_DESCRIPTOR_LEN
}

/// A reported limit of 0 means that there is no limit.
fn not_zero(limit: u64) -> u64 {
    if limit == 0 { u64::MAX } else { limit }
}

fn discard(provisioning: &Provisioning, limits: &BlockLimits, write_same: bool) -> Discard {
    let unmaps = limits.unmap_blocks_max > 0 && limits.unmap_descriptors_max > 0;
    match provisioning {
        Provisioning { unmap: true, .. } if unmaps => Discard::Unmap,
        Provisioning { write_same: true, .. } if write_same => Discard::WriteSame,
        _ => Discard::None,
    }
}

/// Executes a command, and retries it after a transient condition.
pub(super) fn execute(
    transport: &impl ScsiTransport,
    command: &Command,
    into: &mut [u8],
) -> (SenseDecision, Result<Outcome, TransportError>) {
    let cdb = command.print();
    let mut tries = 0;
    loop {
        let data = if into.is_empty() { Data::None } else { Data::In(&mut *into) };
        let ended = transport.execute(&cdb, data);
        match decide(&ended) {
            SenseDecision::Retry(_) if tries < RETRIES_MAX => tries += 1,
            decision => return (decision, ended),
        }
    }
}

struct Probe<'t, T> {
    transport: &'t T,
    buffer: Vec<u8>,
}

impl<T: ScsiTransport> Probe<'_, T> {
    /// The response to a command that the disk must support.
    fn ask(&mut self, command: &Command, len: usize) -> Result<&[u8], SdError> {
        match self.try_ask(command, len)? {
            Ok(len) => Ok(&self.buffer[..len]),
            Err(sense) => Err(SdError::Refused { command: command.operation().name, sense }),
        }
    }

    /// The response to a command that the disk may not support.
    fn ask_whether(&mut self, command: &Command, len: usize) -> Result<Option<&[u8]>, SdError> {
        let len = self.try_ask(command, len)?.ok();
        Ok(len.map(|len| &self.buffer[..len]))
    }

    /// The length of the response, or the disk's sense data as text.
    fn try_ask(&mut self, command: &Command, len: usize) -> Result<Result<usize, String>, SdError> {
        let name = command.operation().name;
        let into = &mut self.buffer[..len];
        into.fill(0);
        let (decision, ended) = execute(self.transport, command, into);
        let outcome = ended.map_err(|source| SdError::Transport { command: name, source })?;
        if decision == SenseDecision::Done {
            return Ok(Ok(outcome.transferred.min(len)));
        }
        let said = match outcome.sense {
            Some(sense) => sense.to_string(),
            None => format!("status {:?}", outcome.status),
        };
        let unknown = outcome.sense.is_some_and(|sense| sense.key == SenseKey::IllegalRequest);
        if unknown { Ok(Err(said)) } else { Err(SdError::Refused { command: name, sense: said }) }
    }

    fn inquiry(&mut self) -> Result<Inquiry, SdError> {
        let data = self.ask(&command::inquiry(None, PAGE_LEN), PAGE_LEN.into())?;
        let inquiry = Inquiry::read(data);
        match inquiry.peripheral {
            HOST_MANAGED => Ok(inquiry),
            DIRECT_ACCESS => Err(SdError::unfit(format!(
                "{} {} is a disk without zones, or with zones that the host may ignore; expected a \
                 host-managed one (device type 14h)",
                inquiry.vendor, inquiry.product
            ))),
            other => Err(SdError::unfit(format!(
                "{} {} is no host-managed disk: its device type is {other:02x}h, expected 14h",
                inquiry.vendor, inquiry.product
            ))),
        }
    }

    /// After a reset, the first commands end with unit attentions, one per event.
    fn wait_until_ready(&mut self) -> Result<(), SdError> {
        self.ask(&Command::TestUnitReady, 0).map(drop)
    }

    fn capacity(&mut self) -> Result<Capacity, SdError> {
        let command = Command::ReadCapacity16 { allocation: Capacity::LEN as u32 };
        let data = self.ask(&command, Capacity::LEN)?;
        let short = || SdError::unfit("its READ CAPACITY(16) data are short");
        let capacity = Capacity::read(data).ok_or_else(short)?;
        let block = capacity.block_bytes;
        if !block.is_power_of_two() || !(512..=4096).contains(&block) {
            return Err(SdError::unfit(format!(
                "its blocks have {block} bytes: expected 512, 1024, 2048 or 4096"
            )));
        }
        if capacity.physical_exponent > 8 {
            return Err(SdError::unfit(format!(
                "its physical blocks have 2^{} logical ones: expected at most 2^8",
                capacity.physical_exponent
            )));
        }
        Ok(capacity)
    }

    /// A page of vital product data, if the disk has it.
    fn page(&mut self, page: u8) -> Result<Option<&[u8]>, SdError> {
        let command = command::inquiry(Some(page), PAGE_LEN);
        let data = self.ask_whether(&command, PAGE_LEN.into())?;
        Ok(data.and_then(|data| vital_product_data(data, page)))
    }

    fn zoned_characteristics(&mut self) -> Result<ZonedCharacteristics, SdError> {
        let page = self.page(0xb6)?.map(ZonedCharacteristics::read);
        let page = page.ok_or_else(|| {
            SdError::unfit("it has no page B6h (zoned block device characteristics)")
        })?;
        if !page.unrestricted_reads {
            return Err(SdError::unfit(
                "constrained reads devices are not supported (URSWRZ is 0)",
            ));
        }
        Ok(page)
    }

    fn caching(&mut self) -> Result<Caching, SdError> {
        let command = command::mode_sense(Caching::PAGE, 192);
        let data = self.ask_whether(&command, 192)?;
        Ok(data.map(Caching::read).unwrap_or_default())
    }

    fn has_write_same(&mut self) -> Result<bool, SdError> {
        let command = command::report_opcode(WRITE_SAME_16, 512);
        let data = self.ask_whether(&command, 512)?;
        Ok(data.is_some_and(is_supported))
    }

    /// Reads all zones and determines the zone geometry and the capacity of the disk, both in
    /// blocks.
    fn zones(
        &mut self,
        capacity: &Capacity,
        zoned: &ZonedCharacteristics,
    ) -> Result<(ZoneGeometry, u64), SdError> {
        let mut scan = ZoneScan::new(zoned);
        let mut lba_last = capacity.lba_last;
        loop {
            let lba = scan.next_lba();
            let len = self.buffer.len();
            let command = command::report_zones(lba, len as u32);
            let data = self.ask(&command, len)?;
            let report = ZoneReport::read(data).ok_or_else(|| {
                SdError::unfit(format!(
                    "its zone report has {} bytes; expected {ZONE_DESCRIPTOR_LEN} at least",
                    data.len()
                ))
            })?;
            if !capacity.whole_disk {
                lba_last = report.lba_last;
            }
            let blocks = lba_last.checked_add(1).filter(|blocks| {
                let bytes = blocks.checked_mul(capacity.block_bytes.into());
                bytes.is_some_and(|bytes| bytes < Sector(u64::MAX >> 9).bytes())
            });
            let blocks = blocks.ok_or_else(|| {
                SdError::unfit(format!("its last block would be number {lba_last}"))
            })?;
            for zone in report.zones() {
                scan.step(&zone, blocks)?;
            }
            if scan.next_lba() == blocks {
                return Ok((scan.geometry()?, blocks));
            }
            if scan.next_lba() == lba {
                return Err(SdError::unfit(format!("missing zones from block {lba}")));
            }
        }
    }
}
