//! Several threads on one disk.

use std::thread;

use blockyard_core::zone::ZoneCond;
use blockyard_smr::Disk;
use blockyard_smr::cdb::Form;
use blockyard_testing::seed::Seed;
use blockyard_zone_media::MemoryMedium;
use fastrand::Rng;

use super::plain::{Action, BLOCK, Cond, PHYSICAL, Plain, UNALIGNED_WRITE};
use super::{act, disk, model, read, same_zone, write};

const THREADS: u32 = 4;
/// Sequential zones of a thread, in addition to one conventional zone.
const ZONES: u32 = 3;

/// A random command to one of a thread's zones and to its model, which has no limit on open zones.
fn own_step(rng: &mut Rng, disk: &Disk<MemoryMedium>, model: &mut Plain, zone: usize, opens: bool) {
    let (start, len) = (model.start(zone), model.len(zone));
    // The end of a full zone is the start of another thread's zone.
    let at = start + model.zones[zone].written.min(len - PHYSICAL);
    match rng.u8(..16) {
        0..9 => {
            let lba = if rng.u8(..8) == 0 { start + rng.u64(..len) } else { at };
            let mut count = PHYSICAL * rng.u64(1..5);
            // Conventional zones are contiguous: blocks after the end belong to another thread.
            if model.zones[zone].cond == Cond::NotWp {
                count = count.min(start + len - lba);
            }
            let bytes = vec![rng.u8(1..); count as usize * BLOCK];
            let wanted = model.write(lba, &bytes);
            assert_eq!(write(disk, Form::Sixteen, lba, &bytes), wanted, "zone {zone}");
        }
        9..13 => {
            let count = rng.u64(1..=len);
            let same = read(disk, Form::Sixteen, start, count) == model.read(start, count);
            assert!(same, "data of zone {zone}");
        }
        choice => {
            let action = match choice {
                13 => Action::Close,
                14 if opens => Action::Open,
                14 => Action::Finish,
                _ => Action::Reset,
            };
            assert_eq!(act(disk, action, start, false), model.act(action, start));
        }
    }
}

/// Every thread works on its own zones; `exact` is called after each command.
fn own_zones(
    open_max: u32,
    opens: bool,
    exact: impl Fn(&Disk<MemoryMedium>, &Plain, usize) + Sync,
) {
    let seed = Seed::from_env();
    let _watch = seed.watch("own_zones");
    let disk = disk(u64::from(THREADS * (ZONES + 1)), THREADS, open_max, true);
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (disk, exact) = (&disk, &exact);
            scope.spawn(move || {
                let mut rng = seed.rng(u64::from(100 + number));
                let mut model = model(disk);
                model.without_limit();
                for _ in 0..3000 {
                    let own = rng.u32(..ZONES + 1);
                    let zone = if own == ZONES { number } else { THREADS + number * ZONES + own };
                    own_step(&mut rng, disk, &mut model, zone as usize, opens);
                    exact(disk, &model, zone as usize);
                }
            });
        }
    });
    assert_eq!(act(&disk, Action::Reset, 0, true), Ok(()));
    for zone in THREADS..disk.layout().slots() {
        assert_eq!(disk.zone(zone).cond, ZoneCond::Empty);
    }
    if let Some(counts) = disk.counts() {
        assert_eq!((counts.open, counts.explicit), (0, 0), "no open zone is lost");
    }
}

#[test]
fn threads_with_zones_of_their_own_do_not_notice_each_other() {
    own_zones(0, true, same_zone);
}

#[test]
fn threads_at_the_open_limit_close_each_others_zones_and_lose_nothing() {
    own_zones(2, false, |disk, model, zone| {
        let found = disk.zone(zone as u32);
        let wanted = &model.zones[zone];
        // Another thread may have closed the zone to make room.
        let open = matches!(found.cond, ZoneCond::ImplicitOpen | ZoneCond::Closed);
        match wanted.cond {
            Cond::Implicit | Cond::Closed => {
                assert!(open, "zone {zone}: {}", found.cond);
                assert_eq!(found.wp.0 - found.start.0, wanted.written, "zone {zone}");
            }
            _ => same_zone(disk, model, zone),
        }
        let counts = disk.counts().unwrap();
        assert!(counts.open <= 2, "{counts:?}");
    });
}

/// A physical block that contains its address and its writer.
fn stamped(lba: u64, thread: u32) -> Vec<u8> {
    let mut bytes = vec![thread as u8; PHYSICAL as usize * BLOCK];
    bytes[..8].copy_from_slice(&lba.to_le_bytes());
    bytes
}

