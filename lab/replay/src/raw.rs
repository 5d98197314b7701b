//! Parses the block events that tracefs prints into the events of a trace.
//!
//! The kernel merges bios in two places: in the plug of a task, before the scheduler has seen the
//! request, and in the scheduler. Both print the same event. Where `block_getrq` was recorded too,
//! the requests in plugs are known, and bios that join one of them are left out: the insertion of
//! the request has its length.
//!
//! A task that empties its plug inserts all its requests in one list. It allocates requests before,
//! which separates one list from the next; without that event a gap in time does.

use std::collections::HashMap;

use crate::parse::{
    EVENTS_MAX, SECTOR_MAX, SECTORS_MAX, TEXT_MAX, TraceError, class, number, quoted,
};
use crate::ticks::TickSample;
use crate::trace::{EventKind, OpKind, TraceEvent};

/// The first words of tracefs's output.
pub const FIRST_WORDS: &str = "# tracer:";
/// The most requests of one task that are looked for in its plug.
const PLUG_MAX: usize = 256;

/// The greatest gap between requests of one list, in microseconds.
const LIST_GAP_US: u64 = 3;

/// The contents of a tracefs text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// The events, the first one at 0.
    pub events: Vec<TraceEvent>,
    /// The samples of the kernel's tick.
    pub ticks: Vec<TickSample>,
    /// The time of the first event, in microseconds of the recording's clock.
    pub began_us: u64,
}

/// A parsed line of tracefs.
#[derive(Debug)]
struct TraceLine<'a> {
    task: &'a str,
    at_us: u64,
    name: &'a str,
    rest: &'a str,
}

/// A request or a bio as an event prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    kind: OpKind,
    sector: u64,
    sectors: u32,
}

/// Parses the text. Lines of other events are skipped.
///
/// # Errors
/// If a line is not one of tracefs, an event cannot be parsed, events were lost, or there are too
/// many.
pub fn recording(text: &str) -> Result<Recording, TraceError> {
    if text.len() > TEXT_MAX {
        return Err(TraceError::new(1, format!("it has more than {TEXT_MAX} bytes")));
    }
    let mut recording = Recording::default();
    let mut plugs = Plugs::default();
    let mut lists = Lists::default();
    let mut last_us = None;
    for (line, number_of_line) in text.lines().zip(1..) {
        let error = |why: String| TraceError::new(number_of_line, why);
        if line.starts_with('#') {
            check_complete(line).map_err(error)?;
            continue;
        }
        if line.trim().is_empty() {
            continue;
        }
        let line = split(line).map_err(error)?;
        if let Some(sample) = TickSample::parse(line.at_us, line.name, line.rest) {
            recording.ticks.push(sample);
            continue;
        }
        let Some(mut event) = event(&line, &mut plugs).map_err(error)? else {
            lists.pass(line.name);
            continue;
        };
        event.what = lists.what(&line, event.what);
        if recording.events.len() == EVENTS_MAX {
            return Err(error(format!("there are more than {EVENTS_MAX} events")));
        }
        if last_us.is_some_and(|last| event.at_us < last) {
            return Err(error("it is earlier than the line before it".to_owned()));
        }
        if last_us.is_none() {
            recording.began_us = event.at_us;
        }
        last_us = Some(event.at_us);
        let at_us = event.at_us - recording.began_us;
        recording.events.push(TraceEvent { at_us, ..event });
    }
    Ok(recording)
}

/// Checks the number of entries in the buffer against the number written, from the header.
fn check_complete(line: &str) -> Result<(), String> {
    let Some((_, counts)) = line.split_once("entries-in-buffer/entries-written:") else {
        return Ok(());
    };
    let counts = counts.split_whitespace().next().and_then(|counts| counts.split_once('/'));
    match counts {
        Some((kept, written)) if kept == written => Ok(()),
        Some((kept, written)) => Err(format!(
            "events were lost: {} of {} are there; use a larger buffer or fewer requests",
            quoted(kept),
            quoted(written)
        )),
        None => Err(format!("{} does not say whether events were lost", quoted(line))),
    }
}

