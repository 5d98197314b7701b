//! The texts that describe faults: Linux's `error_injection` syntax for the injector, and
//! `NAME=VALUE` for a device's own faults.

use blockyard_core::inject::{Injection, Rule};
use blockyard_core::{Op, Sector, Status};

use crate::param::shown;
use crate::suggestion::suggestion;

/// The longest text, in bytes.
pub const LEN_MAX: usize = 1024;

/// The keys of a rule.
const KEYS: [&str; 6] = ["op", "start", "nr_sectors", "status", "chance", "times"];

/// The expected forms, for messages and help.
pub const WANTED: &str = "add,op=OP,start=SECTOR,nr_sectors=N,status=STATUS,chance=N,times=N (all \
     but status optional), removeall, or a fault of the device's own as NAME=VALUE";

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

/// Parses the text of a fault.
///
/// # Errors
/// If it has none of the forms of [`WANTED`].
pub fn parse(text: &str) -> Result<Injection, InjectError> {
    let text = text.trim();
    if text.len() > LEN_MAX {
        return Err(refuse("fault", text, format!("expected at most {LEN_MAX} bytes")));
    }
    if text == "removeall" {
        return Ok(Injection::RemoveRules);
    }
    if let Some(rest) = text.strip_prefix("add,") {
        return rule(rest).map(Injection::AddRule);
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
    Ok(Injection::Device { name: name.to_owned(), value: value.to_owned() })
}

fn rule(text: &str) -> Result<Rule, InjectError> {
    let mut rule = Rule {
        op: None,
        start: Sector(0),
        sectors: u64::MAX,
        status: Status::Ok,
        chance: 1,
        times: None,
    };
    let mut seen: Vec<&str> = Vec::new();
    for part in text.split(',') {
        let (key, value) =
            part.split_once('=').ok_or_else(|| refuse("add", part, "expected KEY=VALUE"))?;
        if seen.contains(&key) {
            return Err(refuse(&shown(key), value, "it is given twice; give it once"));
        }
        match key {
            "op" => rule.op = Some(op(value)?),
            "start" => rule.start = Sector(number(key, value, 0, u64::MAX)?),
            "nr_sectors" => rule.sectors = number(key, value, 1, u64::MAX)?,
            "status" => rule.status = status(value)?,
            "chance" => rule.chance = number(key, value, 1, u64::from(u32::MAX))? as u32,
            "times" => rule.times = Some(number(key, value, 1, u64::MAX)?),
            _ => {
                let advice = suggestion(key, KEYS);
                let wanted = format!("known keys are {}{advice}", KEYS.join(", "));
                return Err(refuse("add", key, wanted));
            }
        }
        seen.push(key);
    }
    if rule.status.is_ok() {
        return Err(refuse("status", "", format!("expected one of {}", statuses())));
    }
    Ok(rule)
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
        let advice = suggestion(value, Status::ALL.iter().map(|status| status.name()));
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn linux_syntax_is_read() {
        let text = "add,op=WRITE,start=16,nr_sectors=8,status=MEDIUM,chance=10,times=3";
        let rule = Rule {
            op: Some(Op::Write),
            start: Sector(16),
            sectors: 8,
            status: Status::Medium,
            chance: 10,
            times: Some(3),
        };
        assert_eq!(parse(text), Ok(Injection::AddRule(rule)));
        let Ok(Injection::AddRule(rule)) = parse("add,status=BLK_STS_IOERR\n") else { panic!() };
        assert_eq!((rule.op, rule.sectors, rule.status), (None, u64::MAX, Status::IoErr));
        assert_eq!(parse("removeall"), Ok(Injection::RemoveRules));
    }

    #[test]
    fn a_fault_of_the_device_is_a_name_and_a_value() {
        for (text, name, value) in [
            ("badblocks=+8-15", "badblocks", "+8-15"),
            ("timeout=1,100,0,1", "timeout", "1,100,0,1"),
            ("power_cut=1", "power_cut", "1"),
        ] {
            let want = Injection::Device { name: name.to_owned(), value: value.to_owned() };
            assert_eq!(parse(text), Ok(want));
        }
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
