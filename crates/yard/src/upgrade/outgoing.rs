//! The old process's side of an upgrade.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use blockyard_nbd::{PausedServer, Server};
use sd_notify::NotifyState;

use super::link::{Link, LinkError};
use super::message::{
    ConnectionEntry, DeviceState, ListenerKind, ListenerState, Message, Offer, OfferedDevice,
    RamSettings, State, VERSION,
};
use super::{
    PlaneListener, UpgradePlan, UpgradeRequest, UpgradeState, UpgradeView, VARIABLE, memory,
};
use crate::api::Control;
use crate::devices::WithdrawnDevices;
use crate::entry::DeviceEntry;
use crate::error::YardError;
use crate::nvme_listeners::PausedNvme;
use crate::scheduler;
use crate::size::rounded;
use crate::stack::check_secret;
use crate::vhost::PausedVhost;
use crate::volumes::PoolView;

/// How long the new process may take to read its configuration.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// How long what is in flight may take, and requests of the control API may have a device.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// How long clients may wait until the new process has opened the devices. Many programs report an
/// error after 30 s, and until then this process can open the devices again.
const PAUSE_MAX: Duration = Duration::from_secs(20);

/// Most bytes that an object store may lack of a pool, and the greatest age of the oldest write
/// that it lacks, in milliseconds. A store that keeps up has each write about a second later. 64
/// MiB take 7 s at 10 MB/s, which leaves time of [`PAUSE_MAX`] to open the pool.
const LAG_BYTES_MAX: u64 = 64 << 20;
const LAG_MS_MAX: u64 = 5000;

/// How long the new process may take to say that it serves. It has nothing else to do.
const GO_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a process that has failed may take to end before it is killed.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a notification of systemd may take.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(1);

/// How often the end of a process is checked.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Hands everything over to a new process of the program. When this returns a view, this process
/// serves no client any more, and the caller calls [`end`].
///
/// # Errors
/// If the daemon cannot be handed over, or the new process fails. Then this process serves as
/// before.
pub(crate) fn run(control: &Control, request: &UpgradeRequest) -> Result<UpgradeView, YardError> {
    let upgrade = &control.upgrade;
    // Held until the end: another upgrade is refused, and a signal waits.
    let mut state = match upgrade.state.try_lock() {
        Ok(state) => state,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return Err(refused("an upgrade is in progress")),
    };
    if *state != UpgradeState::Serving {
        return Err(refused("the daemon ends"));
    }
    if control.standby.is_waiting() {
        return Err(refused("this yard is a standby, and serves nothing: restart it"));
    }
    let plan = upgrade.plan.get().ok_or_else(|| refused("this yard is part of another program"))?;
    let program = match &request.program {
        Some(program) => checked(Path::new(program))?,
        None => plan.program.clone(),
    };
    // A backup that begins now would use the pools until it ends.
    let _paused = control.backups.pause();
    let whys = obstacles(control, plan, request.force);
    if !whys.is_empty() {
        return Err(YardError::NotUpgradable { whys });
    }
    let successor = Successor::start(&program, plan)?;
    let offered = offer(control);
    let ready = successor
        .tell(&Message::Offer(offered))
        .and_then(|()| successor.expect(&Message::Ready, START_TIMEOUT, "before it was ready"));
    if let Err(error) = ready {
        return Err(successor.fail(error));
    }
    // They have their pools open; the successor continues them.
    control.devices.scrubs().stop_all();
    let (paused, view) = hand_over(control, request, &successor)?;
    *state = UpgradeState::Ended;
    // It is still empty: a process is upgraded once.
    let _ = upgrade.successor.set(view.pid);
    paused.leave();
    tracing::info!(pid = view.pid, pause_ns = view.pause_ns, "handed over");
    Ok(view)
}

fn refused(why: &str) -> YardError {
    YardError::NotUpgradable { whys: vec![why.to_owned()] }
}

/// The error of an upgrade that has failed and has lost nothing.
fn failed(what: String) -> YardError {
    YardError::Upgrade { what, lost: Vec::new() }
}