/// Splits `TASK-PID [CPU] FLAGS SECONDS.MICROSECONDS: EVENT: REST`; a task's name may contain
/// anything.
fn split(line: &str) -> Result<TraceLine<'_>, String> {
    let bad = || format!("{} is no line of tracefs", quoted(line));
    if line.contains("LOST") && line.contains("EVENTS") {
        return Err(format!("events were lost: {}", quoted(line)));
    }
    // The processor is the first word in brackets that is all digits.
    let processor = line.match_indices(" [").find(|(at, _)| {
        let inside = line[at + 2..].split(']').next().unwrap_or_default();
        !inside.is_empty() && inside.bytes().all(|byte| byte.is_ascii_digit())
    });
    let (at, _) = processor.ok_or_else(bad)?;
    let task = line[..at].trim();
    let (_, rest) = line[at..].split_once("] ").ok_or_else(bad)?;
    let (_flags, rest) = rest.split_once(' ').ok_or_else(bad)?;
    let (time, rest) = rest.trim_start().split_once(": ").ok_or_else(bad)?;
    let (seconds, micros) = time.split_once('.').ok_or_else(bad)?;
    if micros.len() != 6 {
        return Err(bad());
    }
    let seconds = number("time", seconds, 0, u64::from(u32::MAX))?;
    let micros = number("time", micros, 0, 999_999)?;
    let (name, rest) = rest.split_once(':').ok_or_else(bad)?;
    Ok(TraceLine {
        task,
        at_us: seconds * 1_000_000 + micros,
        name: name.trim(),
        rest: rest.trim(),
    })
}

fn event(line: &TraceLine<'_>, plugs: &mut Plugs) -> Result<Option<TraceEvent>, String> {
    let what = match line.name {
        "block_rq_insert" => EventKind::Insert,
        "block_rq_issue" => EventKind::Issue,
        "block_rq_complete" => EventKind::Complete,
        "block_rq_requeue" => EventKind::Requeue,
        "block_rq_merge" => EventKind::Merge,
        "block_bio_backmerge" => EventKind::BackMerge,
        "block_bio_frontmerge" => EventKind::FrontMerge,
        "block_getrq" => {
            plugs.get(line.task, extent(line.rest)?);
            return Ok(None);
        }
        _ => return Ok(None),
    };
    let extent = extent(line.rest)?;
    let class = match what.is_bio() {
        true if plugs.joins(line.task, what, extent) => return Ok(None),
        true => None,
        false => Some(class(class_word(line.rest))?),
    };
    if matches!(what, EventKind::Insert | EventKind::Merge) {
        // A request may be merged while its list is inserted.
        plugs.leaves(line.task, extent);
    }
    let Extent { kind, sector, sectors } = extent;
    Ok(Some(TraceEvent { at_us: line.at_us, what, kind, class, sector, sectors }))
}

/// `MAJOR,MINOR RWBS [BYTES] [(COMMAND)] SECTOR + SECTORS ...`
fn extent(rest: &str) -> Result<Extent, String> {
    let bad = || format!("{} has no `SECTOR + SECTORS`", quoted(rest));
    let mut words = rest.split_whitespace();
    let rwbs = words.nth(1).ok_or_else(bad)?;
    let kind =
        rwbs.bytes().next().and_then(OpKind::from_letter).ok_or_else(|| {
            format!("{} is neither a read, nor a write, nor a discard", quoted(rwbs))
        })?;
    let words: Vec<&str> = words.take(5).collect();
    let plus = words.iter().position(|word| *word == "+").filter(|at| *at > 0).ok_or_else(bad)?;
    let sectors = words.get(plus + 1).ok_or_else(bad)?;
    let sectors = number("length", sectors, 1, SECTORS_MAX)?;
    let sector = number("sector", words[plus - 1], 0, SECTOR_MAX - u64::from(sectors))?;
    Ok(Extent { kind, sector, sectors })
}

/// `CLASS,HINT,LEVEL` after `+ SECTORS`; kernels before 6.10 print none.
fn class_word(rest: &str) -> &str {
    let (_, after) = rest.split_once(" + ").unwrap_or_default();
    let word = after.split_whitespace().nth(1).unwrap_or_default();
    word.split_once(',').map_or("be", |(class, _)| class)
}

