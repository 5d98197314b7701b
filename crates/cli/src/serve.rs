//! `serve`: from the command line to a running yard, and to its end.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use blockyard_os::{AtomicFile, Replace};
use blockyard_yard::config::{
    self, Config, NvmeProblem, NvmeSettings, TEMPLATE, TlsMode, TlsProblem, TlsSettings,
};
use blockyard_yard::control::Event;
use blockyard_yard::daemon::{Daemon, DaemonError, DaemonOptions};
use blockyard_yard::endpoint::{Endpoint, check_socket_path};
use blockyard_yard::entry::{DeviceEntry, describe};
use blockyard_yard::error::{StackError, YardError, counted};
use blockyard_yard::paths::{self, TempDir};
use blockyard_yard::ublk::block_path;
use blockyard_yard::upgrade::UpgradePlan;
use blockyard_yard::upgrade::incoming::ReceivedOffer;
use blockyard_yard::{UnixPlace, activation, view::DeviceView};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, setrlimit};
use sd_notify::NotifyState;
use serde_json::json;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::args::{NbdPlace, ServeArgs, Tls};
use crate::failure::{Code, Failure};
use crate::run::{RunningCommand, Told};
use crate::shell_snippet;

pub(crate) fn run(args: ServeArgs, parent: Option<Pid>) -> Result<ExitCode, Failure> {
    if args.exit_with_parent {
        follow_parent(parent)?;
    }
    let stdio = args.nbd.contains(&NbdPlace::At(Endpoint::Stdio));
    start_log(args.log.as_deref(), if stdio || args.run.is_some() { "warn" } else { "info" })?;
    if let Some(dir) = args.state.as_deref().filter(|dir| !dir.as_os_str().is_empty()) {
        let failed =
            |error| Failure::new(Code::Usage, format!("state: {}: {error}", dir.display()));
        paths::set_state_dir(dir).map_err(failed)?;
    }
    // As early as possible: a package may replace the program.
    let program = std::env::current_exe();
    let files = raise_files();
    let incoming = ReceivedOffer::take().map_err(|error| Failure::new(Code::Failed, error))?;
    let prepared = prepare(&args, incoming.as_ref());
    let (ServePlan { mut options, temp }, pidfile) = match (prepared, &incoming) {
        (Ok(prepared), _) => prepared,
        (Err(failure), Some(incoming)) => {
            incoming.refuse(&failure.text());
            return Err(failure);
        }
        (Err(failure), None) => return Err(failure),
    };
    if let Some(incoming) = incoming {
        let inherited = incoming.accept(&|kind, place| options.has_place(kind, place));
        let inherited = inherited.map_err(|error| Failure::new(Code::Failed, error))?;
        options.devices = inherited.specs().to_vec();
        options.inherited = Some(Arc::new(inherited));
    }
    let Some(daemon) = start(&args, &options)? else { return Ok(ExitCode::SUCCESS) };
    daemon.upgrade().set_plan(upgrade_plan(&args, &options, program, &daemon));
    let pidfile = match (pidfile.map(UnwrittenPidfile::write).transpose(), &options.inherited) {
        (Err(failure), Some(_)) => {
            // The old process has given everything up.
            tracing::error!("{}", failure.text());
            None
        }
        (pidfile, _) => pidfile?,
    };
    temp.iter().for_each(|temp| daemon.cleanup().add_first(temp.path()));
    args.pidfile.iter().for_each(|path| daemon.cleanup().add(path));
    if let Some(inherited) = &options.inherited {
        let (pid, version) = inherited.old();
        tracing::info!(pid, version, "serving in place of another process");
    } else if !stdio && args.run.is_none() {
        announce(&args, &options, &daemon)?;
    } else {
        warn_of_notes(&daemon);
    }
    notify(&[NotifyState::Ready, NotifyState::Status(&status(&daemon))]);
    let running = match &args.run {
        Some(command) => Some(start_command(command, &options, files, &daemon)?),
        None => None,
    };
    let Some(code) = wait(&daemon, running) else {
        // Another process serves, at the same places: nothing is removed, and no socket shut down.
        std::process::exit(0);
    };
    notify(&[NotifyState::Stopping]);
    daemon.shutdown();
    drop((pidfile, temp));
    Ok(code)
}