fn checked(program: &Path) -> Result<PathBuf, YardError> {
    if program.is_absolute() {
        return Ok(program.to_owned());
    }
    let (value, wanted) = (program.display().to_string(), "a path from the root on".to_owned());
    Err(YardError::Argument { field: "program", value, wanted })
}

/// The reasons for which the daemon cannot be handed over now.
fn obstacles(control: &Control, plan: &UpgradePlan, force: bool) -> Vec<String> {
    let mut whys = plan.refusals.clone();
    let devices = &control.devices;
    for backup in control.backups.views().into_iter().filter(|backup| backup.running) {
        whys.push(format!("the backup `{}` is in progress", backup.name));
    }
    for mount in devices.zonefs_mounts() {
        whys.push(format!("the zonefs of `{}` is mounted at {}", mount.device, mount.dir));
    }
    for (name, _) in devices.ublk().list() {
        whys.push(format!("`{name}` is a block device of the kernel (ublk)"));
    }
    whys.extend(control.streams.list());
    for name in devices.vhost().stopping() {
        whys.push(format!(
            "`{name}` still executes requests of a hypervisor that was disconnected"
        ));
    }
    for entry in devices.list() {
        let name = entry.spec.name();
        whys.extend(memory::obstacle(&entry.spec));
        whys.extend(entry.check_latch().err().map(|error| error.to_string()));
        if let Some(pool) = &entry.pool
            && let Err(error) = check_secret(&entry.spec, pool)
        {
            whys.push(format!("`{name}` cannot be unlocked by what its line names: {error}"));
        }
        if let Some(path) = entry.spec.text("trace") {
            whys.push(format!("`{name}` records the trace {path}"));
        }
        if devices.replays().count(name) > 0 {
            whys.push(format!("a trace is replayed on `{name}`"));
        }
    }
    whys.extend(devices.pools().iter().filter_map(|pool| lag_obstacle(&PoolView::new(pool).ok()?)));
    for name in unlocked_by_hand(&devices.list()) {
        whys.push(format!(
            "`{name}` is encrypted and was unlocked by `volume unlock`: the new process does not \
             get its key"
        ));
    }
    if !force {
        for server in servers(control) {
            for (peer, why) in server.unpausable() {
                whys.push(format!("NBD client {peer}: {why}; --force disconnects it"));
            }
        }
    }
    whys
}

/// The reason for which a pool cannot be handed over: the next opening uploads what the object
/// store lacks, and clients wait meanwhile.
fn lag_obstacle(pool: &PoolView) -> Option<String> {
    let upload = pool.upload.as_ref()?;
    (upload.lag_ms > LAG_MS_MAX || upload.lag_bytes > LAG_BYTES_MAX).then(|| {
        format!(
            "the object store of {} lacks {} of writes, the oldest for {} s, and clients would \
             wait for their upload; try again when it has them",
            pool.path,
            rounded(upload.lag_bytes),
            upload.lag_ms / 1000
        )
    })
}

/// The volumes and snapshots, one for each key, whose keys no line of a device names: such a key is
/// gone when the pool is closed.
fn unlocked_by_hand(devices: &[DeviceEntry]) -> BTreeSet<String> {
    let names_key = |entry: &&DeviceEntry| {
        entry.pool.is_some()
            && ["key_file", "passphrase_file"].iter().any(|it| entry.spec.text(it).is_some())
    };
    let key_of = |entry: &DeviceEntry| {
        let pool = entry.pool.as_ref()?;
        Some((pool.path().to_owned(), pool.pool().find(entry.spec.name()).ok()?.meta.key))
    };
    let mut known: BTreeSet<_> = devices.iter().filter(names_key).filter_map(key_of).collect();
    let mut found = BTreeSet::new();
    for pool in devices.iter().filter_map(|entry| entry.pool.as_ref()) {
        for meta in pool.pool().list() {
            let is_unlocked = meta.key != 0 && pool.pool().keys().is_unlocked(&meta);
            if is_unlocked && known.insert((pool.path().to_owned(), meta.key)) {
                found.insert(meta.name);
            }
        }
    }
    found
}

fn servers(control: &Control) -> Vec<Arc<Server>> {
    control.servers.get().into_iter().flatten().filter_map(Weak::upgrade).collect()
}

