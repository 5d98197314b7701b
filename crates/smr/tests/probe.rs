//! How the driver interprets a disk's responses: those of the emulated disk, and modified ones.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only whole test functions.
#![allow(clippy::disallowed_types)] // A test's transport is not the data path.

use std::sync::{Arc, Mutex};

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::inject::Injection;
use blockyard_core::zone::{ZoneCond, ZoneType};
use blockyard_core::{Bio, Composed, Device, DeviceError, Disk as _, Op, Sector, Status};
use blockyard_smr::config::DiskConfig;
use blockyard_smr::disk::Disk;
use blockyard_smr::sd::Sd;
use blockyard_smr::sense::{ScsiStatus, Sense, SenseKey};
use blockyard_smr::transport::{Data, Outcome, ScsiTransport, TransportError};
use blockyard_zone_media::MemoryMedium;

/// A modification of a response, given the command and the response.
type Change = Box<dyn Fn(&[u8], &mut [u8]) + Send + Sync>;

/// A transport that modifies responses and may return other outcomes first.
struct Changed {
    disk: Disk<MemoryMedium>,
    change: Change,
    /// Outcomes that replace the disk's, the last one first.
    before: Mutex<Vec<Outcome>>,
}

impl ScsiTransport for Changed {
    fn execute(&self, cdb: &[u8], data: Data<'_>) -> Result<Outcome, TransportError> {
        let before = self.before.lock().unwrap().pop();
        if let Some(outcome) = before {
            return Ok(outcome);
        }
        match data {
            Data::In(bytes) => {
                let outcome = self.disk.execute(cdb, Data::In(&mut *bytes))?;
                (self.change)(cdb, &mut bytes[..outcome.transferred]);
                Ok(outcome)
            }
            data => self.disk.execute(cdb, data),
        }
    }
}

fn config() -> DiskConfig {
    DiskConfig {
        size: 64 << 20,
        zone_size: 1 << 20,
        zone_nr_conv: 4,
        zone_max_open: 8,
        ..DiskConfig::default()
    }
}

fn disk(config: DiskConfig) -> Disk<MemoryMedium> {
    let memory = MemoryMedium::new(config.size, config.zone_size).unwrap();
    Disk::open(config, memory).unwrap()
}

fn changed(change: impl Fn(&[u8], &mut [u8]) + Send + Sync + 'static) -> Changed {
    Changed { disk: disk(config()), change: Box::new(change), before: Mutex::default() }
}

fn is_inquiry(cdb: &[u8], page: u8) -> bool {
    cdb[0] == 0x12 && (cdb[1], cdb[2]) == (u8::from(page > 0), page)
}

#[test]
fn the_emulated_disk_is_found_as_it_is_configured() {
    let sd = Sd::open(disk(config())).unwrap();
    let geometry = sd.geometry();
    assert_eq!(geometry.sectors, 64 << 11);
    assert_eq!((geometry.logical_block_bytes, geometry.physical_block_bytes), (512, 4096));
    let zones = geometry.zones.as_ref().unwrap();
    assert_eq!((zones.zone_sectors, zones.zone_capacity_sectors), (2048, 2048));
    assert_eq!((zones.zone_count, zones.conventional_count), (64, 4));
    assert_eq!((zones.open_max, zones.active_max), (8, 0));
    let limits = sd.limits();
    assert!(limits.write_cache && limits.fua && !limits.read_only);
    assert_eq!((limits.chunk_sectors, limits.zone_append_sectors_max), (2048, 0));
    assert!(limits.write_zeroes_sectors_max > 0);
    let through = DiskConfig { write_cache: false, ..config() };
    assert!(!Sd::open(disk(through)).unwrap().limits().write_cache);
}