/// Finds the requests that are inserted in one list.
#[derive(Debug, Default)]
struct Lists<'a> {
    /// The task that inserted last and the time, if no event has ended the list since.
    goes_on: Option<(&'a str, u64)>,
    /// Whether the allocation of requests was recorded.
    knows: bool,
}

impl<'a> Lists<'a> {
    /// Handles a line that is no event of a trace.
    fn pass(&mut self, name: &str) {
        if name == "block_getrq" {
            self.knows = true;
            self.goes_on = None;
        }
    }

    /// The kind of an event, given the events before it.
    fn what(&mut self, line: &TraceLine<'a>, what: EventKind) -> EventKind {
        let goes_on = self.goes_on.is_some_and(|(task, at_us)| {
            task == line.task && (self.knows || line.at_us.saturating_sub(at_us) <= LIST_GAP_US)
        });
        match what {
            EventKind::Insert => {
                self.goes_on = Some((line.task, line.at_us));
                if goes_on { EventKind::InsertMore } else { EventKind::Insert }
            }
            // A request of the list was merged.
            EventKind::Merge => what,
            _ => {
                self.goes_on = None;
                what
            }
        }
    }
}

/// The requests that are in the plugs of tasks.
#[derive(Debug, Default)]
struct Plugs {
    tasks: HashMap<String, Vec<Extent>>,
}

impl Plugs {
    /// A task got a request for a bio.
    fn get(&mut self, task: &str, extent: Extent) {
        let plug = self.tasks.entry(task.to_owned()).or_default();
        if plug.len() == PLUG_MAX {
            plug.remove(0);
        }
        plug.push(extent);
    }

    /// Whether a bio joined the request that the task plugged last, which it tries first.
    fn joins(&mut self, task: &str, what: EventKind, bio: Extent) -> bool {
        let Some(last) = self.tasks.get_mut(task).and_then(|plug| plug.last_mut()) else {
            return false;
        };
        let back = last.sector + u64::from(last.sectors) == bio.sector;
        let front = bio.sector + u64::from(bio.sectors) == last.sector;
        let meets = if what == EventKind::BackMerge { back } else { front };
        if last.kind != bio.kind || !meets {
            return false;
        }
        last.sectors = last.sectors.saturating_add(bio.sectors);
        last.sector = last.sector.min(bio.sector);
        true
    }

    /// A request left its plug: that of this task, unless another one flushed it.
    fn leaves(&mut self, task: &str, extent: Extent) {
        let take = |plug: &mut Vec<Extent>| {
            let at = plug.iter().position(|other| *other == extent);
            at.map(|at| plug.remove(at)).is_some()
        };
        if !self.tasks.get_mut(task).is_some_and(take) {
            self.tasks.values_mut().any(take);
        }
    }
}

#[cfg(test)]
mod tests {
    use blockyard_core::bio::Prio;

    use super::*;

    const HEAD: &str = "# tracer: nop\n#\n# entries-in-buffer/entries-written: 3/3   #P:2\n#\n";

    fn lines(lines: &[&str]) -> Result<Recording, TraceError> {
        let body: String = lines
            .iter()
            .zip(100..)
            .map(|(line, at)| format!("   fio-12  [000] ...1.  31.000{at}: {line}\n"))
            .collect();
        recording(&format!("{HEAD}{body}"))
    }