/// Starts the daemon; `None` if a signal has ended a standby.
fn start(args: &ServeArgs, options: &DaemonOptions) -> Result<Option<Daemon>, Failure> {
    match Daemon::start(options) {
        Ok(daemon) => Ok(Some(daemon)),
        Err(DaemonError::Ended(signal)) => {
            tracing::info!(signal, "ending");
            Ok(None)
        }
        Err(error) => {
            if let Some(inherited) = &options.inherited {
                inherited.refuse(&error);
            }
            Err(start_failure(args, error))
        }
    }
}

/// The failure of a start. A device with an invalid parameter is an error of the command line if
/// that names the device, and of the configuration otherwise.
fn start_failure(args: &ServeArgs, error: DaemonError) -> Failure {
    if let DaemonError::Device { name, source } = &error
        && !matches!(source, YardError::Stack(StackError::Volume(_) | StackError::InUse { .. }))
        && args.devices.iter().any(|spec| spec.name() == name)
    {
        return Failure::new(Code::Usage, error);
    }
    error.into()
}

/// The plan, and the file for the process id: everything that can fail before a device is opened.
fn prepare(
    args: &ServeArgs,
    incoming: Option<&ReceivedOffer>,
) -> Result<(ServePlan, Option<UnwrittenPidfile>), Failure> {
    let is_activated = activation::is_activated().map_err(DaemonError::Activation)?;
    let activated = is_activated || incoming.is_some_and(ReceivedOffer::is_activated);
    let plan = plan(args, activated)?;
    if plan.options.standby {
        check_standby(args, &plan.options)?;
    }
    Ok((plan, args.pidfile.as_deref().map(Pidfile::prepare).transpose()?))
}

/// How this process starts its successor, or why it cannot have one.
fn upgrade_plan(
    args: &ServeArgs,
    options: &DaemonOptions,
    program: io::Result<PathBuf>,
    daemon: &Daemon,
) -> UpgradePlan {
    let mut refusals = Vec::new();
    let mut refuse = |is_so: bool, why: &str| {
        if is_so {
            refusals.push(why.to_owned());
        }
    };
    refuse(options.nbd.contains(&Endpoint::Stdio), "NBD is served on standard input and output");
    refuse(args.run.is_some(), "the yard runs for a command (--run)");
    refuse(args.unix.as_deref() == Some("-"), "its socket is temporary (--unix -)");
    refuse(args.exit_with_parent, "the yard ends with its parent (--exit-with-parent)");
    refuse(options.fuse.is_some(), "the devices are mounted as files (--fuse)");
    refuse(std::process::id() == 1, "it is process 1, with which its container ends");
    let program = program.unwrap_or_else(|error| {
        refuse(true, &format!("the path of the program is unknown: {error}"));
        PathBuf::new()
    });
    let args = std::env::args_os().skip(1).collect();
    let events = daemon.sender();
    // A daemon without a receiver is ending already.
    let end = Box::new(move || _ = events.send(Event::Upgraded));
    UpgradePlan { program, args, refusals, end }
}

