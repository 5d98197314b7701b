//! The scrubs of pools: which run, which are paused, and when the next one is due.
//!
//! ```text
//!           run                   end
//! none ───────────▸ running ─────────────▸ none
//!                    │   ▴
//!   pause, or a stop │   │ run, resume
//!                    ▾   │
//!                   stopped: the position is in a file, and survives a restart
//! ```
//!
//! The file of a stopped scrub is in the state directory. It is written every half minute while a
//! scrub runs, too, so that a scrub continues there after a crash.
#![allow(clippy::disallowed_types)] // The table of scrubs is control plane.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_os::{AtomicFile, Replace};
use blockyard_volume::admin::now;
use blockyard_volume::verify::{Damage, Report};
use blockyard_volume::{Running, VolumeError};
use blockyard_volume_admin::scrub::{ScrubPosition, ScrubStep, continue_scrub};
use serde::{Deserialize, Serialize};

use crate::error::YardError;
use crate::paths;
use crate::time_text;

/// How often the position of a scrub that runs is saved.
const SAVE_INTERVAL: Duration = Duration::from_secs(30);

/// The longest file of a position, in bytes: a thousand damages have some hundred bytes each.
const SAVED_MAX: u64 = 4 << 20;

const DAY_S: u64 = 86_400;

/// What is expected of `scrub=`, for messages.
pub const SCHEDULE_WANTED: &str =
    "never, daily, weekly, monthly (30 days), or a time from 1m on, e.g. 36h";

/// How often a pool is scrubbed: the value of `scrub=`, in seconds; `None` for never.
///
/// # Errors
/// What is expected instead.
pub fn parse_schedule(text: &str) -> Result<Option<u64>, &'static str> {
    match text {
        "" | "never" => Ok(None),
        "daily" => Ok(Some(DAY_S)),
        "weekly" => Ok(Some(7 * DAY_S)),
        "monthly" => Ok(Some(30 * DAY_S)),
        other => match time_text::parse(other).map(|ns| ns / 1_000_000_000) {
            Some(seconds @ 60..) => Ok(Some(seconds)),
            _ => Err(SCHEDULE_WANTED),
        },
    }
}

/// Whether a pool is to be scrubbed now whose scrubs ended at `ends` seconds since 1970. A time in
/// the future is ignored: the clock was ahead then, and how long ago the scrub ended is unknown.
fn is_due(now_s: u64, ends: [Option<u64>; 2], interval_s: u64) -> bool {
    let last_s = ends.into_iter().flatten().filter(|ended_s| *ended_s <= now_s).max();
    last_s.is_none_or(|last_s| now_s - last_s >= interval_s)
}

/// What the scrubs of a pool found since the yard was started, also if the pool was closed since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScrubCounts {
    /// Completed scrubs.
    pub(crate) scrubs: u64,
    /// Damaged blocks and map pages that could not be repaired.
    pub(crate) damaged: u64,
}

/// A scrub that has begun and not ended.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct ScrubStateView {
    /// Whether it runs; otherwise it is stopped, and continues from its position.
    pub running: bool,
    /// Whether it was paused by a command: the schedule does not continue it.
    pub paused: bool,
    /// The bytes of blocks and map pages that were verified.
    pub verified_bytes: u64,
    /// The most bytes that are to be verified, about; 0 if the scrub has not run since the start.
    pub total_bytes: u64,
}

/// The position of a scrub in its file.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
struct SavedScrub {
    /// What tells the pool from others, also if its first copy is replaced.
    identity: String,
    is_paused: bool,
    /// Whether the yard itself continues it.
    is_background: bool,
    volume: u32,
    block: u64,
    verified_bytes: u64,
    elapsed_ms: u64,
    volumes: u64,
    blocks: u64,
    stored_bytes: u64,
    damaged: u64,
    repaired: u64,
    damage: Vec<SavedDamage>,
}

/// A damage that a scrub has found before it was stopped.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
struct SavedDamage {
    volume: String,
    block: u64,
    address: u64,
    what: String,
}

impl From<Damage> for SavedDamage {
    fn from(damage: Damage) -> SavedDamage {
        let Damage { volume, block, address, what } = damage;
        SavedDamage { volume, block, address, what }
    }
}

