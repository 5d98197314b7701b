//! Backups that the daemon makes by itself: snapshots at an interval, sent to another pool by a
//! command, and pruned by age. docs/backup.md is the guide.
//!
//! One thread runs all policies, one at a time. The state of a policy is in the pool: its snapshots
//! begin with its name, and the last one that was sent has a hold of its name, so that it can be
//! the base of the next stream. A restart therefore loses nothing but the last result.
#![allow(clippy::disallowed_types)] // Results are read rarely.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blockyard_volume::Running;
use blockyard_volume::admin::now;
use blockyard_volume_admin::prune;
use blockyard_volume_admin::send::{SendOptions, Sending};
use blockyard_volume_format::catalogue::VolumeMeta;
use blockyard_volume_format::stream::ResumeToken;
use serde::{Deserialize, Serialize};

use crate::config::BackupSettings;
use crate::devices::Devices;

mod command;

use command::{BackupTarget, TargetError, TargetStop};

/// How long a policy waits after a failure before it tries again.
const RETRY_INTERVAL_S: u64 = 600;

/// The longest sleep of the thread, after which it looks at the clock again: the clock may have
/// been set.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);

/// The state and the last result of a policy.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct BackupView {
    /// The name of the policy.
    pub name: String,
    /// The pool.
    pub pool: String,
    /// The period of the snapshots: `hourly`, `daily`, `weekly` or `monthly`.
    pub snapshots: String,
    /// Whether it runs now.
    pub running: bool,
    /// When the last run ended, in seconds since 1970 (UTC). This and the following times are
    /// absent if there was none since the daemon was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_run: Option<u64>,
    /// When the last run that succeeded ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_success: Option<u64>,
    /// Why the last run failed; absent if it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// How long the last run took.
    pub duration_ms: u64,
    /// The length of the streams that were sent since the daemon was started.
    pub sent_bytes: u64,
    /// The runs since the daemon was started.
    pub runs: u64,
    /// The runs that failed.
    pub failures: u64,
    /// When the next run begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_run: Option<u64>,
}

/// The policies of a daemon with their results.
#[derive(Debug, Default)]
pub struct Backups {
    policies: Mutex<Vec<Policy>>,
    /// Ends the wait for the next run, and the command in progress.
    stop: TargetStop,
    changed: Condvar,
}

#[derive(Debug)]
struct Policy {
    settings: BackupSettings,
    view: BackupView,
}

/// What a run has done.
#[derive(Debug, Default)]
struct RunResult {
    sent_bytes: u64,
    errors: Vec<String>,
}

impl Backups {
    fn policies(&self) -> MutexGuard<'_, Vec<Policy>> {
        self.policies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the policies.
    pub fn set(&self, settings: &[BackupSettings]) {
        let policy = |settings: &BackupSettings| Policy {
            view: BackupView {
                name: settings.name.clone(),
                pool: settings.pool.display().to_string(),
                snapshots: settings.snapshots.adverb().to_owned(),
                ..BackupView::default()
            },
            settings: settings.clone(),
        };
        *self.policies() = settings.iter().map(policy).collect();
    }

    /// The state of each policy.
    pub fn views(&self) -> Vec<BackupView> {
        self.policies().iter().map(|policy| policy.view.clone()).collect()
    }

    /// Starts the thread that runs the policies. It stops when the result is dropped.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn start(self: &Arc<Self>, devices: &Arc<Devices>) -> std::io::Result<BackupThread> {
        let (backups, devices) = (Arc::clone(self), Arc::clone(devices));
        let run = move || {
            while !backups.stop.is_set() {
                let next = backups.run_due(&devices, now());
                let seconds = Duration::from_secs(next.saturating_sub(now()));
                backups.sleep(seconds.min(LOOK_INTERVAL));
            }
        };
        let thread = std::thread::Builder::new().name("backup".to_owned()).spawn(run)?;
        Ok(BackupThread { backups: Arc::clone(self), thread: Some(thread) })
    }

    fn sleep(&self, time: Duration) {
        let policies = self.policies();
        let is_waiting = |_: &mut Vec<Policy>| !self.stop.is_set();
        drop(self.changed.wait_timeout_while(policies, time, is_waiting));
    }

    /// Runs the policies that are due at `now`, one after another. Returns when the next one is.
    pub fn run_due(&self, devices: &Devices, now: u64) -> u64 {
        let count = self.policies().len();
        for index in 0..count {
            let settings = {
                let mut policies = self.policies();
                let due = policies.get_mut(index).filter(|policy| policy.is_due(now));
                let Some(policy) = due.filter(|_| !self.stop.is_set()) else { continue };
                policy.view.running = true;
                policy.settings.clone()
            };
            let began = Instant::now();
            let result = self.run_one(&settings, devices, now);
            let took = began.elapsed();
            if let Some(policy) = self.policies().get_mut(index) {
                policy.end(result, now, took);
            }
        }
        let next = self.policies().iter().filter_map(|policy| policy.view.next_run).min();
        next.unwrap_or(u64::MAX)
    }

    /// Runs a policy: makes the snapshots that are missing, sends what was not sent, and prunes.
    fn run_one(&self, settings: &BackupSettings, devices: &Devices, now: u64) -> RunResult {
        let mut result = RunResult::default();
        let path = settings.pool.display().to_string();
        let running = match devices.pool(Some(&path)) {
            Ok(running) => running,
            Err(error) => {
                result.errors.push(error.to_string());
                return result;
            }
        };
        let run = PolicyRun { settings, running: &running, stop: &self.stop, now };
        let volumes = run.volumes();
        result.errors.extend(run.make_snapshots(&volumes));
        for volume in &volumes {
            let done = run.send(volume, &mut result.sent_bytes).and_then(|()| run.prune(volume));
            if let Err(error) = done {
                result.errors.push(error);
            }
        }
        result
    }
}

