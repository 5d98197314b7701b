//! Validates a configuration: null_blk's checks and corrections, in its order.
//!
//! Values that null_blk corrects silently are corrected too, with a note for each.

use blockyard_core::{Bytes, Geometry, Limits, SECTOR_BYTES, ZoneGeometry};

use crate::config::NullConfig;
use crate::error::NullError;

/// Largest bandwidth limit in MiB/s, as in null_blk.
const MBPS_MAX: u32 = 40960;
/// Maximum requests of a queue: tags have 16 bits, and one value means none.
const DEPTH_MAX: u16 = 32768;
/// Smallest write cache in bytes: a page.
const CACHE_MIN: u64 = 4096;
/// Largest write cache in bytes: its memory is reserved when the device is created.
const CACHE_MAX: u64 = 4 << 30;
/// Largest device in bytes: calculations with sectors and pages stay far from overflow.
const SIZE_MAX: u64 = 1 << 60;
/// Maximum number of zones: each takes memory, whether or not it is written.
const ZONES_MAX: u32 = 1 << 22;
/// Maximum sectors of one write-zeroes: 64 MiB. If the range must stay allocated, zeros are copied,
/// and the channel does nothing else meanwhile.
const ZEROES_MAX: u64 = 64 << 11;
/// Maximum duration of a request, an hour: sums of times cannot overflow.
const WAIT_NS_MAX: u64 = 3_600_000_000_000;

fn invalid(field: &'static str, value: impl ToString, wanted: impl Into<String>) -> NullError {
    NullError::invalid(field, value, wanted)
}

/// A valid configuration.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) geometry: Geometry,
    pub(crate) limits: Limits,
    /// The configuration after corrections.
    pub(crate) config: NullConfig,
    /// A sentence for each correction.
    pub(crate) notes: Vec<String>,
}

impl Shape {
    pub(crate) fn new(config: &NullConfig) -> Result<Shape, NullError> {
        let mut config = config.clone();
        let mut notes = Vec::new();
        check_plain(&config)?;
        correct_plain(&mut config, &mut notes);
        let zones = match config.zoned {
            true => Some(zones(&mut config, &mut notes)?),
            false => None,
        };
        let geometry = Geometry {
            sectors: config.size / SECTOR_BYTES,
            logical_block_bytes: config.bs,
            physical_block_bytes: config.bs,
            zones,
        };
        let limits = limits(&config, &geometry);
        Ok(Shape { geometry, limits, config, notes })
    }
}

impl Shape {
    /// The shape of a zoned device on a medium, which keeps the data and the zones.
    pub(crate) fn on_media(config: &NullConfig) -> Result<Shape, NullError> {
        if !config.zoned {
            return Err(invalid("zoned", 0, "1 with backing; `file:` serves a plain file"));
        }
        if config.memory_backed {
            return Err(invalid(
                "memory_backed",
                1,
                "0 with backing, which keeps the data in files",
            ));
        }
        if config.cache_size != 0 {
            let wanted = "0 with backing: the write cache is the kernel's page cache";
            return Err(invalid("cache_size", config.cache_size, wanted));
        }
        if config.zone_full {
            return Err(invalid(
                "zone_full",
                1,
                "0 with backing, which keeps the zones' conditions",
            ));
        }
        let mut shape = Shape::new(&NullConfig { discard: false, ..config.clone() })?;
        if config.discard {
            shape.notes.push("discard: ignored in zoned mode".to_owned());
        }
        shape.limits.write_cache = true;
        shape.limits.fua = shape.config.fua;
        Ok(shape)
    }
}