#[test]
fn threads_in_one_zone_write_each_block_once() {
    let disk = disk(4, 1, 1, true);
    let zone = disk.zone(1);
    let mut written: Vec<(u64, u32)> = thread::scope(|scope| {
        let writers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let disk = &disk;
                scope.spawn(move || {
                    let mut written = Vec::new();
                    loop {
                        let now = disk.zone(1);
                        if now.cond == ZoneCond::Full {
                            return written;
                        }
                        let lba = now.wp.0;
                        match write(disk, Form::Sixteen, lba, &stamped(lba, thread)) {
                            Ok(()) => {
                                // Written data can be read at once.
                                let found = read(disk, Form::Sixteen, lba, PHYSICAL).unwrap();
                                assert!(found == stamped(lba, thread), "data at {lba}");
                                written.push((lba, thread));
                            }
                            Err(super::plain::INVALID_FIELD | UNALIGNED_WRITE) => {}
                            Err(code) => panic!("{code:x?}"),
                        }
                    }
                })
            })
            .collect();
        writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
    });
    written.sort_unstable();
    let wanted: Vec<u64> =
        (zone.start.0..zone.start.0 + zone.sectors).step_by(PHYSICAL as usize).collect();
    assert_eq!(written.iter().map(|(lba, _)| *lba).collect::<Vec<_>>(), wanted);
    for (lba, thread) in written {
        let found = read(&disk, Form::Sixteen, lba, PHYSICAL);
        assert!(found == Ok(stamped(lba, thread)), "data at {lba}");
    }
}

#[test]
fn read_concurrent_with_resets_finds_one_write_or_zeros() {
    let disk = disk(3, 1, 0, true);
    let start = disk.zone(1).start.0;
    let count = 4 * PHYSICAL;
    thread::scope(|scope| {
        let disk = &disk;
        scope.spawn(move || {
            for round in 0..2000u32 {
                let bytes = vec![(round % 250) as u8 + 1; count as usize * BLOCK];
                assert_eq!(write(disk, Form::Sixteen, start, &bytes), Ok(()));
                assert_eq!(act(disk, Action::Reset, start, false), Ok(()));
            }
        });
        for _ in 0..2 {
            scope.spawn(move || {
                for _ in 0..6000 {
                    let found = read(disk, Form::Sixteen, start, count).unwrap();
                    assert!(found.iter().all(|&byte| byte == found[0]), "a mixture");
                }
            });
        }
    });
}

#[test]
fn all_zones_commands_concurrent_with_writers_lose_no_open_zone() {
    let seed = Seed::from_env();
    let _watch = seed.watch("all_zones_commands_concurrent_with_writers_lose_no_open_zone");
    let disk = disk(12, 2, 3, true);
    thread::scope(|scope| {
        for number in 0..THREADS {
            let disk = &disk;
            scope.spawn(move || {
                let mut rng = seed.rng(u64::from(200 + number));
                for _ in 0..2000 {
                    let zone = disk.zone(rng.u32(2..disk.layout().slots()));
                    let start = zone.start.0;
                    // Other threads interfere: any refusal is valid, but no other error.
                    let _ = match rng.u8(..16) {
                        0..10 => write(disk, Form::Sixteen, zone.wp.0, &stamped(start, number)),
                        10 => act(disk, Action::Open, start, false),
                        11 => act(disk, Action::Reset, start, false),
                        12 => act(disk, Action::Open, 0, true),
                        13 => act(disk, Action::Close, 0, true),
                        14 => act(disk, Action::Finish, start, false),
                        _ => act(disk, Action::Reset, 0, true),
                    };
                    let counts = disk.counts().unwrap();
                    assert!(counts.open <= 3 && counts.explicit <= counts.open, "{counts:?}");
                }
            });
        }
    });
    let zones = (2..disk.layout().slots()).map(|zone| disk.zone(zone).cond);
    let open = zones.filter(|cond| matches!(cond, ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen));
    assert_eq!(disk.counts().unwrap().open as usize, open.count(), "accounts and zones agree");
    assert_eq!(act(&disk, Action::Reset, 0, true), Ok(()));
    assert_eq!(disk.counts().unwrap().open, 0);
    for zone in 2..5 {
        assert_eq!(act(&disk, Action::Open, disk.zone(zone).start.0, false), Ok(()));
    }
    let refused = act(&disk, Action::Open, disk.zone(5).start.0, false);
    assert_eq!(refused, Err(super::plain::NO_RESOURCES));
}
