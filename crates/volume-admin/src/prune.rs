//! Prunes snapshots by age. A retention such as `24h,7d,4w,12m` keeps the newest snapshot of each
//! of the last 24 hours that have one, of the last 7 days that have one, and so on; the others are
//! destroyed.
//!
//! The rule is that of restic and borg: for each period, go from the newest snapshot to the oldest
//! one, keep the first one of each hour (day, week, month, year), and stop after the count. A
//! period without a snapshot does not count, so a pool that was off for a month loses nothing. A
//! snapshot stays if one of the periods keeps it. Periods are those of UTC, so that a change to
//! summer time neither repeats nor skips an hour; a week is one of ISO 8601 and begins on Monday.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use blockyard_volume::names::{invalid, volume_name};
use blockyard_volume::{Running, VolumeError};
use blockyard_volume_format::catalogue::{VolumeMeta, is_name};
use time::{Date, Duration, OffsetDateTime};

/// The seconds of an hour.
const HOUR_S: u64 = 3600;

/// A time in seconds since 1970; `None` if it is beyond the calendar, after the year 9999.
fn time_of(seconds: u64) -> Option<OffsetDateTime> {
    OffsetDateTime::from_unix_timestamp(i64::try_from(seconds).ok()?).ok()
}

/// Most snapshots that a retention keeps of one period.
const COUNT_MAX: u32 = 100_000;

/// The form of a retention, for errors.
const FORM: &str = "counts with units h, d, w, m or y, each unit once, such as 24h,7d,4w,12m";

/// A period of the calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Period {
    /// An hour.
    Hour,
    /// A day.
    Day,
    /// A week of ISO 8601.
    Week,
    /// A month.
    Month,
    /// A year.
    Year,
}

impl Period {
    const ALL: [Period; 5] = [Period::Hour, Period::Day, Period::Week, Period::Month, Period::Year];

    /// The unit in a retention, and the name.
    fn words(self) -> (char, &'static str) {
        match self {
            Period::Hour => ('h', "hour"),
            Period::Day => ('d', "day"),
            Period::Week => ('w', "week"),
            Period::Month => ('m', "month"),
            Period::Year => ('y', "year"),
        }
    }

    /// How often something happens that happens once in each period.
    pub fn adverb(self) -> &'static str {
        match self {
            Period::Hour => "hourly",
            Period::Day => "daily",
            Period::Week => "weekly",
            Period::Month => "monthly",
            Period::Year => "yearly",
        }
    }

    /// The longest time from the beginning of a period to its end, in seconds.
    pub fn seconds_max(self) -> u64 {
        match self {
            Period::Hour => HOUR_S,
            Period::Day => 24 * HOUR_S,
            Period::Week => 7 * 24 * HOUR_S,
            Period::Month => 31 * 24 * HOUR_S,
            Period::Year => 366 * 24 * HOUR_S,
        }
    }

    /// The period of which [`Period::adverb`] is this.
    pub fn of_adverb(word: &str) -> Option<Period> {
        Period::ALL.into_iter().find(|period| period.adverb() == word)
    }

    /// A name of the period (UTC) of a time in seconds since 1970, such as `2026-11-29T20`,
    /// `2026-11-29`, `2026-W48`, `2026-11` or `2026`.
    pub fn label(self, seconds: u64) -> String {
        let time = time_of(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        let date = time.date();
        let (year, month, day) = (date.year(), u8::from(date.month()), date.day());
        match self {
            Period::Hour => format!("{year:04}-{month:02}-{day:02}T{:02}", time.hour()),
            Period::Day => format!("{year:04}-{month:02}-{day:02}"),
            Period::Week => {
                let (year, week, _) = date.to_iso_week_date();
                format!("{year:04}-W{week:02}")
            }
            Period::Month => format!("{year:04}-{month:02}"),
            Period::Year => format!("{year:04}"),
        }
    }

    /// When the period of a time ends, in seconds since 1970.
    pub fn end_of(self, seconds: u64) -> u64 {
        let last = || {
            let time = time_of(seconds)?;
            let first_of_month = time.date().replace_day(1).ok()?;
            // 32 days after the first of a month are in the next one.
            let next_month = first_of_month.checked_add(Duration::days(32))?.replace_day(1).ok()?;
            let date = match self {
                Period::Hour => {
                    return Some((seconds / HOUR_S).saturating_add(1).saturating_mul(HOUR_S));
                }
                Period::Day => time.date().next_day()?,
                Period::Week => {
                    let passed = i64::from(time.weekday().number_days_from_monday());
                    time.date().checked_add(Duration::days(7 - passed))?
                }
                Period::Month => next_month,
                Period::Year => Date::from_ordinal_date(time.year() + 1, 1).ok()?,
            };
            u64::try_from(date.midnight().assume_utc().unix_timestamp()).ok()
        };
        last().unwrap_or(u64::MAX)
    }

    /// A number that two times have in common if they are in the same period.
    fn number(self, time: OffsetDateTime) -> i64 {
        let date = time.date();
        match self {
            Period::Hour => time.unix_timestamp().div_euclid(3600),
            Period::Day => date.to_julian_day().into(),
            Period::Week => {
                let (year, week, _) = date.to_iso_week_date();
                i64::from(year) * 100 + i64::from(week)
            }
            Period::Month => i64::from(date.year()) * 100 + i64::from(u8::from(date.month())),
            Period::Year => date.year().into(),
        }
    }
}

