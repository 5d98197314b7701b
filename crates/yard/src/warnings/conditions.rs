//! The conditions of pools, RAM disks, files and backup policies about which a yard warns, from
//! their state at one moment.

use blockyard_volume_admin::prune::Period;

use super::{Condition, KnownPool, Level, WarningKind};
use crate::backup::BackupView;
use crate::ram::RamView;
use crate::size::rounded;
use crate::time_text::date;
use crate::volumes::{CopyView, PoolView};

/// How far a fill has to fall below its mark before the warning ends, in percentage points.
const HYSTERESIS: u64 = 5;

/// The level of a fill of `used` of `all` against a mark in percent; a mark of 0 never warns.
fn fill_level(used: u64, all: u64, mark_percent: u64) -> Level {
    let share = |percent: u64| u128::from(all) * u128::from(percent);
    let used = u128::from(used) * 100;
    if mark_percent == 0 || all == 0 {
        Level::Clear
    } else if used >= share(mark_percent) {
        Level::Raise
    } else if used >= share(mark_percent.saturating_sub(HYSTERESIS)) {
        Level::Keep
    } else {
        Level::Clear
    }
}

fn percent(used: u64, all: u64) -> u128 {
    u128::from(used) * 100 / u128::from(all.max(1))
}

/// The conditions of a pool with a mark for its fill in percent.
pub(crate) fn pool_conditions(view: &PoolView, mark_percent: u64) -> Vec<Condition> {
    let (used, left) = (view.used_bytes, view.available_bytes);
    let all = used.saturating_add(left);
    let condition = |kind, level, message: String| Condition {
        kind,
        subject: view.path.clone(),
        level,
        message,
    };
    let missing_since = view.upload.as_ref().and_then(|upload| upload.missing_since);
    let lost = view.upload.as_ref().map_or((0, 0), |it| (it.lost_files, it.lost_bytes));
    let damaged = view.last_scrub.map_or(0, |scrub| scrub.damaged);
    let bad: Vec<&CopyView> = view.copies.iter().filter(|copy| !copy.good).collect();
    let states: Vec<String> =
        bad.iter().map(|copy| format!("the copy at {} is {}", copy.path, copy.state)).collect();
    vec![
        condition(
            WarningKind::PoolFill,
            fill_level(used, all, mark_percent),
            format!("{}% full: {} of {}", percent(used, all), rounded(used), rounded(all)),
        ),
        condition(
            WarningKind::PoolReadOnly,
            Level::of(view.failed_read_only),
            "a write or a sync has failed; nothing is written until it is opened again".to_owned(),
        ),
        condition(
            WarningKind::PoolHeld,
            Level::of(view.upload.as_ref().is_some_and(|upload| upload.held)),
            "the lease was not renewed in time, and a standby may take the pool over; all requests \
             wait until it is renewed"
                .to_owned(),
        ),
        condition(WarningKind::CopyBad, Level::of(!bad.is_empty()), states.join("; ")),
        condition(
            WarningKind::ScrubDamage,
            Level::of(damaged > 0),
            format!(
                "the last scrub found {damaged} damaged blocks and pages that it could not repair"
            ),
        ),
        condition(
            WarningKind::WritesMissing,
            Level::of(missing_since.is_some()),
            format!(
                "writes after {} UTC may be missing: the machine that had the pool acknowledged \
                 them by its local log",
                date(missing_since.unwrap_or_default())
            ),
        ),
        lost_condition(&view.path, lost),
        condition(
            WarningKind::LocalLogFailed,
            Level::of(view.upload.as_ref().is_some_and(|upload| upload.log_failed)),
            "the local log cannot be written; each sync waits for the object store until the pool \
             is opened again"
                .to_owned(),
        ),
        condition(
            WarningKind::Reservations,
            Level::of(view.unused_reserved_bytes > left),
            format!(
                "{} are reserved and not written, and {} are left",
                rounded(view.unused_reserved_bytes),
                rounded(left)
            ),
        ),
    ]
}

/// The condition of a pool of which this machine has lost files of its local log: their number, and
/// their bytes.
fn lost_condition(path: &str, (files, bytes): (u64, u64)) -> Condition {
    Condition {
        kind: WarningKind::WritesLost,
        subject: path.to_owned(),
        level: Level::of(files > 0),
        message: format!(
            "{files} files with {} of writes, which this machine acknowledged by its local log, \
             were not uploaded before another machine took the pool over; they are kept as \
             `lost-*` in the directory of the log, until you delete them",
            rounded(bytes)
        ),
    }
}

/// The conditions of a pool of a standby.
pub(crate) fn standby_conditions(path: &str, pool: &KnownPool) -> [Condition; 3] {
    let unreadable = Condition {
        kind: WarningKind::LeaseUnreadable,
        subject: path.to_owned(),
        level: Level::of(pool.unreadable.is_some()),
        message: format!(
            "the standby cannot read the lease, and cannot take the pool over: {}",
            pool.unreadable.as_deref().unwrap_or_default()
        ),
    };
    let log_unusable = Condition {
        kind: WarningKind::LocalLogFailed,
        subject: path.to_owned(),
        level: Level::of(pool.log_unusable.is_some()),
        message: format!(
            "the standby cannot use the local log of this machine, and does not take the pool \
             over: {}",
            pool.log_unusable.as_deref().unwrap_or_default()
        ),
    };
    [unreadable, log_unusable, lost_condition(path, (pool.lost.files, pool.lost.bytes))]
}

