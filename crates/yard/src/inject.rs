//! The texts that describe faults: Linux's `error_injection` syntax for the injector, with more
//! keys, and `NAME=VALUE` for a device's own faults.

use blockyard_core::inject::{Chance, LATENCY_NS_MAX, Latency, Rule};
use blockyard_core::middleware::RuleStatus;
use blockyard_core::{Geometry, Op, Sector, Status};
use serde::{Deserialize, Serialize};

use crate::param::shown;
use crate::suggestion::suggestion;
use crate::time_text;

/// The longest text, in bytes.
pub const LEN_MAX: usize = 1024;

/// The keys of a rule.
pub(crate) const KEYS: [&str; 9] =
    ["op", "start", "nr_sectors", "zones", "status", "latency", "chance", "times", "seed"];

/// The expected forms, for messages and help.
pub const WANTED: &str = "add,op=OP,start=SECTOR,nr_sectors=N,zones=N-N,status=STATUS,\
     latency=LATENCY,chance=CHANCE,times=N,seed=N (status or latency, and as many of the others as \
     are needed), removeall, or a fault of the device's own as NAME=VALUE";

/// The forms of a latency.
const LATENCY_WANTED: &str = "a time such as 5ms, 1ms..20ms for every time between these with the \
     same probability, or 200us/5ms/50ms for the percentiles 50, 99 and 99.9; at most 5m";

/// The reason for which a text describes no fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid {field} `{value}`: {wanted}")]
pub struct InjectError {
    /// The part of the text.
    pub field: String,
    /// The value, shortened.
    pub value: String,
    /// What is expected.
    pub wanted: String,
}

fn refuse(field: &str, value: &str, wanted: impl Into<String>) -> InjectError {
    InjectError { field: field.to_owned(), value: shown(value), wanted: wanted.into() }
}

/// A fault, or the removal of all rules.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// A rule of the fault injector.
    Rule(RuleText),
    /// The removal of all rules.
    RemoveRules,
    /// A fault of the device itself.
    Device {
        /// The name of the fault.
        name: String,
        /// The value, in the form that the device documents.
        value: String,
    },
}

/// A rule whose range may be given in zones of a device that is not known yet.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleText {
    rule: Rule,
    /// The first and the last zone.
    zones: Option<(u64, u64)>,
    /// The keys that were given.
    given: Vec<&'static str>,
}

/// Parses the text of a fault.
///
/// # Errors
/// If it has none of the forms of [`WANTED`].
pub fn parse(text: &str) -> Result<Fault, InjectError> {
    let text = text.trim();
    if text.len() > LEN_MAX {
        return Err(refuse("fault", text, format!("expected at most {LEN_MAX} bytes")));
    }
    if text == "removeall" {
        return Ok(Fault::RemoveRules);
    }
    if let Some(rest) = text.strip_prefix("add,") {
        let mut rule = RuleText::new();
        for part in rest.split(',') {
            let (key, value) =
                part.split_once('=').ok_or_else(|| refuse("add", part, "expected KEY=VALUE"))?;
            rule.set(key, value)?;
        }
        return rule.check().map(|()| Fault::Rule(rule));
    }
    if text == "add" {
        return Err(refuse("add", "", format!("expected {WANTED}")));
    }
    let (name, value) =
        text.split_once('=').ok_or_else(|| refuse("fault", text, format!("expected {WANTED}")))?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    if name.is_empty() || !name.bytes().all(plain) || value.chars().any(char::is_control) {
        return Err(refuse("fault", text, format!("expected {WANTED}")));
    }
    Ok(Fault::Device { name: name.to_owned(), value: value.to_owned() })
}

impl RuleText {
    /// A rule without any key.
    pub(crate) fn new() -> RuleText {
        RuleText { rule: Rule::new(Status::Ok), zones: None, given: Vec::new() }
    }