/// Waits for what ends the server. `None` if another process serves in place of this one.
fn wait(daemon: &Daemon, mut running: Option<RunningCommand>) -> Option<ExitCode> {
    loop {
        match daemon.next_event() {
            Event::CommandDone(code) => return Some(ExitCode::from(code)),
            Event::StdioDone | Event::Unmounted => return Some(ExitCode::SUCCESS),
            Event::Upgraded => return None,
            // A lease that ran out when the daemon was promoted at the same moment.
            Event::Promoted | Event::LeaseRanOut | Event::WasLast => {}
            Event::PoolLost if daemon.upgrade().begin_end() => {
                return Some(ExitCode::from(Code::Failed as u8));
            }
            Event::PoolLost => {}
            // `Upgraded` follows, after the response to the request for the upgrade.
            Event::Signal(name) if !daemon.upgrade().begin_end() => daemon.upgrade().forward(name),
            Event::Signal(name) => {
                tracing::info!(signal = name, "ending");
                match running.take() {
                    // The command uses the devices until it has ended.
                    Some(running) => running.terminate(),
                    None => return Some(ExitCode::SUCCESS),
                }
            }
        }
    }
}

fn start_command(
    command: &str,
    options: &DaemonOptions,
    files: Rlimit,
    daemon: &Daemon,
) -> Result<RunningCommand, Failure> {
    let export = options.devices.first().map_or("", |spec| spec.name());
    let server = daemon.servers().first();
    let told = Told {
        uri: server.and_then(|server| server.uri(export)),
        export,
        address: server.map_or("", |server| server.local_addr()),
        control: options.control.as_ref().map(|place| place.path.as_path()),
    };
    RunningCommand::start(command, &told, files, daemon.sender())
}

/// Lets the process have as many files open as the system permits: each client is one. Says what
/// the limit was.
pub(crate) fn raise_files() -> Rlimit {
    let before = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: before.maximum, maximum: before.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    before
}

/// Ends this process when its parent does; at once, if that has happened already.
fn follow_parent(parent: Option<Pid>) -> Result<(), Failure> {
    let failed = |error| Failure::new(Code::Failed, format!("exit-with-parent: {error}"));
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM)).map_err(failed)?;
    // A parent that died before the call sends no signal, but then there is another one.
    if rustix::process::getppid() != parent {
        return Err(Failure::new(Code::Failed, "exit-with-parent: the parent has ended already"));
    }
    Ok(())
}

pub(crate) fn start_log(filter: Option<&str>, default: &str) -> Result<(), Failure> {
    let filter = filter.unwrap_or(default);
    let filter: Targets = filter.parse().map_err(|error| {
        let wanted = "expected a level (error, warn, info, debug, trace), or MODULE=LEVEL, with \
                      commas between them";
        Failure::new(Code::Usage, format!("invalid log filter `{filter}`: {error}; {wanted}"))
    })?;
    let ansi = io::IsTerminal::is_terminal(&io::stderr());
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(ansi);
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
    Ok(())
}

/// What is to be done, and what must live as long.
struct ServePlan {
    options: DaemonOptions,
    temp: Option<TempDir>,
}

/// The places of NVMe discovery alone.
fn nvme_discovery(
    args: &ServeArgs,
    configured: Vec<Endpoint>,
    nvme: &[Endpoint],
) -> Result<Vec<Endpoint>, Failure> {
    let places = match args.nvme_discovery.is_empty() {
        true => configured,
        false => args.nvme_discovery.clone(),
    };
    if nvme.is_empty() && !places.is_empty() {
        let message = "nvme-discovery: NVMe is not served; add --nvme tcp:HOST:PORT";
        return Err(Failure::new(Code::Usage, message));
    }
    Ok(places)
}

/// The place of a listener for HTTP.
fn http_place(option: &str, place: Option<Endpoint>) -> Result<Option<Endpoint>, Failure> {
    if place == Some(Endpoint::Stdio) {
        let message = format!("invalid {option} `stdio`: expected tcp:HOST:PORT or unix:PATH");
        return Err(Failure::new(Code::Usage, message));
    }
    Ok(place)
}

/// The place of the dashboard, and the file with its token.
fn web(
    args: &ServeArgs,
    place: Option<Endpoint>,
    token_file: Option<PathBuf>,
) -> Result<(Option<Endpoint>, Option<PathBuf>), Failure> {
    let place = http_place("web", args.web.clone().or(place))?;
    let token_file = args.web_token_file.clone().or(token_file);
    if place.is_none() && token_file.is_some() {
        let message = "web-token-file: there is no dashboard; add --web tcp:HOST:PORT";
        return Err(Failure::new(Code::Usage, message));
    }
    Ok((place, token_file))
}

