//! Parses the text of a trace. The text is untrusted: the result is a trace within its bounds, or
//! an error with the line number.

use std::fmt::Display;

use blockyard_core::bio::Prio;

use crate::trace::{
    EventKind, FIRST_LINE, KernelTunables, OpKind, Tick, Trace, TraceEvent, TraceHeader,
};

/// The most bytes of text that are read.
pub const TEXT_MAX: usize = 64 << 20;
/// The most events of a trace.
pub const EVENTS_MAX: usize = 1 << 20;
/// The exclusive bound of a device's last sector.
pub const SECTOR_MAX: u64 = 1 << 54;
/// The most sectors of a request.
pub const SECTORS_MAX: u32 = 1 << 22;
/// The most requests that a driver or a scheduler accepts.
const DEPTH_MAX: u32 = 1 << 16;
/// The most microseconds between two events: an hour.
const GAP_MAX_US: u64 = 3_600_000_000;
/// A tunable is an `int` in the kernel.
const TUNABLE_MAX: u32 = i32::MAX as u32;
/// The most characters of a bad line that are quoted.
const QUOTED_MAX: usize = 60;

/// An error in a trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct TraceError {
    /// The line, counted from 1.
    pub line: usize,
    /// The error.
    pub why: String,
}

impl TraceError {
    /// An error in this line.
    pub fn new(line: usize, why: impl Display) -> TraceError {
        TraceError { line, why: why.to_string() }
    }
}