fn offer(control: &Control) -> Offer {
    let plane = control.upgrade.plane.lock().unwrap_or_else(PoisonError::into_inner);
    let of_plane = |it: &PlaneListener| ListenerState::new(it.kind, &it.place, it.sockets.len());
    let nbd = servers(control);
    let of_nbd = nbd.iter().map(|server| {
        ListenerState::new(ListenerKind::Nbd, server.place(), server.local_addrs().len())
    });
    let of_nvme = control
        .nvme
        .places()
        .into_iter()
        .map(|(kind, place, sockets)| ListenerState::new(kind, &place, sockets));
    let of_vhost = control
        .devices
        .vhost()
        .list()
        .into_iter()
        .map(|(place, _)| ListenerState::new(ListenerKind::Vhost, &place.to_string(), 1));
    let devices = control.devices.list();
    Offer {
        program_version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        listeners: plane
            .iter()
            .map(of_plane)
            .chain(of_nbd)
            .chain(of_nvme)
            .chain(of_vhost)
            .collect(),
        devices: devices.iter().map(|it| OfferedDevice::new(&it.spec, &it.identity)).collect(),
    }
}

/// A process that is to take everything over.
struct Successor {
    child: std::cell::RefCell<Child>,
    link: Link,
}

impl Successor {
    fn start(program: &Path, plan: &UpgradePlan) -> Result<Successor, YardError> {
        let failed =
            |error: std::io::Error| failed(format!("cannot start {}: {error}", program.display()));
        let (link, there) = Link::pair().map_err(failed)?;
        let child = Command::new(program)
            .args(&plan.args)
            .env(VARIABLE, VERSION.to_string())
            // They are of this process, and would be ignored or taken for another purpose.
            .env_remove("LISTEN_PID")
            .env_remove("LISTEN_FDS")
            .env_remove("LISTEN_FDNAMES")
            .env_remove("WATCHDOG_PID")
            .stdin(Stdio::from(there))
            .spawn()
            .map_err(failed)?;
        Ok(Successor { child: child.into(), link })
    }

    fn pid(&self) -> u32 {
        self.child.borrow().id()
    }

    fn tell(&self, message: &Message) -> Result<(), String> {
        self.link
            .send(message, &[], START_TIMEOUT)
            .map_err(|error| self.explain(&error, "before it was ready"))
    }

    /// Waits for a message.
    fn expect(&self, wanted: &Message, timeout: Duration, when: &str) -> Result<(), String> {
        match self.link.receive(timeout) {
            Ok(message) if message == *wanted => Ok(()),
            Ok(other) => Err(self.explain(&LinkError::Order(format!("{other:?}")), when)),
            Err(error) => Err(self.explain(&error, when)),
        }
    }

    /// The failure of the new process, in words.
    fn explain(&self, error: &LinkError, when: &str) -> String {
        match error {
            LinkError::Failed(what) => format!("the new process refuses: {what}"),
            LinkError::Closed => match self.exit_status() {
                Some(status) => format!("the new process ended {when}: {status}"),
                None => format!("the new process closed its socket {when}"),
            },
            error => format!("the new process failed {when}: {error}"),
        }
    }

    /// The exit status of a process that has ended, or ends soon.
    fn exit_status(&self) -> Option<std::process::ExitStatus> {
        let deadline = Instant::now() + END_TIMEOUT;
        loop {
            match self.child.borrow_mut().try_wait() {
                Ok(None) if Instant::now() < deadline => {}
                Ok(status) => return status,
                Err(_) => return None,
            }
            std::thread::sleep(END_CHECK_INTERVAL);
        }
    }

    /// Ends the process, which has nothing yet or may have opened devices.
    fn kill(&self) {
        let mut child = self.child.borrow_mut();
        // It may have ended already.
        let _ = child.kill();
        if let Err(error) = child.wait() {
            tracing::warn!(%error, "the new process cannot be waited for");
        }
    }

    fn fail(&self, what: String) -> YardError {
        self.kill();
        failed(what)
    }
}