fn check_plain(config: &NullConfig) -> Result<(), NullError> {
    if !config.bs.is_power_of_two() || !(512..=4096).contains(&config.bs) {
        return Err(invalid("bs", config.bs, "512, 1024, 2048 or 4096"));
    }
    let bs = u64::from(config.bs);
    if config.size == 0 || config.size > SIZE_MAX || !config.size.is_multiple_of(bs) {
        let wanted = format!("a multiple of bs ({0}), from {0} to 1E", Bytes(bs));
        return Err(invalid("size", config.size, wanted));
    }
    let block_sectors = config.bs / SECTOR_BYTES as u32;
    if config.max_sectors != 0 && config.max_sectors < block_sectors {
        let wanted = format!("0, or at least a block ({block_sectors} sectors)");
        return Err(invalid("max_sectors", config.max_sectors, wanted));
    }
    if !(1..=DEPTH_MAX).contains(&config.hw_queue_depth) {
        let wanted = format!("1 to {DEPTH_MAX}");
        return Err(invalid("hw_queue_depth", config.hw_queue_depth, wanted));
    }
    if config.completion_nsec > WAIT_NS_MAX {
        let wanted = "at most an hour (3600000000000)";
        return Err(invalid("completion_nsec", config.completion_nsec, wanted));
    }
    if !(1..=WAIT_NS_MAX / 1_000_000).contains(&config.request_timeout_ms) {
        let wanted = "1 to an hour (3600000)";
        return Err(invalid("request_timeout_ms", config.request_timeout_ms, wanted));
    }
    let cache = config.cache_size;
    if cache != 0 && !(CACHE_MIN..=CACHE_MAX).contains(&cache) {
        return Err(invalid("cache_size", cache, "0, or 4k to 4G"));
    }
    if config.memory_backed && cache > config.size.next_multiple_of(CACHE_MIN) {
        let wanted = format!("at most the device's size ({})", Bytes(config.size));
        return Err(invalid("cache_size", cache, wanted));
    }
    Ok(())
}

fn correct_plain(config: &mut NullConfig, notes: &mut Vec<String>) {
    if let Some(queues) = config.submit_queues {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        let corrected = queues.clamp(1, processors);
        if corrected != queues {
            notes.push(format!("submit_queues: {queues} becomes {corrected}"));
            config.submit_queues = Some(corrected);
        }
    }
    if config.mbps > MBPS_MAX {
        notes.push(format!("mbps: {} becomes {MBPS_MAX}", config.mbps));
        config.mbps = MBPS_MAX;
    }
    if config.cache_size != 0 && !config.memory_backed {
        notes.push("cache_size: ignored without memory_backed".to_owned());
        config.cache_size = 0;
    }
    if config.discard && !config.memory_backed {
        notes.push("discard: ignored without memory_backed".to_owned());
        config.discard = false;
    }
    if config.discard && config.zoned {
        notes.push("discard: ignored in zoned mode".to_owned());
        config.discard = false;
    }
}

