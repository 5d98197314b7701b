//! A device's scheduler: its initial setting, changes by requests, and its view.
//!
//! Names, units and ranges are Linux's (`queue/scheduler` and `queue/iosched/`). They are the same
//! in a URI, in TOML and at run time, because the table of parameters parses them all.
#![allow(clippy::disallowed_types)] // Requests that change a scheduler are control plane.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use blockyard_core::Disk;
use blockyard_core::sched::SchedulerControl;
use blockyard_core::sched::deadline::{Stats, Tunable, Tunables};
use blockyard_core::sched::shared::ORDER_CAPACITY;
use serde::{Deserialize, Serialize};

use crate::error::{StackError, YardError};
use crate::param::{DeviceKind, Param, SCHEDULERS, Value, shown};
use crate::spec::DeviceSpec;
use crate::suggestion::suggestion;
use crate::uri::UriError;

/// The parameter that names the scheduler.
const SCHEDULER: &str = "scheduler";

/// The scheduler of a device that has none.
const NONE: &str = SCHEDULERS[0];

/// The default of `async_depth`: all requests that mq-deadline keeps in order.
const NR_REQUESTS: u32 = ORDER_CAPACITY as u32;

/// A change reads all settings and writes all of them, so two concurrent changes could undo each
/// other.
static CHANGES: Mutex<()> = Mutex::new(());

/// `POST /v1/devices/{name}/scheduler`: parameters and their values.
pub type SchedulerRequest = BTreeMap<String, Given>;

/// The value of a parameter in JSON.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(untagged, expecting = "expected text, a whole number, true or false")]
pub enum Given {
    /// In the form of a URI.
    Text(String),
    /// A number.
    Number(i64),
    /// On or off.
    Switch(bool),
}

impl Given {
    /// The value in the form of a URI.
    fn text(&self) -> String {
        match self {
            Given::Text(text) => text.clone(),
            Given::Number(number) => number.to_string(),
            Given::Switch(on) => u8::from(*on).to_string(),
        }
    }
}

/// `GET /v1/devices/{name}/scheduler`: a device's scheduler now.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct SchedulerView {
    /// The device.
    pub device: String,
    /// The scheduler's name.
    pub scheduler: String,
    /// The schedulers that the device can have.
    pub available: Vec<String>,
    /// The most requests that mq-deadline keeps in order; `null` if the device cannot have it.
    pub nr_requests: Option<u32>,
    /// mq-deadline's tunables under Linux's names and in Linux's units: the expiries in
    /// milliseconds.
    pub tunables: BTreeMap<String, i64>,
    /// mq-deadline's counts of the requests of each class and direction.
    pub counts: Vec<CountsView>,
}

/// Counts of the requests of a class and direction since the device was made.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct CountsView {
    /// The class, as `ionice` calls it: `rt`, `be`, `idle`.
    pub class: String,
    /// `read`, or `write` for all requests that change the device.
    pub direction: String,
    /// Requests that were inserted.
    pub inserted: u64,
    /// Requests that were merged into another one.
    pub merged: u64,
    /// Requests that were dispatched to the device; a requeued one counts again.
    pub dispatched: u64,
    /// Requests that the device has completed.
    pub completed: u64,
    /// Requests that were dispatched at their deadline or later.
    pub expired: u64,
    /// Requests that the device did not start and that were requeued.
    pub requeued: u64,
    /// Requests that wait or are in flight on the device.
    pub queued: u64,
}

impl SchedulerView {
    /// The present scheduler of a device.
    pub fn new(disk: &dyn Disk) -> SchedulerView {
        let control = disk.scheduler();
        let available = control.map_or(&[NONE][..], |control| control.available());
        let tunables = control.map(|control| control.tunables());
        let tunables = tunables.iter().flat_map(Tunables::iter);
        SchedulerView {
            device: disk.name().to_owned(),
            scheduler: active(disk).to_owned(),
            available: available.iter().map(|name| (*name).to_owned()).collect(),
            nr_requests: control.map(|_| NR_REQUESTS),
            tunables: tunables.map(|(name, value)| (name.to_string(), value.into())).collect(),
            counts: control.map_or_else(Vec::new, |control| counts(&control.stats())),
        }
    }

