//! Responses of a drive: an emulated disk whose responses are changed or replaced. The driver
//! refuses the drive or uses it. It must not panic, loop without end, or report more zones than
//! requested.

use std::cell::RefCell;
use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{Bio, Composed, Device, Disk as _, Op, Sector, blocking};
use blockyard_smr::sense::{ScsiStatus, Sense};
use blockyard_smr::transport::{Data, Outcome, ScsiTransport, TransportError};
use blockyard_smr::{Disk, DiskConfig, Sd};
use blockyard_testing::clock::ManualClock;
use blockyard_zone_media::MemoryMedium;

use crate::input::Input;

/// The number of requests of one input.
const REQUESTS: u64 = 16;

thread_local! {
    /// The rest of the input. It is thread-local because a transport is shared, while an input
    /// belongs to one thread.
    static LEFT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The next byte of the input; 0 after its end.
fn byte() -> u8 {
    LEFT.with(|left| left.borrow_mut().pop().unwrap_or(0))
}

fn number() -> usize {
    usize::from(byte()) << 8 | usize::from(byte())
}

/// Interprets the bytes as the changes of each response.
///
/// # Panics
/// If the driver panics, or reports too many zones.
pub fn drive_answers(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let config = DiskConfig {
        size: 4 << 20,
        zone_size: 64 << 10,
        zone_nr_conv: input.choose(&[2, 0]),
        zone_capacity: input.choose(&[0, 40 << 10]),
        ..DiskConfig::default()
    };
    LEFT.with(|left| *left.borrow_mut() = bytes.iter().skip(2).rev().copied().collect());
    let memory = MemoryMedium::new(config.size, config.zone_size).expect("a little memory");
    let disk = Disk::open(config, memory).expect("configurations in here are right");
    let Ok(sd) = Sd::open(Changed(disk)).map(Arc::new) else { return };
    let (name, clock, depth) =
        ("drive".to_owned(), ManualClock::new(), ChannelConfig { depth: 16 });
    let disk = Composed::with_clock(name, "drive", Arc::clone(&sd), depth, clock);
    let mut io = blocking::Io::new(disk.open().expect("a queue is memory only"), 4096);
    for at in 0..REQUESTS {
        let mut zones: Vec<ZoneInfo> = Vec::new();
        // Any error is allowed.
        let _ = sd.report_zones(Sector(at * 128), 3, &mut zones);
        assert!(zones.len() <= 3, "more zones than were asked for");
        let _ = io.run(Bio::new(Op::ALL[at as usize % Op::ALL.len()], Sector(at * 128), 0));
        let _ = io.read(Sector(at * 128), &mut [0; 4096]);
    }
}

/// A disk whose answers the input changes.
struct Changed(Disk<MemoryMedium>);

impl ScsiTransport for Changed {
    fn execute(&self, cdb: &[u8], data: Data<'_>) -> Result<Outcome, TransportError> {
        let changes = match byte() {
            0..160 => 0,
            160..230 => byte() % 4,
            230..236 => return Err(TransportError::Timeout),
            236..240 => {
                let status = ScsiStatus::Busy;
                return Ok(Outcome { status, sense: None, transferred: 0 });
            }
            240..250 => {
                let bytes: Vec<u8> = (0..byte() % 20).map(|_| byte()).collect();
                return Ok(Outcome {
                    status: ScsiStatus::CheckCondition,
                    sense: Sense::parse(&bytes),
                    transferred: number(),
                });
            }
            _ => return Ok(Outcome::good(number())),
        };
        let Data::In(room) = data else { return self.0.execute(cdb, data) };
        let outcome = self.0.execute(cdb, Data::In(&mut *room));
        for _ in 0..changes {
            // The important fields are mostly in the first bytes of a response.
            let at = if byte() < 200 { usize::from(byte()) } else { number() };
            if let Some(changed) = room.get_mut(at) {
                *changed = byte();
            }
        }
        outcome
    }
}