impl SavedScrub {
    fn at(&self, position: ScrubPosition) -> SavedScrub {
        let ScrubPosition { volume, block, verified_bytes, elapsed, report } = position;
        let Report { volumes, blocks, stored_bytes, damaged, repaired, damage, .. } = report;
        SavedScrub {
            volume,
            block,
            verified_bytes,
            elapsed_ms: elapsed.as_millis() as u64,
            volumes,
            blocks,
            stored_bytes,
            damaged,
            repaired,
            damage: damage.into_iter().map(SavedDamage::from).collect(),
            ..self.clone()
        }
    }

    fn position(self) -> ScrubPosition {
        let damage = self.damage.into_iter().map(|it| Damage {
            volume: it.volume,
            block: it.block,
            address: it.address,
            what: it.what,
        });
        ScrubPosition {
            volume: self.volume,
            block: self.block,
            verified_bytes: self.verified_bytes,
            elapsed: Duration::from_millis(self.elapsed_ms),
            report: Report {
                volumes: self.volumes,
                blocks: self.blocks,
                stored_bytes: self.stored_bytes,
                damaged: self.damaged,
                repaired: self.repaired,
                damage: damage.collect(),
                ..Report::default()
            },
        }
    }
}

/// A pool, as its scrubs know it.
#[derive(Clone, Debug)]
pub(crate) struct ScrubbedPool {
    pub(crate) running: Arc<Running>,
    /// What tells the pool from others, also if its first copy is replaced.
    pub(crate) identity: String,
}

impl ScrubbedPool {
    fn path(&self) -> PathBuf {
        self.running.path()
    }
}

#[derive(Debug, Default)]
struct PoolScrubs {
    counts: ScrubCounts,
    /// The flag that asks the scrub that runs to stop.
    stop: Option<Arc<AtomicBool>>,
    is_paused: bool,
    /// When the last scrub ended, in seconds since 1970: a pool that could not record its scrub
    /// must not be scrubbed again at once.
    ended: Option<u64>,
    verified_bytes: u64,
    total_bytes: u64,
}

/// The scrubs of a yard, by the identity of the pool.
#[derive(Debug, Default)]
pub(crate) struct Scrubs {
    table: Mutex<BTreeMap<String, PoolScrubs>>,
    /// The directory of the positions; the state directory by default.
    directory: Option<PathBuf>,
}

/// A scrub that runs. Dropping it says that it does no more.
struct RunningScrub<'s> {
    scrubs: &'s Scrubs,
    pool: &'s ScrubbedPool,
    stop: Arc<AtomicBool>,
}

impl Drop for RunningScrub<'_> {
    fn drop(&mut self) {
        self.scrubs.with(self.pool, |pool| pool.stop = None);
    }
}