    /// The line of Linux's `queue/scheduler`: all available schedulers, the present one in
    /// brackets.
    pub fn line(&self) -> String {
        let names = self.available.iter().map(|name| match *name == self.scheduler {
            true => format!("[{name}]"),
            false => name.clone(),
        });
        names.collect::<Vec<_>>().join(" ")
    }
}

fn counts(stats: &Stats) -> Vec<CountsView> {
    let rows = stats.iter().map(|(prio, direction, counts)| CountsView {
        class: prio.name().to_owned(),
        direction: direction.name().to_owned(),
        inserted: counts.inserted,
        merged: counts.merged,
        dispatched: counts.dispatched,
        completed: counts.completed,
        expired: counts.expired,
        requeued: counts.requeued,
        queued: counts.queued(),
    });
    rows.collect()
}

/// The name of the scheduler that a disk has.
pub fn active(disk: &dyn Disk) -> &'static str {
    disk.scheduler().map_or(NONE, |control| control.active())
}

/// A setting for a disk: a scheduler by name, and tunables.
struct Setting {
    name: &'static str,
    tunables: Tunables,
}

impl Setting {
    /// Sets a parameter of the table to a value of its form.
    fn set(&mut self, name: &'static str, value: &Value) -> Result<(), StackError> {
        let number = match *value {
            Value::Choice(index) => {
                self.name = SCHEDULERS[index];
                return Ok(());
            }
            Value::Count(number) => i64::try_from(number).unwrap_or(i64::MAX),
            Value::Int(number) => number.into(),
            Value::Switch(on) => on.into(),
            Value::Size(_) | Value::Text(_) => unreachable!("{name} has another form"),
        };
        let tunable = Tunable::from_name(name).expect("a test finds each in the table");
        let number = match tunable {
            Tunable::AsyncDepth if number == 0 => NR_REQUESTS.into(),
            _ => number,
        };
        self.tunables.set(tunable, number).map_err(|_| {
            let (least, most) = tunable.range();
            StackError::Invalid {
                field: name,
                value: number.to_string(),
                wanted: format!("a number from {least} to {most}"),
            }
        })
    }

    /// Applies the setting.
    fn apply(&self, control: &dyn SchedulerControl) -> Result<(), StackError> {
        // The tunables first: no request of the new scheduler must use the old ones.
        if control.tunables() != self.tunables {
            control.set(self.tunables);
        }
        match self.name == control.active() {
            true => Ok(()),
            false => switch(control, self.name),
        }
    }
}

/// Switches a disk to the scheduler of this name.
///
/// # Errors
/// If the disk has none of this name.
pub fn switch(control: &dyn SchedulerControl, name: &str) -> Result<(), StackError> {
    control.switch(name).map_err(|error| StackError::Invalid {
        field: SCHEDULER,
        value: shown(&error.name),
        wanted: format!("one of {}", control.available().join(", ")),
    })
}

/// The names of all scheduler parameters: the scheduler itself, and mq-deadline's tunables.
pub fn names() -> impl Iterator<Item = &'static str> {
    [SCHEDULER].into_iter().chain(Tunable::ALL.map(Tunable::name))
}

/// Whether a parameter of a device is mq-deadline's.
pub fn is_tunable(name: &str) -> bool {
    Tunable::from_name(name).is_some()
}

/// The scheduler parameters that the specification sets.
fn given(spec: &DeviceSpec) -> impl Iterator<Item = (&'static Param, &Value)> {
    spec.given().filter(|(param, _)| names().any(|name| name == param.name))
}

/// Applies the scheduler parameters to a disk that has just been opened.
///
/// # Errors
/// If the disk does not have that scheduler.
pub(crate) fn begin(spec: &DeviceSpec, control: &dyn SchedulerControl) -> Result<(), StackError> {
    let mut setting = Setting { name: NONE, tunables: Tunables::new(NR_REQUESTS) };
    for (param, value) in given(spec) {
        setting.set(param.name, value)?;
    }
    setting.apply(control)
}

/// The present scheduler of a disk as a request that sets it; `None` if the disk can have none.
pub(crate) fn present(disk: &dyn Disk) -> Option<SchedulerRequest> {
    let tunables = disk.scheduler()?.tunables();
    let number = |(name, value): (Tunable, _)| (name.to_string(), Given::Number(i64::from(value)));
    let mut request: SchedulerRequest = tunables.iter().map(number).collect();
    request.insert(SCHEDULER.to_owned(), Given::Text(active(disk).to_owned()));
    Some(request)
}

