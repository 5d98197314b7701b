//! Scenarios of faults: a TOML file says which rules devices get, when, and for how long.
//! docs/faults.md describes the file.
//!
//! ```text
//! text ─ parse ▸ Scenario ─ begin(devices) ▸ ScenarioRun ─ advance(time) ▸ lines
//! ```
//!
//! A run has no clock: its caller says how much time has passed. Whatever ends it, the rules that
//! it has added are removed.
#![allow(clippy::disallowed_types)] // The table of runs is control plane.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use blockyard_core::Disk;
use blockyard_core::inject::Rule;
use serde::{Deserialize, Serialize};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::ConfigError;
use crate::error::{FaultError, ScenarioError, YardError};
use crate::inject::{self, InjectError, RuleText};
use crate::param::shown;
use crate::spec::check_name;
use crate::suggestion::suggestion;
use crate::time_text;

/// The longest text of a scenario, in bytes: that of a request.
pub const LEN_MAX: usize = 64 << 10;

/// The most steps of a scenario.
pub const STEPS_MAX: usize = 256;

/// The longest scenario: a day, in nanoseconds.
pub const LENGTH_NS_MAX: u64 = 86_400_000_000_000;

/// The most scenarios that run in a yard at once.
pub const RUNS_MAX: usize = 16;

const FILE_KEYS: [&str; 3] = ["seed", "device", "step"];
const STEP_KEYS: [&str; 3] = ["at", "for", "device"];

/// A scenario, checked as far as that is possible without its devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    steps: Vec<ScenarioStep>,
}

#[derive(Clone, Debug, PartialEq)]
struct ScenarioStep {
    at_ns: u64,
    length_ns: u64,
    device: String,
    rule: RuleText,
    /// The line of the file at which it begins.
    line: usize,
}

struct ScenarioReader<'t> {
    text: &'t str,
}

type Value<'t> = Spanned<DeValue<'t>>;