    #[test]
    fn lines_of_every_kind_become_events() {
        let recording = lines(&[
            "block_getrq: 7,1 WS 4096 + 8 [fio]",
            "block_rq_insert: 7,1 WS 4096 () 4096 + 8 rt,0,4 [fio]",
            "block_bio_frontmerge: 7,1 WS 4088 + 8 [a b] [c]",
            "block_rq_issue: 7,1 WS 8192 () 4088 + 16 rt,0,4 [kworker/0:2H]",
            "timer_start: timer=x function=y expires=100 [timeout=10] cpu=0",
            "sched_switch: whatever",
            "block_rq_complete: 7,1 WS () 4088 + 16 rt,0,4 [0]",
            "block_rq_insert: 7,1 R 4096 () 0 + 8 [fio]",
        ])
        .unwrap();
        let events: Vec<_> = recording
            .events
            .iter()
            .map(|event| (event.at_us, event.what, event.class, event.sector, event.sectors))
            .collect();
        let rt = Some(Prio::RealTime);
        let want = [
            (0, EventKind::Insert, rt, 4096, 8),
            (1, EventKind::FrontMerge, None, 4088, 8),
            (2, EventKind::Issue, rt, 4088, 16),
            (5, EventKind::Complete, rt, 4088, 16),
            (6, EventKind::Insert, Some(Prio::BestEffort), 0, 8),
        ];
        assert_eq!(events, want);
        assert_eq!(recording.began_us, 31_000_101);
        assert_eq!(recording.ticks, [TickSample { at_us: 31_000_104, tick: 90 }]);
    }

    #[test]
    fn a_bio_that_joins_a_plugged_request_is_no_event() {
        let recording = lines(&[
            "block_getrq: 7,1 R 8 + 8 [fio]",
            "block_bio_backmerge: 7,1 R 16 + 8 [fio]",
            "block_rq_insert: 7,1 R 8192 () 8 + 16 be,0,4 [fio]",
            "block_bio_backmerge: 7,1 R 24 + 8 [fio]",
        ])
        .unwrap();
        let whats: Vec<_> = recording.events.iter().map(|event| event.what).collect();
        assert_eq!(whats, [EventKind::Insert, EventKind::BackMerge]);
    }

    #[test]
    fn a_list_ends_where_the_next_request_is_allocated() {
        let get = "block_getrq: 7,1 R 8 + 8 [fio]";
        let insert = "block_rq_insert: 7,1 R 4096 () 8 + 8 be,0,4 [fio]";
        let whats = |all: &[&str]| -> Vec<EventKind> {
            lines(all).unwrap().events.iter().map(|event| event.what).collect()
        };
        let (first, more) = (EventKind::Insert, EventKind::InsertMore);
        assert_eq!(whats(&[get, insert, insert, get, insert]), [first, more, first]);
        // Without that event the gap in time decides.
        assert_eq!(whats(&[insert, insert, "x: y", "x: y", "x: y", insert]), [first, more, first]);
        let issue = "block_rq_issue: 7,1 R 4096 () 8 + 8 be,0,4 [fio]";
        assert_eq!(whats(&[insert, issue, insert]), [first, EventKind::Issue, first]);
    }

    #[test]
    fn a_line_without_an_event_is_refused_by_its_number() {
        for (line, why) in [
            ("block_rq_insert: 7,1 FF 0 () 0 + 0 be,0,4 [fio]", "neither a read"),
            ("block_rq_insert: 7,1 R 4096 () 8 8 be,0,4 [fio]", "no `SECTOR + SECTORS`"),
            ("block_rq_insert: 7,1 R 4096 () 8 + 0 be,0,4 [fio]", "invalid length `0`"),
            ("block_rq_insert: 7,1 R 4096 () 8 + 8 zz,0,4 [fio]", "invalid class `zz`"),
            ("nothing", "is no line of tracefs"),
        ] {
            let error = lines(&[line]).unwrap_err();
            assert!(error.why.contains(why), "{line}: {error}");
            assert_eq!(error.line, 5);
        }
        let error = recording("CPU:1 [LOST 17 EVENTS]\n").unwrap_err();
        assert!(error.why.contains("events were lost"), "{error}");
        let error = recording(&HEAD.replace("3/3", "3/4")).unwrap_err();
        assert!(error.why.contains("`3` of `4` are there"), "{error}");
        let early = "a-1 [0] . 1.000002: block_rq_insert: 7,1 R 8 () 8 + 8\n\
                     a-1 [0] . 1.000001: block_rq_insert: 7,1 R 8 () 8 + 8\n";
        assert!(recording(early).unwrap_err().why.contains("earlier than the line before"));
    }
}
