//! Warnings: conditions of pools, RAM disks, files and backups that an administrator should know
//! of.
//!
//! [`Warnings::update`] compares the conditions of now with the warnings that are raised: each is
//! logged once when it is raised, and once when it is over. A measure that goes up and down around
//! its mark raises one warning, because it has to fall below a second mark before the warning ends.
#![allow(clippy::disallowed_types)] // The table of warnings is control plane.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_store::remote::LostWrites;
use serde::{Deserialize, Serialize};

pub(crate) mod conditions;

/// The default of `warn_fill`, in percent.
pub const WARN_FILL: u64 = 80;

/// How long after the last write that failed for lack of space the warning about it stays.
const NO_SPACE_S: u64 = 600;

/// What a warning is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WarningKind {
    /// A pool is fuller than its mark.
    PoolFill,
    /// Writes to a pool or a RAM disk failed for lack of space.
    NoSpace,
    /// A pool accepts no writes.
    PoolReadOnly,
    /// All requests to a pool in an object store wait, because its lease was not renewed in time.
    PoolHeld,
    /// A copy of a pool is not good.
    CopyBad,
    /// A file, or the files of zones, may have lost completed writes: writes and flushes fail.
    DeviceLatched,
    /// The last scrub of a pool found damage that it could not repair.
    ScrubDamage,
    /// Writes to a pool in an object store may be missing that another machine acknowledged.
    WritesMissing,
    /// This machine has acknowledged writes to a pool in an object store that the pool lacks.
    WritesLost,
    /// The local log of a pool in an object store cannot be written.
    LocalLogFailed,
    /// A standby cannot read the lease of a pool.
    LeaseUnreadable,
    /// The reservations of a pool exceed its space.
    Reservations,
    /// A RAM disk uses more of its memory limit than its mark.
    RamLimit,
    /// The last run of a backup policy failed.
    BackupFailed,
}

impl WarningKind {
    /// All kinds.
    pub const ALL: [WarningKind; 14] = [
        WarningKind::PoolFill,
        WarningKind::NoSpace,
        WarningKind::PoolReadOnly,
        WarningKind::PoolHeld,
        WarningKind::CopyBad,
        WarningKind::DeviceLatched,
        WarningKind::ScrubDamage,
        WarningKind::WritesMissing,
        WarningKind::WritesLost,
        WarningKind::LocalLogFailed,
        WarningKind::LeaseUnreadable,
        WarningKind::Reservations,
        WarningKind::RamLimit,
        WarningKind::BackupFailed,
    ];

    /// The name for programs.
    pub const fn name(self) -> &'static str {
        match self {
            WarningKind::PoolFill => "pool_fill",
            WarningKind::NoSpace => "no_space",
            WarningKind::PoolReadOnly => "pool_read_only",
            WarningKind::PoolHeld => "pool_held",
            WarningKind::CopyBad => "copy_bad",
            WarningKind::DeviceLatched => "device_latched",
            WarningKind::ScrubDamage => "scrub_damage",
            WarningKind::WritesMissing => "writes_missing",
            WarningKind::WritesLost => "writes_lost",
            WarningKind::LocalLogFailed => "local_log_failed",
            WarningKind::LeaseUnreadable => "lease_unreadable",
            WarningKind::Reservations => "reservations",
            WarningKind::RamLimit => "ram_limit",
            WarningKind::BackupFailed => "backup_failed",
        }
    }

    /// Whether data are lost or refused, or the next failure would lose some.
    pub const fn is_critical(self) -> bool {
        match self {
            WarningKind::NoSpace
            | WarningKind::PoolReadOnly
            | WarningKind::PoolHeld
            | WarningKind::CopyBad
            | WarningKind::DeviceLatched
            | WarningKind::ScrubDamage
            | WarningKind::WritesMissing
            | WarningKind::WritesLost => true,
            WarningKind::PoolFill
            | WarningKind::LocalLogFailed
            | WarningKind::LeaseUnreadable
            | WarningKind::Reservations
            | WarningKind::RamLimit
            | WarningKind::BackupFailed => false,
        }
    }
}

/// A warning that is raised.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct WarningView {
    /// The kind: `pool_fill`, `no_space`, `pool_read_only`, `pool_held`, `copy_bad`,
    /// `device_latched`, `scrub_damage`, `writes_missing`, `writes_lost`, `local_log_failed`,
    /// `lease_unreadable`, `reservations`, `ram_limit` or `backup_failed`.
    pub kind: String,
    /// `warning` or `critical`.
    pub severity: String,
    /// The path of the pool, or the name of the device or backup policy.
    pub subject: String,
    /// A sentence for people.
    pub message: String,
    /// When it was raised, in seconds since 1970 (UTC).
    pub since: u64,
}

/// The last result of a backup policy, in [`StatusView`].
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct BackupStatusView {
    /// The name of the policy.
    pub name: String,
    /// When the last run that succeeded ended, in seconds since 1970 (UTC). For one before the
    /// daemon was started: when the snapshot was made that was sent last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_success: Option<u64>,
    /// Why the last run failed; absent if it succeeded, or none has ended since the daemon was
    /// started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// `GET /v1/status`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct StatusView {
    /// The worst severity: `ok`, `warning` or `critical`.
    pub state: String,
    /// The number of devices.
    pub devices: u64,
    /// The number of pools that are open.
    pub pools: u64,
    /// Whether the daemon is a standby, which has not opened its devices.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub standby: bool,
    /// Whether the daemon was a standby, and opens its devices now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub promoting: bool,
    /// The warnings, critical ones first, the oldest first.
    pub warnings: Vec<WarningView>,
    /// The backup policies, in the order of the configuration.
    #[serde(default)]
    pub backups: Vec<BackupStatusView>,
}