/// Where files are mounted, and whether other users see them.
fn fuse(
    args: &ServeArgs,
    configured: Option<PathBuf>,
    allow_other: bool,
) -> Result<(Option<PathBuf>, bool), Failure> {
    let dir = args.fuse.clone().or(configured);
    let allow_other = args.fuse_allow_other || allow_other;
    if allow_other && dir.is_none() {
        let message = "fuse-allow-other: nothing is mounted; add --fuse DIR";
        return Err(Failure::new(Code::Usage, message));
    }
    Ok((dir, allow_other))
}

/// Reads the configuration. `activated`: NBD is served on sockets that another program made.
fn plan(args: &ServeArgs, activated: bool) -> Result<ServePlan, Failure> {
    let mut config = match &args.config {
        Some(file) => crate::config::load(file, adds_tls(args), adds_nvme_access(args))?,
        None => Config::default(),
    };
    add_devices(args, &mut config)?;
    let tls = tls(args, &config)?;
    let stdio = args.nbd.contains(&NbdPlace::At(Endpoint::Stdio));
    let explicit = !args.nbd.is_empty() || args.unix.as_deref().is_some_and(|path| path != "-");
    let temporary = args.unix.as_deref() == Some("-")
        || (args.run.is_some() && !explicit && config.nbd.is_none() && !activated);
    let one_shot = temporary || stdio || args.run.is_some();
    let temp = if temporary || (args.run.is_some() && args.control.is_none()) {
        let failed = |error| Failure::new(Code::Failed, format!("temporary directory: {error}"));
        Some(TempDir::new().map_err(failed)?)
    } else {
        None
    };
    let nbd = nbd_places(args, config.nbd, temp.as_ref().filter(|_| temporary), activated)?;
    if nbd.is_empty() && !activated && adds_tls(args) && tls.mode != TlsMode::Off {
        let message = "tls: no NBD server would use it; serve NBD, or remove the options of TLS";
        return Err(Failure::new(Code::Usage, message));
    }
    let control = match (&args.control, config.control, &temp) {
        (Some(place), _, _) if place.path.as_os_str() == config::NO_SOCKET => None,
        (Some(place), _, _) => Some(place.clone()),
        (None, Some(place), _) if place.path.as_os_str() == config::NO_SOCKET => None,
        (None, Some(place), _) => Some(place),
        (None, None, Some(temp)) => Some(temp.path().join(paths::CONTROL_SOCKET).into()),
        (None, None, None) if one_shot => None,
        (None, None, None) => Some(default_control()?.into()),
    };
    if let Some(place) = &control {
        check_socket_path(&place.path)
            .map_err(|what| Failure::new(Code::Usage, format!("control: {what}")))?;
    }
    if args.run.is_some() && nbd.contains(&Endpoint::Stdio) {
        let message = "run: with --nbd stdio the command's output would get into the NBD stream; \
                       leave out one of the two, or serve NBD at unix:PATH";
        return Err(Failure::new(Code::Usage, message));
    }
    let (nvme, nvme_access) = nvme(args, config.nvme, config.nvme_access, control.is_some())?;
    let metrics = http_place("metrics", args.metrics.clone().or(config.metrics))?;
    let (web, web_token_file) = web(args, config.web, config.web_token_file)?;
    let (fuse, fuse_allow_other) = fuse(args, config.fuse, config.fuse_allow_other)?;
    let options = DaemonOptions {
        devices: config.devices,
        nbd,
        nvme_discovery: nvme_discovery(args, config.nvme_discovery, &nvme)?,
        nvme,
        vhost: if args.vhost.is_empty() { config.vhost } else { args.vhost.clone() },
        ublk: if args.ublk.is_empty() { config.ublk } else { args.ublk.clone() },
        nvme_access,
        activated,
        fuse,
        fuse_allow_other,
        control,
        api_directories: [config.api_directories, args.api_directory.clone()].concat(),
        metrics,
        web,
        web_token_file,
        tls,
        nbd_memory: args.nbd_memory.or(config.nbd_memory),
        backups: config.backups,
        standby: args.standby || config.standby,
        vhost_poll: args.vhost_poll.or(config.vhost_poll).unwrap_or(0),
        inherited: None,
    };
    Ok(ServePlan { options, temp })
}