#[test]
fn a_report_has_every_zone_though_many_do_not_fit_one_answer() {
    let config = DiskConfig { size: 3000 << 20, ..config() };
    let sd = Sd::open(disk(config)).unwrap();
    let mut zones = Vec::new();
    sd.report_zones(Sector(0), usize::MAX, &mut zones).unwrap();
    assert_eq!(zones.len(), 3000);
    assert!(zones.windows(2).all(|pair| pair[0].start + pair[0].sectors == pair[1].start));
    assert_eq!((zones[3].kind, zones[3].cond), (ZoneType::Conventional, ZoneCond::NotWp));
    assert_eq!(
        (zones[4].kind, zones[4].cond),
        (ZoneType::SequentialWriteRequired, ZoneCond::Empty)
    );
}

/// A transport with a limit of 4096 bytes per command.
struct Narrow(Disk<MemoryMedium>);

impl ScsiTransport for Narrow {
    fn execute(&self, cdb: &[u8], data: Data<'_>) -> Result<Outcome, TransportError> {
        let given = match &data {
            Data::None => 0,
            Data::In(bytes) => bytes.len() as u64,
            Data::Out(bytes) => bytes.len() as u64,
        };
        if given > 4096 {
            return Err(TransportError::Buffer { wanted: given, given: 4096 });
        }
        self.0.execute(cdb, data)
    }

    fn bytes_max(&self) -> usize {
        4096
    }
}

#[test]
fn a_report_is_no_longer_than_the_way_to_the_disk_takes() {
    let sd = Sd::open(Narrow(disk(DiskConfig { size: 300 << 20, ..config() }))).unwrap();
    assert_eq!(sd.limits().sectors_max, 8);
    let mut zones = Vec::new();
    sd.report_zones(Sector(0), usize::MAX, &mut zones).unwrap();
    assert_eq!(zones.len(), 300);
}

/// The response that a case modifies.
#[derive(Clone, Copy)]
enum Answer {
    /// The response to INQUIRY: the page, or 0 for the standard data.
    Inquiry(u8),
    /// The response to the command with this operation code.
    Command(u8),
}

#[test]
fn disks_that_linux_does_not_drive_are_refused_with_the_reason() {
    let (capacity, zones) = (Answer::Command(0x9e), Answer::Command(0x95));
    for (answer, at, byte, want) in [
        (Answer::Inquiry(0), 0, 0x00, "without zones"),
        (Answer::Inquiry(0), 0, 0x05, "device type is 05h"),
        (Answer::Inquiry(0xb6), 4, 0, "URSWRZ is 0"),
        (Answer::Inquiry(0xb6), 1, 0xb7, "no page B6h"),
        (capacity, 10, 0x30, "its blocks have 12288 bytes"),
        (capacity, 13, 0x0f, "2^15 logical ones"),
        (zones, 64, 0x03, "zone 0 is of type 3"),
        (zones, 64 + 15, 1, "is not a power of two"),
        (zones, 2, 0, "missing zones from block 0"),
    ] {
        let transport = changed(move |cdb, data| {
            let is_it = match answer {
                Answer::Inquiry(page) => is_inquiry(cdb, page),
                Answer::Command(opcode) => cdb[0] == opcode,
            };
            if is_it {
                data[at] = byte;
            }
            // A list without zones, whatever follows it.
            if is_it && want.contains("missing") {
                data[..4].fill(0);
            }
        });
        let error = Sd::open(transport).unwrap_err().to_string();
        assert!(error.contains(want), "expected `{want}`: {error}");
    }
}

#[test]
fn unit_attentions_are_retried_and_other_errors_reported() {
    let attention = Outcome::check(Sense::new(SenseKey::UnitAttention, 0x29, 0x00));
    let transport = changed(|_, _| {});
    *transport.before.lock().unwrap() = vec![attention; 3];
    assert!(Sd::open(transport).is_ok());
    let transport = changed(|_, _| {});
    *transport.before.lock().unwrap() = vec![attention; 50];
    let error = Sd::open(transport).unwrap_err().to_string();
    assert!(error.contains("INQUIRY: the disk refuses: 06/29/00"), "{error}");
    let transport = changed(|_, _| {});
    let busy = Outcome { status: ScsiStatus::Busy, sense: None, transferred: 0 };
    transport.before.lock().unwrap().push(busy);
    let error = Sd::open(transport).unwrap_err().to_string();
    assert!(error.contains("status Busy"), "{error}");
}

