//! What a yard does by itself from time to time: it looks for [warnings](crate::warnings), and
//! scrubs pools that are due.

use std::sync::Arc;
use std::time::Duration;

use blockyard_volume::Running;
use blockyard_volume::admin::now;
use tokio::time::MissedTickBehavior;

use crate::api::Control;
use crate::backup::BackupView;
use crate::devices::Devices;
use crate::entry::DeviceEntry;
use crate::error::YardError;
use crate::ram::RamView;
use crate::scrubs::{ScrubbedPool, is_stopped, parse_schedule};
use crate::volumes::{PoolView, RESUME_SCRUB, VolumeDone};
use crate::warnings::WARN_FILL;
use crate::warnings::conditions::{
    backup_condition, latch_condition, pool_conditions, ram_condition, standby_conditions,
};

/// The time between two looks.
const INTERVAL: Duration = Duration::from_secs(10);

/// What the volumes of a pool say about it together.
struct PoolSettings {
    scrubbed: ScrubbedPool,
    /// The least `warn_fill` that was given.
    warn_fill: u64,
    /// The shortest interval between two scrubs, in seconds.
    scrub_s: Option<u64>,
    /// The least rate of a scrub, in bytes per second; 0 for no limit.
    rate: u64,
}

impl PoolSettings {
    fn new(pool: &Arc<Running>, entries: &[DeviceEntry]) -> PoolSettings {
        let is_of = |entry: &&DeviceEntry| {
            entry.pool.as_ref().is_some_and(|other| Arc::ptr_eq(other, pool))
        };
        let of: Vec<&DeviceEntry> = entries.iter().filter(is_of).collect();
        let given = |name: &'static str| {
            let given = of.iter().filter(move |entry| entry.spec.is_set(name));
            given.map(move |entry| entry.spec.number(name))
        };
        let schedule = |entry: &&DeviceEntry| {
            parse_schedule(&entry.spec.text("scrub").unwrap_or_default()).ok().flatten()
        };
        let default = of.first().map_or(0, |entry| entry.spec.number("scrub_rate"));
        PoolSettings {
            scrubbed: scrubbed(pool, &of),
            warn_fill: given("warn_fill").min().unwrap_or(WARN_FILL),
            scrub_s: of.iter().filter_map(schedule).min(),
            rate: given("scrub_rate").filter(|rate| *rate > 0).min().unwrap_or(default),
        }
    }
}

/// A pool with what tells it from others: the part of the identity of a volume before the number of
/// the volume, or the path.
fn scrubbed(pool: &Arc<Running>, entries: &[&DeviceEntry]) -> ScrubbedPool {
    let identity = entries.first().map_or("", |entry| entry.identity.as_str());
    let identity = match identity.split('/').next() {
        None | Some("") => pool.path().display().to_string(),
        Some(identity) => identity.to_owned(),
    };
    ScrubbedPool { running: Arc::clone(pool), identity }
}

impl Devices {
    /// A pool of this yard, as its scrubs know it.
    pub(crate) fn scrubbed(&self, pool: &Arc<Running>) -> ScrubbedPool {
        let entries = self.list();
        let is_of = |entry: &&DeviceEntry| {
            entry.pool.as_ref().is_some_and(|other| Arc::ptr_eq(other, pool))
        };
        scrubbed(pool, &entries.iter().filter(is_of).collect::<Vec<_>>())
    }

    /// Pauses or resumes the scrub of a pool.
    pub(crate) fn scrub_verb(
        &self,
        pool: &Arc<Running>,
        verb: &str,
    ) -> Result<VolumeDone, YardError> {
        let scrubbed = self.scrubbed(pool);
        let done = match verb {
            RESUME_SCRUB => self.scrubs().resume(&scrubbed).map(|()| "the scrub continues")?,
            _ => self.scrubs().pause(&scrubbed).map(|()| "paused the scrub")?,
        };
        let name = pool.path().display().to_string();
        Ok(VolumeDone { name, done: done.to_owned(), ..VolumeDone::default() })
    }

