//! Parameters of a null device, with null_blk's names and meanings; sizes in bytes.

use std::fmt;
use std::str::FromStr;

use crate::fault_attr::FaultAttr;

/// When a request completes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IrqMode {
    /// Inside `start`.
    #[default]
    None,
    /// At the next poll.
    Softirq,
    /// `completion_nsec` after its start.
    Timer,
}

impl FromStr for IrqMode {
    type Err = String;

    /// Parses a name or null_blk's number.
    fn from_str(text: &str) -> Result<IrqMode, String> {
        match text {
            "none" | "0" => Ok(IrqMode::None),
            "softirq" | "1" => Ok(IrqMode::Softirq),
            "timer" | "2" => Ok(IrqMode::Timer),
            _ => Err("`none` (0), `softirq` (1) or `timer` (2)".to_owned()),
        }
    }
}

impl fmt::Display for IrqMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IrqMode::None => "none",
            IrqMode::Softirq => "softirq",
            IrqMode::Timer => "timer",
        })
    }
}

/// Parameters of a null device.
///
/// The defaults are null_blk's with two exceptions. `irqmode` is `none`, because a null device is
/// for completing at once. `submit_queues` gives each channel a hardware queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NullConfig {
    /// Capacity in bytes, a multiple of `bs`. Default 250 GiB.
    pub size: u64,
    /// Block size in bytes: 512, 1024, 2048 or 4096. Default 512.
    pub bs: u32,
    /// Longest read or write in sectors of 512 bytes; 0, the default, for no additional limit.
    pub max_sectors: u32,
    /// Number of hardware queues; the channels of a queue share its tags. `None`, the default, for
    /// one queue per channel. 0 means 1; a number above the number of CPUs is reduced to it.
    pub submit_queues: Option<u32>,
    /// Requests that a hardware queue executes at once. Default 64.
    pub hw_queue_depth: u16,
    /// When requests complete. Default `none`.
    pub irqmode: IrqMode,
    /// With `irqmode` `timer`: the duration of a request in nanoseconds. Default 10000.
    pub completion_nsec: u64,
    /// Whether to keep data in memory. Default off: writes are dropped, reads leave the buffer
    /// unchanged.
    pub memory_backed: bool,
    /// Whether to accept discards; needs `memory_backed`, and is ignored on zoned devices.
    pub discard: bool,
    /// Whether to honour FUA; has an effect only with a cache. Default on.
    pub fua: bool,
    /// Size of the volatile write cache in bytes; needs `memory_backed`. Default 0: none.
    pub cache_size: u64,
    /// Bandwidth limit in MiB/s; 0, the default, for none.
    pub mbps: u32,
    /// Whether the device is zoned.
    pub zoned: bool,
    /// Zone size in bytes, a power of two. Default 256 MiB. Each zone takes 64 bytes of memory.
    pub zone_size: u64,
    /// Writable bytes of a zone; 0, the default, for the zone size.
    pub zone_capacity: u64,
    /// Number of conventional zones at the start of the device.
    pub zone_nr_conv: u32,
    /// Maximum number of open zones; 0, the default, for no limit.
    pub zone_max_open: u32,
    /// Maximum number of active zones; 0, the default, for no limit.
    pub zone_max_active: u32,
    /// Longest zone append in sectors of 512 bytes; 0 for a device without append. Default: a
    /// zone's capacity.
    pub zone_append_max_sectors: u32,
    /// Whether sequential zones are full initially.
    pub zone_full: bool,
    /// Initial bad blocks: `+START-END`, separated by commas. 512-byte sectors, `END` inclusive.
    pub badblocks: String,
    /// Whether a bad block becomes good after the first error.
    pub badblocks_once: bool,
    /// Whether the data before a bad block are transferred.
    pub badblocks_partial_io: bool,
    /// Fault from the start: requests that never complete by themselves.
    pub timeout: Option<FaultAttr>,
    /// Fault from the start: requests that come back unstarted.
    pub requeue: Option<FaultAttr>,
    /// Time in milliseconds after which a request that does not complete ends with a timeout.
    /// Default 5000, null_blk's fixed value.
    pub request_timeout_ms: u64,
}

impl Default for NullConfig {
    fn default() -> NullConfig {
        NullConfig {
            size: 250 << 30,
            bs: 512,
            max_sectors: 0,
            submit_queues: None,
            hw_queue_depth: 64,
            irqmode: IrqMode::None,
            completion_nsec: 10_000,
            memory_backed: false,
            discard: false,
            fua: true,
            cache_size: 0,
            mbps: 0,
            zoned: false,
            zone_size: 256 << 20,
            zone_capacity: 0,
            zone_nr_conv: 0,
            zone_max_open: 0,
            zone_max_active: 0,
            zone_append_max_sectors: i32::MAX as u32,
            zone_full: false,
            badblocks: String::new(),
            badblocks_once: false,
            badblocks_partial_io: false,
            timeout: None,
            requeue: None,
            request_timeout_ms: 5000,
        }
    }
}
