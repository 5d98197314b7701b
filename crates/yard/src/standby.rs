//! A standby: a daemon that has opened and serves nothing yet. It watches the leases of its pools
//! in object stores, and takes them over when it is promoted or a lease has run out.
//!
//! ```text
//!  Waiting ─ promote, a lease has run out, it had the pool last ─▸ Promoting ─ all is open ─▸
//!  Serving ─ another opener takes over ─▸ ends
//! ```
//!
//! A take-over is an opening, which fences the opener before. Before that, the standby claims the
//! lease, so that the opener before cannot renew it, and does not serve any more
//! ([`blockyard_store::lease`]).
//!
//! All pools are opened together. So no pool is claimed before each of them may be taken over: the
//! opener of another pool may serve it.
#![allow(clippy::disallowed_types)] // The state of a standby is control plane.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blockyard_store::StoreError;
use blockyard_store::lease::{AskedAt, LEASE_READS, SeenLease};
use blockyard_store::remote::{self, Lease, OwnPart};

use crate::error::{StackError, YardError};
use crate::event::Event;
use crate::spec::DeviceSpec;
use crate::stack::{remote_pool, shared_parameters};
use crate::volumes::PoolView;
use crate::warnings::{KnownPool, KnownPools};

/// How often the state of a pool is asked for until it is known, if the pool has no lease.
const PAUSE: Duration = Duration::from_secs(3);

/// What a standby does now.
#[derive(Debug, Default)]
enum StandbyState {
    /// The daemon is no standby, or serves.
    #[default]
    Serving,
    /// It waits; a promotion is sent there.
    Waiting(Sender<Event>),
    /// It opens its devices.
    Promoting,
}

/// Whether a daemon waits as a standby.
#[derive(Debug, Default)]
pub struct Standby {
    state: Mutex<StandbyState>,
    /// Where the loss of a pool is sent, if the daemon was started as a standby.
    losses: OnceLock<Sender<Event>>,
}

impl Standby {
    /// From now on the loss of a pool ends the daemon.
    pub(crate) fn end_after_loss(&self, sender: &Sender<Event>) {
        // It is still empty: a daemon starts once.
        let _ = self.losses.set(sender.clone());
    }

    /// Ends a daemon that was started as a standby, if a pool in an object store acknowledges
    /// nothing any more. Its service manager starts it again as a standby.
    pub(crate) fn look_for_loss(&self, pools: &[PoolView]) {
        let is_lost = |pool: &&PoolView| pool.upload.is_some() && pool.failed_read_only;
        if let Some(sender) = self.losses.get()
            && let Some(pool) = pools.iter().find(is_lost)
        {
            tracing::error!(pool = pool.path, "the standby has lost a pool, and ends");
            // A daemon without a receiver is ending.
            let _ = sender.send(Event::PoolLost);
        }
    }

    fn state(&self) -> MutexGuard<'_, StandbyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the daemon waits.
    pub fn is_waiting(&self) -> bool {
        matches!(&*self.state(), StandbyState::Waiting(_))
    }

    /// Whether the daemon opens its devices after it has waited.
    pub fn is_promoting(&self) -> bool {
        matches!(&*self.state(), StandbyState::Promoting)
    }

    /// The daemon serves its devices.
    pub(crate) fn serve(&self) {
        *self.state() = StandbyState::Serving;
    }

    /// Ends the wait: the daemon opens and serves its devices.
    ///
    /// # Errors
    /// If the daemon is no standby, or not any more.
    pub fn promote(&self) -> Result<(), YardError> {
        let mut state = self.state();
        let StandbyState::Waiting(sender) = &*state else { return Err(YardError::NotStandby) };
        // A daemon without a receiver is ending.
        let _ = sender.send(Event::Promoted);
        *state = StandbyState::Promoting;
        Ok(())
    }

