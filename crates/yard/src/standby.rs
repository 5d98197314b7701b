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
#![allow(clippy::disallowed_types)] // The state of a standby is control plane.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blockyard_store::StoreError;
use blockyard_store::lease::{AskedAt, LEASE_READS, SeenLease};
use blockyard_store::remote;

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

    /// Waits for a promotion, for a pool that is to be taken over, or for a signal. Returns the
    /// event. `known` gets what is found of the pools.
    pub(crate) fn wait(
        &self,
        pools: Vec<WatchedPool>,
        known: &KnownPools,
        (sender, events): (&Sender<Event>, &Receiver<Event>),
    ) -> std::io::Result<Event> {
        *self.state() = StandbyState::Waiting(sender.clone());
        let mut stops = Vec::new();
        for pool in pools {
            let (stop, stopped) = channel();
            let (sender, known) = (sender.clone(), known.clone());
            let watch = move || {
                if let Some(event) = pool.watch(&stopped, &known) {
                    let _ = sender.send(event);
                }
            };
            // Not joined: a request to an object store may take some seconds.
            std::thread::Builder::new().name("lease-watch".to_owned()).spawn(watch)?;
            stops.push(stop);
        }
        let event = events.recv().map_err(|_| std::io::ErrorKind::BrokenPipe)?;
        *self.state() = StandbyState::Promoting;
        drop(stops);
        known.lock().clear();
        Ok(event)
    }
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
    fn watch(&self, stopped: &Receiver<()>, known: &KnownPools) -> Option<Event> {
        let pause = if self.lease.is_zero() { PAUSE } else { self.lease / LEASE_READS };
        let (mut seen, mut own) = (SeenLease::default(), None);
        loop {
            let looked = match own {
                None => remote::own_part(&self.path).map(|found| {
                    own = Some(found);
                    found.was_last.then_some(Event::WasLast)
                }),
                Some(_) if self.lease.is_zero() => return None,
                Some(_) => self.look(&mut seen),
            };
            {
                let mut known = known.lock();
                // After the wait nothing is known: the pools are open.
                if let Err(TryRecvError::Disconnected) = stopped.try_recv() {
                    return None;
                }
                let unreadable = looked.as_ref().err().map(ToString::to_string);
                let lost = own.map(|own| own.lost).unwrap_or_default();
                known.insert(self.path.clone(), KnownPool { unreadable, lost });
            }
            if let Ok(Some(event)) = looked {
                return Some(event);
            }
            match stopped.recv_timeout(pause) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// Reads the lease. Claims it if it has run out.
    fn look(&self, seen: &mut SeenLease) -> Result<Option<Event>, StoreError> {
        let asked = Instant::now();
        let found = remote::lease(&self.path);
        let times = AskedAt { asked, answered: Instant::now() };
        let ran_out = seen.ran_out(found.as_ref().ok().copied(), times, self.lease);
        found?;
        let Some(lease) = ran_out else { return Ok(None) };
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
    use blockyard_store::remote::{
        Lease, LostWrites, OwnPart, RemoteParameters, RemotePools, RemoteStore,
    };

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
        claims: Mutex<Vec<(String, u64)>>,
    }

    #[derive(Clone, Copy, Debug)]
    enum Answer {
        /// A lease of this epoch with this number of renewals.
        Lease(u64, u64),
        NoLease,
        Unavailable,
        Refused,
    }

    impl Script {
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
            match SCRIPT.get().unwrap().next(path) {
                Answer::Lease(epoch, renewals) => Ok(Some(Lease {
                    opener: [1; 16],
                    epoch,
                    renewals,
                    length: Duration::from_millis(9),
                })),
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

        fn own_part(&self, path: &str) -> Result<OwnPart, StoreError> {
            let was_last = path.ends_with("own");
            Ok(OwnPart { was_last, lost: LostWrites::default() })
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
        assert_eq!(pool.watch(&stopped, &known), Some(Event::LeaseRanOut));
        let claims = SCRIPT.get().unwrap().claims.lock().unwrap();
        let of_pool: Vec<u64> =
            claims.iter().filter(|(of, _)| of == path).map(|(_, renewals)| *renewals).collect();
        assert_eq!(of_pool, [4, 4]);
    }

    #[test]
    fn a_watch_takes_a_pool_that_this_machine_had_last_without_a_lease() {
        let pool = WatchedPool {
            lease: Duration::ZERO,
            ..script("s3://scripted/own", &[Answer::NoLease])
        };
        let ((_stop, stopped), known) = (channel::<()>(), KnownPools::default());
        assert_eq!(pool.watch(&stopped, &known), Some(Event::WasLast));
        let other = WatchedPool { path: "s3://scripted/other".to_owned(), ..pool };
        assert_eq!(other.watch(&stopped, &known), None);
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
            let watching = scope.spawn(move || pool.watch(&stopped, known));
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