/// How many snapshots of which periods are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retention(BTreeMap<Period, u32>);

impl FromStr for Retention {
    type Err = String;

    fn from_str(text: &str) -> Result<Retention, String> {
        let wrong = |part: &str| match part == text {
            true => format!("expected {FORM}"),
            false => format!("`{part}`: expected {FORM}"),
        };
        let mut counts = BTreeMap::new();
        for part in text.split(',') {
            let unit = part.chars().next_back().ok_or_else(|| wrong(part))?;
            let digits = &part[..part.len() - unit.len_utf8()];
            let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
            let count = digits.parse().ok().filter(|it| is_number && (1..=COUNT_MAX).contains(it));
            let period = Period::ALL.into_iter().find(|period| period.words().0 == unit);
            let (Some(period), Some(count)) = (period, count) else { return Err(wrong(part)) };
            if counts.insert(period, count).is_some() {
                return Err(wrong(part));
            }
        }
        Ok(Retention(counts))
    }
}

impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (period, count)) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(f, "{comma}{count}{}", period.words().0)?;
        }
        Ok(())
    }
}

/// A snapshot of one volume, as far as a retention needs to know it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    /// The number, which grows with each snapshot.
    pub id: u32,
    /// When it was created, in seconds since 1970 (UTC); 0: unknown.
    pub created: u64,
    /// Why it is not destroyed, whatever the retention says.
    pub protected: Option<String>,
}

impl Retention {
    /// Decides about the snapshots of one volume at the time `now`. Returns for each in `all` why
    /// it is kept; `None` if it is to be destroyed.
    ///
    /// A snapshot with an unknown creation time, or one later than `now`, is kept, and no period
    /// counts it: a clock that was wrong once must not destroy the others. The one that was made
    /// last is kept whatever its time is: the next incremental stream builds on it.
    pub fn decide(&self, all: &[Candidate], now: u64) -> Vec<Option<String>> {
        let mut reasons: Vec<Vec<String>> = vec![Vec::new(); all.len()];
        let mut known: Vec<(usize, OffsetDateTime)> = Vec::new();
        for (at, it) in all.iter().enumerate() {
            match time_of(it.created) {
                _ if it.created == 0 => reasons[at].push("its creation time is unknown".to_owned()),
                Some(time) if it.created <= now => known.push((at, time)),
                _ => reasons[at].push("created in the future".to_owned()),
            }
        }
        // The newest first; of several at one moment the one that was created last.
        known.sort_by_key(|(at, _)| (all[*at].created, all[*at].id));
        known.reverse();
        for (period, count) in &self.0 {
            let mut last = None;
            let mut kept = 0;
            for (at, time) in &known {
                let number = period.number(*time);
                if last != Some(number) {
                    if kept == *count {
                        break;
                    }
                    reasons[*at].push(format!("newest of its {}", period.words().1));
                    (last, kept) = (Some(number), kept + 1);
                }
            }
        }
        let last = all.iter().enumerate().max_by_key(|(_, it)| it.id);
        if let Some((at, _)) = last.filter(|(at, _)| reasons[*at].is_empty()) {
            reasons[at].push("the last one that was made".to_owned());
        }
        let protected = all.iter().map(|it| it.protected.clone());
        let reasons = reasons.into_iter().zip(protected).map(|(mut reasons, protected)| {
            reasons.extend(protected);
            (!reasons.is_empty()).then(|| reasons.join(", "))
        });
        reasons.collect()
    }
}

/// Snapshots that stay and snapshots that go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrunePlan {
    /// Those that are to be destroyed, volume by volume, the oldest first.
    pub doomed: Vec<VolumeMeta>,
    /// The names of those that stay, and why.
    pub kept: Vec<(String, String)>,
}

