//! Backups that the daemon makes by itself: snapshots at an interval, sent to another pool by a
//! command, and pruned by age. docs/backup.md is the guide.
//!
//! Each policy has a thread, so that a target that hangs delays no other policy. The state of a
//! policy is in the pool: its snapshots begin with its name, and the last one that was sent has a
//! hold of its name, so that it can be the base of the next stream. A restart therefore loses
//! nothing but the last result.
#![allow(clippy::disallowed_types)] // Results are read rarely.

use std::panic::{AssertUnwindSafe, catch_unwind};
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
use crate::warnings::BackupStatusView;

mod command;

use command::{BackupTarget, TargetError, TargetStop};

/// How long a policy waits after a failure before it tries again.
const RETRY_INTERVAL_S: u64 = 600;

/// The longest sleep of a policy's thread, after which it looks at the clock again: the clock may
/// have been set.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);

/// The shortest sleep of a policy's thread: a run that is due may be paused.
const LOOK_INTERVAL_MIN: Duration = Duration::from_secs(1);

/// The state and the last result of a policy.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct BackupView {
    /// The name of the policy.
    pub name: String,
    /// The pool.
    pub pool: String,
    /// The period of the snapshots: `hourly`, `daily`, `weekly`, `monthly` or `yearly`.
    pub snapshots: String,
    /// When the daemon was started, in seconds since 1970 (UTC), as all times are.
    #[serde(default)]
    pub since: u64,
    /// Whether it runs now.
    pub running: bool,
    /// When the last run ended; absent if none did since the daemon was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_run: Option<u64>,
    /// When the last run that succeeded ended. For one before the daemon was started: when the
    /// snapshot was made that was sent last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_success: Option<u64>,
    /// Why the last run failed; absent if it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What targets have said to standard error in the last run that sent a stream, though they
    /// succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
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

impl From<&BackupView> for BackupStatusView {
    fn from(view: &BackupView) -> BackupStatusView {
        let BackupView { name, last_success, error, .. } = view;
        BackupStatusView { name: name.clone(), last_success: *last_success, error: error.clone() }
    }
}

/// The policies of a daemon with their results.
#[derive(Debug, Default)]
pub struct Backups {
    state: Mutex<BackupState>,
    /// Signaled when the threads have to end.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct BackupState {
    policies: Vec<Policy>,
    phase: BackupPhase,
}

/// What the daemon does with the policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum BackupPhase {
    #[default]
    Running,
    /// No run begins, as the daemon is being handed over to a new process.
    Paused,
    /// The daemon ends.
    Ended,
}

#[derive(Debug)]
struct Policy {
    settings: BackupSettings,
    view: BackupView,
    /// Ends the command in progress.
    stop: Arc<TargetStop>,
    /// The volume at whose stream the target hung in the last run.
    hung: Option<String>,
}

/// What a run has done.
#[derive(Debug, Default)]
struct RunResult {
    sent_bytes: u64,
    errors: Vec<String>,
    /// What targets have said that succeeded.
    notes: Vec<String>,
    /// Whether a stream was sent.
    has_sent: bool,
    /// The volume at whose stream the target hung.
    hung: Option<String>,
}

impl Backups {
    fn state(&self) -> MutexGuard<'_, BackupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the policies.
    pub fn set(&self, settings: &[BackupSettings]) {
        let policy = |settings: &BackupSettings| Policy {
            view: BackupView {
                name: settings.name.clone(),
                pool: settings.pool.display().to_string(),
                snapshots: settings.snapshots.adverb().to_owned(),
                since: now(),
                ..BackupView::default()
            },
            settings: settings.clone(),
            stop: Arc::default(),
            hung: None,
        };
        self.state().policies = settings.iter().map(policy).collect();
    }

    /// The state of each policy.
    pub fn views(&self) -> Vec<BackupView> {
        self.state().policies.iter().map(|policy| policy.view.clone()).collect()
    }