impl StatusView {
    /// The status of a yard with these warnings.
    pub fn new(devices: usize, pools: usize, mut warnings: Vec<WarningView>) -> StatusView {
        warnings.sort_by_key(|it| (it.severity != CRITICAL, it.since));
        let state = warnings.first().map_or("ok", |worst| worst.severity.as_str()).to_owned();
        let (devices, pools) = (devices as u64, pools as u64);
        let (standby, promoting, backups) = (false, false, Vec::new());
        StatusView { state, devices, pools, standby, promoting, warnings, backups }
    }

    /// Replaces the backup policies of the status.
    pub(crate) fn with_backups(self, backups: Vec<BackupStatusView>) -> StatusView {
        StatusView { backups, ..self }
    }
}

/// The severity of a critical warning.
pub const CRITICAL: &str = "critical";

/// Whether a condition is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    /// The warning is raised.
    Raise,
    /// The warning stays as it is, raised or not.
    Keep,
    /// The warning ends.
    Clear,
}

impl Level {
    fn of(is_raised: bool) -> Level {
        if is_raised { Level::Raise } else { Level::Clear }
    }
}

/// A condition of something at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Condition {
    kind: WarningKind,
    subject: String,
    level: Level,
    message: String,
}

#[derive(Debug)]
struct RaisedWarning {
    since: u64,
    message: String,
}

#[derive(Debug, Default)]
struct WarningTable {
    raised: BTreeMap<(WarningKind, String), RaisedWarning>,
    /// How often a warning of each kind was raised.
    counts: [u64; WarningKind::ALL.len()],
    /// The writes to each pool and RAM disk that had failed for lack of space when it was looked at
    /// last, and until when the warning stays.
    refused: BTreeMap<String, (u64, u64)>,
}

/// What a standby knows of a pool that it has not opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KnownPool {
    /// Why the pool could not be read, if the last attempt failed.
    pub(crate) unreadable: Option<String>,
    /// Why the local log of this machine, or its directory, cannot be used, if that is so.
    pub(crate) log_unusable: Option<String>,
    /// What this machine has acknowledged and the pool lacks.
    pub(crate) lost: LostWrites,
}

/// The pools of a standby that waits, by their paths.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnownPools(Arc<Mutex<BTreeMap<String, KnownPool>>>);

impl KnownPools {
    /// The table.
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, KnownPool>> {
        // Each entry is right by itself.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The warnings of a yard.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    table: Mutex<WarningTable>,
    /// The pools that a standby watches.
    pub(crate) known: KnownPools,
}

impl Warnings {
    fn table(&self) -> MutexGuard<'_, WarningTable> {
        // The next update corrects what a holder that panicked has left.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Raises and ends warnings by all conditions at a time, in seconds since 1970. `refused` has
    /// for each open pool, by its path, and each RAM disk, by its name, the writes that failed for
    /// lack of space since it was opened. A warning about something that has no condition ends.
    pub(crate) fn update(
        &self,
        now_s: u64,
        mut conditions: Vec<Condition>,
        refused: &[(String, u64)],
    ) {
        let mut table = self.table();
        conditions.extend(refused.iter().map(|(subject, count)| {
            // What was opened again counts from 0.
            let (before, until_s) = table.refused.get(subject).copied().unwrap_or((0, 0));
            let is_new = *count > if *count < before { 0 } else { before };
            let until_s = if is_new { now_s.saturating_add(NO_SPACE_S) } else { until_s };
            table.refused.insert(subject.clone(), (*count, until_s));
            Condition {
                kind: WarningKind::NoSpace,
                subject: subject.clone(),
                level: Level::of(now_s < until_s),
                message: format!("{count} writes failed with ENOSPC since it was opened"),
            }
        }));
        table.refused.retain(|subject, _| refused.iter().any(|(open, _)| open == subject));
        let is_there = |key: &(WarningKind, String)| {
            let mut of = conditions.iter().filter(|it| it.kind == key.0 && it.subject == key.1);
            of.any(|condition| condition.level != Level::Clear)
        };
        table.raised.retain(|key, _| {
            let stays = is_there(key);
            if !stays {
                tracing::info!(subject = key.1, warning = key.0.name(), "a warning is over");
            }
            stays
        });
        for Condition { kind, subject, level, message } in conditions {
            if let Some(raised) = table.raised.get_mut(&(kind, subject.clone())) {
                raised.message = message;
            } else if level == Level::Raise {
                tracing::warn!(subject, warning = kind.name(), "{message}");
                let count = WarningKind::ALL.iter().position(|it| *it == kind);
                count.into_iter().for_each(|at| table.counts[at] += 1);
                table.raised.insert((kind, subject), RaisedWarning { since: now_s, message });
            }
        }
    }

    /// The warnings that are raised.
    pub(crate) fn list(&self) -> Vec<WarningView> {
        let table = self.table();
        let view = |((kind, subject), raised): (&(WarningKind, String), &RaisedWarning)| {
            let severity = if kind.is_critical() { CRITICAL } else { "warning" };
            WarningView {
                kind: kind.name().to_owned(),
                severity: severity.to_owned(),
                subject: subject.clone(),
                message: raised.message.clone(),
                since: raised.since,
            }
        };
        table.raised.iter().map(view).collect()
    }

    /// For each kind the warnings that are raised now, and how many were raised so far.
    pub(crate) fn counts(&self) -> [(WarningKind, u64, u64); WarningKind::ALL.len()] {
        let table = self.table();
        let mut at = 0;
        WarningKind::ALL.map(|kind| {
            let now = table.raised.keys().filter(|key| key.0 == kind).count() as u64;
            at += 1;
            (kind, now, table.counts[at - 1])
        })
    }
}