/// Untrusted text as it may be shown: without control characters, and shortened.
pub(crate) fn quoted(text: &str) -> String {
    let mut quoted: String = text.chars().take(QUOTED_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(QUOTED_MAX).is_some() {
        quoted.push_str("...");
    }
    format!("`{quoted}`")
}

/// A number within bounds, both included.
pub(crate) fn number<T>(what: &str, text: &str, least: T, most: T) -> Result<T, String>
where
    T: std::str::FromStr + PartialOrd + Display,
{
    let value = text.parse::<T>().ok().filter(|value| (&least..=&most).contains(&value));
    value.ok_or_else(|| {
        format!("invalid {what} {}: expected a number from {least} to {most}", quoted(text))
    })
}

/// The class of this name. A request without one is best effort.
pub(crate) fn class(text: &str) -> Result<Prio, String> {
    match text {
        "rt" => Ok(Prio::RealTime),
        "be" | "none" => Ok(Prio::BestEffort),
        "idle" => Ok(Prio::Idle),
        _ => Err(format!("invalid class {}: expected rt, be or idle", quoted(text))),
    }
}

/// Parses a trace.
///
/// # Errors
/// If the text is no trace, or exceeds the bounds.
pub fn trace(text: &str) -> Result<Trace, TraceError> {
    if text.len() > TEXT_MAX {
        return Err(TraceError::new(1, format!("it has more than {TEXT_MAX} bytes")));
    }
    let mut lines = text.lines().zip(1..);
    match lines.next() {
        Some((FIRST_LINE, _)) => {}
        first => {
            let first = first.map_or("", |(line, _)| line);
            let why = format!("it starts with {}, not with `{FIRST_LINE}`", quoted(first));
            return Err(TraceError::new(1, why));
        }
    }
    let header = header(&mut lines)?;
    let mut events: Vec<TraceEvent> = Vec::new();
    let mut now = 0;
    for (line, number_of_line) in lines {
        let error = |why: String| TraceError::new(number_of_line, why);
        if let Some(count) = line.strip_prefix("end ") {
            let count = number("count", count, 0, EVENTS_MAX).map_err(error)?;
            if count != events.len() {
                let why = format!("it ends after {} of {count} events", events.len());
                return Err(error(why));
            }
            return Ok(Trace { header, events });
        }
        if events.len() == EVENTS_MAX {
            return Err(error(format!("there are more than {EVENTS_MAX} events")));
        }
        let event = event(line, now).map_err(error)?;
        // The first event is at 0, whatever its line says.
        let event = if events.is_empty() { TraceEvent { at_us: 0, ..event } } else { event };
        now = event.at_us;
        events.push(event);
    }
    Err(TraceError::new(text.lines().count(), "the last line, `end COUNT`, is missing"))
}

fn event(line: &str, last_us: u64) -> Result<TraceEvent, String> {
    let words: Vec<&str> = line.split(' ').take(7).collect();
    let [what, gap, kind, class_name, sector, sectors] = words[..] else {
        let why = "an event is a letter, a time, R, W or D, a class, a sector and a length";
        return Err(format!("{} is no event: {why}", quoted(line)));
    };
    let letter = |text: &str| match text.as_bytes() {
        [letter] => Some(*letter),
        _ => None,
    };
    let what = letter(what).and_then(EventKind::from_letter);
    let what = what.ok_or_else(|| format!("{} is no event; I is one", quoted(line)))?;
    let kind = letter(kind).and_then(OpKind::from_letter);
    let kind = kind.ok_or_else(|| format!("{} has neither R, W nor D", quoted(line)))?;
    let class = match (what.is_bio(), class_name) {
        (true, "-") => None,
        (true, _) => return Err(format!("the class is {}, of a bio `-`", quoted(class_name))),
        (false, _) => Some(class(class_name)?),
    };
    let sectors = number("length", sectors, 1, SECTORS_MAX)?;
    let sector = number("sector", sector, 0, SECTOR_MAX - u64::from(sectors))?;
    let at_us = last_us + number("time", gap, 0, GAP_MAX_US)?;
    Ok(TraceEvent { at_us, what, kind, class, sector, sectors })
}

/// The names of the header's lines other than the tunables.
const KEYS: [&str; 9] =
    ["workload", "kernel", "device", "sectors", "tags", "requests", "nomerges", "tick", "fio"];

fn header<'a>(
    lines: &mut impl Iterator<Item = (&'a str, usize)>,
) -> Result<TraceHeader, TraceError> {
    let mut header = TraceHeader::default();
    let mut seen: Vec<&str> = Vec::new();
    let mut last = 1;
    for (line, number_of_line) in lines {
        last = number_of_line;
        let error = |why: String| TraceError::new(number_of_line, why);
        if line == "events" {
            let mut keys = KEYS.iter().chain(&KernelTunables::NAMES);
            return match keys.find(|key| !seen.contains(key)) {
                Some(key) => Err(error(format!("the header has no line `{key}`"))),
                None => Ok(header),
            };
        }
        let (key, value) = line.split_once(' ').unwrap_or((line, ""));
        if seen.contains(&key) {
            return Err(error(format!("{} stands there twice", quoted(key))));
        }
        set(&mut header, key, value).map_err(error)?;
        seen.push(key);
    }
    Err(TraceError::new(last, "the line `events` is missing"))
}

fn set(header: &mut TraceHeader, key: &str, value: &str) -> Result<(), String> {
    let text = || match value.chars().any(char::is_control) {
        true => Err(format!("{key} has a control character in {}", quoted(value))),
        false => Ok(value.to_owned()),
    };
    let depth = |what| number(what, value, 1, DEPTH_MAX);
    match key {
        "workload" => header.workload = text()?,
        "kernel" => header.kernel = text()?,
        "device" => header.device = text()?,
        "fio" => header.fio = text()?,
        "sectors" => header.sectors = number("size", value, 1, SECTOR_MAX)?,
        "tags" => header.tags = depth("number of tags")?,
        "requests" => header.requests = depth("number of requests")?,
        "nomerges" => header.nomerges = number("nomerges", value, 0, 2)?,
        "tick" => {
            let (period, phase) = value.split_once(' ').unwrap_or((value, ""));
            let period_us = number("tick's period", period, 1, 1_000_000)?;
            let phase_us = number("tick's phase", phase, 0, period_us - 1)?;
            header.tick = Tick { period_us, phase_us };
        }
        _ => match header.tunables.value_mut(key) {
            Some(tunable) => *tunable = number(key, value, 0, TUNABLE_MAX)?,
            None => return Err(format!("the header knows no {}", quoted(key))),
        },
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Trace {
        let event = |at_us, what, class, sector| TraceEvent {
            at_us,
            what,
            kind: OpKind::Write,
            class,
            sector,
            sectors: 8,
        };
        let be = Some(Prio::BestEffort);
        Trace {
            header: TraceHeader {
                workload: "mixed".into(),
                kernel: "6.18".into(),
                device: "loop1 over a file".into(),
                sectors: 524_288,
                tags: 128,
                requests: 256,
                nomerges: 0,
                tunables: KernelTunables { fifo_batch: 4, ..KernelTunables::default() },
                tick: Tick { period_us: 4000, phase_us: 17 },
                fio: "fio --name=x --bs=4k".into(),
            },
            events: vec![
                event(0, EventKind::Insert, be, 8),
                event(2, EventKind::FrontMerge, None, 0),
                event(2, EventKind::Issue, be, 0),
                event(900, EventKind::Complete, Some(Prio::Idle), 0),
            ],
        }
    }

    #[test]
    fn printing_and_parsing_round_trip() {
        let trace = sample();
        assert_eq!(super::trace(&trace.text()), Ok(trace));
    }

    #[test]
    fn an_error_names_its_line_and_the_value() {
        let text = sample().text();
        let line_of = |part: &str| text.lines().position(|line| line.contains(part)).unwrap() + 1;
        let cases = [
            ("blockyard deadline trace 1", "something else", "it starts with `something else`"),
            ("tags 128", "tags 0", "invalid number of tags `0`: expected a number from 1 to 65536"),
            ("tags 128", "tag 128", "the header knows no `tag`"),
            ("fifo_batch 4", "fifo_batch -1", "invalid fifo_batch `-1`"),
            ("tick 4000 17", "tick 4000 4000", "invalid tick's phase `4000`"),
            ("I 0 W be 8 8", "X 0 W be 8 8", "`X 0 W be 8 8` is no event"),
            ("I 0 W be 8 8", "I 0 X be 8 8", "has neither R, W nor D"),
            ("I 0 W be 8 8", "I 0 W hi 8 8", "invalid class `hi`: expected rt, be or idle"),
            ("I 0 W be 8 8", "I 0 W be 8", "is no event: an event is a letter"),
            ("I 0 W be 8 8", "I 0 W be 8 0", "invalid length `0`"),
            ("F 2 W - 0 8", "F 2 W be 0 8", "the class is `be`, of a bio `-`"),
            ("end 4", "end 5", "it ends after 4 of 5 events"),
        ];
        for (part, bad, why) in cases {
            let error = trace(&text.replace(part, bad)).unwrap_err();
            assert!(error.why.contains(why), "{bad}: {error}");
            assert_eq!(error.line, line_of(part), "{bad}: {error}");
        }
        let error = trace(&text.replace("tags 128\n", "")).unwrap_err();
        assert!(error.to_string().ends_with("the header has no line `tags`"), "{error}");
        let error = trace(&text.replace("kernel 6.18", "kernel 6.18\nkernel 6.19")).unwrap_err();
        assert_eq!(error.to_string(), "line 4: `kernel` stands there twice");
        let error = trace(text.trim_end_matches("end 4\n")).unwrap_err();
        assert!(error.to_string().contains("`end COUNT`, is missing"), "{error}");
    }
}