impl Policy {
    /// Whether a run is due at `now`. A next run that is later than any could be set now was set by
    /// a clock that was ahead: it is due, so that backups do not stop until that time.
    fn is_due(&self, now: u64) -> bool {
        let latest = self.settings.snapshots.end_of(now).max(now.saturating_add(RETRY_INTERVAL_S));
        self.view.next_run.is_none_or(|next| next <= now || next > latest)
    }

    /// Records the result of a run that began at `now`.
    fn end(&mut self, result: RunResult, now: u64, took: Duration) {
        let RunResult { sent_bytes, errors } = result;
        let (view, name) = (&mut self.view, &self.settings.name);
        let ended = now.saturating_add(took.as_secs());
        view.running = false;
        view.runs += 1;
        view.last_run = Some(ended);
        view.duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        view.sent_bytes += sent_bytes;
        if errors.is_empty() {
            tracing::info!(backup = name, sent_bytes, "backup done");
            (view.last_success, view.error) = (Some(ended), None);
            view.next_run = Some(self.settings.snapshots.end_of(now));
            return;
        }
        let error = summary(&errors);
        tracing::warn!(backup = name, "backup failed: {error}");
        view.failures += 1;
        view.error = Some(error);
        view.next_run = Some(ended.saturating_add(RETRY_INTERVAL_S));
    }
}

/// Most errors of a run that are shown: each has up to a kilobyte of what a command printed.
const ERRORS_SHOWN: usize = 8;

/// The errors of a run as one line. Control characters that a command has printed, perhaps on
/// another machine, do not reach a terminal.
fn summary(errors: &[String]) -> String {
    let shown = &errors[..errors.len().min(ERRORS_SHOWN)];
    let mut line = shown.join("; ").replace(char::is_control, " ");
    if errors.len() > shown.len() {
        line += &format!("; and {} more", errors.len() - shown.len());
    }
    line
}

/// One run of a policy.
struct PolicyRun<'a> {
    settings: &'a BackupSettings,
    running: &'a Arc<Running>,
    stop: &'a TargetStop,
    now: u64,
}

