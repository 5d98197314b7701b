//! The scheduler `deadline`: every operation is also applied to its model. Texts for its tunables
//! are accepted, or refused with an error that is not empty.

use blockyard_core::request::MergeRules;
use blockyard_core::sched::deadline::{DeadlineConfig, Tunable, Tunables};
use blockyard_core::{Limits, Op, Prio, ZoneGeometry};
use blockyard_testing::deadline::{Lockstep, TestStep};

use crate::input::Input;

/// The number of sectors of a zone.
const ZONE_SECTORS: u64 = 64;

/// The most steps of one input.
const STEPS_MAX: usize = 600;

/// Interprets the bytes as steps.
///
/// # Panics
/// If the scheduler and its model disagree.
pub fn steps(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut both = Lockstep::new(config(&mut input));
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        both.step(step(&mut input));
    }
    both.finish();
}

fn config(input: &mut Input<'_>) -> DeadlineConfig {
    let zoned = input.below(2) == 1;
    let zones = ZoneGeometry {
        zone_sectors: ZONE_SECTORS,
        zone_capacity_sectors: ZONE_SECTORS,
        zone_count: 8,
        conventional_count: input.below(3) as u32,
        open_max: 0,
        active_max: 0,
    };
    let limits = Limits {
        sectors_max: 16 + input.below(64),
        segments_max: 1 + input.below(6) as u16,
        discard_sectors_max: input.below(64),
        chunk_sectors: if zoned { ZONE_SECTORS } else { 0 },
        ..Limits::unlimited(8)
    };
    let capacity = 1 + input.below(80) as usize;
    DeadlineConfig {
        capacity,
        in_flight_max: 1 + input.below(8) as usize,
        rules: MergeRules::new(&limits),
        zones: zoned.then_some(zones),
        tunables: Tunables::new(capacity as u32),
    }
}

fn step(input: &mut Input<'_>) -> TestStep {
    match input.below(17) {
        16 => TestStep::Pass {
            op: input.choose(&[Op::Write, Op::Discard]),
            prio: input.choose(&[Prio::BestEffort, Prio::BestEffort, Prio::RealTime, Prio::Idle]),
            reads: input.word() & input.word() & input.choose(&[0, u64::MAX]),
            writes: input.word() & input.word() & input.choose(&[0, u64::MAX]),
        },
        0..8 => insert(input),
        8..11 => TestStep::Dispatch(1 + input.below(9) as usize),
        11..13 => TestStep::Complete(input.byte().into()),
        13 => TestStep::Requeue(input.byte().into()),
        14 => TestStep::Wait(input.below(16)),
        _ => {
            let tunable = input.choose(&Tunable::ALL);
            let (least, most) = tunable.range();
            let value = input.choose(&[0, 1, 2, 5, 30, -1, i32::MAX, i32::MIN]);
            TestStep::Tune(tunable, value.clamp(least, most))
        }
    }
}

fn insert(input: &mut Input<'_>) -> TestStep {
    let op = input.choose(&[Op::Read, Op::Write, Op::Write, Op::Discard, Op::ZoneReset]);
    let prio = input.choose(&[Prio::BestEffort, Prio::BestEffort, Prio::RealTime, Prio::Idle]);
    let sector = input.below(64) * 8 + if input.below(8) == 7 { input.below(8) } else { 0 };
    let sectors = if input.below(8) == 7 { 1 + input.below(16) } else { 8 };
    // A request ends within its zone: a longer one would have been split.
    let sectors = sectors.min(ZONE_SECTORS - sector % ZONE_SECTORS);
    let chance = input.below(16);
    TestStep::Insert {
        op,
        prio,
        sector,
        sectors: if op.has_range() { sectors } else { 0 },
        merges: chance != 1,
        at_head: chance == 2,
    }
}

/// Interprets the bytes as the name of a tunable and a value for it.
///
/// # Panics
/// If an accepted value differs from the text, or is out of range.
pub fn tunables(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let name = match input.below(8) {
        7 => String::from_utf8_lossy(input.take(12)).into_owned(),
        _ => input.choose(&Tunable::ALL).name().to_owned(),
    };
    let value = match input.below(4) {
        0 => String::from_utf8_lossy(input.take(24)).into_owned(),
        1 => (input.word() as i64).to_string(),
        2 => (input.word() as i32).to_string(),
        _ => input.byte().to_string(),
    };
    let mut tunables = Tunables::new(input.byte().into());
    let before = tunables;
    match tunables.set_text(&name, &value) {
        Ok(()) => {
            let tunable = Tunable::from_name(&name).expect("it was set");
            let (least, most) = tunable.range();
            let taken = tunables.get(tunable);
            assert!((least..=most).contains(&taken), "{tunable} is {taken}");
            assert_eq!(value.parse(), Ok(taken), "`{value}` was taken");
        }
        Err(error) => {
            assert_eq!(tunables, before, "refused, yet something has changed");
            let text = error.to_string();
            assert!(text.contains(&value) || text.contains(&name), "{text}");
        }
    }
}
