//! Times as people write them: `200us`, `5ms`, `10s`, `2m`, and dates.

/// The units, longest first, and their lengths in nanoseconds.
const UNITS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

/// What is expected, for messages.
pub const WANTED: &str = "a whole number with a unit: ns, us, ms, s, m or h";

/// Parses a time; returns nanoseconds. 0 needs no unit.
pub fn parse(text: &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    if number == 0 && unit.is_empty() {
        return Some(0);
    }
    let (_, ns) = UNITS.iter().find(|(name, _)| *name == unit)?;
    number.checked_mul(*ns)
}

/// Prints a time exactly, in the longest unit that has no fraction.
pub fn print(ns: u64) -> String {
    let fits = |(_, unit): &&(&str, u64)| ns > 0 && ns.is_multiple_of(*unit);
    match UNITS.iter().find(fits) {
        Some((name, unit)) => format!("{}{name}", ns / unit),
        None => "0s".to_owned(),
    }
}

/// A time in seconds since 1970 as date and time of day, in UTC: `2026-11-29 16:20`.
pub fn date(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}", second / 3600, second / 60 % 60)
}

/// The date, in the Gregorian calendar, of a day since 1970-01-01: year, month and day.
fn civil(days: u64) -> (u64, u64, u64) {
    // Count from March 1st of the year 0, so that a leap day is the last of its year; 400 years
    // have 146,097 days.
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn times_have_a_unit() {
        for (text, ns) in [
            ("0", 0),
            ("0s", 0),
            ("7ns", 7),
            ("1500us", 1_500_000),
            ("5ms", 5_000_000),
            ("90s", 90_000_000_000),
            ("2m", 120_000_000_000),
            ("1h", 3_600_000_000_000),
        ] {
            assert_eq!(parse(text), Some(ns), "{text}");
        }
        for text in ["", "5", "ms", "1.5s", "-1s", "+1s", " 1s", "1 s", "1S", "1d", "9999999999h"] {
            assert_eq!(parse(text), None, "{text}");
        }
        assert_eq!([0, 1, 60_000_000_000, 61_000_000_000].map(print), ["0s", "1ns", "1m", "61s"]);
    }

    proptest! {
        #[test]
        fn printed_times_are_read_back(ns in any::<u64>()) {
            prop_assert_eq!(parse(&print(ns)), Some(ns));
        }
    }
}