/// Refuses a standby whose clients could connect before it serves.
fn check_standby(args: &ServeArgs, options: &DaemonOptions) -> Result<(), Failure> {
    let is_stdio = options.nbd.contains(&Endpoint::Stdio);
    let why = match (args.run.is_some(), options.activated, is_stdio) {
        (true, ..) => "the yard runs for a command (--run)",
        (_, true, _) => "NBD is served on sockets of systemd, which accept clients already",
        (.., true) => "NBD is served on standard input and output",
        _ => return Ok(()),
    };
    Err(Failure::new(Code::Usage, format!("standby: {why}")))
}

fn add_devices(args: &ServeArgs, config: &mut Config) -> Result<(), Failure> {
    if args.devices.is_empty() && args.config.is_none() {
        let template = config::parse(TEMPLATE).expect("a test parses the template");
        config.devices = template.devices;
        return Ok(());
    }
    for spec in &args.devices {
        if config.devices.iter().any(|other| other.name() == spec.name()) {
            let message = format!("name: `{}` is given twice; names are unique", spec.name());
            return Err(Failure::new(Code::Usage, message));
        }
        config.devices.push(spec.clone());
    }
    Ok(())
}

/// Where NBD is served. The first that says so decides: command line, temporary place, systemd,
/// configuration, default.
fn nbd_places(
    args: &ServeArgs,
    configured: Option<Vec<Endpoint>>,
    temp: Option<&TempDir>,
    activated: bool,
) -> Result<Vec<Endpoint>, Failure> {
    if args.nbd.contains(&NbdPlace::Nowhere) {
        if args.nbd.len() > 1 {
            let message = "nbd: `none` and a place are both given; leave one of them out";
            return Err(Failure::new(Code::Usage, message));
        }
        return Ok(Vec::new());
    }
    if !args.nbd.is_empty() {
        // libnbd's `[ COMMAND ]` passes a listening socket; then the client is there,
        // and standard input has no client.
        let places = args.nbd.iter().filter_map(|place| match place {
            NbdPlace::At(Endpoint::Stdio) if activated => None,
            NbdPlace::At(place) => Some(place.clone()),
            NbdPlace::Nowhere => None,
        });
        return Ok(places.collect());
    }
    if let Some(temp) = temp {
        return Ok(vec![Endpoint::Unix(temp.path().join(paths::NBD_SOCKET).into())]);
    }
    if let Some(path) = &args.unix {
        let place = UnixPlace::read(path)
            .map_err(|what| Failure::new(Code::Usage, format!("unix: {what}")))?;
        return Ok(vec![Endpoint::Unix(place)]);
    }
    if activated {
        return Ok(Vec::new());
    }
    if let Some(configured) = configured {
        return Ok(configured);
    }
    Ok(vec![Endpoint::Unix(runtime_dir()?.join(paths::NBD_SOCKET).into())])
}

fn default_control() -> Result<PathBuf, Failure> {
    if let Some(path) = std::env::var_os(paths::CONTROL_VARIABLE).filter(|path| !path.is_empty()) {
        return Ok(PathBuf::from(path));
    }
    Ok(runtime_dir()?.join(paths::CONTROL_SOCKET))
}

