//! Zone reports, and the limits on open and active zones.

use blockyard_core::Status;
use blockyard_core::bio::{Bio, Op};
use blockyard_core::device::DeviceError;
use blockyard_core::units::Sector;
use blockyard_core::zone::ZoneCond;

use super::Subject;
use super::fixture::Fixture;
use crate::seed::Seed;

/// Any part of a report equals that part of the whole report.
pub(super) fn report_in_parts(subject: &Subject, _: Seed) {
    let fixture = subject.fixture();
    let sectors = fixture.disk.geometry().sectors;
    let all = fixture.report();
    fixture.same_report();
    let beyond = fixture.disk.report_zones(Sector(sectors), 1, &mut Vec::new());
    assert!(matches!(beyond, Err(DeviceError::OutOfRange { .. })), "{beyond:?}");
    let Some(zones) = fixture.disk.geometry().zones.clone() else {
        assert!(all.is_empty(), "zones of a device without zones");
        return;
    };
    assert_eq!(all.len(), zones.zone_count as usize);
    for from in [0, 1, zones.zone_sectors - 1, zones.zone_sectors, sectors / 2, sectors - 1] {
        for count in [0, 1, 3, usize::MAX] {
            let mut found = all[..1].to_vec();
            fixture.disk.report_zones(Sector(from), count, &mut found).expect("on the device");
            let first = (from / zones.zone_sectors) as usize;
            let wanted: Vec<_> = all[..1].iter().chain(all[first..].iter().take(count)).collect();
            assert_eq!(found.iter().collect::<Vec<_>>(), wanted, "{count} from {from}");
        }
    }
}

/// The limits, with every way to take and free the resources of a zone.
pub(super) fn limits(subject: &Subject, _: Seed) {
    let mut fixture = subject.fixture();
    let Some(zones) = fixture.disk.geometry().zones.clone() else { return };
    let (block, refused) = (fixture.model.write_sectors(), fixture.model.rules().refused());
    let first = zones.conventional_count;
    let start = |zone: u32| Sector(u64::from(zone) * zones.zone_sectors);
    // Write one block to every sequential zone, twice: the model knows which zone is closed
    // implicitly.
    for round in 0..2 {
        for zone in first..zones.zone_count {
            let wp = fixture.model.report()[zone as usize].wp;
            let in_order = fixture.both(Bio::new(Op::Write, wp, block)).status;
            assert!(round == 1 || in_order != refused, "zone {zone}: {in_order}");
        }
        fixture.same_report();
    }
    // Then open, close, finish and reset all of them.
    for op in [Op::ZoneOpen, Op::ZoneClose, Op::ZoneFinish, Op::ZoneReset] {
        for zone in first..zones.zone_count {
            fixture.both(Bio::new(op, start(zone), 0));
        }
        fixture.same_report();
    }
    all_slots_are_there(&mut fixture);
    fixture.both(Bio::new(Op::ZoneResetAll, Sector(0), 0));
    all_slots_are_there(&mut fixture);
}

/// Two adjacent writes in the wrong order: the second block misses the write pointer, although
/// merged with the first it would not. In the right order both succeed.
pub(super) fn order(subject: &Subject, _: Seed) {
    let mut fixture = subject.fixture();
    let Some(zones) = fixture.disk.geometry().zones.clone() else { return };
    let (block, refused) = (fixture.model.write_sectors(), fixture.model.rules().refused());
    let start = u64::from(zones.conventional_count) * zones.zone_sectors;
    let write = |fixture: &Fixture, at: u64, user_data: u64| {
        let buf = fixture.buf(user_data * block * 512);
        Bio::write(Sector(at), block, buf).with_user_data(user_data)
    };
    let mut at = start;
    for right in [false, true, false, true] {
        let (first, second) = if right { (at, at + block) } else { (at + block, at) };
        let bios = [write(&fixture, first, 0), write(&fixture, second, 1)];
        assert_eq!(fixture.channel.push(&bios), 2);
        let mut done = fixture.finish();
        done.sort_by_key(|completion| completion.user_data);
        let wanted = if right { [Status::Ok, Status::Ok] } else { [refused, Status::Ok] };
        assert_eq!(done.iter().map(|done| done.status).collect::<Vec<_>>(), wanted);
        at += if right { 2 * block } else { block };
    }
    assert_eq!(fixture.report()[zones.conventional_count as usize].wp, Sector(at));
}

/// On a device whose zones are all empty: exactly the number of zones that the limits allow can be
/// opened; afterwards they are empty again.
pub(super) fn all_slots_are_there(fixture: &mut Fixture) {
    let zones = fixture.disk.geometry().zones.clone().expect("only called with zones");
    let sequential = zones.zone_count - zones.conventional_count;
    let bounds = [zones.open_max, zones.active_max, sequential];
    let slots = bounds.into_iter().filter(|bound| *bound > 0).min().unwrap_or(0);
    let start = |zone: u32| Sector(u64::from(zones.conventional_count + zone) * zones.zone_sectors);
    for zone in 0..slots {
        let status = fixture.both(Bio::new(Op::ZoneOpen, start(zone), 0)).status;
        assert_eq!(status, Status::Ok, "slot {zone} of {slots}");
    }
    if slots < sequential {
        let status = fixture.both(Bio::new(Op::ZoneOpen, start(slots), 0)).status;
        assert_ne!(status, Status::Ok, "more zones are open than there are slots");
    }
    fixture.same_report();
    for zone in 0..slots {
        assert_eq!(fixture.both(Bio::new(Op::ZoneClose, start(zone), 0)).status, Status::Ok);
    }
    assert!(
        fixture
            .model
            .report()
            .iter()
            .all(|zone| { matches!(zone.cond, ZoneCond::Empty | ZoneCond::NotWp) })
    );
    fixture.same_report();
}