    /// Starts the threads that run the policies. They stop when the result is dropped.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn start(self: &Arc<Self>, devices: &Arc<Devices>) -> std::io::Result<BackupThreads> {
        let count = self.state().policies.len();
        // If the system refuses one, the others end with this.
        let mut threads = BackupThreads { backups: Arc::clone(self), threads: Vec::new() };
        for index in 0..count {
            let (backups, devices) = (Arc::clone(self), Arc::clone(devices));
            let run = move || {
                while backups.state().phase != BackupPhase::Ended {
                    let next = backups.run_if_due(index, &devices, now());
                    let seconds = Duration::from_secs(next.saturating_sub(now()));
                    backups.sleep(seconds.clamp(LOOK_INTERVAL_MIN, LOOK_INTERVAL));
                }
            };
            let name = format!("backup-{index}");
            threads.threads.push(std::thread::Builder::new().name(name).spawn(run)?);
        }
        Ok(threads)
    }

    fn sleep(&self, time: Duration) {
        let state = self.state();
        let is_waiting = |state: &mut BackupState| state.phase != BackupPhase::Ended;
        drop(self.changed.wait_timeout_while(state, time, is_waiting));
    }

    /// Lets no run begin until the result is dropped. Runs in progress go on.
    pub(crate) fn pause(&self) -> BackupPause<'_> {
        let mut state = self.state();
        if state.phase == BackupPhase::Running {
            state.phase = BackupPhase::Paused;
        }
        BackupPause(self)
    }

    /// Runs the policies that are due at `now`, one after another.
    pub fn run_due(&self, devices: &Devices, now: u64) {
        let count = self.state().policies.len();
        for index in 0..count {
            self.run_if_due(index, devices, now);
        }
    }

    /// Runs a policy if it is due at `now`. Returns when the next run is.
    fn run_if_due(&self, index: usize, devices: &Devices, now: u64) -> u64 {
        let (settings, stop, hung) = {
            let mut state = self.state();
            let may_run = state.phase == BackupPhase::Running;
            let Some(policy) = state.policies.get_mut(index) else { return u64::MAX };
            if !may_run || !policy.is_due(now) {
                return policy.view.next_run.unwrap_or(now);
            }
            policy.view.running = true;
            (policy.settings.clone(), Arc::clone(&policy.stop), policy.hung.take())
        };
        let began = Instant::now();
        let run = || self.run_one(index, &settings, &stop, hung.as_deref(), devices, now);
        // The run has no state of its own that a panic could leave in between.
        let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
            let errors = vec!["the run panicked; the log of the daemon has the place".to_owned()];
            RunResult { errors, ..RunResult::default() }
        });
        let took = began.elapsed();
        let mut state = self.state();
        let Some(policy) = state.policies.get_mut(index) else { return u64::MAX };
        policy.end(result, now, took);
        policy.view.next_run.unwrap_or(now)
    }

    /// Runs a policy: makes the snapshots that are missing, sends what was not sent, and prunes.
    /// `hung` is the volume at whose stream the target hung before: it is the last one now.
    fn run_one(
        &self,
        index: usize,
        settings: &BackupSettings,
        stop: &TargetStop,
        hung: Option<&str>,
        devices: &Devices,
        now: u64,
    ) -> RunResult {
        let mut result = RunResult::default();
        let path = settings.pool.display().to_string();
        let running = match devices.pool(Some(&path)) {
            Ok(running) => running,
            Err(error) => {
                result.errors.push(error.to_string());
                return result;
            }
        };
        let run = PolicyRun { settings, running: &running, stop, now };
        let mut volumes = run.volumes();
        let before = run.sent_before(&volumes);
        if let Some(policy) = self.state().policies.get_mut(index) {
            policy.view.last_success = policy.view.last_success.or(before);
        }
        result.errors.extend(run.make_snapshots(&volumes));
        if let Some(at) = volumes.iter().position(|volume| Some(&**volume) == hung) {
            volumes.rotate_left(at + 1);
        }
        for volume in &volumes {
            // Each further stream would take the whole time of a target that hangs.
            let sent = match result.hung {
                None => run.send(volume, &mut result),
                Some(_) => false,
            };
            if stop.is_set() {
                break;
            }
            result.errors.extend(run.prune(volume, sent).err());
        }
        result
    }
}