/// Checks the zone parameters, in the order of null_blk's `null_init_zoned_dev`.
fn zones(config: &mut NullConfig, notes: &mut Vec<String>) -> Result<ZoneGeometry, NullError> {
    let (size, zone_size, bs) = (config.size, config.zone_size, u64::from(config.bs));
    if !zone_size.is_power_of_two() || zone_size < bs {
        let wanted = format!("a power of two of at least bs ({})", Bytes(bs));
        return Err(invalid("zone_size", zone_size, wanted));
    }
    if zone_size > size {
        return Err(invalid("zone_size", zone_size, format!("at most size ({})", Bytes(size))));
    }
    let capacity = if config.zone_capacity == 0 { zone_size } else { config.zone_capacity };
    if capacity > zone_size || !capacity.is_multiple_of(bs) {
        let wanted =
            format!("a multiple of bs ({}), at most zone_size ({})", Bytes(bs), Bytes(zone_size));
        return Err(invalid("zone_capacity", capacity, wanted));
    }
    if capacity < zone_size && !size.is_multiple_of(zone_size) {
        let wanted = format!(
            "a multiple of zone_size ({}): a smaller last zone is not allowed with zone_capacity \
             below zone_size",
            Bytes(zone_size)
        );
        return Err(invalid("size", size, wanted));
    }
    let zone_count = size.div_ceil(zone_size);
    if zone_count > u64::from(ZONES_MAX) {
        let least = size.div_ceil(u64::from(ZONES_MAX)).next_power_of_two();
        let wanted = format!("at least {}: a device has at most {ZONES_MAX} zones", Bytes(least));
        return Err(invalid("zone_size", zone_size, wanted));
    }
    let zone_count = zone_count as u32;
    let mut correct = |field: &'static str, value: &mut u32, corrected: u32| {
        if *value != corrected {
            notes.push(format!("{field}: {value} becomes {corrected}"));
            *value = corrected;
        }
    };
    let conventional = config.zone_nr_conv.min(zone_count - 1);
    correct("zone_nr_conv", &mut config.zone_nr_conv, conventional);
    let append_max = u64::from(config.zone_append_max_sectors) * SECTOR_BYTES;
    let append_max = (append_max / bs * bs).min(capacity) / SECTOR_BYTES;
    if append_max == 0 {
        // A maximum below a block disables the operation. Other corrections are not noted, because
        // the default is above every capacity.
        correct("zone_append_max_sectors", &mut config.zone_append_max_sectors, 0);
    }
    config.zone_append_max_sectors = append_max as u32;
    let sequential = zone_count - conventional;
    if config.zone_max_active >= sequential {
        correct("zone_max_active", &mut config.zone_max_active, 0);
    }
    if config.zone_max_active != 0 && config.zone_max_open > config.zone_max_active {
        let active_max = config.zone_max_active;
        correct("zone_max_open", &mut config.zone_max_open, active_max);
    } else if config.zone_max_open >= sequential {
        correct("zone_max_open", &mut config.zone_max_open, 0);
    }
    Ok(ZoneGeometry {
        zone_sectors: zone_size / SECTOR_BYTES,
        zone_capacity_sectors: capacity / SECTOR_BYTES,
        zone_count,
        conventional_count: conventional,
        open_max: config.zone_max_open,
        active_max: config.zone_max_active,
    })
}