    /// Waits for a promotion, until all pools are to be taken over, or for a signal. Returns the
    /// event. `known` gets what is found of the pools.
    pub(crate) fn wait(
        &self,
        pools: Vec<WatchedPool>,
        known: &KnownPools,
        (sender, events): (&Sender<Event>, &Receiver<Event>),
    ) -> std::io::Result<Event> {
        *self.state() = StandbyState::Waiting(sender.clone());
        let (mut stops, mut left) = (Vec::new(), pools.len());
        let ready = Arc::new(ReadyPools::new(pools.len()));
        for pool in pools.clone() {
            let (stop, stopped) = channel();
            let (sender, known, ready) = (sender.clone(), known.clone(), Arc::clone(&ready));
            let watch = move || {
                if let Some(event) = pool.watch(&ready, &stopped, &known) {
                    let _ = sender.send(event);
                }
            };
            // Not joined: a request to an object store may take some seconds.
            std::thread::Builder::new().name("lease-watch".to_owned()).spawn(watch)?;
            stops.push(stop);
        }
        let event = loop {
            let event = events.recv().map_err(|_| std::io::ErrorKind::BrokenPipe)?;
            if let Event::LeaseRanOut | Event::WasLast = event {
                left -= 1;
                if left > 0 {
                    continue;
                }
            }
            break event;
        };
        *self.state() = StandbyState::Promoting;
        drop(stops);
        known.lock().clear();
        if event == Event::Promoted {
            // A promotion takes each pool over, also from an opener that came after a claim.
            for pool in &pools {
                // A program without remote pools opens none.
                let _ = remote::expect_epoch(&pool.path, None);
            }
        }
        Ok(event)
    }
}

/// Which pools of a standby may be taken over.
#[derive(Debug)]
struct ReadyPools {
    /// The number of the pools.
    all: usize,
    paths: Mutex<BTreeSet<String>>,
}

impl ReadyPools {
    fn new(all: usize) -> ReadyPools {
        ReadyPools { all, paths: Mutex::default() }
    }

    /// Sets whether a pool may be taken over. Returns whether all may.
    fn set(&self, path: &str, is_ready: bool) -> bool {
        let mut paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_ready {
            paths.remove(path);
        } else if paths.insert(path.to_owned()) && paths.len() < self.all {
            tracing::warn!(
                pool = path,
                "the pool may be taken over, and waits until all pools of this standby may be"
            );
        }
        paths.len() == self.all
    }
}

/// What a watch has found of a pool.
#[derive(Debug, Default)]
struct PoolWatch {
    seen: SeenLease,
    /// What this machine knows of the pool, once that is known.
    own: Option<OwnPart>,
    /// The lease of a pool that this machine had last, and when the first answer with it came.
    own_lease: Option<(Lease, Instant)>,
    /// That lease has changed: the last opener lives.
    lives_elsewhere: bool,
}

/// A pool that a standby watches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WatchedPool {
    /// The path of the pool.
    pub(crate) path: String,
    /// The length of the lease; zero: the standby waits for a promotion.
    pub(crate) lease: Duration,
}

/// The pools in object stores among the devices of a configuration, with the longest lease that a
/// volume of each names.
pub(crate) fn watched_pools(devices: &[DeviceSpec]) -> Vec<WatchedPool> {
    let mut pools: Vec<WatchedPool> = Vec::new();
    for (path, lease) in devices.iter().filter_map(remote_pool) {
        match pools.iter_mut().find(|pool| pool.path == path) {
            Some(pool) => pool.lease = pool.lease.max(lease),
            None => pools.push(WatchedPool { path, lease }),
        }
    }
    pools
}