impl PolicyRun<'_> {
    /// The names of the volumes: those of the policy, or all of the pool.
    fn volumes(&self) -> Vec<String> {
        if !self.settings.volumes.is_empty() {
            return self.settings.volumes.clone();
        }
        let all = self.running.pool().list().into_iter();
        all.filter(|meta| !meta.is_snapshot).map(|meta| meta.name).collect()
    }

    /// How the names of the policy's snapshots begin, after the `@`.
    fn prefix(&self) -> String {
        format!("{}-", self.settings.name)
    }

    /// The snapshots of a volume that the policy has made, the oldest first.
    fn snapshots(&self, volume: &str) -> Vec<VolumeMeta> {
        let begin = format!("{volume}@{}", self.prefix());
        let all = self.running.pool().list().into_iter();
        all.filter(|meta| meta.is_snapshot && meta.name.starts_with(&begin)).collect()
    }

    /// Makes a snapshot of each volume that has none of the present period, of all volumes at one
    /// moment if all have none. Returns why some could not be made.
    fn make_snapshots(&self, volumes: &[String]) -> Vec<String> {
        let snapshot = format!("{}{}", self.prefix(), self.settings.snapshots.label(self.now));
        let pool = self.running.pool();
        let has_one = |volume: &String| pool.find(&format!("{volume}@{snapshot}")).is_ok();
        let missing: Vec<&String> = volumes.iter().filter(|volume| !has_one(volume)).collect();
        if self.settings.volumes.is_empty() && missing.len() == volumes.len() {
            let made = self.running.snapshot_all(&snapshot);
            return made.err().map(|error| error.to_string()).into_iter().collect();
        }
        let made = missing.into_iter().map(|volume| {
            let name = format!("{volume}@{snapshot}");
            self.running.snapshot(&name).map_err(|error| format!("`{name}`: {error}"))
        });
        made.filter_map(Result::err).collect()
    }

    /// Sends the snapshots of a volume after the last one that was sent, the oldest first, each on
    /// the one before, and adds the length of the streams to `bytes`. The hold follows each stream
    /// that has arrived, so a failure repeats none of them.
    fn send(&self, volume: &str, bytes: &mut u64) -> Result<(), String> {
        let failed = |error: &dyn std::fmt::Display| format!("`{volume}`: {error}");
        let snapshots = self.snapshots(volume);
        if self.settings.target.is_empty() {
            return Ok(());
        }
        let tag = &self.settings.name;
        let held: Vec<bool> = {
            let volumes = self.running.pool().volumes();
            let is_held =
                |meta: &VolumeMeta| volumes.holds_of(meta.id).iter().any(|hold| hold.tag == *tag);
            snapshots.iter().map(is_held).collect()
        };
        let last = held.iter().rposition(|held| *held);
        let mut sent: Vec<&VolumeMeta> =
            snapshots.iter().zip(&held).filter(|(_, held)| **held).map(|(meta, _)| meta).collect();
        for snapshot in &snapshots[last.map_or(0, |last| last + 1)..] {
            let arrived = self.send_one(volume, snapshot, sent.last().copied(), bytes);
            arrived.map_err(|error| failed(&error))?;
            let hold = self.running.hold_snapshot(&snapshot.name, tag);
            hold.map_err(|error| failed(&error))?;
            for old in std::mem::replace(&mut sent, vec![snapshot]) {
                self.running.release(&old.name, tag).map_err(|error| failed(&error))?;
            }
        }
        Ok(())
    }

    /// Sends a snapshot on `base`. If the target has a part of that stream, of this run or an
    /// earlier one, it refuses with the token that continues it, and the rest is sent.
    fn send_one(
        &self,
        volume: &str,
        snapshot: &VolumeMeta,
        base: Option<&VolumeMeta>,
        bytes: &mut u64,
    ) -> Result<(), TargetError> {
        let substituted = self.settings.target.iter().map(|arg| arg.replace("{volume}", volume));
        let target = BackupTarget { argv: substituted.collect(), timeout: self.settings.timeout };
        let base_name = base.map(|base| base.name.as_str());
        let options = SendOptions {
            snapshot: &snapshot.name,
            base: base_name,
            is_raw: self.settings.raw,
            ..SendOptions::default()
        };
        let sending = Sending::begin(self.running, &options).map_err(TargetError::Send)?;
        let refused = match target.send(sending, self.stop) {
            Ok(sent) => {
                *bytes += sent;
                return Ok(());
            }
            Err(error) => error,
        };
        // The target must not choose that an encrypted volume is sent in plain.
        let is_raw = self.settings.raw && snapshot.key != 0;
        let is_this = |token: &ResumeToken| {
            (token.guid, token.base, token.is_raw)
                == (snapshot.guid, base.map(|base| base.guid), is_raw)
        };
        let Some(token) = refused.token().filter(is_this) else { return Err(refused) };
        tracing::info!(backup = self.settings.name, "{}: continuing its stream", snapshot.name);
        let sending = Sending::resume(self.running, &token, &options).map_err(TargetError::Send)?;
        *bytes += target.send(sending, self.stop)?;
        Ok(())
    }

    /// Destroys the snapshots of a volume that the retention of the policy does not keep.
    fn prune(&self, volume: &str) -> Result<(), String> {
        let Some(retention) = &self.settings.keep else { return Ok(()) };
        let plan = prune::plan(self.running, Some(volume), &self.prefix(), retention, self.now);
        let pruned = plan.and_then(|plan| self.running.destroy_all(&plan.doomed));
        pruned.map_err(|error| format!("`{volume}`: cannot prune: {error}"))
    }
}

/// The thread that runs the policies.
#[derive(Debug)]
pub struct BackupThread {
    backups: Arc<Backups>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for BackupThread {
    /// Kills the command in progress, and waits for the thread.
    fn drop(&mut self) {
        self.backups.stop.set();
        // The lock orders the stop before the thread's next look at it.
        drop(self.backups.policies());
        self.backups.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_one_line_of_bounded_length() {
        let errors = |count: usize| vec!["no\nroute\u{1b}[2J".to_owned(); count];
        assert_eq!(summary(&errors(1)), "no route [2J");
        assert_eq!(summary(&errors(2)), "no route [2J; no route [2J");
        assert!(summary(&errors(8)).ends_with("[2J; no route [2J"));
        assert!(summary(&errors(1000)).ends_with("; no route [2J; and 992 more"));
    }
}