impl ScenarioReader<'_> {
    fn error(&self, span: Range<usize>, message: impl Into<String>) -> ScenarioError {
        let ConfigError { line, message, .. } = ConfigError::at(self.text, span, message, None);
        ScenarioError { line, message }
    }

    /// A string or a whole number, as text.
    fn scalar<'v>(&self, key: &str, value: &'v Value<'_>) -> Result<&'v str, ScenarioError> {
        match value.get_ref() {
            DeValue::String(text) => Ok(text),
            DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str()),
            _ => {
                let message = format!("invalid {key}: expected a string or a whole number");
                Err(self.error(value.span(), message))
            }
        }
    }

    fn time(&self, key: &str, value: &Value<'_>) -> Result<u64, ScenarioError> {
        let text = self.scalar(key, value)?;
        let time = time_text::parse(text).filter(|ns| *ns <= LENGTH_NS_MAX);
        time.ok_or_else(|| {
            let wanted = format!("expected {}, 24h at most", time_text::WANTED);
            self.error(value.span(), format!("invalid {key} `{}`: {wanted}", shown(text)))
        })
    }

    fn device(&self, value: &Value<'_>) -> Result<String, ScenarioError> {
        let name = self.scalar("device", value)?;
        let refused = |error| self.error(value.span(), format!("invalid device: {error}"));
        check_name(name).map_err(refused)?;
        Ok(name.to_owned())
    }

    fn unknown(&self, span: Range<usize>, key: &str, known: &[&str]) -> ScenarioError {
        let advice = suggestion(key, known.iter().copied());
        let known = known.join(", ");
        self.error(span, format!("unknown key `{}`: known keys are {known}{advice}", shown(key)))
    }

    fn document(
        &self,
        document: &DeTable<'_>,
        device: Option<&str>,
    ) -> Result<Scenario, ScenarioError> {
        for key in document.keys() {
            if !FILE_KEYS.contains(&key.get_ref().as_ref()) {
                return Err(self.unknown(key.span(), key.get_ref(), &FILE_KEYS));
            }
        }
        let mut seed = 0;
        if let Some(value) = document.get("seed") {
            let text = self.scalar("seed", value)?;
            let refused = |_| {
                self.error(
                    value.span(),
                    format!("invalid seed `{}`: expected 0 to 2^64 - 1", shown(text)),
                )
            };
            seed = text.parse().map_err(refused)?;
        }
        // The device of the command replaces that of the file.
        let of_file = document.get("device").map(|value| self.device(value)).transpose()?;
        let device = device.map(str::to_owned).or(of_file);
        let steps = document.get("step").ok_or_else(|| {
            self.error(0..0, "a scenario without steps: begin each with a line [[step]]")
        })?;
        let DeValue::Array(items) = steps.get_ref() else {
            return Err(self.error(steps.span(), "invalid step: begin each with a line [[step]]"));
        };
        if items.len() > STEPS_MAX {
            let message = format!("{} steps: expected at most {STEPS_MAX}", items.len());
            return Err(self.error(steps.span(), message));
        }
        let step = |(index, item)| self.step(item, device.as_deref(), step_seed(seed, index));
        let steps: Result<_, _> = items.iter().enumerate().map(step).collect();
        Ok(Scenario { steps: steps? })
    }

    fn step(
        &self,
        item: &Value<'_>,
        device: Option<&str>,
        seed: u64,
    ) -> Result<ScenarioStep, ScenarioError> {
        let DeValue::Table(table) = item.get_ref() else {
            return Err(self.error(item.span(), "invalid step: begin each with a line [[step]]"));
        };
        let (mut at_ns, mut length_ns) = (None, None);
        let (mut device, mut rule) = (device.map(str::to_owned), RuleText::new());
        for (key, value) in table.iter() {
            match key.get_ref().as_ref() {
                "at" => at_ns = Some(self.time("at", value)?),
                "for" => length_ns = Some(self.time("for", value)?),
                "device" => device = Some(self.device(value)?),
                other if inject::KEYS.contains(&other) => {
                    let refused = |error: InjectError| self.error(value.span(), error.to_string());
                    rule.set(other, self.scalar(other, value)?).map_err(refused)?;
                }
                other => {
                    let known: Vec<&str> = STEP_KEYS.into_iter().chain(inject::KEYS).collect();
                    return Err(self.unknown(key.span(), other, &known));
                }
            }
        }
        let needed = |key: &str, example: &str| {
            self.error(item.span(), format!("the step has no `{key}`: e.g. {key} = {example}"))
        };
        let at_ns = at_ns.ok_or_else(|| needed("at", "\"10s\""))?;
        let length_ns = length_ns.ok_or_else(|| needed("for", "\"5s\""))?;
        if at_ns + length_ns > LENGTH_NS_MAX {
            return Err(self.error(item.span(), "the step ends after more than 24h"));
        }
        let device =
            device.ok_or_else(|| needed("device", "\"mem0\"; or name it once at the top"))?;
        rule.check().map_err(|error| self.error(item.span(), error.to_string()))?;
        rule.seed_with(seed);
        let line = self.error(item.span(), "").line;
        Ok(ScenarioStep { at_ns, length_ns, device, rule, line })
    }
}

/// The seed of a step: equal for equal files, and different for its steps.
fn step_seed(seed: u64, index: usize) -> u64 {
    seed.wrapping_add((index as u64 + 1).wrapping_mul(0xd134_2543_de82_ef95))
}

impl Scenario {
    /// Parses a scenario. `device` replaces the device that the file names for all steps.
    ///
    /// # Errors
    /// The first one of the file.
    pub fn parse(text: &str, device: Option<&str>) -> Result<Scenario, ScenarioError> {
        let reader = ScenarioReader { text };
        if text.len() > LEN_MAX {
            let message = format!("a scenario of {} bytes: expected at most {LEN_MAX}", text.len());
            return Err(reader.error(0..0, message));
        }
        match DeTable::parse(text) {
            Ok(document) => reader.document(document.get_ref(), device),
            Err(error) => {
                Err(reader.error(error.span().unwrap_or(0..0), error.message().trim_end()))
            }
        }
    }