/// The runtime directory, made if it is not there.
fn runtime_dir() -> Result<PathBuf, Failure> {
    let dir = paths::runtime_dir();
    if dir.last_resort {
        tracing::warn!(
            "XDG_RUNTIME_DIR is not set; sockets are in {}, where commands find them too",
            dir.path.display()
        );
    }
    paths::make_private_dir(&dir.path).map_err(|error| {
        let message = format!(
            "runtime directory {}: {error}; set XDG_RUNTIME_DIR, or name the sockets with --nbd \
             and --control",
            dir.path.display()
        );
        Failure::new(Code::Failed, message)
    })?;
    Ok(dir.path)
}

/// Whether the command line says something of TLS.
fn adds_tls(args: &ServeArgs) -> bool {
    args.tls.is_some()
        || args.tls_certificates.is_some()
        || args.tls_verify_peer
        || !args.tls_allow.is_empty()
}

/// The settings of the file and of the command line together, checked together.
fn tls(args: &ServeArgs, config: &Config) -> Result<TlsSettings, Failure> {
    let mut tls = config.tls.clone();
    match args.tls {
        Some(Tls::Off) => tls.mode = TlsMode::Off,
        Some(Tls::On) => tls.mode = TlsMode::On,
        Some(Tls::Require) => tls.mode = TlsMode::Require,
        None => {}
    }
    if args.tls_certificates.is_some() {
        tls.certificates.clone_from(&args.tls_certificates);
    }
    tls.verify_peer |= args.tls_verify_peer;
    for (export, subject) in &args.tls_allow {
        let refused = |what| Failure::new(Code::Usage, format!("tls-allow: {what}"));
        tls.allow.allow(export, subject).map_err(refused)?;
    }
    // A command line with certificates wants TLS, even if the file has it off.
    let asked = args.tls.is_some() || (config.tls_places.mode.is_some() && !adds_tls(args));
    let message = match tls.check(asked) {
        Ok(()) => return Ok(tls),
        Err(TlsProblem::Off) => {
            "tls: certificates are given but TLS is off; add --tls require (or on)"
        }
        Err(TlsProblem::VerifyPeerIsOptional) => {
            "tls-verify-peer: with --tls on a client without TLS is let in and shows no \
             certificate; use --tls require"
        }
        Err(TlsProblem::AllowWithoutVerifyPeer) => {
            "tls-allow: clients show no certificate whose subject could be in a list; add \
             --tls-verify-peer"
        }
        Err(TlsProblem::NoCertificates) => {
            "tls: no certificates; name their directory with --tls-certificates DIR"
        }
    };
    Err(Failure::new(Code::Usage, message))
}

/// Whether the command line says something of the access or the connections of NVMe hosts.
fn adds_nvme_access(args: &ServeArgs) -> bool {
    args.nvme_secrets.is_some()
        || !args.nvme_allow.is_empty()
        || !args.nvme_hashes.is_empty()
        || !args.nvme_dh_groups.is_empty()
        || args.nvme_subsystem.is_some()
        || args.nvme_threads.is_some()
        || args.nvme_connections.is_some()
}