    /// Sets a key.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<(), InjectError> {
        let Some(known) = KEYS.into_iter().find(|known| *known == key) else {
            let advice = suggestion(key, KEYS);
            let wanted = format!("known keys are {}{advice}", KEYS.join(", "));
            return Err(refuse("add", key, wanted));
        };
        if self.given.contains(&known) {
            return Err(refuse(known, value, "it is given twice; give it once"));
        }
        let rule = &mut self.rule;
        match known {
            "op" => rule.op = Some(op(value)?),
            "start" => rule.start = Sector(number(key, value, 0, u64::MAX)?),
            "nr_sectors" => rule.sectors = number(key, value, 1, u64::MAX)?,
            "zones" => self.zones = Some(zones(value)?),
            "status" => rule.status = status(value)?,
            "latency" => rule.latency = Some(latency(value)?),
            "chance" => rule.chance = chance(value)?,
            "times" => rule.times = Some(number(key, value, 1, u64::MAX)?),
            _ => rule.seed = Some(number(key, value, 0, u64::MAX)?),
        }
        self.given.push(known);
        Ok(())
    }

    /// Sets the seed, unless the rule has one.
    pub(crate) fn seed_with(&mut self, seed: u64) {
        self.rule.seed = self.rule.seed.or(Some(seed));
    }

    /// Checks that the keys make a rule together.
    pub(crate) fn check(&self) -> Result<(), InjectError> {
        if self.rule.status.is_ok() && self.rule.latency.is_none() {
            let wanted = format!("expected one of {}; or a latency", statuses());
            return Err(refuse("status", "", wanted));
        }
        let has_range = self.given.contains(&"start") || self.given.contains(&"nr_sectors");
        match self.zones.filter(|_| has_range) {
            Some((first, last)) => {
                let value = format!("{first}-{last}");
                Err(refuse("zones", &value, "give either zones, or start and nr_sectors"))
            }
            None => Ok(()),
        }
    }

    /// The rule for a device of this shape.
    ///
    /// # Errors
    /// If the rule names zones, and the device has none of these numbers.
    pub fn resolve(&self, geometry: &Geometry) -> Result<Rule, InjectError> {
        let Some((first, last)) = self.zones else { return Ok(self.rule.clone()) };
        let value = format!("{first}-{last}");
        let Some(shape) = &geometry.zones else {
            return Err(refuse("zones", &value, "the device has no zones; give start"));
        };
        if last >= u64::from(shape.zone_count) {
            let wanted = format!("expected zones from 0 to {}", shape.zone_count - 1);
            return Err(refuse("zones", &value, wanted));
        }
        let start = Sector(first * shape.zone_sectors);
        let sectors = (last - first + 1) * shape.zone_sectors;
        Ok(Rule { start, sectors, ..self.rule.clone() })
    }
}

fn op(value: &str) -> Result<Op, InjectError> {
    Op::from_name(value).ok_or_else(|| {
        let names: Vec<_> = Op::ALL.iter().map(|op| op.name().to_ascii_uppercase()).collect();
        let advice = suggestion(value, names.iter().map(String::as_str));
        refuse("op", value, format!("expected one of {}{advice}", names.join(", ")))
    })
}

fn status(value: &str) -> Result<Status, InjectError> {
    Status::from_name(value).filter(|status| !status.is_ok()).ok_or_else(|| {
        let failures = Status::ALL.iter().filter(|status| !status.is_ok());
        let advice = suggestion(value, failures.map(|status| status.name()));
        refuse("status", value, format!("expected one of {}{advice}", statuses()))
    })
}

fn statuses() -> String {
    let failures = Status::ALL.iter().filter(|status| !status.is_ok());
    failures.map(|status| status.name()).collect::<Vec<_>>().join(", ")
}

fn number(key: &str, value: &str, min: u64, max: u64) -> Result<u64, InjectError> {
    let plain = value.bytes().all(|byte| byte.is_ascii_digit());
    let number = value.parse().ok().filter(|number| plain && (min..=max).contains(number));
    number.ok_or_else(|| refuse(key, value, format!("expected a number from {min} to {max}")))
}

/// A zone, or the first and the last of several.
fn zones(value: &str) -> Result<(u64, u64), InjectError> {
    let (first, last) = value.split_once('-').unwrap_or((value, value));
    let zone = |text| number("zones", text, 0, u32::MAX.into()).ok();
    let zones = zone(first).zip(zone(last)).filter(|(first, last)| first <= last);
    zones.ok_or_else(|| refuse("zones", value, "expected a zone, or FIRST-LAST, e.g. 3-7"))
}

fn latency(value: &str) -> Result<Latency, InjectError> {
    let time = |text: &str| time_text::parse(text).filter(|ns| *ns <= LATENCY_NS_MAX);
    let parsed = if let Some((min, max)) = value.split_once("..") {
        let ends = time(min).zip(time(max)).filter(|(min, max)| min <= max);
        ends.map(|(min_ns, max_ns)| Latency::Uniform { min_ns, max_ns })
    } else if value.contains('/') {
        let times: Option<Vec<u64>> = value.split('/').map(time).collect();
        match times.as_deref() {
            Some(&[p50_ns, p99_ns, p999_ns])
                if p50_ns > 0 && p50_ns <= p99_ns && p99_ns <= p999_ns =>
            {
                Some(Latency::Quantiles { p50_ns, p99_ns, p999_ns })
            }
            _ => None,
        }
    } else {
        time(value).map(|ns| Latency::Fixed { ns })
    };
    parsed.ok_or_else(|| refuse("latency", value, format!("expected {LATENCY_WANTED}")))
}