/// Older drives lack some pages; a missing page means no limit.
#[test]
fn a_disk_without_optional_pages_has_no_such_limits() {
    let sd = Sd::open(changed(|cdb, data| {
        if is_inquiry(cdb, 0xb0) || is_inquiry(cdb, 0xb2) {
            data[1] = 0;
        }
        if cdb[0] == 0xa3 {
            data[1] = 1;
        }
        if cdb[0] == 0x1a {
            data[2] |= 0x80;
        }
    }));
    let sd = sd.unwrap();
    let limits = sd.limits();
    assert_eq!((limits.write_zeroes_sectors_max, limits.discard_sectors_max), (0, 0));
    assert_eq!(limits.sectors_max, 2048);
    assert!(limits.read_only);
}

/// Without UNMAP a discard is a WRITE SAME, which in a sequential zone would be a write.
#[test]
fn a_discard_that_is_a_write_is_not_for_sequential_zones() {
    let sd = Sd::open(changed(|cdb, data| {
        if is_inquiry(cdb, 0xb2) {
            data[5] = data[5] & !0x80 | 0x40;
        }
    }));
    let sd = Arc::new(sd.unwrap());
    assert!(sd.limits().discard_sectors_max > 0);
    let (device, depth) = (Arc::clone(&sd), ChannelConfig::default());
    let disk = Composed::new("sd".to_owned(), "smr", device, depth);
    let mut io = Io::new(disk.open().unwrap(), 1 << 20);
    let mut discard = |sector| io.run(Bio::new(Op::Discard, Sector(sector), 8)).map(drop);
    assert_eq!(discard(0), Ok(()));
    assert_eq!(discard(4 * 2048), Err(Status::NotSupp));
    let mut zones = Vec::new();
    sd.report_zones(Sector(4 * 2048), 1, &mut zones).unwrap();
    assert_eq!(zones[0].cond, ZoneCond::Empty);
}

/// Whatever a disk responds to any command, it is driven or refused, and nothing panics.
#[test]
fn answers_that_are_changed_anywhere_do_no_harm() {
    use std::sync::atomic::{AtomicU64, Ordering};
    static SEED: AtomicU64 = AtomicU64::new(0);
    fn spoil(_: &[u8], data: &mut [u8]) {
        let mut rng = fastrand::Rng::with_seed(SEED.fetch_add(1, Ordering::Relaxed) / 3);
        for _ in 0..rng.u32(0..3) {
            // Headers are short, and reports long.
            let most = [64, 256, 65_536][rng.usize(..3)];
            let at = rng.usize(..data.len().clamp(1, most));
            if let Some(byte) = data.get_mut(at) {
                *byte ^= rng.u8(..);
            }
        }
    }
    let seed = blockyard_testing::seed::Seed::from_env();
    let _watch = seed.watch("answers that are changed anywhere");
    SEED.store(seed.0 << 20, Ordering::Relaxed);
    let mut driven = 0;
    for _ in 0..300 {
        if let Ok(sd) = Sd::open(changed(spoil)) {
            driven += 1;
            let mut zones = Vec::new();
            let _ = sd.report_zones(Sector(0), 100, &mut zones);
            assert!(zones.len() <= 100);
        }
    }
    assert!(driven > 0, "some changes do not matter");
}

#[test]
fn unsupported_injection_is_refused() {
    let sd = Sd::open(changed(|_, _| {})).unwrap();
    let fault = Injection::Device { name: "badblocks".to_owned(), value: "0".to_owned() };
    assert!(matches!(sd.inject(&fault), Err(DeviceError::NoSuchFault { .. })));
}