/// Lets runs begin again when it is dropped.
pub(crate) struct BackupPause<'a>(&'a Backups);

impl Drop for BackupPause<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if state.phase == BackupPhase::Paused {
            state.phase = BackupPhase::Running;
        }
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
        let RunResult { sent_bytes, errors, notes, has_sent, hung } = result;
        self.hung = hung;
        let (view, name) = (&mut self.view, &self.settings.name);
        let ended = now.saturating_add(took.as_secs());
        view.running = false;
        view.runs += 1;
        view.last_run = Some(ended);
        view.duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        view.sent_bytes += sent_bytes;
        if has_sent {
            view.note = (!notes.is_empty()).then(|| summary(&notes));
        }
        if let Some(note) = view.note.as_ref().filter(|_| has_sent) {
            tracing::warn!(backup = name, "the target has said: {note}");
        }
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

/// Most errors or notes of a run that are shown: each has up to a kilobyte of what a command
/// printed.
const ERRORS_SHOWN: usize = 8;

/// The errors of a run as one line. Characters that a command has printed, perhaps on another
/// machine, and that control a terminal or the direction of text, do not reach a terminal.
fn summary(errors: &[String]) -> String {
    let shown = &errors[..errors.len().min(ERRORS_SHOWN)];
    let is_hidden = |c: char| !matches!(c, '"' | '\'' | '\\') && c.escape_debug().len() > 1;
    let mut line = shown.join("; ").replace(is_hidden, " ");
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

    /// The snapshots of a volume that the policy has made, the oldest first, and whether each has
    /// the hold of one that was sent.
    fn snapshots_held(&self, volume: &str) -> Vec<(VolumeMeta, bool)> {
        let (snapshots, tag) = (self.snapshots(volume), &self.settings.name);
        let volumes = self.running.pool().volumes();
        let is_held = |id: u32| volumes.holds_of(id).iter().any(|hold| hold.tag == *tag);
        let held: Vec<bool> = snapshots.iter().map(|meta| is_held(meta.id)).collect();
        snapshots.into_iter().zip(held).collect()
    }

    /// When the snapshots were made that were sent last, the oldest of all volumes; `None` if none
    /// of a volume was sent.
    fn sent_before(&self, volumes: &[String]) -> Option<u64> {
        let newest = |volume: &String| {
            let held = self.snapshots_held(volume).into_iter().filter(|(_, is_held)| *is_held);
            held.map(|(meta, _)| meta.created).max()
        };
        volumes.iter().map(newest).min().flatten()
    }

    /// Sends the snapshots of a volume after the last one that was sent, the oldest first, each on
    /// the one before. The hold follows each stream that has arrived, so a failure repeats none of
    /// them. Returns whether all were sent.
    fn send(&self, volume: &str, result: &mut RunResult) -> bool {
        if self.settings.target.is_empty() {
            return true;
        }
        let tag = &self.settings.name;
        let all = self.snapshots_held(volume);
        let first = all.iter().rposition(|(_, is_held)| *is_held).map_or(0, |last| last + 1);
        let held = all.iter().filter(|(_, is_held)| *is_held);
        let mut sent: Vec<&VolumeMeta> = held.map(|(meta, _)| meta).collect();
        for (snapshot, _) in &all[first..] {
            let arrived = self.send_one(volume, snapshot, sent.last().copied(), result);
            if arrived.as_ref().is_err_and(TargetError::is_hang) {
                result.hung = Some(volume.to_owned());
            }
            let moved = arrived.map_err(|error| error.to_string()).and_then(|()| {
                let old = std::mem::replace(&mut sent, vec![snapshot]);
                let held = self.running.hold_snapshot(&snapshot.name, tag);
                let released = held.and_then(|_| {
                    old.iter().try_for_each(|old| self.running.release(&old.name, tag).map(drop))
                });
                released.map_err(|error| error.to_string())
            });
            if let Err(error) = moved {
                result.errors.push(format!("`{volume}`: {error}"));
                return false;
            }
        }
        true
    }

    /// Sends a snapshot on `base`. If the target has a part of that stream, of this run or an
    /// earlier one, it refuses with the token that continues it, and the rest is sent.
    fn send_one(
        &self,
        volume: &str,
        snapshot: &VolumeMeta,
        base: Option<&VolumeMeta>,
        result: &mut RunResult,
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
        let done = match target.send(sending, self.stop) {
            Ok(done) => done,
            Err(refused) => {
                // The target must not choose that an encrypted volume is sent in plain.
                let is_raw = self.settings.raw && snapshot.key != 0;
                let is_this = |token: &ResumeToken| {
                    (token.guid, token.base, token.is_raw)
                        == (snapshot.guid, base.map(|base| base.guid), is_raw)
                };
                let Some(token) = refused.token().filter(is_this) else { return Err(refused) };
                let name = &snapshot.name;
                tracing::info!(backup = self.settings.name, "{name}: continuing its stream");
                let sending = Sending::resume(self.running, &token, &options);
                target.send(sending.map_err(TargetError::Send)?, self.stop)?
            }
        };
        result.has_sent = true;
        result.sent_bytes += done.bytes;
        if !done.said.is_empty() {
            result.notes.push(format!("`{}`: {}", snapshot.name, done.said));
        }
        Ok(())
    }

    /// Destroys the snapshots of a volume that the retention of the policy does not keep. If not
    /// all were sent, those that follow the last one that was sent stay.
    fn prune(&self, volume: &str, all_sent: bool) -> Result<(), String> {
        let Some(retention) = &self.settings.keep else { return Ok(()) };
        let plan = prune::plan(self.running, Some(volume), &self.prefix(), retention, self.now);
        let pruned = plan.and_then(|mut plan| {
            if !all_sent {
                let held = self.snapshots_held(volume).into_iter().filter(|(_, is_held)| *is_held);
                let last = held.map(|(meta, _)| meta.id).max().unwrap_or(0);
                plan.doomed.retain(|meta| meta.id < last);
            }
            self.running.destroy_all(&plan.doomed)
        });
        pruned.map_err(|error| format!("`{volume}`: cannot prune: {error}"))
    }
}