fn print_latency(latency: Latency) -> String {
    let text = time_text::print;
    match latency {
        Latency::Fixed { ns } => text(ns),
        Latency::Uniform { min_ns, max_ns } => format!("{}..{}", text(min_ns), text(max_ns)),
        Latency::Quantiles { p50_ns, p99_ns, p999_ns } => {
            [p50_ns, p99_ns, p999_ns].map(text).join("/")
        }
    }
}

/// Decimals of a percentage: a millionth has four.
const DECIMALS: usize = 4;

/// One in N as `N`, or a percentage as `1%` or `0.5%`.
fn chance(value: &str) -> Result<Chance, InjectError> {
    let Some(percent) = value.strip_suffix('%') else {
        return number("chance", value, 1, u32::MAX.into()).map(|n| Chance::OneIn(n as u32));
    };
    let (whole, decimals) = percent.split_once('.').unwrap_or((percent, "0"));
    let wanted = || refuse("chance", value, "expected 0.0001% to 100%, with four decimals at most");
    let digits = decimals.len();
    if !(1..=DECIMALS).contains(&digits) {
        return Err(wanted());
    }
    let whole = number("chance", whole, 0, 100).map_err(|_| wanted())?;
    let part = number("chance", decimals, 0, 9_999).map_err(|_| wanted())?;
    let millionths = whole * 10_000 + part * 10_u64.pow((DECIMALS - digits) as u32);
    match millionths {
        1..=1_000_000 => Ok(Chance::PerMillion(millionths as u32)),
        _ => Err(wanted()),
    }
}

fn print_chance(chance: Chance) -> String {
    match chance {
        Chance::OneIn(n) => n.to_string(),
        Chance::PerMillion(n) => {
            let decimals = format!("{:04}", n % 10_000);
            let decimals = decimals.trim_end_matches('0');
            let point = if decimals.is_empty() { "" } else { "." };
            format!("{}{point}{decimals}%", n / 10_000)
        }
    }
}

/// Prints a rule as the text that [`parse`] reads.
pub fn print(rule: &Rule) -> String {
    let mut text = "add".to_owned();
    let mut add = |key: &str, value: String| text += &format!(",{key}={value}");
    if let Some(op) = rule.op {
        add("op", op.name().to_ascii_uppercase());
    }
    if rule.start != Sector(0) {
        add("start", rule.start.0.to_string());
    }
    if rule.sectors != u64::MAX {
        add("nr_sectors", rule.sectors.to_string());
    }
    if !rule.status.is_ok() {
        add("status", rule.status.name().to_owned());
    }
    if let Some(latency) = rule.latency {
        add("latency", print_latency(latency));
    }
    if rule.chance != Chance::OneIn(1) {
        add("chance", print_chance(rule.chance));
    }
    if let Some(times) = rule.times {
        add("times", times.to_string());
    }
    if let Some(seed) = rule.seed {
        add("seed", seed.to_string());
    }
    text
}

/// A rule of a device's fault injector.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct FaultRuleView {
    /// The number of the rule, by which it is removed.
    pub id: u64,
    /// The rule in the form in which it is added.
    pub rule: String,
    /// Requests that matched, whether or not the chance hit.
    pub matched: u64,
    /// Requests that the rule failed or delayed.
    pub applied: u64,
}