/// Changes a disk's scheduler while it is in use: all requested parameters or none.
///
/// # Errors
/// If a parameter is unknown, a value is invalid, or the disk has no such scheduler.
pub fn change(
    disk: &dyn Disk,
    device: &'static DeviceKind,
    request: &SchedulerRequest,
) -> Result<SchedulerView, YardError> {
    // The lock protects no value, so a panic of another holder does no harm.
    let _alone = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    let control = disk.scheduler();
    let tunables = control.map_or(Tunables::new(NR_REQUESTS), |control| control.tunables());
    let mut setting = Setting { name: active(disk), tunables };
    for (key, given) in request {
        let param = device.param(key).ok().filter(|param| names().any(|name| name == param.name));
        let Some(param) = param else {
            let known = names().collect::<Vec<_>>().join(", ");
            let advice = suggestion(key, names());
            return Err(YardError::NoSuchTunable { name: shown(key), known, advice });
        };
        let value = param.parse(&given.text()).map_err(UriError::from)?;
        setting.set(param.name, &value)?;
    }
    match control {
        Some(control) => setting.apply(control)?,
        None if setting.name == NONE => {}
        None => {
            let wanted = "none: a device whose zones keep the order of writes themselves has a \
                          scheduler from the beginning or never; add it with scheduler=mq-deadline";
            let (value, wanted) = (setting.name.to_owned(), wanted.to_owned());
            return Err(YardError::Argument { field: SCHEDULER, value, wanted });
        }
    }
    Ok(SchedulerView::new(disk))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::param::{COMMON, ValueForm};
    use crate::{stack, uri};
    use blockyard_core::zone::gate::GateMode;
    use std::sync::Arc;

    fn disk(uri: &str) -> (&'static DeviceKind, Arc<dyn Disk>) {
        let spec = uri::parse(uri).unwrap();
        (spec.kind(), stack::open(&spec).unwrap().disk)
    }

    fn request<const N: usize>(pairs: [(&str, &str); N]) -> SchedulerRequest {
        pairs.map(|(key, value)| (key.to_owned(), Given::Text(value.to_owned()))).into()
    }

    #[test]
    fn the_table_and_the_scheduler_agree() {
        let (_, plain) = disk("null:///d?size=1M");
        assert_eq!(plain.scheduler().unwrap().available(), SCHEDULERS);
        let defaults = Tunables::new(64);
        for tunable in Tunable::ALL {
            let param = COMMON.iter().find(|param| param.name == tunable.name()).unwrap();
            let (least, most) = tunable.range();
            let bounds = match param.form {
                ValueForm::Millis { min, max } | ValueForm::Count { min, max } => {
                    (min as i64, max as i64)
                }
                ValueForm::Int { min, max } => (min.into(), max.into()),
                ValueForm::Switch => (0, 1),
                other => panic!("{tunable}: {other:?}"),
            };
            // 0 stands for the default, which is known only once there is a device.
            let least = if tunable == Tunable::AsyncDepth { 0 } else { least };
            assert_eq!(bounds, (least.into(), most.into()), "{tunable}");
            if tunable != Tunable::AsyncDepth {
                assert_eq!(param.default, defaults.get(tunable).to_string(), "{tunable}");
            }
        }
    }

    #[test]
    fn a_device_begins_with_what_its_uri_says() {
        let (_, plain) = disk("null:///d?size=1M");
        assert_eq!(active(&*plain), "none");
        assert_eq!(plain.scheduler().unwrap().tunables(), Tunables::new(NR_REQUESTS));
        let (_, tuned) = disk(
            "null:///d?size=1M&scheduler=deadline&read_expire=2s&writes_starved=-1\
             &front_merges=0&async_depth=7",
        );
        let view = SchedulerView::new(tuned.as_ref());
        assert_eq!(view.line(), "none [mq-deadline]");
        let value = |name: &str| view.tunables[name];
        assert_eq!((value("read_expire"), value("write_expire")), (2000, 5000));
        assert_eq!((value("writes_starved"), value("front_merges")), (-1, 0));
        assert_eq!((value("async_depth"), value("fifo_batch")), (7, 16));
        assert_eq!(view.counts.len(), 6);
    }

    #[test]
    fn a_change_is_whole_or_nothing() {
        let (kind, disk) = disk("null:///d?size=1M");
        let before = SchedulerView::new(&*disk);
        for (key, value, want) in [
            ("scheduler", "bfq", "invalid scheduler `bfq`: expected one of none, mq-deadline"),
            ("read_expire", "-1", "invalid read_expire `-1`: expected milliseconds from 0 to"),
            ("fifo_batch", "2147483648", "expected a number from 0 to 2147483647"),
            ("front_merges", "2", "invalid front_merges `2`: expected 1 or 0"),
            ("read_expires", "1", "did you mean `read_expire`?"),
            ("size", "1M", "`size` is no parameter of a scheduler; there are scheduler, read_"),
        ] {
            let both = request([("fifo_batch", "1"), (key, value)]);
            let error = change(&*disk, kind, &both).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
            assert_eq!(SchedulerView::new(&*disk), before);
        }
        assert_eq!(change(&*disk, kind, &SchedulerRequest::new()).unwrap(), before);
        let both = request([("scheduler", "deadline"), ("fifo_batch", "1"), ("async_depth", "3")]);
        let after = change(&*disk, kind, &both).unwrap();
        assert_eq!(
            (after.line().as_str(), after.tunables["fifo_batch"]),
            ("none [mq-deadline]", 1)
        );
        assert_eq!(after.tunables["async_depth"], 3);
        // Other tunables do not change; under `none` no tunable does.
        let after = change(&*disk, kind, &request([("sched", "none")])).unwrap();
        assert_eq!(
            (after.line().as_str(), after.tunables["fifo_batch"]),
            ("[none] mq-deadline", 1)
        );
        let after = change(&*disk, kind, &request([("async_depth", "0")])).unwrap();
        assert_eq!(after.tunables["async_depth"], i64::from(after.nr_requests.unwrap()));
    }

    #[test]
    fn zones_in_a_pipeline_have_a_scheduler_from_the_beginning_or_never() {
        let zoned = "null:///z?size=64M&zoned=1&zone_size=1M";
        let (kind, pipeline) = disk(zoned);
        let error = change(&*pipeline, kind, &request([("scheduler", "mq-deadline")]));
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("invalid scheduler `mq-deadline`: expected none"), "{error}");
        assert_eq!(SchedulerView::new(&*pipeline).line(), "[none]");
        for asked in ["scheduler=mq-deadline", "gate=plug"] {
            let (kind, disk) = disk(&format!("{zoned}&{asked}"));
            change(&*disk, kind, &request([("scheduler", "mq-deadline")])).unwrap();
            assert_eq!(disk.gate().map(|gate| gate.mode), Some(GateMode::ZoneWritePlug), "{asked}");
        }
        let spec = uri::parse(&format!("{zoned}&scheduler=mq-deadline&gate=pipeline")).unwrap();
        let error = stack::open(&spec).map(drop).unwrap_err().to_string();
        assert_eq!(
            error,
            "invalid gate `pipeline`: expected plug: the scheduler does not keep the order of \
             writes"
        );
    }

    #[test]
    fn numbers_and_switches_are_values_too() {
        let text = r#"{"read_expire": 5, "front_merges": false, "writes_starved": "-3"}"#;
        let request: SchedulerRequest = serde_json::from_str(text).unwrap();
        let (kind, disk) = disk("null:///d?size=1M");
        let tunables = change(&*disk, kind, &request).unwrap().tunables;
        assert_eq!((tunables["read_expire"], tunables["front_merges"]), (5, 0));
        assert_eq!(tunables["writes_starved"], -3);
        for text in [r#"{"read_expire": null}"#, r#"{"read_expire": 1.5}"#, "[]", "1"] {
            assert!(serde_json::from_str::<SchedulerRequest>(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_request_makes_it_panic_and_what_it_takes_is_shown(
            key in prop_oneof![
                proptest::sample::select(names().collect::<Vec<_>>()).prop_map(str::to_owned),
                "\\PC{0,20}",
            ],
            value in prop_oneof![any::<i64>().prop_map(|n| n.to_string()), "\\PC{0,20}"],
        ) {
            let (kind, disk) = disk("null:///d?size=1M");
            let request = request([(key.as_str(), value.as_str())]);
            if let Ok(view) = change(&*disk, kind, &request) {
                prop_assert_eq!(SchedulerView::new(&*disk), view);
            }
            let body = serde_json::to_vec(&request).unwrap();
            prop_assert_eq!(serde_json::from_slice::<SchedulerRequest>(&body).unwrap(), request);
        }
    }
}