/// What is paused.
#[derive(Default)]
struct Paused {
    servers: Vec<(Arc<Server>, PausedServer)>,
    vhost: Option<PausedVhost>,
    nvme: Option<PausedNvme>,
}

impl Paused {
    /// Continues all servers and the control plane.
    fn resume(self, control: &Control) {
        for (server, paused) in self.servers {
            if let Err(error) = server.resume(paused) {
                tracing::error!(%error, "a client is lost");
            }
        }
        let devices = &control.devices;
        if let Some(vhost) = self.vhost {
            devices.vhost().resume_all(vhost, |name| devices.disk(name));
        }
        if let Some(nvme) = self.nvme {
            control.nvme.resume(nvme);
        }
        control.upgrade.holding.send_replace(false);
    }

    /// The time from which on the first client waited.
    fn since(&self) -> Option<Instant> {
        let nbd = self.servers.iter().map(|(_, paused)| paused.since());
        let vhost = self.vhost.as_ref().and_then(PausedVhost::since);
        nbd.chain(vhost).chain(self.nvme.as_ref().and_then(PausedNvme::since)).min()
    }

    /// The listeners with their sockets, those of NBD first.
    fn listeners(&self) -> Vec<(ListenerState, Vec<BorrowedFd<'_>>)> {
        let nbd = self.servers.iter().map(|(server, paused)| {
            (ListenerKind::Nbd, server.place().to_owned(), paused.sockets().collect::<Vec<_>>())
        });
        let nvme = self.nvme.iter().flat_map(PausedNvme::listeners);
        let nvme = nvme.map(|(kind, place, sockets)| (kind, place.to_owned(), sockets));
        let vhost = self.vhost.iter().flat_map(PausedVhost::listeners);
        let vhost =
            vhost.map(|(place, socket)| (ListenerKind::Vhost, place.to_string(), vec![socket]));
        let state = |(kind, place, sockets): (_, String, Vec<_>)| {
            (ListenerState::new(kind, &place, sockets.len()), sockets)
        };
        nbd.chain(nvme).chain(vhost).map(state).collect()
    }

    /// The failure of an upgrade, with what it means for NVMe hosts.
    fn explain(&self, what: String) -> String {
        match self.nvme.as_ref().is_some_and(PausedNvme::had_hosts) {
            true => format!("{what}; NVMe hosts were disconnected and connect again"),
            false => what,
        }
    }

    /// Closes the sockets, in favour of the process that serves now. The threads of hypervisors,
    /// which were disconnected, are waited for.
    fn leave(self) {
        self.servers.into_iter().for_each(|(_, server)| server.leave());
        self.vhost.into_iter().for_each(PausedVhost::leave);
    }
}

/// From a new process that is ready to one that serves. At an error the new process has been ended.
fn hand_over(
    control: &Control,
    request: &UpgradeRequest,
    successor: &Successor,
) -> Result<(Paused, UpgradeView), YardError> {
    let deadline = Instant::now() + PAUSE_MAX;
    let paused = pause(control, request).inspect_err(|_| successor.kill())?;
    let begun = Instant::now();
    let schedulers = control.devices.list().iter().map(scheduler_of).collect::<Vec<_>>();
    let timeout = DRAIN_TIMEOUT.min(until(deadline));
    let withdrawn = match control.devices.withdraw_all(memory::is_in_memory, timeout) {
        Ok(withdrawn) => withdrawn,
        Err(error) => {
            successor.kill();
            let what = paused.explain(error.error.to_string());
            paused.resume(control);
            return Err(YardError::Upgrade { what, lost: error.lost });
        }
    };
    tracing::debug!(elapsed = ?begun.elapsed(), "devices closed");
    let sent = send_state(control, &paused, &withdrawn, schedulers, successor, deadline);
    let opened = sent.and_then(|sent| {
        let when = "while it opened the devices";
        successor.expect(&Message::Opened, until(deadline), when).map(|()| sent)
    });
    let gone = opened.and_then(|(connections, devices)| {
        give_up(control, successor)?;
        // At once: until then another hypervisor that waits could use a disk too.
        paused.vhost.iter().for_each(PausedVhost::disconnect);
        let since = paused.since().unwrap_or(begun);
        let pause_ns = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // systemd accepts it from the main process alone, so before this one ends.
        tell_systemd(successor.pid());
        Ok(UpgradeView { pid: successor.pid(), connections, devices, pause_ns })
    });
    match gone {
        Ok(view) => {
            // This process has no device any more; those in memory are closed here.
            drop(withdrawn);
            Ok((paused, view))
        }
        Err(what) => {
            // First: a device has one owner.
            successor.kill();
            let lost = control.devices.restore_all(withdrawn);
            let what = paused.explain(what);
            paused.resume(control);
            Err(YardError::Upgrade { what, lost })
        }
    }
}