impl From<RuleStatus> for FaultRuleView {
    fn from(status: RuleStatus) -> FaultRuleView {
        let RuleStatus { id, rule, matched, applied } = status;
        FaultRuleView { id, rule: print(&rule), matched, applied }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{stack, uri};

    /// A device of 16 zones of 1024 sectors.
    fn zoned() -> Geometry {
        let spec = uri::parse("null:///z?size=8M&zoned=1&zone_size=512k").unwrap();
        stack::open(&spec).unwrap().disk.geometry().clone()
    }

    fn rule_of(text: &str) -> Rule {
        let Ok(Fault::Rule(rule)) = parse(text) else { panic!("{text}") };
        rule.resolve(&zoned()).unwrap()
    }

    #[test]
    fn linux_syntax_is_read() {
        let text = "add,op=WRITE,start=16,nr_sectors=8,status=MEDIUM,chance=10,times=3";
        let rule = Rule {
            op: Some(Op::Write),
            start: Sector(16),
            sectors: 8,
            chance: Chance::OneIn(10),
            times: Some(3),
            ..Rule::new(Status::Medium)
        };
        assert_eq!(rule_of(text), rule);
        assert_eq!(rule_of("add,status=BLK_STS_IOERR\n"), Rule::new(Status::IoErr));
        assert_eq!(parse("removeall"), Ok(Fault::RemoveRules));
    }

    #[test]
    fn a_fault_of_the_device_is_a_name_and_a_value() {
        for (text, name, value) in [
            ("badblocks=+8-15", "badblocks", "+8-15"),
            ("timeout=1,100,0,1", "timeout", "1,100,0,1"),
            ("power_cut=1", "power_cut", "1"),
        ] {
            let want = Fault::Device { name: name.to_owned(), value: value.to_owned() };
            assert_eq!(parse(text), Ok(want));
        }
    }

    #[test]
    fn rules_are_printed_as_they_are_read() {
        for (text, printed) in [
            ("add,status=IOERR", ""),
            ("add,op=READ,latency=5ms", ""),
            ("add,op=READ,latency=1000us..20ms,seed=9", "add,op=READ,latency=1ms..20ms,seed=9"),
            ("add,latency=200us/5ms/50ms,chance=10", ""),
            ("add,op=WRITE,status=IOERR,chance=0.50%", "add,op=WRITE,status=IOERR,chance=0.5%"),
            ("add,status=TIMEOUT,latency=30s,chance=12.0001%,times=3", ""),
            ("add,status=IOERR,chance=100%", ""),
            (
                "add,op=WRITE,zones=3-7,status=IOERR",
                "add,op=WRITE,start=3072,nr_sectors=5120,status=IOERR",
            ),
            ("add,zones=15,latency=0", "add,start=15360,nr_sectors=1024,latency=0s"),
        ] {
            let rule = rule_of(text);
            let printed = if printed.is_empty() { text } else { printed };
            assert_eq!(print(&rule), printed);
            assert_eq!(rule_of(printed), rule);
        }
    }

    #[test]
    fn zones_are_those_of_the_device() {
        let Ok(Fault::Rule(rule)) = parse("add,zones=3-16,status=IOERR") else { panic!() };
        let error = rule.resolve(&zoned()).unwrap_err().to_string();
        assert_eq!(error, "invalid zones `3-16`: expected zones from 0 to 15");
        let flat = Geometry { zones: None, ..zoned() };
        let error = rule.resolve(&flat).unwrap_err().to_string();
        assert_eq!(error, "invalid zones `3-16`: the device has no zones; give start");
    }

    #[test]
    fn errors_name_the_part_and_what_would_do() {
        let cases = [
            ("", "invalid fault ``: expected add,"),
            ("nonsense", "invalid fault `nonsense`"),
            ("=1", "invalid fault `=1`"),
            ("a b=1", "invalid "),
            ("add", "invalid add ``"),
            ("add,", "invalid add ``: expected KEY=VALUE"),
            ("add,op=WRITE", "invalid status ``: expected one of NOTSUPP, TIMEOUT"),
            ("add,op=WRIT,status=IOERR", "did you mean `WRITE`?"),
            ("add,status=MEDUM", "did you mean `MEDIUM`?"),
            ("add,status=OK", "invalid status `OK`"),
            ("add,sectors=1,status=IOERR", "did you mean `nr_sectors`?"),
            ("add,start=1,start=2,status=IOERR", "invalid start `2`: it is given twice"),
            ("add,start=-1,status=IOERR", "invalid start `-1`: expected a number from 0"),
            ("add,nr_sectors=0,status=IOERR", "invalid nr_sectors `0`"),
            ("add,chance=0,status=IOERR", "invalid chance `0`"),
            ("add,chance=4294967296,status=IOERR", "invalid chance `4294967296`"),
            ("add,chance=0%,status=IOERR", "invalid chance `0%`: expected 0.0001% to 100%"),
            ("add,chance=100.0001%,status=IOERR", "invalid chance"),
            ("add,chance=1.%,status=IOERR", "invalid chance"),
            ("add,chance=.5%,status=IOERR", "invalid chance"),
            ("add,zones=7-3,status=IOERR", "invalid zones `7-3`: expected a zone, or FIRST-LAST"),
            ("add,zones=1,start=0,status=IOERR", "invalid zones `1-1`: give either zones"),
            ("add,latency=5", "invalid latency `5`: expected a time such as 5ms"),
            ("add,latency=6m", "invalid latency `6m`"),
            ("add,latency=2ms..1ms", "invalid latency `2ms..1ms`"),
            ("add,latency=0/1ms/2ms", "invalid latency `0/1ms/2ms`"),
            ("add,latency=1ms/3ms/2ms", "invalid latency `1ms/3ms/2ms`"),
            ("add,latency=1ms/2ms", "invalid latency `1ms/2ms`"),
        ];
        for (text, want) in cases {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(want), "{text}: {error}");
        }
        assert!(parse(&"x".repeat(LEN_MAX + 1)).is_err());
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(add,)?\\PC{0,80}") {
            let _ = parse(&text);
        }
    }
}