/// Where NVMe is served, and the access of hosts, by the file and the command line together,
/// checked together.
fn nvme(
    args: &ServeArgs,
    configured: Vec<Endpoint>,
    mut access: NvmeSettings,
    has_control: bool,
) -> Result<(Vec<Endpoint>, NvmeSettings), Failure> {
    let places = if args.nvme.is_empty() { configured } else { args.nvme.clone() };
    for (device, host) in &args.nvme_allow {
        let refused = |what| Failure::new(Code::Usage, format!("nvme-allow: {what}"));
        access.allow.allow(device, host).map_err(refused)?;
    }
    if args.nvme_secrets.is_some() {
        access.secrets.clone_from(&args.nvme_secrets);
    }
    if !args.nvme_hashes.is_empty() {
        access.hashes.clone_from(&args.nvme_hashes);
    }
    if args.nvme_subsystem.is_some() {
        access.subsystem.clone_from(&args.nvme_subsystem);
    }
    if !args.nvme_dh_groups.is_empty() {
        access.dh_groups.clone_from(&args.nvme_dh_groups);
    }
    let count = |given: Option<u64>| given.and_then(|count| NonZeroUsize::new(count as usize));
    access.threads = count(args.nvme_threads).or(access.threads);
    access.connections = count(args.nvme_connections).or(access.connections);
    let message = match access.check() {
        Ok(()) if places.is_empty() && !has_control && adds_nvme_access(args) => {
            "nvme: no server would use its options; add --nvme tcp:HOST:PORT, or a \
             control socket"
        }
        Ok(()) => return Ok((places, access)),
        Err(NvmeProblem::HashesWithoutSecrets) => {
            "nvme-hashes: no host authenticates without secrets; add --nvme-secrets FILE"
        }
        Err(NvmeProblem::GroupsWithoutSecrets) => {
            "nvme-dh-groups: no host authenticates without secrets; add --nvme-secrets FILE"
        }
    };
    Err(Failure::new(Code::Usage, message))
}

/// Prints for each device what it is and how to use it.
fn announce(args: &ServeArgs, options: &DaemonOptions, daemon: &Daemon) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let control = options.control.as_ref().map(|place| place.path.as_path());
    let server = daemon.servers().first();
    if args.json {
        return announce_json(&mut out, control, daemon);
    }
    let nvme = daemon.nvme().addresses(false);
    let connect = |nqn: &str, address: &SocketAddr| {
        shell_snippet::nvme_connect(nqn, *address, options.nvme_access.secrets.is_some())
    };
    for entry in daemon.devices().list() {
        let uri = server.and_then(|server| server.uri(entry.spec.name()));
        let disk = entry.disk.as_ref();
        writeln!(out, "{}: {}", entry.spec.name(), describe(&entry.spec, disk))?;
        if let Some(line) = shell_snippet::line(&entry.spec, disk, uri.as_deref(), control) {
            writeln!(out, "  {line}")?;
        }
        if let (Some(nqn), Some(address)) = (entry.nqn(), nvme.first()) {
            writeln!(out, "  {}", connect(nqn, address))?;
        }
        if let Some((place, _)) = daemon.devices().vhost().find(entry.spec.name()) {
            writeln!(out, "  {}", shell_snippet::vhost_device(&place))?;
        }
        if let Some(info) = daemon.devices().ublk().find(entry.spec.name()) {
            writeln!(out, "  {}", block_path(info.id))?;
        }
        for note in entry.notes() {
            writeln!(out, "  note: {note}")?;
        }
    }
    for address in addresses(daemon) {
        writeln!(out, "NBD at {address}")?;
    }
    for address in &nvme {
        writeln!(out, "NVMe at tcp:{address}")?;
    }
    if let (Some(nqn), Some(address)) = (&options.nvme_access.subsystem, nvme.first()) {
        writeln!(out, "  all devices: {}", connect(nqn, address))?;
    }
    for address in daemon.nvme().addresses(true) {
        writeln!(out, "NVMe discovery at tcp:{address}")?;
    }
    if let (Some(dir), Some(transport)) = (daemon.mount_dir(), daemon.mount_transport()) {
        writeln!(out, "files in {}, through {transport}", dir.display())?;
    }
    if let Some(metrics) = daemon.control().and_then(|control| control.metrics_address()) {
        writeln!(out, "metrics at {metrics}")?;
    }
    if let Some(web) = daemon.control().and_then(|control| control.web_address()) {
        writeln!(out, "dashboard at {web}")?;
    }
    match control {
        Some(path) => writeln!(out, "control at {}; Ctrl-C ends", path.display())?,
        None => writeln!(out, "no control socket; Ctrl-C ends")?,
    }
    Ok(out.flush()?)
}

/// Says what was corrected, where standard output is not ours.
fn warn_of_notes(daemon: &Daemon) {
    for entry in daemon.devices().list() {
        for note in entry.notes() {
            tracing::warn!(device = entry.spec.name(), "{note}");
        }
    }
}