impl Scrubs {
    fn table(&self) -> MutexGuard<'_, BTreeMap<String, PoolScrubs>> {
        // Every change is one assignment: a holder that panicked has left the table consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, pool: &ScrubbedPool, work: impl FnOnce(&mut PoolScrubs) -> T) -> T {
        work(self.table().entry(pool.identity.clone()).or_default())
    }

    /// The completed scrubs of a pool.
    pub(crate) fn counts(&self, pool: &ScrubbedPool) -> ScrubCounts {
        self.with(pool, |pool| pool.counts)
    }

    /// Scrubs a pool from its saved position, or from the beginning, until it is complete or `tell`
    /// stops it. `is_background` says that the yard continues it by itself after a restart.
    ///
    /// # Errors
    /// If a scrub of the pool runs already, or is stopped.
    pub(crate) fn run(
        &self,
        pool: &ScrubbedPool,
        rate: u64,
        is_background: bool,
        tell: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Report, YardError> {
        let stop = Arc::new(AtomicBool::new(false));
        let is_entered = self.with(pool, |it| {
            let is_free = it.stop.is_none();
            if is_free {
                (it.stop, it.is_paused) = (Some(Arc::clone(&stop)), false);
            }
            is_free
        });
        if !is_entered {
            return Err(being_scrubbed(&pool.path()));
        }
        let entered = RunningScrub { scrubs: self, pool, stop };
        let saved = self.load(pool).unwrap_or_default();
        let saved = SavedScrub {
            identity: pool.identity.clone(),
            is_paused: false,
            is_background: is_background || saved.is_background,
            ..saved
        };
        let mut saved_at = Instant::now();
        let position = saved.clone().position();
        let scrubbed = continue_scrub(&pool.running, rate, position, &mut |step| {
            self.with(pool, |it| {
                (it.verified_bytes, it.total_bytes) = (step.verified_bytes, step.total_bytes);
            });
            // Relaxed: the flag publishes nothing but itself.
            let goes_on = !entered.stop.load(Ordering::Relaxed)
                && tell(step.verified_bytes, step.total_bytes);
            if !goes_on || saved_at.elapsed() >= SAVE_INTERVAL {
                saved_at = Instant::now();
                self.save_step(pool, &saved, step);
            }
            goes_on
        });
        match scrubbed {
            Ok(report) => {
                // First, so that no other scrub continues at this position.
                self.forget(pool);
                self.with(pool, |it| {
                    it.counts.scrubs += 1;
                    it.counts.damaged += report.damaged;
                    // A pause may have come too late.
                    it.is_paused = false;
                    it.ended = Some(now());
                });
                Ok(report)
            }
            Err(error) => {
                drop(entered);
                // A pause that comes later finds no scrub that runs, and marks the file itself.
                if self.with(pool, |it| it.is_paused) {
                    self.change_saved(pool, |saved| saved.is_paused = true)?;
                }
                Err(error.into())
            }
        }
    }

    fn save_step(&self, pool: &ScrubbedPool, saved: &SavedScrub, step: &ScrubStep<'_>) {
        if let Err(error) = self.save(pool, &saved.at(step.position())) {
            let path = pool.path();
            tracing::warn!("{}: the position of the scrub is not saved: {error}", path.display());
        }
    }

    /// Pauses the scrub of a pool, until a command continues it.
    ///
    /// # Errors
    /// If none has begun.
    pub(crate) fn pause(&self, pool: &ScrubbedPool) -> Result<(), YardError> {
        let is_running = self.with(pool, |it| {
            // Relaxed: the flag publishes nothing but itself.
            it.stop.iter().for_each(|stop| stop.store(true, Ordering::Relaxed));
            it.is_paused = it.stop.is_some();
            it.is_paused
        });
        if is_running {
            // The scrub saves its position when it stops, and then that it is paused.
            return Ok(());
        }
        self.change_saved(pool, |saved| saved.is_paused = true)
    }

    /// Ends the pause of a scrub: the yard continues it.
    ///
    /// # Errors
    /// If none is stopped.
    pub(crate) fn resume(&self, pool: &ScrubbedPool) -> Result<(), YardError> {
        self.with(pool, |it| it.is_paused = false);
        self.change_saved(pool, |saved| (saved.is_paused, saved.is_background) = (false, true))
    }

    fn change_saved(
        &self,
        pool: &ScrubbedPool,
        change: impl FnOnce(&mut SavedScrub),
    ) -> Result<(), YardError> {
        let Some(mut saved) = self.load(pool) else {
            return Err(YardError::Argument {
                field: "pool",
                value: pool.path().display().to_string(),
                wanted: "a pool with a scrub that is in progress, paused or stopped".to_owned(),
            });
        };
        change(&mut saved);
        let unsaved = VolumeError::io("cannot save the position of the scrub");
        self.save(pool, &saved).map_err(|source| unsaved(source).into())
    }

    /// Asks the scrubs that run to stop; they continue from their positions.
    pub(crate) fn stop_all(&self) {
        for stop in self.table().values().filter_map(|pool| pool.stop.as_ref()) {
            // Relaxed: the flag publishes nothing but itself.
            stop.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the yard is to scrub a pool now: to continue a scrub that it has begun, or because
    /// one is due.
    pub(crate) fn is_wanted(
        &self,
        pool: &ScrubbedPool,
        now_s: u64,
        last_s: Option<u64>,
        interval_s: Option<u64>,
    ) -> bool {
        let (is_busy, ended_s) =
            self.with(pool, |it| (it.stop.is_some() || it.is_paused, it.ended));
        if is_busy {
            return false;
        }
        match self.load(pool) {
            Some(saved) => !saved.is_paused && (saved.is_background || interval_s.is_some()),
            None => interval_s.is_some_and(|it| is_due(now_s, [last_s, ended_s], it)),
        }
    }

    /// The scrub of a pool that has begun and not ended, if there is one.
    pub(crate) fn state(&self, pool: &ScrubbedPool) -> Option<ScrubStateView> {
        let (running, verified_bytes, total_bytes) =
            self.with(pool, |it| (it.stop.is_some(), it.verified_bytes, it.total_bytes));
        if running {
            return Some(ScrubStateView { running, paused: false, verified_bytes, total_bytes });
        }
        let saved = self.load(pool)?;
        let SavedScrub { is_paused: paused, verified_bytes, .. } = saved;
        Some(ScrubStateView { running, paused, verified_bytes, total_bytes })
    }

    fn file(&self, pool: &ScrubbedPool) -> PathBuf {
        let directory = self.directory.clone().unwrap_or_else(paths::state_dir);
        directory.join(format!("scrub-{:08x}.json", crc32fast::hash(pool.identity.as_bytes())))
    }

    /// The saved position of this pool's scrub.
    fn load(&self, pool: &ScrubbedPool) -> Option<SavedScrub> {
        let file = self.file(pool);
        let length = std::fs::metadata(&file).ok()?.len();
        let text = std::fs::read(&file).ok().filter(|_| length <= SAVED_MAX)?;
        let saved: SavedScrub = serde_json::from_slice(&text)
            .inspect_err(|error| tracing::warn!("{}: {error}; it is ignored", file.display()))
            .ok()?;
        (saved.identity == pool.identity).then_some(saved)
    }

    fn save(&self, pool: &ScrubbedPool, saved: &SavedScrub) -> io::Result<()> {
        let target = self.file(pool);
        if let Some(directory) = target.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        let file = AtomicFile::create(&target, Replace::Any, &[])?;
        let text = serde_json::to_vec(saved).expect("a position is plain data");
        file.file().write_all(&text)?;
        file.commit()
    }

    fn forget(&self, pool: &ScrubbedPool) {
        match std::fs::remove_file(self.file(pool)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let path = pool.path();
                tracing::warn!("{}: the position of a scrub stays: {error}", path.display());
            }
            _ => {}
        }
    }
}

/// The refusal of a second scrub of a pool.
pub(crate) fn being_scrubbed(path: &Path) -> YardError {
    let why = "being scrubbed; `blockyard pool status` shows how far it is".to_owned();
    VolumeError::Busy { name: path.display().to_string(), why }.into()
}

/// The error of a scrub that was stopped.
pub(crate) fn is_stopped(error: &YardError) -> bool {
    matches!(error, YardError::Volume(VolumeError::Stopped))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::TempDir;
    use blockyard_volume::Options;

    #[test]
    fn schedules_are_words_or_times() {
        for (text, seconds) in [
            ("never", None),
            ("daily", Some(86_400)),
            ("weekly", Some(604_800)),
            ("monthly", Some(2_592_000)),
            ("36h", Some(129_600)),
            ("1m", Some(60)),
        ] {
            assert_eq!(parse_schedule(text), Ok(seconds), "{text}");
        }
        for text in ["yearly", "59s", "0", "1d", "-1h"] {
            assert_eq!(parse_schedule(text), Err(SCHEDULE_WANTED), "{text}");
        }
        let is_due_after = |now_s, last_s| is_due(now_s, [last_s, None], 60);
        assert!(is_due_after(100, None) && is_due_after(160, Some(100)));
        assert!(!is_due_after(159, Some(100)) && !is_due_after(100, Some(100)));
        assert!(!is_due(159, [Some(20), Some(100)], 60) && !is_due(159, [Some(100), Some(20)], 60));
        assert!(!is_due(u64::MAX - 1, [Some(1), None], u64::MAX));
    }

    /// The clock of a machine was years ahead while a pool was scrubbed. After the clock was
    /// corrected no scrub of the pool was due until that year, and no warning said so.
    #[test]
    fn a_clock_that_is_set_back_does_not_stop_scrubs() {
        const YEAR_S: u64 = 365 * DAY_S;
        let place = TempDir::new().unwrap();
        let pool = pool(&place);
        let scrubs = Scrubs { directory: Some(place.path().join("state")), ..Scrubs::default() };
        let today_s = now();
        let ahead_s = Some(today_s + 11 * YEAR_S);
        let wanted = |now_s, last_s| scrubs.is_wanted(&pool, now_s, last_s, Some(30 * DAY_S));
        assert!(wanted(today_s, ahead_s), "the time in the pool is in the future");
        assert!(!scrubs.is_wanted(&pool, today_s, ahead_s, None), "there is no schedule");
        // The next scrub is due an interval after the one that follows, although the pool still
        // has the time in the future.
        scrubs.run(&pool, 0, true, &mut |_, _| true).unwrap();
        assert!(!wanted(now(), ahead_s), "the pool was scrubbed a moment ago");
        assert!(wanted(now() + 30 * DAY_S, ahead_s), "the interval is over");
    }

    /// A pool with a volume of several leaves of its map.
    fn pool(place: &TempDir) -> ScrubbedPool {
        let path = place.path().join("pool");
        let running = Running::open(&path, Options::default()).unwrap();
        running.create("v0", 64 << 20, 4096).unwrap();
        let spec = format!("volume:///v0?path={}", path.display());
        let made = crate::stack::open(&crate::uri::parse(&spec).unwrap()).unwrap();
        let mut io = blockyard_core::blocking::Io::new(made.disk.open().unwrap(), 4096);
        for at in 0..8 {
            let (sector, flags) = (blockyard_core::Sector(at * 16_384), blockyard_core::Flags::FUA);
            io.write(sector, &[at as u8 + 1; 4096], flags).unwrap();
        }
        ScrubbedPool { running, identity: "first".to_owned() }
    }

    #[test]
    fn a_paused_scrub_continues_where_it_was_after_a_restart() {
        let place = TempDir::new().unwrap();
        let pool = pool(&place);
        let yard = || Scrubs { directory: Some(place.path().join("state")), ..Scrubs::default() };
        let scrubs = yard();
        let wanted = |scrubs: &Scrubs, interval_s| scrubs.is_wanted(&pool, 1000, None, interval_s);
        assert!(!wanted(&scrubs, None) && wanted(&scrubs, Some(60)), "there was none yet");
        assert_eq!(scrubs.pause(&pool).unwrap_err().code(), "invalid");
        assert_eq!(scrubs.resume(&pool).unwrap_err().code(), "invalid");
        // It is paused at its third step.
        let mut steps = 0;
        let stopped = scrubs.run(&pool, 0, true, &mut |_, _| {
            steps += 1;
            if steps == 3 {
                assert!(scrubs.state(&pool).unwrap().running);
                assert_eq!(
                    scrubs.run(&pool, 0, true, &mut |_, _| true).unwrap_err().code(),
                    "busy"
                );
                scrubs.pause(&pool).unwrap();
            }
            true
        });
        assert!(is_stopped(&stopped.unwrap_err()));
        let state = scrubs.state(&pool).unwrap();
        assert!(!state.running && state.paused && state.verified_bytes > 0, "{state:?}");
        // Another process finds it, and its schedule does not continue it.
        drop(scrubs);
        let scrubs = yard();
        assert_eq!(scrubs.state(&pool).map(|it| it.paused), Some(true));
        assert!(!wanted(&scrubs, Some(60)));
        scrubs.resume(&pool).unwrap();
        assert!(wanted(&scrubs, None), "the yard continues it without a schedule");
        let mut verified = Vec::new();
        let report = scrubs.run(&pool, 0, true, &mut |bytes, _| {
            verified.push(bytes);
            true
        });
        assert!(verified[0] > state.verified_bytes, "{verified:?} after {state:?}");
        assert_eq!((report.unwrap().damaged, scrubs.counts(&pool).scrubs), (0, 1));
        assert_eq!((scrubs.state(&pool), wanted(&scrubs, None)), (None, false));
        // The interval begins at its end, even if the pool has not recorded it.
        assert!(!scrubs.is_wanted(&pool, now(), None, Some(DAY_S)));
        let other = ScrubbedPool { identity: "second".to_owned(), ..pool.clone() };
        assert!(scrubs.is_wanted(&other, 1000, None, Some(60)), "another pool has had none");
    }

    #[test]
    fn the_position_of_another_pool_is_not_used() {
        let place = TempDir::new().unwrap();
        let pool = pool(&place);
        let scrubs = Scrubs { directory: Some(place.path().join("state")), ..Scrubs::default() };
        assert!(scrubs.run(&pool, 0, false, &mut |_, _| false).is_err());
        assert!(scrubs.state(&pool).is_some());
        // A scrub that a client has stopped is not continued by itself, unless there is a schedule.
        assert!(!scrubs.is_wanted(&pool, 1000, Some(999), None));
        assert!(scrubs.is_wanted(&pool, 1000, Some(999), Some(60)));
        let again = ScrubbedPool { identity: "second".to_owned(), ..pool.clone() };
        assert_eq!(scrubs.state(&again), None);
        std::fs::write(scrubs.file(&pool), "{").unwrap();
        assert_eq!(scrubs.state(&pool), None);
        use std::os::unix::fs::PermissionsExt;
        scrubs.run(&pool, 0, false, &mut |_, _| false).unwrap_err();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&scrubs.file(&pool)), 0o600);
        assert_eq!(mode(&place.path().join("state")), 0o700);
    }
}
