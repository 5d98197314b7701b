//! A running `blockyard serve`, from its first notification to its end.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::place::Place;
use crate::run::{Run, bounded, finish};

/// The program, as cargo built it for this test.
pub(crate) const BLOCKYARD: &str = env!("CARGO_BIN_EXE_blockyard");

/// The number of waits for a notification and their length: together a minute.
const LOOKS_MAX: u32 = 1200;
const LOOK: Duration = Duration::from_millis(50);

/// A server in a place of its own. Dropping it kills the server.
#[derive(Debug)]
pub(crate) struct Yard {
    child: Child,
    /// The socket to which the server sends its state (sd_notify).
    notices: UnixDatagram,
    pub(crate) place: Place,
}

impl Yard {
    /// Serves the devices on a unix socket, and waits for READY.
    pub(crate) fn serve(devices: &[&str]) -> Yard {
        Yard::serve_in(Place::new(), devices)
    }

    /// Serves from a folder that may have files; `args` may contain options too.
    pub(crate) fn serve_in(place: Place, args: &[&str]) -> Yard {
        let nbd = format!("unix:{}", place.file("nbd"));
        let control = place.file("control");
        let folder = place.path().display().to_string();
        let mut line = vec!["serve", "--nbd", &nbd, "--control", &control];
        line.extend(["--api-directory", &folder]);
        line.extend(args);
        Yard::start(place, &line)
    }

    /// Runs `blockyard` with these arguments and waits for READY.
    pub(crate) fn start(place: Place, args: &[&str]) -> Yard {
        match Yard::spawn(place, args).ready() {
            Ok(yard) => yard,
            Err((status, text)) => {
                panic!("{args:?} ended with {status} before it was ready: {text}")
            }
        }
    }

    /// As [`Yard::serve`], for a server that may end instead: then its exit status and error
    /// output.
    #[allow(dead_code)] // One of the programs that have this module asks for it.
    pub(crate) fn try_serve(devices: &[&str]) -> Result<Yard, (ExitStatus, String)> {
        Yard::begin(devices).ready()
    }

    /// Starts to serve the devices without waiting.
    pub(crate) fn begin(devices: &[&str]) -> Yard {
        let place = Place::new();
        let (nbd, control) = (format!("unix:{}", place.file("nbd")), place.file("control"));
        let line = [&["serve", "--nbd", &nbd, "--control", &control], devices].concat();
        Yard::spawn(place, &line)
    }

    /// Waits for READY, or for the server's end: then its exit status and error output.
    pub(crate) fn ready(mut self) -> Result<Yard, (ExitStatus, String)> {
        match self.look_for(|notice| notice.contains("READY=1")) {
            None => Ok(self),
            Some(status) => Err((status, self.complained())),
        }
    }

    /// Waits until a standby serves.
    #[allow(dead_code)] // One of the programs that have this module asks for it.
    pub(crate) fn until_it_serves(&mut self) {
        let ended = self.look_for(|notice| notice.contains("READY=1"));
        assert_eq!(ended, None, "{}", self.complained());
    }

    /// As [`Yard::serve`], under a tracer that gives the server a process of its own.
    #[allow(dead_code)] // One of the programs that have this module asks for it.
    pub(crate) fn serve_below(place: Place, tracer: &[&str], devices: &[&str]) -> Yard {
        let (nbd, control) = (format!("unix:{}", place.file("nbd")), place.file("control"));
        let line = [&["serve", "--nbd", &nbd, "--control", &control], devices].concat();
        let ready = Yard::spawn_below(place, tracer, &line).ready();
        ready.unwrap_or_else(|(status, text)| panic!("{line:?} ended with {status}: {text}"))
    }

    /// As [`Yard::serve_below`]. Returns also the exit status and the error output of a server that
    /// has ended.
    #[allow(dead_code)] // One of the programs that have this module asks for it.
    pub(crate) fn try_serve_below(
        place: Place,
        tracer: &[&str],
        devices: &[&str],
    ) -> Result<Yard, (ExitStatus, String)> {
        let (nbd, control) = (format!("unix:{}", place.file("nbd")), place.file("control"));
        let line = [&["serve", "--nbd", &nbd, "--control", &control], devices].concat();
        Yard::spawn_below(place, tracer, &line).ready()
    }

    /// As [`Yard::start`], under a tracer that gives the server a process of its own.
    #[allow(dead_code)] // One of the programs that have this module asks for it.
    pub(crate) fn start_below(place: Place, tracer: &[&str], program: &str, args: &[&str]) -> Yard {
        let ready = Yard::spawn_program(place, &[tracer, &[program]].concat(), args).ready();
        ready.unwrap_or_else(|(status, text)| panic!("{args:?} ended with {status}: {text}"))
    }