    /// When the last step ends, in nanoseconds.
    pub fn length_ns(&self) -> u64 {
        self.steps.iter().map(|step| step.at_ns + step.length_ns).max().unwrap_or(0)
    }
}

/// What happens in a run: a line of the answer to `POST /v1/scenario`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ScenarioLine {
    /// When, in nanoseconds since the run has begun.
    pub at_ns: u64,
    /// What: `begin` or `end` of a step; in the last line `done`, `stopped` or `failed`.
    pub event: String,
    /// The step, from 1; absent in the last line, unless that step failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<usize>,
    /// The device of the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The rule in the form in which `inject` takes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Requests that matched the rule; absent if the rule was removed by another command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matched: Option<u64>,
    /// Requests that the rule failed or delayed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied: Option<u64>,
    /// Why the run failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// A scenario that runs. Dropping it removes its rules.
pub(crate) struct ScenarioRun {
    steps: Vec<ReadyStep>,
    /// When a step ends or begins, in order; at one time ends come first.
    events: Vec<(u64, StepEvent, usize)>,
    next: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum StepEvent {
    End,
    Begin,
}

/// A step with its device, which the run does not keep open.
struct ReadyStep {
    name: String,
    disk: Weak<dyn Disk>,
    rule: Rule,
    /// The number of the rule while the step lasts.
    id: Option<u64>,
}

impl ScenarioRun {
    /// Finds the devices, and checks the rest of the scenario against them.
    ///
    /// # Errors
    /// If a device does not exist, or a rule does not fit its device.
    pub(crate) fn begin(
        scenario: &Scenario,
        find: impl Fn(&str) -> Result<Arc<dyn Disk>, YardError>,
    ) -> Result<ScenarioRun, YardError> {
        let (mut steps, mut events) = (Vec::new(), Vec::new());
        for (index, step) in scenario.steps.iter().enumerate() {
            let disk = find(&step.device)?;
            let refused = |error: InjectError| {
                FaultError::from(ScenarioError { line: step.line, message: error.to_string() })
            };
            let rule = step.rule.resolve(disk.geometry()).map_err(refused)?;
            let disk = Arc::downgrade(&disk);
            steps.push(ReadyStep { name: step.device.clone(), disk, rule, id: None });
            events.push((step.at_ns, StepEvent::Begin, index));
            events.push((step.at_ns + step.length_ns, StepEvent::End, index));
        }
        // A step of no length begins before it ends: the sort is stable.
        events.sort_by_key(|(at_ns, event, index)| {
            let is_empty = scenario.steps[*index].length_ns == 0;
            (*at_ns, if is_empty { StepEvent::Begin } else { *event })
        });
        Ok(ScenarioRun { steps, events, next: 0 })
    }

    /// When the next step begins or ends; `None` after the last one.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        self.events.get(self.next).map(|event| event.0)
    }

    /// Begins and ends the steps that are due. Returns what has happened; after the last step, and
    /// after a failure, the last line says so.
    pub(crate) fn advance(&mut self, now_ns: u64) -> Vec<ScenarioLine> {
        let mut lines = Vec::new();
        while let Some((at_ns, event, index)) = self.events.get(self.next).copied()
            && at_ns <= now_ns
        {
            self.next += 1;
            match event {
                StepEvent::End => lines.extend(self.end_step(index, now_ns)),
                StepEvent::Begin => {
                    let line = self.begin_step(index, now_ns);
                    if line.event == FAILED {
                        lines.extend(self.end(now_ns));
                        lines.push(line);
                        self.next = self.events.len();
                        return lines;
                    }
                    lines.push(line);
                }
            }
        }
        if self.next == self.events.len() {
            lines.push(ScenarioLine::last(now_ns, "done"));
        }
        lines
    }

