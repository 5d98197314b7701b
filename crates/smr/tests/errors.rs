//! How a request ends when the disk or the transport fails: the driver retries where that helps,
//! and otherwise the request ends with the right status.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only whole test functions.
#![allow(clippy::disallowed_types)] // A test's transport is not the data path.

use std::sync::{Arc, Mutex};

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::clock::Clock;
use blockyard_core::{Bio, Composed, Disk as _, Flags, Nanos, Op, Sector, Status};
use blockyard_smr::config::DiskConfig;
use blockyard_smr::disk::Disk;
use blockyard_smr::sd::Sd;
use blockyard_smr::sense::{ScsiStatus, Sense, SenseKey};
use blockyard_smr::transport::{Data, Outcome, ScsiTransport, TransportError};
use blockyard_testing::clock::ManualClock;
use blockyard_zone_media::MemoryMedium;

type Ended = Result<Outcome, TransportError>;

/// A transport that returns injected results instead of the disk's.
struct Unwell {
    disk: Disk<MemoryMedium>,
    /// Results that replace the disk's for reads and writes, the last one first.
    instead: Arc<Mutex<Vec<Ended>>>,
    /// Duration of each command in nanoseconds.
    takes_ns: u64,
}

impl ScsiTransport for Unwell {
    fn execute(&self, cdb: &[u8], data: Data<'_>) -> Ended {
        if matches!(cdb[0], 0x88 | 0x8a)
            && let Some(ended) = self.instead.lock().unwrap().pop()
        {
            return ended;
        }
        self.disk.execute(cdb, data)
    }

    fn due(&self, now: Nanos, _: &[u8]) -> Nanos {
        now + self.takes_ns
    }

    fn is_immediate(&self) -> bool {
        self.takes_ns == 0
    }
}

struct Fixture {
    io: Io,
    clock: ManualClock,
    instead: Arc<Mutex<Vec<Ended>>>,
}

fn fixture(takes_ns: u64) -> Fixture {
    let config =
        DiskConfig { size: 16 << 20, zone_size: 1 << 20, zone_nr_conv: 2, ..DiskConfig::default() };
    let memory = MemoryMedium::new(config.size, config.zone_size).unwrap();
    let instead = Arc::new(Mutex::new(Vec::new()));
    let disk = Disk::open(config, memory).unwrap();
    let sd = Sd::open(Unwell { disk, instead: Arc::clone(&instead), takes_ns }).unwrap();
    let clock = ManualClock::new();
    let config = ChannelConfig { depth: 64 };
    let disk = Composed::with_clock("unwell".to_owned(), "smr", sd, config, clock.clone());
    Fixture { io: Io::new(disk.open().unwrap(), 1 << 20), clock, instead }
}

impl Fixture {
    fn next(&self, ended: impl IntoIterator<Item = Ended>) {
        self.instead.lock().unwrap().extend(ended);
    }

    fn write(&mut self) -> Status {
        match self.io.write(Sector(0), &[7; 4096], Flags::NONE) {
            Ok(()) => Status::Ok,
            Err(status) => status,
        }
    }
}

fn check(key: SenseKey, asc: u8, ascq: u8) -> Ended {
    Ok(Outcome::check(Sense::new(key, asc, ascq)))
}

#[test]
fn unit_attentions_are_retried_a_bounded_number_of_times() {
    let mut fixture = fixture(0);
    fixture.next([check(SenseKey::UnitAttention, 0x29, 0), check(SenseKey::AbortedCommand, 0, 0)]);
    assert_eq!(fixture.write(), Status::Ok);
    fixture.next((0..20).map(|_| check(SenseKey::UnitAttention, 0x29, 0)));
    assert_eq!(fixture.write(), Status::IoErr);
    assert!(fixture.instead.lock().unwrap().len() > 10, "it was not tried for ever");
}

#[test]
fn busy_disk_is_retried_later() {
    let mut fixture = fixture(0);
    let busy = || Ok(Outcome { status: ScsiStatus::Busy, sense: None, transferred: 0 });
    fixture.next((0..7).map(|_| busy()));
    let before = fixture.clock.now();
    assert_eq!(fixture.write(), Status::Ok);
    assert!(fixture.clock.now().since(before) >= 7_000_000, "each time is some milliseconds later");
    let mut back = [0; 4096];
    fixture.io.read(Sector(0), &mut back).unwrap();
    assert_eq!(back, [7; 4096]);
    // For a host, "becoming ready" has the same effect.
    fixture.next([check(SenseKey::NotReady, 0x04, 0x01)]);
    assert_eq!(fixture.write(), Status::Ok);
    fixture.next((0..20_000).map(|_| busy()));
    assert_eq!(fixture.write(), Status::DevResource);
}

#[test]
fn a_link_that_fails_gives_its_own_statuses() {
    let mut fixture = fixture(0);
    for (error, status) in [
        (TransportError::Gone, Status::Offline),
        (TransportError::Timeout, Status::Timeout),
        (TransportError::Link { host: 7, driver: 0 }, Status::Transport),
        (TransportError::Io(std::io::Error::from_raw_os_error(libc::EPERM)), Status::IoErr),
    ] {
        fixture.next([Err(error)]);
        assert_eq!(fixture.write(), status);
    }
    assert_eq!(fixture.write(), Status::Ok);
}

#[test]
fn data_that_did_not_come_are_not_given_out() {
    let mut fixture = fixture(0);
    assert_eq!(fixture.write(), Status::Ok);
    fixture.next([Ok(Outcome::good(512))]);
    assert_eq!(fixture.io.read(Sector(0), &mut [0; 4096]), Err(Status::IoErr));
    fixture.next([Ok(Outcome::good(512))]);
    assert_eq!(fixture.write(), Status::IoErr);
    fixture.next([check(SenseKey::MediumError, 0x11, 0)]);
    assert_eq!(fixture.io.read(Sector(0), &mut [0; 4096]), Err(Status::Medium));
}

#[test]
fn a_disk_with_a_model_of_time_completes_when_it_would() {
    let mut fixture = fixture(5_000_000);
    for ops in 1..=4 {
        assert_eq!(fixture.write(), Status::Ok);
        assert!(fixture.clock.now() >= Nanos(ops * 5_000_000));
    }
    assert_eq!(fixture.io.run(Bio::new(Op::ZoneReset, Sector(2 * 2048), 0)), Ok(Sector(2 * 2048)));
    assert!(fixture.clock.now() >= Nanos(25_000_000));
}