/// Decides about the snapshots of a volume, or of all volumes of a pool, each for itself. Only
/// snapshots whose names begin with `prefix` (after the `@`) are considered. Destroys nothing.
///
/// A snapshot that has a hold, that a volume was cloned from, or that is in use, is kept.
///
/// # Errors
/// If there is no such volume, or the prefix is not the beginning of a name.
pub fn plan(
    running: &Running,
    volume: Option<&str>,
    prefix: &str,
    retention: &Retention,
    now: u64,
) -> Result<PrunePlan, VolumeError> {
    if !prefix.is_empty() && (prefix.contains('@') || !is_name(&format!("v@{prefix}"))) {
        return invalid("prefix", prefix, "the beginning of a snapshot's name, after the `@`");
    }
    let volumes = running.pool().volumes();
    if let Some(name) = volume {
        volume_name(name)?;
        let no_volume = || VolumeError::NoSuchVolume { name: name.to_owned() };
        volumes.find(name).ok_or_else(no_volume)?;
    }
    // A clone names the snapshot that it was made from as its origin.
    let clones: BTreeMap<u32, &str> = volumes
        .by_id
        .values()
        .filter(|it| !it.meta.is_snapshot)
        .map(|it| (it.origin(), it.meta.name.as_str()))
        .collect();
    let mut of_volume: BTreeMap<&str, Vec<(VolumeMeta, Candidate)>> = BTreeMap::new();
    for live in volumes.by_id.values().filter(|it| it.meta.is_snapshot) {
        let Some((name, snapshot)) = live.meta.name.split_once('@') else { continue };
        if volume.is_some_and(|volume| volume != name) || !snapshot.starts_with(prefix) {
            continue;
        }
        let (id, created) = (live.meta.id, live.meta.created);
        let is_used = running.is_taken(id) || Arc::strong_count(live) > 1;
        let hold = volumes.holds_of(id).first().map(|hold| format!("held by `{}`", hold.tag));
        let clone = clones.get(&id).map(|clone| format!("origin of the clone `{clone}`"));
        let protected = hold.or(clone).or(is_used.then(|| "in use".to_owned()));
        let candidate = Candidate { id, created, protected };
        of_volume.entry(name).or_default().push((live.listed(), candidate));
    }
    let mut plan = PrunePlan::default();
    for (metas, candidates) in of_volume.into_values().map(|all| all.into_iter().unzip()) {
        let (metas, candidates): (Vec<VolumeMeta>, Vec<Candidate>) = (metas, candidates);
        for (meta, why) in metas.into_iter().zip(retention.decide(&candidates, now)) {
            match why {
                Some(why) => plan.kept.push((meta.name, why)),
                None => plan.doomed.push(meta),
            }
        }
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::Weekday;
    use time::macros::datetime;

    /// Snapshots at these times, in order of creation.
    fn made(times: &[OffsetDateTime]) -> Vec<Candidate> {
        let candidate = |(id, time): (u32, &OffsetDateTime)| Candidate {
            id,
            created: time.unix_timestamp() as u64,
            protected: None,
        };
        (1..).zip(times).map(candidate).collect()
    }

    /// The positions of what is kept.
    fn kept(retention: &str, all: &[Candidate], now: OffsetDateTime) -> Vec<usize> {
        let retention: Retention = retention.parse().unwrap();
        let decided = retention.decide(all, now.unix_timestamp() as u64);
        decided.iter().enumerate().filter(|(_, why)| why.is_some()).map(|(at, _)| at).collect()
    }

    const NOW: OffsetDateTime = datetime!(2027-06-01 00:00 UTC);

    /// A case: what it is about, the retention, when the snapshots were made, which ones stay.
    type Case = (&'static str, &'static str, &'static [OffsetDateTime], &'static [usize]);

    const CASES: [Case; 14] = [
        (
            "the newest of each hour; the count begins with the newest",
            "2h",
            &[
                datetime!(2026-11-29 09:59:59 UTC),
                datetime!(2026-11-29 10:00 UTC),
                datetime!(2026-11-29 10:59:59 UTC),
                datetime!(2026-11-29 11:00 UTC),
            ],
            &[2, 3],
        ),
        (
            "hours and days without a snapshot do not count",
            "2h,2d",
            &[
                datetime!(2024-01-01 12:00 UTC),
                datetime!(2025-06-01 08:00 UTC),
                datetime!(2025-06-01 09:30 UTC),
                datetime!(2026-11-29 10:00 UTC),
            ],
            &[2, 3],
        ),
        (
            "fewer snapshots than the count",
            "24h",
            &[datetime!(2026-11-29 10:00 UTC), datetime!(2026-11-29 11:00 UTC)],
            &[0, 1],
        ),
        ("no snapshot", "24h,7d,4w,12m", &[], &[]),
        (
            "summer time ends in Berlin: 02:30 comes twice there, but these are two hours",
            "9h",
            &[datetime!(2026-10-25 02:30 +2), datetime!(2026-10-25 02:30 +1)],
            &[0, 1],
        ),
        (
            "summer time begins: 01:59 and 03:00 are a minute apart, and two hours of UTC",
            "9h",
            &[
                datetime!(2026-03-29 01:00 +1),
                datetime!(2026-03-29 01:59 +1),
                datetime!(2026-03-29 03:00 +2),
            ],
            &[1, 2],
        ),
        (
            "a day is one of UTC: half past midnight in Berlin is the day before",
            "9d",
            &[datetime!(2026-07-02 00:30 +2), datetime!(2026-07-02 12:00 +2)],
            &[0, 1],
        ),
        (
            "February 29th is a day, and its month ends with it",
            "9d,9m",
            &[
                datetime!(2028-02-28 12:00 UTC),
                datetime!(2028-02-29 00:00 UTC),
                datetime!(2028-02-29 23:59:59 UTC),
                datetime!(2028-03-01 00:00 UTC),
            ],
            &[0, 2, 3],
        ),
        (
            "1900 and 2100 are no leap years, 2000 is one",
            "9d",
            &[datetime!(2000-02-29 12:00 UTC), datetime!(2000-03-01 12:00 UTC)],
            &[0, 1],
        ),
        (
            "an ISO week spans the year end: Monday 2025-12-29 to Sunday 2026-01-04",
            "9w",
            &[
                datetime!(2025-12-28 23:59:59 UTC),
                datetime!(2025-12-29 00:00 UTC),
                datetime!(2026-01-01 12:00 UTC),
                datetime!(2026-01-04 23:59:59 UTC),
                datetime!(2026-01-05 00:00 UTC),
            ],
            &[0, 3, 4],
        ),
        (
            "week 53: 2026-12-31 and 2027-01-03 are in it, 2027-01-04 is not",
            "9w",
            &[
                datetime!(2026-12-31 12:00 UTC),
                datetime!(2027-01-03 12:00 UTC),
                datetime!(2027-01-04 12:00 UTC),
            ],
            &[1, 2],
        ),
        (
            "the same month and week of two years are two",
            "9m",
            &[datetime!(2025-05-10 12:00 UTC), datetime!(2026-05-10 12:00 UTC)],
            &[0, 1],
        ),
        (
            "the year ends at midnight of UTC",
            "9y",
            &[
                datetime!(2024-12-31 23:59:59 UTC),
                datetime!(2025-01-01 00:00 UTC),
                datetime!(2025-12-31 23:59:59 UTC),
            ],
            &[0, 2],
        ),
        (
            "of several at one moment the last one stays",
            "9h,9d,9w,9m,9y",
            &[datetime!(2026-05-10 12:00 UTC); 3],
            &[2],
        ),
    ];

    #[test]
    fn the_newest_of_each_period_is_kept_over_all_calendars() {
        for (what, retention, times, wanted) in CASES {
            let now = if times.iter().all(|it| *it <= NOW) { NOW } else { times[times.len() - 1] };
            assert_eq!(kept(retention, &made(times), now), wanted, "{what}");
            // The order in which they are listed is irrelevant.
            let mut turned = made(times);
            turned.reverse();
            let mut found = kept(retention, &turned, now);
            found.iter_mut().for_each(|at| *at = times.len() - 1 - *at);
            found.reverse();
            assert_eq!(found, wanted, "{what}, reversed");
        }
    }

    /// Counts by going through all hours of three years, with a snapshot in each.
    #[test]
    fn three_years_of_hourly_snapshots_become_one_for_each_period() {
        let begin = datetime!(2024-01-01 00:30 UTC);
        let hours = 0..3 * 366 * 24;
        let times: Vec<_> = hours.map(|hour| begin + Duration::hours(hour)).collect();
        let now = times[times.len() - 1];
        let kept = kept("24h,7d,4w,12m,3y", &made(&times), now);
        let stays: Vec<_> = kept.iter().map(|at| times[*at]).collect();
        // The last 24 hours; of each of the 6 days before the last hour; of the weeks and months
        // before, their last hours, which are not those of the last days.
        let mut wanted: Vec<_> = times[times.len() - 24..].to_vec();
        let last_hour_of = |date: Date| date.with_hms(23, 30, 0).unwrap().assume_utc();
        let day = |days: i64| now.date() - Duration::days(days);
        wanted.extend((1..7).map(|days| last_hour_of(day(days))));
        let sundays = (1..28).map(day).filter(|it| it.weekday() == Weekday::Sunday);
        wanted.extend(sundays.take(3).map(last_hour_of));
        let firsts = (0..340).map(day).filter(|it| it.day() == 1).take(11);
        wanted.extend(firsts.map(|it| last_hour_of(it.previous_day().unwrap())));
        wanted.push(datetime!(2025-12-31 23:30 UTC));
        wanted.sort();
        wanted.dedup();
        assert_eq!(stays, wanted);
    }

    #[test]
    fn periods_have_names_and_ends() {
        let cases = [
            (Period::Hour, datetime!(2026-12-31 23:59:59 UTC), "2026-12-31T23"),
            (Period::Day, datetime!(2028-02-29 23:59:59 UTC), "2028-02-29"),
            (Period::Week, datetime!(2027-01-03 23:59:59 UTC), "2026-W53"),
            (Period::Month, datetime!(2026-12-31 23:59:59 UTC), "2026-12"),
            (Period::Month, datetime!(2027-01-31 23:59:59 UTC), "2027-01"),
            (Period::Year, datetime!(2026-12-31 23:59:59 UTC), "2026"),
        ];
        for (period, last, label) in cases {
            let last = last.unix_timestamp() as u64;
            assert_eq!((period.label(last).as_str(), period.end_of(last)), (label, last + 1));
            // The end is the first second of the next period.
            assert_ne!(period.label(last + 1), label);
            assert!(period.end_of(last + 1) > last + 1);
            assert_eq!(Period::of_adverb(period.adverb()), Some(period));
        }
        let monday = datetime!(2027-01-04 00:00 UTC).unix_timestamp() as u64;
        assert_eq!(Period::Week.end_of(monday), monday + 7 * 86_400);
        assert_eq!(Period::Day.end_of(u64::MAX), u64::MAX);
        assert_eq!(Period::of_adverb("sometimes"), None);
    }

    #[test]
    fn protected_future_and_undated_snapshots_stay() {
        let times = [
            datetime!(2026-11-29 10:00 UTC),
            datetime!(2026-11-29 10:10 UTC),
            datetime!(2026-11-29 10:20 UTC),
            datetime!(2026-11-29 10:30 UTC),
            datetime!(2026-11-29 10:31 UTC),
        ];
        let mut all = made(&times);
        all[0].protected = Some("held by `keep`".to_owned());
        all[1].created = 0;
        let retention: Retention = "1h".parse().unwrap();
        let decided = retention.decide(&all, times[3].unix_timestamp() as u64);
        let wanted = [
            Some("held by `keep`"),
            Some("its creation time is unknown"),
            None,
            // The one of the future does not take its place.
            Some("newest of its hour"),
            Some("created in the future"),
        ];
        assert_eq!(decided.iter().map(Option::as_deref).collect::<Vec<_>>(), wanted);
        all[4].created = u64::MAX;
        let decided = retention.decide(&all, u64::MAX - 1);
        assert_eq!(decided[4].as_deref(), Some("created in the future"));
    }

    /// The clock was set back after the first snapshot.
    #[test]
    fn the_last_one_that_was_made_stays_though_it_is_not_the_newest() {
        let times = [datetime!(2026-11-29 10:00 UTC), datetime!(2026-11-28 09:00 UTC)];
        assert_eq!(kept("1h", &made(&times), NOW), [0, 1]);
    }

    #[test]
    fn a_retention_has_counts_and_units() {
        for text in ["24h", "24h,7d,4w,12m", "1y", "100000h,1d"] {
            assert_eq!(text.parse::<Retention>().unwrap().to_string(), text);
        }
        assert_eq!("7d,24h".parse::<Retention>().unwrap().to_string(), "24h,7d");
        for text in [
            "",
            ",",
            "24",
            "h",
            "0h",
            "-1h",
            "+1h",
            " 1h",
            "1h,",
            "1h,1h",
            "1x",
            "1h;1d",
            "100001h",
            "99999999999999999999h",
            "1\u{e9}",
            "1.5h",
            "1H",
        ] {
            let said = text.parse::<Retention>().unwrap_err();
            assert!(said.contains("expected counts with units"), "{text}: {said}");
        }
    }
}