    fn begin_step(&mut self, index: usize, now_ns: u64) -> ScenarioLine {
        let step = &mut self.steps[index];
        let line = step.line(index, now_ns, "begin");
        let Some(disk) = step.disk.upgrade() else {
            let message = format!("device `{}` was removed", step.name);
            return ScenarioLine { event: FAILED.to_owned(), message: Some(message), ..line };
        };
        let added = disk.fault_injector().map(|injector| injector.add(step.rule.clone()));
        match added {
            Some(Ok(id)) => {
                step.id = Some(id);
                line
            }
            refused => {
                let why = match refused {
                    Some(Err(error)) => error.to_string(),
                    _ => format!("device `{}` has no fault injector", step.name),
                };
                ScenarioLine { event: FAILED.to_owned(), message: Some(why), ..line }
            }
        }
    }

    fn end_step(&mut self, index: usize, now_ns: u64) -> Option<ScenarioLine> {
        let step = &mut self.steps[index];
        let id = step.id.take()?;
        let disk = step.disk.upgrade();
        let status = disk.and_then(|disk| disk.fault_injector()?.remove(id));
        let counts = status.map(|status| (status.matched, status.applied)).unzip();
        let (matched, applied) = counts;
        Some(ScenarioLine { matched, applied, ..step.line(index, now_ns, "end") })
    }

    /// Ends all steps that have begun.
    pub(crate) fn end(&mut self, now_ns: u64) -> Vec<ScenarioLine> {
        (0..self.steps.len()).filter_map(|index| self.end_step(index, now_ns)).collect()
    }
}

impl Drop for ScenarioRun {
    fn drop(&mut self) {
        self.end(0);
    }
}

impl ReadyStep {
    fn line(&self, index: usize, at_ns: u64, event: &str) -> ScenarioLine {
        ScenarioLine {
            step: Some(index + 1),
            device: Some(self.name.clone()),
            rule: Some(inject::print(&self.rule)),
            ..ScenarioLine::last(at_ns, event)
        }
    }
}

/// The event of a run that could not go on.
pub const FAILED: &str = "failed";

impl ScenarioLine {
    /// The last line of a run.
    pub(crate) fn last(at_ns: u64, event: &str) -> ScenarioLine {
        ScenarioLine {
            at_ns,
            event: event.to_owned(),
            step: None,
            device: None,
            rule: None,
            matched: None,
            applied: None,
            message: None,
        }
    }
}

/// The scenarios that run in a yard.
#[derive(Default)]
pub(crate) struct ScenarioRuns(Mutex<Vec<(u64, Arc<AtomicBool>)>>);