    /// Compares the state of all pools and RAM disks with their marks, and updates the warnings;
    /// `backups` are the policies.
    pub(crate) fn look_for_warnings(&self, pools: &[PoolView], backups: &[BackupView], now_s: u64) {
        let entries = self.list();
        let mut conditions: Vec<_> = backups.iter().map(|it| backup_condition(it, now_s)).collect();
        for view in pools {
            let pool = self.pools().into_iter().find(|pool| pool.path().as_os_str() == &*view.path);
            let mark = pool.map_or(WARN_FILL, |pool| PoolSettings::new(&pool, &entries).warn_fill);
            conditions.extend(pool_conditions(view, mark));
        }
        let known = self.warnings().known.lock().clone();
        conditions.extend(known.iter().flat_map(|(path, pool)| standby_conditions(path, pool)));
        let mut refused: Vec<_> =
            pools.iter().map(|view| (view.path.clone(), view.writes_refused)).collect();
        for entry in &entries {
            if let Some(view) = RamView::of(entry) {
                let (name, mark) = (entry.spec.name(), entry.spec.number("warn_fill"));
                conditions.push(ram_condition(name, &view, mark));
                refused.push((name.to_owned(), view.writes_refused));
            }
            if entry.has_latch() {
                conditions.push(latch_condition(entry.spec.name(), entry.latched_by()));
            }
        }
        self.warnings().update(now_s, conditions, &refused);
    }

    /// The pools that the yard is to scrub now, and at what rate.
    fn due_scrubs(&self, pools: &[PoolView], now_s: u64) -> Vec<(ScrubbedPool, u64)> {
        let entries = self.list();
        let settings = self.pools().into_iter().map(|pool| PoolSettings::new(&pool, &entries));
        let is_wanted = |settings: &PoolSettings| {
            let path = settings.scrubbed.running.path();
            let view = pools.iter().find(|view| path.as_os_str() == &*view.path);
            // A pool that accepts no writes cannot record a scrub.
            view.is_some_and(|view| {
                let last_s = view.last_scrub.map(|scrub| scrub.ended);
                let (scrubbed, interval_s) = (&settings.scrubbed, settings.scrub_s);
                !view.failed_read_only
                    && self.scrubs().is_wanted(scrubbed, now_s, last_s, interval_s)
            })
        };
        settings.filter(is_wanted).map(|it| (it.scrubbed, it.rate)).collect()
    }

    /// Scrubs a pool until the scrub is complete or stopped, or no device has the pool any more.
    fn scrub_in_background(&self, pool: &ScrubbedPool, rate: u64) {
        let path = pool.running.path().display().to_string();
        tracing::info!(pool = path, "scrub begins or continues");
        let mut looked = std::time::Instant::now();
        let scrubbed = self.scrubs().run(pool, rate, true, &mut |_, _| {
            if looked.elapsed() < Duration::from_secs(1) {
                return true;
            }
            looked = std::time::Instant::now();
            self.pools().iter().any(|open| Arc::ptr_eq(open, &pool.running))
        });
        match scrubbed {
            Ok(report) => {
                let (damaged, mended) = (report.damaged, report.repaired);
                tracing::info!(pool = path, damaged, mended, "scrubbed");
            }
            Err(error) if is_stopped(&error) => tracing::info!(pool = path, "scrub stopped"),
            Err(error) => tracing::warn!(pool = path, "scrub: {error}"),
        }
    }
}

/// Asks the scrubs to stop when the control plane ends: they have their pools open.
struct StopScrubs(Arc<Devices>);

impl Drop for StopScrubs {
    fn drop(&mut self) {
        self.0.scrubs().stop_all();
    }
}

/// Looks for warnings and for scrubs that are due; never ends.
pub(crate) async fn run(control: Arc<Control>) {
    let _ends = StopScrubs(Arc::clone(&control.devices));
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = control.upkeep.notified() => {}
        }
        let (shared, backups) = (Arc::clone(&control), control.backups.views());
        // The state of a pool asks its file system for its free space.
        let looked = tokio::task::spawn_blocking(move || {
            let (devices, now_s) = (&shared.devices, now());
            let pools = devices.pool_views();
            devices.look_for_warnings(&pools, &backups, now_s);
            shared.standby.look_for_loss(&pools);
            devices.due_scrubs(&pools, now_s)
        });
        // A panic was reported.
        for (pool, rate) in looked.await.unwrap_or_default() {
            let devices = Arc::clone(&control.devices);
            tokio::task::spawn_blocking(move || devices.scrub_in_background(&pool, rate));
        }
    }
}