/// Accepts no client any more, and pauses the connections. NVMe hosts are disconnected, last:
/// nothing of the others can fail any more.
fn pause(control: &Control, request: &UpgradeRequest) -> Result<Paused, YardError> {
    control.upgrade.holding.send_replace(true);
    let mut paused = Paused::default();
    let servers = servers(control);
    servers.iter().for_each(|server| server.hold());
    let drained = Instant::now() + DRAIN_TIMEOUT;
    let mut left = servers.into_iter();
    for server in left.by_ref() {
        let timeout = drained.saturating_duration_since(Instant::now());
        match server.pause(timeout, request.force) {
            Ok(stopped) => paused.servers.push((server, stopped)),
            Err(error) => {
                paused.resume(control);
                left.for_each(|server| server.proceed());
                return Err(failed(error.to_string()));
            }
        }
    }
    match pause_others(control, &mut paused, drained) {
        Ok(()) => Ok(paused),
        Err(error) => {
            paused.resume(control);
            Err(failed(error))
        }
    }
}

/// Pauses the servers of other protocols than NBD.
fn pause_others(control: &Control, paused: &mut Paused, drained: Instant) -> Result<(), String> {
    let devices = &control.devices;
    let timeout = drained.saturating_duration_since(Instant::now());
    let vhost = devices.vhost().pause(timeout, |name| devices.disk(name));
    paused.vhost = Some(vhost.map_err(|error| error.to_string())?);
    let nvme = control.nvme.pause();
    paused.nvme = Some(nvme.map_err(|error| format!("NVMe cannot be handed over: {error}"))?);
    Ok(())
}

/// The time until a deadline, and enough to find out that it has passed.
fn until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(END_TIMEOUT)
}

/// The scheduler that a device has now, as a request.
fn scheduler_of(entry: &DeviceEntry) -> Option<scheduler::SchedulerRequest> {
    scheduler::present(entry.disk.as_ref())
}