impl ScenarioRuns {
    fn table(&self) -> MutexGuard<'_, Vec<(u64, Arc<AtomicBool>)>> {
        // Every change is one call: a holder that panicked has left the table consistent.
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The run has dropped its flag.
        table.retain(|(_, stop)| Arc::strong_count(stop) > 1);
        table
    }

    /// Enters a run of this number; returns the flag that asks it to stop.
    ///
    /// # Errors
    /// If there are [`RUNS_MAX`] already.
    pub(crate) fn enter(&self, id: u64) -> Result<Arc<AtomicBool>, YardError> {
        let (mut table, stop) = (self.table(), Arc::new(AtomicBool::new(false)));
        if table.len() >= RUNS_MAX {
            return Err(FaultError::Scenarios { max: RUNS_MAX }.into());
        }
        table.push((id, Arc::clone(&stop)));
        Ok(stop)
    }

    /// Asks the runs of this number to stop; returns how many there are.
    pub(crate) fn stop(&self, id: u64) -> u64 {
        let table = self.table();
        let meant = table.iter().filter(|(other, _)| *other == id);
        // Relaxed: the flag publishes nothing but itself.
        meant.inspect(|(_, stop)| stop.store(true, Ordering::Relaxed)).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{stack, uri};

    const S: u64 = 1_000_000_000;
    const EXAMPLE: &str = r#"
seed = 42
device = "z"

[[step]]
at = "10s"
for = "5s"
op = "WRITE"
zones = "3-7"
status = "IOERR"
chance = "1%"

[[step]]
at = "12s"
for = "8s"
op = "READ"
latency = "200us/5ms/50ms"
"#;

    fn disk() -> Arc<dyn Disk> {
        let uri = "null:///z?size=8M&zoned=1&zone_size=512k&memory_backed=1";
        stack::open(&uri::parse(uri).unwrap()).unwrap().disk
    }

    fn run(text: &str, disk: &Arc<dyn Disk>) -> ScenarioRun {
        let scenario = Scenario::parse(text, None).unwrap();
        ScenarioRun::begin(&scenario, |_| Ok(Arc::clone(disk))).unwrap()
    }

    fn rules(disk: &Arc<dyn Disk>) -> Vec<String> {
        let rules = disk.fault_injector().unwrap().rules();
        rules.iter().map(|status| inject::print(&status.rule)).collect()
    }

    fn said(lines: &[ScenarioLine]) -> Vec<(&str, Option<usize>)> {
        lines.iter().map(|line| (line.event.as_str(), line.step)).collect()
    }

    #[test]
    fn steps_begin_and_end_at_their_times() {
        let disk = disk();
        let mut run = run(EXAMPLE, &disk);
        assert_eq!((run.due_ns(), run.advance(10 * S - 1)), (Some(10 * S), vec![]));
        let lines = run.advance(10 * S);
        assert_eq!(said(&lines), [("begin", Some(1))]);
        let rule = lines[0].rule.clone().unwrap();
        assert!(
            rule.starts_with(
                "add,op=WRITE,start=3072,nr_sectors=5120,status=IOERR,chance=1%,seed="
            )
        );
        assert_eq!(rules(&disk), std::slice::from_ref(&rule));
        assert_eq!(said(&run.advance(12 * S)), [("begin", Some(2))]);
        assert_eq!((rules(&disk).len(), run.due_ns()), (2, Some(15 * S)));
        let lines = run.advance(15 * S + 7);
        assert_eq!(said(&lines), [("end", Some(1))]);
        assert_eq!(
            (lines[0].at_ns, lines[0].matched, lines[0].applied),
            (15 * S + 7, Some(0), Some(0))
        );
        // The caller may be late by as much as it likes.
        assert_eq!(said(&run.advance(99 * S)), [("end", Some(2)), ("done", None)]);
        assert_eq!((rules(&disk).len(), run.due_ns()), (0, None));
        // Equal files have equal rules.
        let mut again = super::tests::run(EXAMPLE, &disk);
        assert_eq!(again.advance(10 * S)[0].rule, Some(rule));
    }

    #[test]
    fn a_run_that_is_dropped_or_fails_removes_its_rules_and_no_others() {
        let disk = disk();
        let injector = disk.fault_injector().unwrap();
        let own = injector.add(Rule::new(blockyard_core::Status::IoErr)).unwrap();
        let mut run = run(EXAMPLE, &disk);
        run.advance(13 * S);
        assert_eq!(rules(&disk).len(), 3);
        drop(run);
        assert_eq!(rules(&disk), ["add,status=IOERR"]);
        assert!(injector.remove(own).is_some());
        // A device that is removed ends the scenario; the run does not keep it open.
        let mut run = super::tests::run(EXAMPLE, &disk);
        run.advance(10 * S);
        drop(disk);
        let lines = run.advance(12 * S);
        assert_eq!(said(&lines), [("end", Some(1)), ("failed", Some(2))]);
        assert_eq!(lines[1].message.as_deref(), Some("device `z` was removed"));
        assert_eq!(run.due_ns(), None);
    }

    #[test]
    fn a_step_that_ends_makes_way_for_the_next_and_an_empty_one_begins_and_ends() {
        let disk = disk();
        let step = |at: u64, length: u64| {
            format!("[[step]]\nat=\"{at}s\"\nfor=\"{length}s\"\nstatus=\"IOERR\"\n")
        };
        let text = format!("device=\"z\"\n{}{}{}", step(1, 1), step(2, 1), step(2, 0));
        let mut run = run(&text, &disk);
        run.advance(S);
        let lines = run.advance(2 * S);
        let want = [("end", Some(1)), ("begin", Some(2)), ("begin", Some(3)), ("end", Some(3))];
        assert_eq!(said(&lines), want);
    }

    #[test]
    fn errors_name_the_line_and_the_value() {
        let step = "device = \"z\"\n[[step]]\nat = \"1s\"\nfor = \"1s\"\n";
        for (text, want) in [
            ("", "line 1: a scenario without steps"),
            ("x = [", "line 1: "),
            ("sead = 1", "line 1: unknown key `sead`: known keys are seed, device, step; did you"),
            ("seed = -1\nstep = []", "line 1: invalid seed `-1`: expected 0 to 2^64 - 1"),
            ("step = 1", "line 1: invalid step: begin each with a line [[step]]"),
            ("[[step]]\nat = \"1s\"", "line 1: the step has no `for`: e.g. for = \"5s\""),
            ("[[step]]\nat = \"soon\"", "line 2: invalid at `soon`: expected a whole number with"),
            ("[[step]]\nat = 1.5", "line 2: invalid at: expected a string or a whole number"),
            (step, "line 2: invalid status ``: expected one of"),
            (&format!("{step}status = \"MEDUM\""), "line 5: invalid status `MEDUM`: expected one"),
            (&format!("{step}latency = \"1\""), "line 5: invalid latency `1`"),
            (&format!("{step}statsu = \"IOERR\""), "line 5: unknown key `statsu`"),
            (&format!("{step}device = \"a b\""), "line 5: invalid device"),
            (&step[13..], "line 1: the step has no `device`"),
            (&format!("{step}at = \"2s\""), "line 5: "),
        ] {
            let error = Scenario::parse(text, None).unwrap_err().to_string();
            assert!(error.starts_with(want), "{text}: {error}");
        }
        let late = "device = \"z\"\n[[step]]\nat = \"24h\"\nfor = \"1s\"\nstatus = \"IOERR\"";
        assert!(Scenario::parse(late, None).unwrap_err().message.contains("more than 24h"));
        assert!(Scenario::parse(&"#".repeat(LEN_MAX + 1), None).is_err());
        let many = format!("{step}status = \"IOERR\"\n").replacen("device = \"z\"\n", "", 1);
        let many = format!("device = \"z\"\n{}", many.repeat(STEPS_MAX + 1));
        assert!(Scenario::parse(&many, None).unwrap_err().message.contains("at most 256"));
        // The device is checked before anything begins.
        let text = format!("{step}status = \"IOERR\"\nzones = \"3-16\"");
        let (scenario, disk) = (Scenario::parse(&text, None).unwrap(), disk());
        let error = ScenarioRun::begin(&scenario, |_| Ok(Arc::clone(&disk))).err().unwrap();
        assert_eq!(error.to_string(), "line 2: invalid zones `3-16`: expected zones from 0 to 15");
        assert_eq!(scenario.length_ns(), 2 * S);
    }

    #[test]
    fn the_device_of_the_command_replaces_that_of_the_file() {
        let scenario = Scenario::parse(EXAMPLE, Some("other")).unwrap();
        assert!(scenario.steps.iter().all(|step| step.device == "other"));
        let runs = ScenarioRuns::default();
        let stops: Vec<_> = (0..RUNS_MAX as u64).map(|id| runs.enter(id).unwrap()).collect();
        assert_eq!(runs.enter(99).unwrap_err().code(), "overloaded");
        assert_eq!((runs.stop(3), runs.stop(99)), (1, 0));
        assert!(stops[3].load(Ordering::Relaxed) && !stops[4].load(Ordering::Relaxed));
        drop(stops);
        assert!(runs.enter(99).is_ok());
    }
}