/// The threads that run the policies.
#[derive(Debug)]
pub struct BackupThreads {
    backups: Arc<Backups>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for BackupThreads {
    /// Kills the commands in progress, and waits for the threads.
    fn drop(&mut self) {
        {
            let mut state = self.backups.state();
            state.phase = BackupPhase::Ended;
            state.policies.iter().for_each(|policy| policy.stop.set());
        }
        self.backups.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of a thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_run_begins_while_the_daemon_is_handed_over() {
        let (backups, devices) = (Backups::default(), Devices::new());
        backups.set(&[BackupSettings {
            name: "off".to_owned(),
            pool: "/nowhere".into(),
            volumes: Vec::new(),
            snapshots: prune::Period::Hour,
            keep: None,
            target: Vec::new(),
            timeout: Duration::from_secs(1),
            raw: true,
        }]);
        let paused = backups.pause();
        backups.run_due(&devices, 1);
        assert_eq!(backups.views()[0].runs, 0);
        drop(paused);
        backups.run_due(&devices, 1);
        assert_eq!(backups.views()[0].runs, 1);
    }

    #[test]
    fn errors_are_one_line_of_bounded_length() {
        let errors = |count: usize| vec!["no\nroute\u{1b}[2J".to_owned(); count];
        assert_eq!(summary(&errors(1)), "no route [2J");
        assert_eq!(summary(&errors(2)), "no route [2J; no route [2J");
        // A direction of text, and a separator of lines.
        assert_eq!(summary(&["a\u{202e}b\u{2028}c \u{e4} \"'\\".to_owned()]), "a b c \u{e4} \"'\\");
        assert!(summary(&errors(8)).ends_with("[2J; no route [2J"));
        assert!(summary(&errors(1000)).ends_with("; no route [2J; and 992 more"));
    }
}