/// The condition of a RAM disk with a mark for its memory limit in percent.
pub(crate) fn ram_condition(name: &str, view: &RamView, mark_percent: u64) -> Condition {
    let (used, limit) = (view.mm_stat.mem_used_total, view.mm_stat.mem_limit);
    let share = percent(used, limit);
    Condition {
        kind: WarningKind::RamLimit,
        subject: name.to_owned(),
        level: fill_level(used, limit, mark_percent),
        message: format!("{share}% of its memory: {} of {}", rounded(used), rounded(limit)),
    }
}

/// The condition of a device with a latch of its own, which is latched because `latched_by` has
/// failed.
pub(crate) fn latch_condition(name: &str, latched_by: Option<&str>) -> Condition {
    Condition {
        kind: WarningKind::DeviceLatched,
        subject: name.to_owned(),
        level: Level::of(latched_by.is_some()),
        message: format!(
            "{} has failed, and completed writes may be lost; writes and flushes fail until the \
             device is removed and added again",
            latched_by.unwrap_or_default()
        ),
    }
}

/// The condition of a backup policy. It lasts until a run succeeds: a run in progress ends nothing,
/// and one that hangs for two periods warns, too.
pub(crate) fn backup_condition(view: &BackupView, now_s: u64) -> Condition {
    let period_s = Period::of_adverb(&view.snapshots).map_or(u64::MAX, Period::seconds_max);
    let age_s = now_s.saturating_sub(view.last_success.unwrap_or(view.since));
    let is_late = age_s > period_s.saturating_mul(2);
    let message = match &view.error {
        Some(error) => format!("the last run of the backup failed: {error}"),
        None => "no run of the backup has succeeded for two periods".to_owned(),
    };
    Condition {
        kind: WarningKind::BackupFailed,
        subject: view.name.clone(),
        level: Level::of(view.error.is_some() || is_late),
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_store::remote::LostWrites;

    use crate::volumes::{LastScrubView, UploadView};
    use crate::warnings::{StatusView, Warnings};

    fn pool(used: u64) -> PoolView {
        PoolView {
            path: "/p".to_owned(),
            used_bytes: used,
            available_bytes: 1000 - used,
            ..PoolView::default()
        }
    }

    fn kinds(warnings: &Warnings) -> Vec<String> {
        warnings.list().into_iter().map(|warning| warning.kind).collect()
    }

    #[test]
    fn a_fill_warns_once_until_it_is_well_below_its_mark() {
        let warnings = Warnings::default();
        let counted = || warnings.counts()[0].2;
        for (now, used, is_raised, count) in [
            (1, 799, false, 0),
            (2, 800, true, 1),
            (3, 799, true, 1),
            (4, 801, true, 1),
            (5, 750, true, 1),
            (6, 749, false, 1),
            (7, 799, false, 1),
            (8, 900, true, 2),
        ] {
            warnings.update(now, pool_conditions(&pool(used), 80), &[]);
            assert_eq!((!kinds(&warnings).is_empty(), counted()), (is_raised, count), "{used}");
        }
        let warning = &warnings.list()[0];
        assert_eq!((warning.since, warning.severity.as_str()), (8, "warning"));
        assert_eq!(warning.message, "90% full: 900 of 1000");
        // A mark of 0 never warns, and a pool that was closed has no warnings.
        warnings.update(9, pool_conditions(&pool(900), 0), &[]);
        assert_eq!(kinds(&warnings), [""; 0]);
        warnings.update(10, pool_conditions(&pool(900), 80), &[]);
        warnings.update(11, Vec::new(), &[]);
        assert_eq!((kinds(&warnings), counted()), (vec![], 3));
    }

    #[test]
    fn writes_without_space_warn_for_ten_minutes() {
        let warnings = Warnings::default();
        for (now, count, is_raised, raised) in [
            (0, 0, false, 0),
            (100, 5, true, 1),
            (699, 5, true, 1),
            (700, 5, false, 1),
            (800, 6, true, 2),
            (1399, 7, true, 2),
            (1998, 7, true, 2),
            // The pool was opened again.
            (2000, 0, false, 2),
            (2001, 1, true, 3),
        ] {
            warnings.update(now, Vec::new(), &[("/p".to_owned(), count)]);
            let have = (!kinds(&warnings).is_empty(), warnings.counts()[1].2);
            assert_eq!(have, (is_raised, raised), "at {now}");
        }
    }

    #[test]
    fn a_standby_warns_of_a_lease_that_it_cannot_read_and_of_what_it_has_lost() {
        let warnings = Warnings::default();
        let lost = LostWrites { files: 1, bytes: 5 };
        let known = KnownPool { unreadable: Some("403".to_owned()), lost, ..KnownPool::default() };
        warnings.update(5, standby_conditions("s3://v/p", &known).into(), &[]);
        assert_eq!(kinds(&warnings), ["writes_lost", "lease_unreadable"]);
        assert!(warnings.list()[1].message.ends_with("take the pool over: 403"));
        warnings.update(6, standby_conditions("s3://v/p", &KnownPool::default()).into(), &[]);
        assert_eq!(kinds(&warnings), [""; 0]);
    }

    #[test]
    fn states_of_a_pool_are_warnings_as_long_as_they_last() {
        let warnings = Warnings::default();
        let bad =
            CopyView { path: "/b".to_owned(), state: "stale".to_owned(), ..CopyView::default() };
        let view = PoolView {
            failed_read_only: true,
            copies: vec![CopyView { good: true, ..CopyView::default() }, bad],
            last_scrub: Some(LastScrubView { damaged: 3, ..LastScrubView::default() }),
            unused_reserved_bytes: 901,
            upload: Some(UploadView {
                log_failed: true,
                held: true,
                lost_files: 2,
                lost_bytes: 9000,
                missing_since: Some(1_764_519_600),
                ..UploadView::default()
            }),
            ..pool(100)
        };
        warnings.update(5, pool_conditions(&view, 80), &[]);
        let all = [
            "pool_read_only",
            "pool_held",
            "copy_bad",
            "scrub_damage",
            "writes_missing",
            "writes_lost",
            "local_log_failed",
            "reservations",
        ];
        assert_eq!(kinds(&warnings), all);
        assert_eq!(warnings.list()[2].message, "the copy at /b is stale");
        let status = StatusView::new(1, 1, warnings.list());
        assert_eq!((status.state.as_str(), status.warnings[3].kind.as_str()), ("critical", all[3]));
        assert!(warnings.list()[5].message.starts_with("2 files with 8."));
        let severities: Vec<&str> = status.warnings.iter().map(|it| it.severity.as_str()).collect();
        assert_eq!(severities[5..], ["critical", "warning", "warning"]);
        let message = &status.warnings[4].message;
        assert!(message.starts_with("writes after 2025-11-30 16:20 UTC may be"), "{message}");
        let view = PoolView { unused_reserved_bytes: 901, ..pool(100) };
        warnings.update(6, pool_conditions(&view, 80), &[]);
        let status = StatusView::new(1, 1, warnings.list());
        assert_eq!((status.state.as_str(), status.warnings[0].since), ("warning", 5));
        warnings.update(7, pool_conditions(&pool(100), 80), &[]);
        assert_eq!(StatusView::new(1, 1, warnings.list()).state, "ok");
    }

    #[test]
    fn a_backup_warns_from_a_run_that_failed_to_one_that_succeeded() {
        let warnings = Warnings::default();
        let failed = Some("no route".to_owned());
        for (now, error, running, is_raised) in [
            (1, None, true, false),
            (2, failed.clone(), false, true),
            (3, failed, true, true),
            (4, None, false, false),
        ] {
            let name = "offsite".to_owned();
            let view = BackupView { name, error, running, ..BackupView::default() };
            warnings.update(now, vec![backup_condition(&view, now)], &[]);
            let list = warnings.list();
            assert_eq!(!list.is_empty(), is_raised, "at {now}");
            for it in list {
                assert_eq!((it.kind.as_str(), it.subject.as_str()), ("backup_failed", "offsite"));
                assert_eq!(it.message, "the last run of the backup failed: no route");
                assert_eq!((it.severity.as_str(), it.since), ("warning", 2));
            }
        }
    }

    /// Regression: a target that hung was not seen before its timeout.
    #[test]
    fn a_backup_without_a_success_for_two_periods_warns() {
        let view =
            BackupView { snapshots: "hourly".to_owned(), since: 1000, ..BackupView::default() };
        let hung = BackupView { running: true, ..view.clone() };
        let done = BackupView { last_success: Some(5000), ..view };
        for (view, now, level) in [
            (&hung, 8200, Level::Clear),
            (&hung, 8201, Level::Raise),
            (&done, 8201, Level::Clear),
            (&done, 12_201, Level::Raise),
        ] {
            let condition = backup_condition(view, now);
            assert_eq!(condition.level, level, "at {now}");
        }
        let message = backup_condition(&hung, 8201).message;
        assert_eq!(message, "no run of the backup has succeeded for two periods");
    }

    #[test]
    fn a_ram_disk_without_a_limit_does_not_warn() {
        let mut view = RamView::default();
        view.mm_stat.mem_used_total = 90;
        assert_eq!(ram_condition("r", &view, 80).level, Level::Clear);
        view.mm_stat.mem_limit = 100;
        let condition = ram_condition("r", &view, 80);
        assert_eq!(condition.level, Level::Raise);
        assert_eq!(condition.message, "90% of its memory: 90 of 100");
        view.mm_stat.mem_used_total = 76;
        assert_eq!(ram_condition("r", &view, 80).level, Level::Keep);
    }
}