    fn spawn(place: Place, args: &[&str]) -> Yard {
        Yard::spawn_below(place, &[], args)
    }

    fn spawn_below(place: Place, tracer: &[&str], args: &[&str]) -> Yard {
        Yard::spawn_program(place, &[tracer, &[BLOCKYARD]].concat(), args)
    }

    fn spawn_program(place: Place, program: &[&str], args: &[&str]) -> Yard {
        let line = [program, args].concat();
        let notices = UnixDatagram::bind(place.file("notices")).expect("the place is new");
        // The server may run as another user.
        fs::set_permissions(place.file("notices"), PermissionsExt::from_mode(0o666))
            .expect("the place is ours");
        notices.set_read_timeout(Some(LOOK)).expect("a look is longer than nothing");
        let file = |name: &str| File::create(place.file(name)).expect("the place is ours");
        let child = Command::new(line[0])
            .args(&line[1..])
            .env("NOTIFY_SOCKET", place.file("notices"))
            // It is no service of systemd, also if the tests run within one.
            .env_remove("INVOCATION_ID")
            .env("XDG_RUNTIME_DIR", place.path())
            .env("XDG_STATE_HOME", place.path())
            .stdin(Stdio::null())
            .stdout(file("out"))
            .stderr(file("err"))
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", line[0]));
        Yard { child, notices, place }
    }

    /// Waits for a notification (`None`) or the server's end.
    fn look_for(&mut self, is_it: impl Fn(&str) -> bool) -> Option<ExitStatus> {
        let mut notice = [0; 4096];
        for _ in 0..LOOKS_MAX {
            // An error is the timeout of one wait.
            let len = self.notices.recv(&mut notice).unwrap_or(0);
            if is_it(&String::from_utf8_lossy(&notice[..len])) {
                return None;
            }
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                return Some(status);
            }
        }
        panic!("no sign of {} in {:?}", self.child.id(), LOOK * LOOKS_MAX);
    }

    /// Reads the notifications that have come, so that there is room for more.
    #[allow(dead_code)] // One of the programs that have this module asks for it.
    pub(crate) fn read_notices(&self) -> Vec<String> {
        let (mut notice, mut notices) = ([0; 4096], Vec::new());
        while let Ok(len) = self.notices.recv(&mut notice) {
            notices.push(String::from_utf8_lossy(&notice[..len]).into_owned());
        }
        notices
    }

    /// The URI of an export, for libnbd and qemu.
    pub(crate) fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket())
    }

    /// The path of the control socket.
    pub(crate) fn control(&self) -> String {
        self.place.file("control")
    }

    /// The path of the NBD socket.
    pub(crate) fn socket(&self) -> String {
        self.place.file("nbd")
    }

    /// Standard output so far.
    pub(crate) fn printed(&self) -> String {
        fs::read_to_string(self.place.file("out")).unwrap_or_default()
    }

    /// Standard error so far.
    pub(crate) fn complained(&self) -> String {
        fs::read_to_string(self.place.file("err")).unwrap_or_default()
    }

    /// The server's process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs a `blockyard` command against the server.
    pub(crate) fn command(&self, args: &[&str]) -> Run {
        let control = self.place.file("control");
        let mut line = vec![BLOCKYARD];
        line.extend(args);
        line.extend(["--control", &control]);
        finish(&line, &mut bounded(&line))
    }

    /// Fails unless the export answers a client.
    #[track_caller]
    pub(crate) fn serves(&self, export: &str) {
        crate::run::run(&["nbdinfo", "--size", &self.uri(export)]).ok();
    }

    /// Sends the server a signal.
    pub(crate) fn signal(&self, name: &str) {
        crate::run::ok(&["sh", "-c", &format!("kill -{name} {}", self.pid())]);
    }

    /// Waits for the server's end.
    pub(crate) fn end(&mut self) -> ExitStatus {
        self.look_for(|_| false).expect("no notice is looked for")
    }
}

impl Drop for Yard {
    fn drop(&mut self) {
        // The server may have ended already; no error matters here.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the server printed: {}{}", self.printed(), self.complained());
        }
    }
}

/// Runs `blockyard` to its end.
pub(crate) fn blockyard(args: &[&str]) -> Run {
    let mut line = vec![BLOCKYARD];
    line.extend(args);
    // A server without `--control` has its control socket in the runtime directory. Each gets a
    // directory of its own, so that no two share a socket.
    let place = Place::new();
    finish(&line, bounded(&line).env("XDG_RUNTIME_DIR", place.path()))
}