impl WatchedPool {
    /// Refuses a pool that cannot be read for a reason that does not go away by itself, such as
    /// wrong credentials. An object store that does not answer is none.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        match remote::lease(&self.path) {
            Err(error) if !remote::is_unavailable(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns why the pool is to be taken over: this machine had it last, or its lease has run out
    /// and is claimed. `None` if the watch is stopped, or there is nothing to watch.
    fn watch(
        &self,
        ready: &ReadyPools,
        stopped: &Receiver<()>,
        known: &KnownPools,
    ) -> Option<Event> {
        let pause = if self.lease.is_zero() { PAUSE } else { self.lease / LEASE_READS };
        let mut watch = PoolWatch::default();
        loop {
            let looked = self.step(&mut watch, ready);
            if looked.is_err() {
                ready.set(&self.path, false);
            }
            {
                let mut known = known.lock();
                // After the wait nothing is known: the pools are open.
                if let Err(TryRecvError::Disconnected) = stopped.try_recv() {
                    return None;
                }
                known.insert(self.path.clone(), watch.known(looked.as_ref().err()));
            }
            if let Ok(Some(event)) = looked {
                return Some(event);
            }
            let is_own = watch.own.is_some_and(|own| self.takes_at_once(own, &watch).is_some());
            if !is_own && watch.own.is_some() && self.lease.is_zero() {
                return None;
            }
            // The wait for the lease of an own pool is short.
            match stopped.recv_timeout(if is_own { pause / 2 } else { pause }) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// Asks for what this machine knows of the pool, until that is known, and for the lease.
    fn step(&self, watch: &mut PoolWatch, ready: &ReadyPools) -> Result<Option<Event>, StoreError> {
        let own = match watch.own {
            Some(own) => own,
            None => *watch.own.insert(remote::own_part(&self.path)?),
        };
        match self.takes_at_once(own, watch) {
            Some(epoch) => self.look_at_own(epoch, watch, ready),
            None if self.lease.is_zero() => Ok(None),
            None => self.look(&mut watch.seen, ready),
        }
    }

    /// The epoch in which this machine had the pool last, if it takes the pool at once: if its log
    /// has writes that the pool may lack, or there is no lease to wait for.
    fn takes_at_once(&self, own: OwnPart, watch: &PoolWatch) -> Option<u64> {
        let is_wanted = own.has_writes || self.lease.is_zero();
        own.last_epoch.filter(|_| is_wanted && !watch.lives_elsewhere)
    }

    /// Reads the lease of a pool that this machine had last. Takes the pool if the lease does not
    /// change for half its length, which is longer than the time between two renewals: the state
    /// directory may be a copy of that of a machine that lives.
    fn look_at_own(
        &self,
        epoch: u64,
        watch: &mut PoolWatch,
        ready: &ReadyPools,
    ) -> Result<Option<Event>, StoreError> {
        let asked = Instant::now();
        let found = remote::lease(&self.path).inspect_err(|_| watch.own_lease = None)?;
        if let Some(lease) = found {
            let (first, since) = *watch.own_lease.get_or_insert((lease, Instant::now()));
            if lease != first {
                tracing::warn!(pool = self.path, "another machine renews the lease");
                (watch.lives_elsewhere, watch.own) = (true, None);
                ready.set(&self.path, false);
                return Ok(None);
            }
            if asked.saturating_duration_since(since) < lease.length.max(self.lease) / 2 {
                return Ok(None);
            }
        }
        if !ready.set(&self.path, true) {
            return Ok(None);
        }
        remote::expect_epoch(&self.path, Some(epoch))?;
        Ok(Some(Event::WasLast))
    }

    /// Reads the lease. Claims it if it has run out, and all other pools may be taken over, too.
    fn look(&self, seen: &mut SeenLease, ready: &ReadyPools) -> Result<Option<Event>, StoreError> {
        let asked = Instant::now();
        let found = remote::lease(&self.path);
        let times = AskedAt { asked, answered: Instant::now() };
        let ran_out = seen.ran_out(found.as_ref().ok().copied(), times, self.lease);
        found?;
        let are_all_ready = ready.set(&self.path, ran_out.is_some());
        let Some(lease) = ran_out.filter(|_| are_all_ready) else { return Ok(None) };
        *seen = SeenLease::default();
        let is_claimed = remote::claim_lease(&self.path, &lease)?;
        if is_claimed {
            tracing::warn!(
                pool = self.path,
                "the lease was not renewed for {} s: taking the pool over",
                lease.length.max(self.lease).as_secs_f64()
            );
        }
        Ok(is_claimed.then_some(Event::LeaseRanOut))
    }
}

impl PoolWatch {
    /// What is known of the pool after a look, with the error of that.
    fn known(&self, error: Option<&StoreError>) -> KnownPool {
        let text = error.map(ToString::to_string);
        let lost = self.own.map(|own| own.lost).unwrap_or_default();
        let is_of_log = self.own.is_none() && !error.is_some_and(remote::is_unavailable);
        let (log_unusable, unreadable) = if is_of_log { (text, None) } else { (None, text) };
        KnownPool { unreadable, log_unusable, lost }
    }
}

/// Refuses volumes of one pool in an object store that want it otherwise, before a pool is opened:
/// another machine would have lost the pool by then.
pub(crate) fn check_agreement(devices: &[DeviceSpec]) -> Result<(), (String, StackError)> {
    let mut firsts: Vec<(String, &DeviceSpec)> = Vec::new();
    for spec in devices {
        let Some((path, _)) = remote_pool(spec) else { continue };
        let Some((_, first)) = firsts.iter().find(|(pool, _)| *pool == path) else {
            firsts.push((path, spec));
            continue;
        };
        let pairs = shared_parameters(spec).into_iter().zip(shared_parameters(first));
        for ((field, given, wanted), (_, of_first, is)) in pairs {
            if let Some(value) = given.filter(|_| wanted != is) {
                let of_first = of_first.unwrap_or_else(|| "none".to_owned());
                let wanted = format!("`{of_first}`, as `{}`, of the same pool", first.name());
                let error = StackError::Invalid { field, value, wanted };
                return Err((spec.name().to_owned(), error));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::uri;
    use crate::volumes::UploadView;
    use blockyard_store::Purpose;
    use blockyard_store::remote::{LostWrites, RemoteParameters, RemotePools, RemoteStore};

    #[test]
    fn the_pools_of_a_standby_are_those_in_object_stores() {
        let of = |text: &str| uri::parse(text).unwrap();
        let devices = [
            of("null:///n?size=1M"),
            of("volume:///a?path=/srv/pool&size=1G"),
            of("volume:///b?path=s3://v/one&size=1G"),
            of("volume:///c?path=s3://v/one&lease=5000"),
            of("volume:///d?path=s3://v/two&size=1G"),
        ];
        let pool = |path: &str, ms| WatchedPool {
            path: path.to_owned(),
            lease: Duration::from_millis(ms),
        };
        assert_eq!(watched_pools(&devices), [pool("s3://v/one", 5000), pool("s3://v/two", 0)]);
    }

    #[test]
    fn a_standby_ends_when_a_pool_in_an_object_store_acknowledges_nothing_any_more() {
        let pool =
            |failed_read_only, upload| PoolView { failed_read_only, upload, ..PoolView::default() };
        let remote = Some(UploadView::default());
        let (standby, (sender, events)) = (Standby::default(), channel());
        let lost = [pool(true, None), pool(false, remote.clone()), pool(true, remote)];
        standby.look_for_loss(&lost);
        standby.end_after_loss(&sender);
        standby.look_for_loss(&lost[..2]);
        assert!(events.try_recv().is_err());
        standby.look_for_loss(&lost);
        assert_eq!(events.try_recv(), Ok(Event::PoolLost));
    }

    #[test]
    fn a_promotion_ends_the_wait_once() {
        let standby = Standby::default();
        assert!(matches!(standby.promote(), Err(YardError::NotStandby)));
        let (sender, events) = channel();
        std::thread::scope(|scope| {
            let promoting = scope.spawn(|| {
                while !standby.is_waiting() {
                    std::thread::yield_now();
                }
                standby.promote().unwrap();
            });
            let known = KnownPools::default();
            let event = standby.wait(Vec::new(), &known, (&sender, &events));
            assert_eq!(event.unwrap(), Event::Promoted);
            promoting.join().unwrap();
        });
        assert!(matches!(standby.promote(), Err(YardError::NotStandby)));
        assert!(standby.is_promoting() && !standby.is_waiting());
        standby.serve();
        assert!(!standby.is_promoting());
        assert!(matches!(standby.promote(), Err(YardError::NotStandby)));
    }

    #[test]
    fn volumes_of_a_pool_in_an_object_store_must_agree_before_it_is_opened() {
        let refused = |texts: &[&str]| {
            let devices: Vec<DeviceSpec> =
                texts.iter().map(|text| uri::parse(text).unwrap()).collect();
            check_agreement(&devices).err().map(|(name, error)| format!("{name}: {error}"))
        };
        let first = "volume:///a?path=s3://v/one&size=1G&lease=5000";
        for (second, expected) in [
            (
                "volume:///b?path=s3://v/one&lease=6000",
                "b: invalid lease `6000`: expected `5000`, as `a`",
            ),
            (
                "volume:///b?path=s3://v/one&ack=local",
                "b: invalid ack `local`: expected `none`, as `a`, ",
            ),
        ] {
            let error = refused(&[first, second]).unwrap();
            assert!(error.starts_with(expected), "{error}");
        }
        for second in [
            "volume:///b?path=s3://v/one&lease=5000",
            "volume:///b?path=s3://v/one",
            "volume:///b?path=s3://v/one&ack=object",
            "volume:///b?path=s3://v/two&lease=6000",
            "volume:///b?path=/srv/pool&size=1G",
        ] {
            assert_eq!(refused(&[first, second]), None);
        }
    }

    /// A provider whose answers a test has written down.
    #[derive(Debug, Default)]
    struct Script {
        answers: Mutex<BTreeMap<String, Vec<Answer>>>,
        /// How often the lease of a path was read.
        reads: Mutex<BTreeMap<String, u64>>,
        claims: Mutex<Vec<(String, u64)>>,
        expected: Mutex<Vec<(String, Option<u64>)>>,
    }

    #[derive(Clone, Copy, Debug)]
    enum Answer {
        /// A lease of this epoch with this number of renewals.
        Lease(u64, u64),
        /// A lease of this epoch that is renewed before each read.
        Renewed(u64),
        NoLease,
        Unavailable,
        Refused,
    }

    impl Script {
        fn reads(&self, path: &str) -> u64 {
            self.reads.lock().unwrap().get(path).copied().unwrap_or_default()
        }

        fn claims(&self, path: &str) -> Vec<u64> {
            let claims = self.claims.lock().unwrap();
            claims.iter().filter(|(of, _)| of == path).map(|(_, renewals)| *renewals).collect()
        }

        fn expected(&self, path: &str) -> Vec<Option<u64>> {
            let expected = self.expected.lock().unwrap();
            expected.iter().filter(|(of, _)| of == path).map(|(_, epoch)| *epoch).collect()
        }

        fn next(&self, path: &str) -> Answer {
            let mut answers = self.answers.lock().unwrap();
            let answers = answers.get_mut(path).expect("a path of a test");
            if answers.len() > 1 { answers.remove(0) } else { answers[0] }
        }

        fn error(kind: std::io::ErrorKind) -> StoreError {
            StoreError::Io { doing: "cannot open the pool".to_owned(), source: kind.into() }
        }
    }

    static SCRIPT: OnceLock<Script> = OnceLock::new();

    #[derive(Debug)]
    struct Scripted;

    impl RemotePools for Scripted {
        fn is_pool(&self, _: &str) -> Result<bool, StoreError> {
            Ok(true)
        }

        fn superblock(&self, _: &str) -> Result<Option<Vec<u8>>, StoreError> {
            Ok(None)
        }

        fn lease(&self, path: &str) -> Result<Option<Lease>, StoreError> {
            let script = SCRIPT.get().unwrap();
            *script.reads.lock().unwrap().entry(path.to_owned()).or_default() += 1;
            let lease = |epoch, renewals| {
                let length = Duration::from_millis(9);
                Ok(Some(Lease { opener: [1; 16], epoch, renewals, length }))
            };
            match script.next(path) {
                Answer::Lease(epoch, renewals) => lease(epoch, renewals),
                Answer::Renewed(epoch) => lease(epoch, script.reads(path)),
                Answer::NoLease => Ok(None),
                Answer::Unavailable => Err(Script::error(std::io::ErrorKind::TimedOut)),
                Answer::Refused => Err(Script::error(std::io::ErrorKind::PermissionDenied)),
            }
        }

        fn claim_lease(&self, path: &str, lease: &Lease) -> Result<bool, StoreError> {
            let mut claims = SCRIPT.get().unwrap().claims.lock().unwrap();
            claims.push((path.to_owned(), lease.renewals));
            // The first claim is late: its opener has renewed the lease.
            Ok(claims.iter().filter(|(of, _)| of == path).count() > 1)
        }

        fn expect_epoch(&self, path: &str, epoch: Option<u64>) {
            let script = SCRIPT.get().unwrap();
            script.expected.lock().unwrap().push((path.to_owned(), epoch));
        }

        fn own_part(&self, path: &str) -> Result<OwnPart, StoreError> {
            if path.contains("/damaged") {
                return Err(Script::error(std::io::ErrorKind::InvalidData));
            }
            let last_epoch = path.contains("/own").then_some(3);
            let has_writes = path.contains("/own_log");
            Ok(OwnPart { last_epoch, has_writes, lost: LostWrites::default() })
        }

        fn open(
            &self,
            _: &str,
            _: Purpose,
            _: &RemoteParameters,
        ) -> Result<Box<dyn RemoteStore>, StoreError> {
            Err(Script::error(std::io::ErrorKind::Unsupported))
        }
    }

    /// Registers the provider, and sets the answers for a path. The last one is repeated.
    fn script(path: &str, answers: &[Answer]) -> WatchedPool {
        remote::register(Box::new(Scripted));
        let script = SCRIPT.get_or_init(Script::default);
        script.answers.lock().unwrap().insert(path.to_owned(), answers.to_vec());
        WatchedPool { path: path.to_owned(), lease: Duration::from_millis(9) }
    }

    #[test]
    fn a_watch_claims_a_lease_that_has_run_out_and_goes_on_if_it_was_late() {
        use Answer::{Lease, NoLease, Unavailable};
        let path = "s3://scripted/claimed";
        let pool = script(
            path,
            &[NoLease, Lease(3, 1), Unavailable, Lease(3, 2), Lease(3, 3), Lease(3, 4)],
        );
        let ((_stop, stopped), known) = (channel::<()>(), KnownPools::default());
        let ready = ReadyPools::new(1);
        assert_eq!(pool.watch(&ready, &stopped, &known), Some(Event::LeaseRanOut));
        assert_eq!(SCRIPT.get().unwrap().claims(path), [4, 4]);
    }

    #[test]
    fn a_watch_takes_a_pool_that_this_machine_had_last_without_a_lease() {
        let pool = WatchedPool {
            lease: Duration::ZERO,
            ..script("s3://scripted/own", &[Answer::NoLease])
        };
        let ((_stop, stopped), known) = (channel::<()>(), KnownPools::default());
        let ready = ReadyPools::new(1);
        assert_eq!(pool.watch(&ready, &stopped, &known), Some(Event::WasLast));
        assert_eq!(SCRIPT.get().unwrap().expected(&pool.path), [Some(3)]);
        let other = WatchedPool { path: "s3://scripted/other".to_owned(), ..pool };
        assert_eq!(other.watch(&ready, &stopped, &known), None);
    }

    /// The opening gets an error if another opener has come meanwhile: the epoch is expected.
    #[test]
    fn a_watch_takes_a_pool_with_writes_of_this_machine_before_its_lease_runs_out() {
        let pool = script("s3://scripted/own_log", &[Answer::Lease(3, 1)]);
        let ((_stop, stopped), known) = (channel::<()>(), KnownPools::default());
        let ready = ReadyPools::new(1);
        assert_eq!(pool.watch(&ready, &stopped, &known), Some(Event::WasLast));
        let script = SCRIPT.get().unwrap();
        assert_eq!(script.expected(&pool.path), [Some(3)]);
        assert_eq!(script.claims(&pool.path), [0; 0]);
    }

    /// A copy of the state directory of a machine that lives, and a machine that lacks nothing.
    #[test]
    fn a_watch_waits_for_a_lease_that_is_renewed_and_for_one_of_a_log_without_writes() {
        let lease = Answer::Lease(3, 1);
        for (path, answers) in [
            ("s3://scripted/own_log/copied", &[lease, Answer::Lease(3, 2)][..]),
            ("s3://scripted/own/empty", &[lease]),
        ] {
            let pool = script(path, answers);
            let ((_stop, stopped), known) = (channel::<()>(), KnownPools::default());
            let ready = ReadyPools::new(1);
            assert_eq!(pool.watch(&ready, &stopped, &known), Some(Event::LeaseRanOut));
            let script = SCRIPT.get().unwrap();
            assert_eq!((script.expected(path).len(), script.claims(path).len()), (0, 2));
        }
    }

    #[test]
    fn a_standby_of_two_pools_claims_none_while_one_is_renewed() {
        let paths = ["s3://scripted/two/cut_off", "s3://scripted/two/lives"];
        let pools =
            [script(paths[0], &[Answer::Lease(3, 1)]), script(paths[1], &[Answer::Renewed(4)])];
        let (standby, known) = (Standby::default(), KnownPools::default());
        let (sender, events) = channel();
        let script_now = SCRIPT.get().unwrap();
        std::thread::scope(|scope| {
            let (standby, known, sender) = (&standby, &known, &sender);
            let watched = pools.to_vec();
            let waiting = scope.spawn(move || standby.wait(watched, known, (sender, &events)));
            while paths.iter().any(|path| script_now.reads(path) < 30) {
                std::thread::yield_now();
            }
            assert!(paths.iter().all(|path| script_now.claims(path).is_empty()));
            script(paths[1], &[Answer::Lease(4, 1000)]);
            assert_eq!(waiting.join().unwrap().unwrap(), Event::LeaseRanOut);
        });
        assert!(paths.iter().all(|path| script_now.claims(path).len() == 2));
    }

    #[test]
    fn a_standby_with_a_damaged_log_says_so_and_is_promoted_without_an_epoch() {
        let path = "s3://scripted/damaged";
        let pool = script(path, &[Answer::Lease(3, 1)]);
        let (standby, known) = (Standby::default(), KnownPools::default());
        let (sender, events) = channel();
        std::thread::scope(|scope| {
            let (standby, known, sender) = (&standby, &known, &sender);
            let pools = vec![pool];
            let waiting = scope.spawn(move || standby.wait(pools, known, (sender, &events)));
            let found = loop {
                if let Some(found) = known.lock().get(path) {
                    break found.clone();
                }
                std::thread::yield_now();
            };
            assert!(found.log_unusable.is_some() && found.unreadable.is_none(), "{found:?}");
            standby.promote().unwrap();
            assert_eq!(waiting.join().unwrap().unwrap(), Event::Promoted);
        });
        let script = SCRIPT.get().unwrap();
        assert_eq!((script.reads(path), script.expected(path)), (0, vec![None]));
    }

    #[test]
    fn a_lease_that_cannot_be_read_is_known_while_that_lasts_and_a_refusal_fails_the_start() {
        let path = "s3://scripted/unreadable";
        let pool = script(path, &[Answer::Unavailable]);
        pool.check().unwrap();
        let ((stop, stopped), known) = (channel::<()>(), KnownPools::default());
        let unreadable = || known.lock().get(path).and_then(|pool| pool.unreadable.clone());
        std::thread::scope(|scope| {
            let (pool, known) = (&pool, &known);
            let ready = ReadyPools::new(1);
            let watching = scope.spawn(move || pool.watch(&ready, &stopped, known));
            while unreadable().is_none() {
                std::thread::yield_now();
            }
            script(path, &[Answer::NoLease]);
            while unreadable().is_some() {
                std::thread::yield_now();
            }
            drop(stop);
            assert_eq!(watching.join().unwrap(), None);
        });
        let error = script(path, &[Answer::Refused]).check().unwrap_err().to_string();
        assert!(error.starts_with("cannot open the pool"), "{error}");
    }
}
