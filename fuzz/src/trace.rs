//! Recordings of a kernel's scheduler, in our format and in that of tracefs. A text is refused with
//! an error that names its line, or it is a trace that prints to itself and can be replayed.

use blockyard_replay::{file, replay::replay, trace::Trace};

use crate::input::Input;

/// The most events of one text.
const EVENTS_MAX: usize = 80;
/// The greatest length of an error message.
const MESSAGE_MAX: usize = 4096;

/// Words that replace valid ones.
const WORDS: &[&str] =
    &["", " ", "-1", "0", "1", "x", "be", "W", "18446744073709551615", "4096", "é", "\t", "#"];

/// Interprets the bytes as a trace, compressed or not.
///
/// # Panics
/// If an error is empty, or a trace does not print to itself.
pub fn trace(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let text = match input.below(8) {
        0 => match file::text(input.take(usize::MAX)) {
            Ok(text) => text,
            Err(error) => return assert_says_something(&error.to_string()),
        },
        1..=3 => tracefs_text(&mut input),
        _ => own_text(&mut input),
    };
    match file::trace(&text) {
        Ok(trace) => {
            assert_eq!(file::trace(&trace.text()).as_ref(), Ok(&trace));
            replayed(&trace);
        }
        Err(error) => {
            assert!(error.line >= 1 && error.line <= text.lines().count() + 1, "{error}");
            assert_says_something(&error.why);
        }
    }
}

fn replayed(trace: &Trace) {
    match replay(trace) {
        Ok(verdict) => {
            let other = verdict.explained_all() + verdict.unexplained;
            assert_eq!(verdict.decisions, verdict.equal + other, "{verdict:?}");
            assert!((0.0..=1.0).contains(&verdict.share()));
        }
        Err(error) => assert_says_something(&error.why),
    }
}

/// Replaces a word of the text by another one, in half of all inputs.
fn spoil(input: &mut Input<'_>, text: String) -> String {
    let (at, other) = (input.word() as usize, input.choose(WORDS));
    if input.below(2) == 0 {
        return text;
    }
    let words: Vec<&str> = text.split(' ').collect();
    let at = at % words.len();
    let (before, after) = (words[..at].join(" "), words[at + 1..].join(" "));
    format!("{before} {other} {after}")
}

/// A request: the fields of an event after the time.
#[derive(Clone, Copy)]
struct TraceRequest {
    kind: &'static str,
    class: &'static str,
    sector: u64,
    sectors: u64,
}

impl TraceRequest {
    /// A request at one of few sectors, so that requests meet.
    fn new(input: &mut Input<'_>) -> TraceRequest {
        TraceRequest {
            kind: input.choose(&["R", "W", "D"]),
            class: input.choose(&["rt", "be", "be", "idle"]),
            sector: 8 + input.below(200) * 8,
            sectors: 8 * (1 + input.below(2)),
        }
    }

    /// A bio at one of the request's ends, and the request merged with it.
    fn joined(self, front: bool) -> (TraceRequest, TraceRequest) {
        let sector = if front { self.sector.saturating_sub(8) } else { self.sector + self.sectors };
        let bio = TraceRequest { class: "-", sector, sectors: 8, ..self };
        let first = self.sector.min(sector);
        (bio, TraceRequest { sector: first, sectors: self.sectors + 8, ..self })
    }
}

fn own_text(input: &mut Input<'_>) -> String {
    let mut text = Trace::default().text();
    let events = text.find("events\n").expect("the header ends with it");
    text.truncate(events);
    let depth = input.choose(&["1", "2", "128"]);
    for key in ["sectors", "tags", "requests"] {
        text = text.replace(&format!("{key} 0"), &format!("{key} {depth}"));
    }
    text.push_str("events\n");
    let mut waiting: Vec<TraceRequest> = Vec::new();
    let mut in_flight: Vec<TraceRequest> = Vec::new();
    let mut given_back: Vec<TraceRequest> = Vec::new();
    let mut count = 0;
    while count < EVENTS_MAX && !input.is_empty() {
        let what = input.choose(&["I", "i", "I", "D", "D", "C", "C", "Q", "B", "F"]);
        let pick = usize::from(input.byte());
        let taken = |from: &mut Vec<TraceRequest>| {
            if from.is_empty() { None } else { Some(from.swap_remove(pick % from.len())) }
        };
        let request = match what {
            "I" | "i" => {
                let new = taken(&mut given_back).unwrap_or_else(|| TraceRequest::new(input));
                waiting.push(new);
                Some(new)
            }
            "D" => taken(&mut waiting).inspect(|request| in_flight.push(*request)),
            "C" => taken(&mut in_flight),
            "Q" => taken(&mut in_flight).inspect(|request| given_back.push(*request)),
            _ => taken(&mut waiting).map(|request| {
                let (bio, whole) = request.joined(what == "F");
                waiting.push(whole);
                bio
            }),
        };
        let Some(TraceRequest { kind, class, sector, sectors }) = request else { continue };
        let gap = u64::from(input.byte()) * 20;
        text.push_str(&format!("{what} {gap} {kind} {class} {sector} {sectors}\n"));
        count += 1;
    }
    text.push_str(&format!("end {count}\n"));
    spoil(input, text)
}

fn tracefs_text(input: &mut Input<'_>) -> String {
    let mut text = String::from("# tracer: nop\n");
    let mut micros = 0;
    let mut request = TraceRequest::new(input);
    for _ in 0..EVENTS_MAX {
        if input.is_empty() {
            break;
        }
        let name = input.choose(&[
            "block_getrq",
            "block_rq_insert",
            "block_rq_issue",
            "block_rq_complete",
            "block_rq_merge",
            "block_bio_backmerge",
            "block_bio_frontmerge",
            "timer_start",
        ]);
        if matches!(name, "block_getrq" | "block_rq_insert") && input.below(2) == 0 {
            request = TraceRequest::new(input);
        }
        micros += u64::from(input.byte());
        let TraceRequest { kind, sector, sectors, .. } = request;
        let rest = match name {
            "timer_start" => format!("timer=0 expires={sector} [timeout={sectors}]"),
            "block_rq_insert" | "block_rq_issue" => {
                format!("7,1 {kind}S 4096 () {sector} + {sectors} be,0,4 [fio]")
            }
            _ => format!("7,1 {kind} {sector} + {sectors} [fio]"),
        };
        let time = format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000);
        text.push_str(&format!("  fio-{} [000] ....1 {time}: {name}: {rest}\n", sector % 16));
    }
    spoil(input, text)
}

/// Asserts that a message is not empty, not too long, and has no control characters.
fn assert_says_something(message: &str) {
    assert!(!message.trim().is_empty(), "an empty message");
    assert!(message.len() < MESSAGE_MAX, "a message of {} bytes", message.len());
    let odd = message.chars().find(|letter| letter.is_control());
    assert_eq!(odd, None, "a control character in `{}`", message.escape_debug());
}
