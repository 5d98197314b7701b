//! Zone reports, and the limits on open and active zones.

use blockyard_core::bio::{Bio, Op};
use blockyard_core::device::DeviceError;
use blockyard_core::status::Status;
use blockyard_core::units::Sector;
use blockyard_core::zone::ZoneCond;

use super::Subject;
use super::rig::Rig;
use crate::seed::Seed;

/// Any part of a report equals that part of the whole report.
pub(super) fn report_in_parts(subject: &Subject, _: Seed) {
    let rig = subject.rig();
    let sectors = rig.disk.geometry().sectors;
    let all = rig.report();
    rig.same_report();
    let beyond = rig.disk.report_zones(Sector(sectors), 1, &mut Vec::new());
    assert!(matches!(beyond, Err(DeviceError::OutOfRange { .. })), "{beyond:?}");
    let Some(zones) = rig.disk.geometry().zones.clone() else {
        assert!(all.is_empty(), "zones of a device without zones");
        return;
    };
    assert_eq!(all.len(), zones.zone_count as usize);
    for from in [0, 1, zones.zone_sectors - 1, zones.zone_sectors, sectors / 2, sectors - 1] {
        for count in [0, 1, 3, usize::MAX] {
            let mut found = all[..1].to_vec();
            rig.disk.report_zones(Sector(from), count, &mut found).expect("on the device");
            let first = (from / zones.zone_sectors) as usize;
            let wanted: Vec<_> = all[..1].iter().chain(all[first..].iter().take(count)).collect();
            assert_eq!(found.iter().collect::<Vec<_>>(), wanted, "{count} from {from}");
        }
    }
}

/// The limits, with every way to take and free the resources of a zone.
pub(super) fn limits(subject: &Subject, _: Seed) {
    let mut rig = subject.rig();
    let Some(zones) = rig.disk.geometry().zones.clone() else { return };
    let (block, refused) = (rig.model.write_sectors(), rig.model.rules().refused());
    let first = zones.conventional_count;
    let start = |zone: u32| Sector(u64::from(zone) * zones.zone_sectors);
    // Write one block to every sequential zone, twice: the model knows which zone is closed
    // implicitly.
    for round in 0..2 {
        for zone in first..zones.zone_count {
            let wp = rig.model.report()[zone as usize].wp;
            let in_order = rig.both(Bio::new(Op::Write, wp, block)).status;
            assert!(round == 1 || in_order != refused, "zone {zone}: {in_order}");
        }
        rig.same_report();
    }
    // Then open, close, finish and reset all of them.
    for op in [Op::ZoneOpen, Op::ZoneClose, Op::ZoneFinish, Op::ZoneReset] {
        for zone in first..zones.zone_count {
            rig.both(Bio::new(op, start(zone), 0));
        }
        rig.same_report();
    }
    all_slots_are_there(&mut rig);
    rig.both(Bio::new(Op::ZoneResetAll, Sector(0), 0));
    all_slots_are_there(&mut rig);
}

/// Two adjacent writes in the wrong order: the second block misses the write pointer, although
/// merged with the first it would not. In the right order both succeed.
pub(super) fn order(subject: &Subject, _: Seed) {
    let mut rig = subject.rig();
    let Some(zones) = rig.disk.geometry().zones.clone() else { return };
    let (block, refused) = (rig.model.write_sectors(), rig.model.rules().refused());
    let start = u64::from(zones.conventional_count) * zones.zone_sectors;
    let write = |rig: &Rig, at: u64, user_data: u64| {
        let buf = rig.buf(user_data * block * 512);
        Bio::write(Sector(at), block, buf).with_user_data(user_data)
    };
    let mut at = start;
    for right in [false, true, false, true] {
        let (first, second) = if right { (at, at + block) } else { (at + block, at) };
        let bios = [write(&rig, first, 0), write(&rig, second, 1)];
        assert_eq!(rig.channel.push(&bios), 2);
        let mut done = rig.finish();
        done.sort_by_key(|completion| completion.user_data);
        let wanted = if right { [Status::Ok, Status::Ok] } else { [refused, Status::Ok] };
        assert_eq!(done.iter().map(|done| done.status).collect::<Vec<_>>(), wanted);
        at += if right { 2 * block } else { block };
    }
    assert_eq!(rig.report()[zones.conventional_count as usize].wp, Sector(at));
}

/// On a device whose zones are all empty: exactly the number of zones that the limits allow can be
/// opened; afterwards they are empty again.
pub(super) fn all_slots_are_there(rig: &mut Rig) {
    let zones = rig.disk.geometry().zones.clone().expect("only called with zones");
    let sequential = zones.zone_count - zones.conventional_count;
    let bounds = [zones.open_max, zones.active_max, sequential];
    let slots = bounds.into_iter().filter(|bound| *bound > 0).min().unwrap_or(0);
    let start = |zone: u32| Sector(u64::from(zones.conventional_count + zone) * zones.zone_sectors);
    for zone in 0..slots {
        let status = rig.both(Bio::new(Op::ZoneOpen, start(zone), 0)).status;
        assert_eq!(status, Status::Ok, "slot {zone} of {slots}");
    }
    if slots < sequential {
        let status = rig.both(Bio::new(Op::ZoneOpen, start(slots), 0)).status;
        assert_ne!(status, Status::Ok, "more zones are open than there are slots");
    }
    rig.same_report();
    for zone in 0..slots {
        assert_eq!(rig.both(Bio::new(Op::ZoneClose, start(zone), 0)).status, Status::Ok);
    }
    assert!(
        rig.model
            .report()
            .iter()
            .all(|zone| { matches!(zone.cond, ZoneCond::Empty | ZoneCond::NotWp) })
    );
    rig.same_report();
}