/// Sends everything. Returns the numbers of connections and devices.
fn send_state(
    control: &Control,
    paused: &Paused,
    withdrawn: &WithdrawnDevices<'_>,
    schedulers: Vec<Option<scheduler::SchedulerRequest>>,
    successor: &Successor,
    deadline: Instant,
) -> Result<(u64, u64), String> {
    // The new process needs about as long to read the data of the devices.
    let mut bounds = memory::CopyBounds::new(Instant::now() + until(deadline) / 2);
    let mut state = State::default();
    // The descriptors in the order that the message's description gives.
    let mut descriptors: Vec<BorrowedFd<'_>> = Vec::new();
    let plane = control.upgrade.plane.lock().unwrap_or_else(PoisonError::into_inner);
    for PlaneListener { kind, place, sockets } in plane.iter() {
        state.listeners.push(ListenerState::new(*kind, place, sockets.len()));
        descriptors.extend(sockets.iter().map(OwnedFd::as_fd));
    }
    let first_nbd = state.listeners.len();
    for (listener, sockets) in paused.listeners() {
        state.listeners.push(listener);
        descriptors.extend(sockets);
    }
    let mut unread: Vec<Option<File>> = Vec::new();
    let all = || (first_nbd as u32..).zip(&paused.servers);
    let connections = all().flat_map(|(listener, (_, paused))| {
        paused.connections().iter().map(move |connection| (listener, connection))
    });
    for (listener, connection) in connections.clone() {
        state.connections.push(ConnectionEntry::new(listener, &connection.state));
        let bytes = &connection.state.unread;
        let file = (!bytes.is_empty()).then(|| memory::file_of(bytes)).transpose();
        unread.push(file.map_err(|error| format!("cannot make a file in memory: {error}"))?);
    }
    for ((_, connection), file) in connections.zip(&unread) {
        descriptors.push(connection.socket.as_fd());
        descriptors.extend(file.as_ref().map(File::as_fd));
    }
    let numbers = control.devices.namespace_numbers();
    state.last_nsid = numbers.last;
    let mut memories = Vec::new();
    for (device, scheduler) in withdrawn.iter().zip(schedulers) {
        let spec = device.spec();
        let saved = device.kept().map(|entry| memory::save(entry, &mut bounds)).transpose();
        let saved = saved.map_err(|error| format!("`{}`: {error}", spec.name()))?.flatten();
        let memory = saved.is_some();
        let ram = device.kept().and_then(|entry| entry.ram.as_ref()).map(|ram| RamSettings {
            mem_limit: ram.stats().mm.mem_limit,
            compact: ram.compact_percent(),
        });
        let device = OfferedDevice::new(spec, device.identity());
        let nsid = numbers.of.get(spec.name()).copied();
        state.devices.push(DeviceState { device, scheduler, memory, ram, nsid });
        memories.extend(saved);
    }
    descriptors.extend(memories.iter().map(File::as_fd));
    let sent = (state.connections.len() as u64, state.devices.len() as u64);
    let message = Message::State(state);
    let told = successor.link.send(&message, &descriptors, until(deadline));
    told.map_err(|error| successor.explain(&error, "while it received the state")).map(|()| sent)
}

/// Gives everything up in favour of the new process. If that has ended, this process keeps
/// everything.
fn give_up(control: &Control, successor: &Successor) -> Result<(), String> {
    // A second signal ends this process at once, and must remove nothing of the other.
    let files = control.cleanup.take();
    let when = "before it served";
    let told = successor.link.send(&Message::Go, &[], GO_TIMEOUT);
    let told = told
        .map_err(|error| successor.explain(&error, when))
        .and_then(|()| successor.expect(&Message::Serving, GO_TIMEOUT, when));
    if told.is_err() {
        control.cleanup.put(files);
    }
    told
}

/// Names the main process to systemd. The socket of notifications may be full, so another thread
/// waits for it.
fn tell_systemd(pid: u32) {
    let (sender, results) = channel();
    let notify = move || {
        // systemd ignores what the new process sends before this message. So the message resets the
        // watchdog too: the next one of the new process may come half the watchdog's limit later.
        let states = [NotifyState::MainPid(pid), NotifyState::Watchdog];
        // The upgrade may not wait for it any more.
        let _ = sender.send(sd_notify::notify(&states));
    };
    if let Err(error) = std::thread::Builder::new().name("notify".to_owned()).spawn(notify) {
        return tracing::warn!(%error, "systemd cannot be notified");
    }
    match results.recv_timeout(NOTIFY_TIMEOUT) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "systemd cannot be notified"),
        Err(_) => tracing::warn!("systemd does not read notifications"),
    }
}

/// Ends this process.
pub(crate) fn end(control: &Control) {
    if let Some(plan) = control.upgrade.plan.get() {
        (plan.end)();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volumes::UploadView;

    #[test]
    fn a_pool_whose_object_store_lacks_much_is_not_handed_over() {
        let of = |lag_bytes, lag_ms| {
            let upload = Some(UploadView { lag_bytes, lag_ms, ..UploadView::default() });
            lag_obstacle(&PoolView { path: "s3://b/p".to_owned(), upload, ..PoolView::default() })
        };
        assert_eq!(lag_obstacle(&PoolView::default()), None);
        assert_eq!(of(LAG_BYTES_MAX, LAG_MS_MAX), None);
        let expected = "the object store of s3://b/p lacks 1M of writes, the oldest for 6 s, and";
        assert!(of(1 << 20, 6500).unwrap().starts_with(expected));
        assert!(of(LAG_BYTES_MAX + 1, 0).is_some());
    }
}