fn announce_json(
    out: &mut impl Write,
    control: Option<&Path>,
    daemon: &Daemon,
) -> Result<(), Failure> {
    let devices = daemon.devices();
    let view = |entry: &DeviceEntry| DeviceView::new(entry, devices);
    let subsystem = devices.subsystems().and_then(|subsystems| subsystems.all_nqn());
    let devices: Vec<_> = devices.list().iter().map(view).collect();
    let nbd = addresses(daemon);
    let places = |is_discovery| -> Vec<String> {
        let addresses = daemon.nvme().addresses(is_discovery).into_iter();
        addresses.map(|address| format!("tcp:{address}")).collect()
    };
    let metrics = daemon.control().and_then(|control| control.metrics_address());
    let said = json!({
        "devices": devices,
        "nbd": nbd,
        "nvme": places(false),
        "nvme_discovery": places(true),
        "nvme_subsystem": subsystem,
        "files": daemon.mount_dir(),
        "files_transport": daemon.mount_transport(),
        "control": control,
        "metrics": metrics,
        "web": daemon.control().and_then(|control| control.web_address()),
    });
    writeln!(out, "{said}")?;
    Ok(out.flush()?)
}

/// Everywhere where NBD is served.
fn addresses(daemon: &Daemon) -> Vec<&str> {
    let servers = daemon.servers().iter();
    servers.flat_map(|server| server.local_addrs()).map(String::as_str).collect()
}

fn status(daemon: &Daemon) -> String {
    let devices = counted(daemon.devices().list().len() as u64, "device");
    let mut places: Vec<_> = addresses(daemon).into_iter().map(str::to_owned).collect();
    let nvme = daemon.nvme().addresses(false).into_iter();
    places.extend(nvme.map(|address| format!("tcp:{address}")));
    format!("serving {devices} at {}", places.join(", "))
}

/// Tells systemd, if it wants to be told.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "systemd cannot be told");
    }
}

/// The file with the process id, removed in the end.
#[derive(Debug)]
struct Pidfile(PathBuf);

/// A file for the process id, which has its name when it is written.
#[derive(Debug)]
struct UnwrittenPidfile {
    file: AtomicFile,
    path: PathBuf,
}

impl Pidfile {
    /// Checks that the file can be written, before anything else is made.
    fn prepare(path: &Path) -> Result<UnwrittenPidfile, Failure> {
        let failed = |error| pidfile_failure(path, &error);
        if path.try_exists().map_err(failed)? {
            let mut file = std::fs::File::open(path).map_err(failed)?;
            let mut found = String::new();
            // A process id has at most 10 digits; what is longer is not one.
            let read = (&mut file).take(12).read_to_string(&mut found);
            let is_ours = found.trim_end().bytes().all(|byte| byte.is_ascii_digit());
            if read.is_err() || !is_ours {
                let what = "the file holds something else than a process id; remove it";
                return Err(failed(io::Error::other(what)));
            }
        }
        let file = AtomicFile::create(path, Replace::Any, &[]).map_err(failed)?;
        Ok(UnwrittenPidfile { file, path: path.to_owned() })
    }
}

impl UnwrittenPidfile {
    fn write(self) -> Result<Pidfile, Failure> {
        let UnwrittenPidfile { file, path } = self;
        let written = file
            .file()
            .write_all(format!("{}\n", std::process::id()).as_bytes())
            .and_then(|()| file.commit());
        written.map_err(|error| pidfile_failure(&path, &error))?;
        Ok(Pidfile(path))
    }
}

fn pidfile_failure(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Code::Failed, format!("pidfile: cannot write {}: {error}", path.display()))
}

impl Drop for Pidfile {
    fn drop(&mut self) {
        // It may be gone already; then there is nothing to do.
        let _ = std::fs::remove_file(&self.0);
    }
}