fn limits(config: &NullConfig, geometry: &Geometry) -> Limits {
    let mut limits = Limits::unlimited(config.hw_queue_depth);
    if config.max_sectors != 0 {
        let block = geometry.block_sectors();
        limits.sectors_max = u64::from(config.max_sectors) / block * block;
    }
    if !config.discard {
        limits.discard_sectors_max = 0;
    }
    limits.write_zeroes_sectors_max = ZEROES_MAX;
    limits.write_cache = config.cache_size != 0;
    limits.fua = config.fua && limits.write_cache;
    if let Some(zones) = &geometry.zones {
        limits.chunk_sectors = zones.zone_sectors;
        limits.zone_append_sectors_max = u64::from(config.zone_append_max_sectors);
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zoned() -> NullConfig {
        NullConfig { size: 64 << 20, zoned: true, zone_size: 1 << 20, ..NullConfig::default() }
    }

    fn refused(config: NullConfig) -> &'static str {
        match Shape::new(&config) {
            Err(NullError::Invalid { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bad_values_are_refused_by_name() {
        let plain = NullConfig::default;
        assert_eq!(refused(NullConfig { bs: 768, ..plain() }), "bs");
        assert_eq!(refused(NullConfig { bs: 0, ..plain() }), "bs");
        assert_eq!(refused(NullConfig { bs: 8192, ..plain() }), "bs");
        assert_eq!(refused(NullConfig { size: 0, ..plain() }), "size");
        assert_eq!(refused(NullConfig { size: 4097, ..plain() }), "size");
        assert_eq!(refused(NullConfig { size: !511, ..plain() }), "size");
        assert_eq!(refused(NullConfig { bs: 4096, max_sectors: 7, ..plain() }), "max_sectors");
        assert_eq!(refused(NullConfig { hw_queue_depth: 0, ..plain() }), "hw_queue_depth");
        assert_eq!(refused(NullConfig { hw_queue_depth: 65535, ..plain() }), "hw_queue_depth");
        assert_eq!(refused(NullConfig { completion_nsec: u64::MAX, ..plain() }), "completion_nsec");
        assert_eq!(refused(NullConfig { request_timeout_ms: 0, ..plain() }), "request_timeout_ms");
        let cached = NullConfig { memory_backed: true, cache_size: 100, ..plain() };
        assert_eq!(refused(cached.clone()), "cache_size");
        let size = NullConfig { size: 1 << 20, cache_size: 2 << 20, ..cached.clone() };
        assert_eq!(refused(size), "cache_size");
        assert_eq!(refused(NullConfig { cache_size: 1000 << 40, ..cached }), "cache_size");
        assert_eq!(refused(NullConfig { zone_size: 0, ..zoned() }), "zone_size");
        assert_eq!(refused(NullConfig { zone_size: 3 << 20, ..zoned() }), "zone_size");
        assert_eq!(refused(NullConfig { zone_size: 128 << 20, ..zoned() }), "zone_size");
        assert_eq!(refused(NullConfig { zone_capacity: 2 << 20, ..zoned() }), "zone_capacity");
        assert_eq!(refused(NullConfig { zone_capacity: 1000, ..zoned() }), "zone_capacity");
        let runt = NullConfig { size: (64 << 20) + 4096, zone_capacity: 4096, ..zoned() };
        assert_eq!(refused(runt), "size");
        let many = NullConfig { size: 1 << 60, zone_size: 4096, ..zoned() };
        assert_eq!(refused(many), "zone_size");
    }

    #[test]
    fn corrections_are_those_of_null_blk_and_are_noted() {
        let config = NullConfig {
            zone_nr_conv: 100,
            zone_max_active: 1,
            discard: true,
            cache_size: 1 << 20,
            mbps: 50_000,
            ..zoned()
        };
        let shape = Shape::new(&config).unwrap();
        let zones = shape.geometry.zones.unwrap();
        assert_eq!((zones.zone_count, zones.conventional_count), (64, 63));
        assert_eq!(zones.active_max, 0);
        assert_eq!((shape.config.mbps, shape.config.cache_size), (40960, 0));
        assert_eq!(shape.limits.discard_sectors_max, 0);
        assert_eq!(shape.notes.len(), 5, "{:?}", shape.notes);

        let config = NullConfig { zone_max_open: 9, zone_max_active: 6, ..zoned() };
        let zones = Shape::new(&config).unwrap().geometry.zones.unwrap();
        assert_eq!((zones.open_max, zones.active_max), (6, 6));
        let config = NullConfig { zone_max_open: 64, ..zoned() };
        assert_eq!(Shape::new(&config).unwrap().geometry.zones.unwrap().open_max, 0);
        let queues = NullConfig { submit_queues: Some(0), ..zoned() };
        assert_eq!(Shape::new(&queues).unwrap().config.submit_queues, Some(1));
    }

    #[test]
    fn last_short_zone_and_append_limits() {
        let shape = Shape::new(&NullConfig { size: (64 << 20) + 8192, ..zoned() }).unwrap();
        let zones = shape.geometry.zones.unwrap();
        assert_eq!(zones.zone_count, 65);
        assert_eq!(shape.limits.zone_append_sectors_max, 2048);
        let config = NullConfig { bs: 4096, zone_append_max_sectors: 15, ..zoned() };
        assert_eq!(Shape::new(&config).unwrap().limits.zone_append_sectors_max, 8);
        let config = NullConfig { bs: 4096, zone_append_max_sectors: 7, ..zoned() };
        let shape = Shape::new(&config).unwrap();
        assert_eq!(shape.limits.zone_append_sectors_max, 0);
        assert!(shape.notes[0].starts_with("zone_append_max_sectors: 7"), "{:?}", shape.notes);
        let config = NullConfig { zone_append_max_sectors: 0, ..zoned() };
        assert_eq!(Shape::new(&config).unwrap().limits.zone_append_sectors_max, 0);
    }

    #[test]
    fn fua_needs_a_write_cache() {
        let config = NullConfig { memory_backed: true, ..NullConfig::default() };
        let limits = Shape::new(&config).unwrap().limits;
        assert!(!limits.write_cache && !limits.fua);
        let config = NullConfig { cache_size: 1 << 20, ..config };
        let limits = Shape::new(&config).unwrap().limits;
        assert!(limits.write_cache && limits.fua);
    }
}
