//! A backup policy whose target is a real sshd: the connection breaks in the middle of a stream,
//! and the next run sends the rest.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::place::Place;
use crate::run::{nbdsh, ok};
use crate::yard::{BLOCKYARD, Yard, blockyard};

/// Bytes of the first stream that pass before the connection breaks.
const HALF: usize = 8 << 20;

/// Waits until something has happened, a minute at most.
pub(crate) fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let has_happened = (0..6000).any(|_| {
        std::thread::park_timeout(Duration::from_millis(10));
        is_so()
    });
    assert!(has_happened, "{what}");
}

/// An sshd on a port of its own, with a host key of its own. A login runs one command.
struct Sshd {
    child: Child,
    port: u16,
}

impl Sshd {
    fn start(place: &Place, command: &str) -> Sshd {
        for key in ["host", "client"] {
            ok(&["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", &place.file(key)]);
        }
        let public = |key: &str| fs::read_to_string(place.file(key) + ".pub").unwrap();
        let allowed = format!("restrict,command=\"{command}\" {}", public("client"));
        fs::write(place.file("authorized"), allowed).unwrap();
        // The accounts that sshd needs, in a mount namespace, so that the machine keeps its own.
        let accounts = "root:x:0:0:root:/:/bin/sh\nsshd:x:65533:65534::/run/sshd:/bin/false\n";
        fs::write(place.file("passwd"), accounts).unwrap();
        fs::write(place.file("shadow"), "root:*:19000:0:99999:7:::\n").unwrap();
        // The port may be taken before sshd has it.
        for _ in 0..10 {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            drop(listener);
            let mut sshd = Sshd::on(place, port);
            let log = || fs::read_to_string(place.file("sshd.log")).unwrap();
            let is_listening = (0..1000).any(|_| {
                std::thread::park_timeout(Duration::from_millis(10));
                log().contains("Server listening") || sshd.child.try_wait().unwrap().is_some()
            });
            if is_listening && sshd.child.try_wait().unwrap().is_none() {
                let known = format!("[127.0.0.1]:{port} {}", public("host"));
                fs::write(place.file("known"), known).unwrap();
                return sshd;
            }
            assert!(log().contains("in use"), "sshd does not start: {}", log());
        }
        panic!("no port is free");
    }

    fn on(place: &Place, port: u16) -> Sshd {
        let settings = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\n\
             StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n",
            place.file("host"),
            place.file("authorized")
        );
        fs::write(place.file("sshd.conf"), settings).unwrap();
        let program = ["/usr/sbin/sshd", "/usr/local/sbin/sshd"];
        let program = program.into_iter().find(|path| Path::new(path).exists());
        let program = program.expect("sshd is there: `make deps` installs it");
        let script = format!(
            "set -e; cd {}; mount --make-rprivate /; mount --bind passwd /etc/passwd; \
             mount --bind shadow /etc/shadow; mount -t tmpfs tmpfs /run; mkdir -m 755 /run/sshd; \
             exec {program} -D -e -f {}",
            place.path().display(),
            place.file("sshd.conf")
        );
        let log = fs::File::create(place.file("sshd.log")).unwrap();
        let mut command = Command::new("unshare");
        let command = command.args(["-m", "sh", "-c", &script]);
        let child = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        Sshd { child, port }
    }

    /// Kills the processes that serve connections.
    fn break_connections(&self) {
        let id = self.child.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        for child in children.unwrap_or_default().split_whitespace() {
            let child = Pid::from_raw(child.parse().unwrap()).unwrap();
            _ = kill_process(child, Signal::KILL);
        }
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        self.break_connections();
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// A yard with a policy that sends by ssh.
fn serve(place: &Place, sshd: &Sshd, device: &str) -> Yard {
    let option = |name: &str, value: &str| format!("\"-o\", \"{name}={value}\", ");
    let options = option("BatchMode", "yes")
        + &option("IdentitiesOnly", "yes")
        + &option("UserKnownHostsFile", &place.file("known"));
    let settings = format!(
        "[[backup]]\nname = \"off\"\npool = {:?}\nsnapshots = \"yearly\"\ntimeout = \"1m\"\n\
         target = [\"ssh\", \"-F\", \"none\", \"-p\", \"{}\", \"-i\", {:?}, {options}\
         \"root@127.0.0.1\"]\n",
        place.file("pool"),
        sshd.port,
        place.file("client")
    );
    let file = place.file("yard.toml");
    fs::write(&file, settings).unwrap();
    Yard::serve_in(Place::new(), &["-c", &file, device])
}

/// What `backup list` prints of the policy; its exit code depends on the last run.
fn policy(yard: &Yard) -> Value {
    yard.command(&["backup", "list", "--json"]).json()[0].take()
}

#[test]
fn a_backup_over_ssh_goes_on_where_its_connection_broke() {
    let place = Place::new();
    let [pool, there, half, gate, ended, script] =
        ["pool", "there", "half", "gate", "ended", "receive"].map(|name| place.file(name));
    let device = format!("volume:///v0?path={pool}&size=32M&compress=none");
    let yard = Yard::serve(&[&device]);
    nbdsh(
        &yard.uri("v0"),
        "import random\n\
         for i in range(24): h.pwrite(random.Random(i).randbytes(1 << 20), i << 20)\n\
         h.flush()",
    );
    drop(yard);
    ok(&["mkfifo", &gate]);
    // The first stream stops in its middle until the gate opens. The connection is broken then.
    let receive = format!("{BLOCKYARD} volume receive -s {there}");
    let receiving = format!(
        "if mkdir {}; then\n\
         {{ head -c {HALF}; : > {half}; read -r _ < {gate}; cat; }} | {receive}\n\
         : > {ended}\n\
         else exec {receive}\n\
         fi\n",
        place.file("once")
    );
    fs::write(&script, receiving).unwrap();
    let sshd = Sshd::start(&place, &format!("sh {script}"));

    let yard = serve(&place, &sshd, &device);
    let exists = |path: &String| Path::new(path).exists();
    wait_until("half of the stream arrives", || exists(&half));
    sshd.break_connections();
    fs::write(&gate, "\n").unwrap();
    wait_until("the receiver ends", || exists(&ended));
    wait_until("the run fails", || policy(&yard)["failures"] == 1);
    let error = policy(&yard)["error"].as_str().unwrap().to_owned();
    assert!(error.starts_with("`v0`: the target `ssh` failed with exit status: 255"), "{error}");
    let status = yard.command(&["status"]).fails();
    let line = "\nbackup off: the last run failed, no run has succeeded\n";
    assert!(status.code == Some(1) && status.out.ends_with(line), "{status}");
    drop(yard);

    // The next run: the target refuses the stream with the token that continues it.
    let yard = serve(&place, &sshd, &device);
    wait_until("the run ends", || policy(&yard)["runs"] == 1);
    let view = policy(&yard);
    assert!(view["error"].is_null() && view["last_success"].is_u64(), "{view}");
    let sent = view["sent_bytes"].as_u64().unwrap() as usize;
    assert!(sent > 0 && sent < (24 << 20) - HALF / 2, "only the rest is sent: {view}");
    let status = yard.command(&["status", "--json"]).ok().json();
    let backup = json!({ "name": "off", "last_success": view["last_success"] });
    assert_eq!(status["backups"], json!([backup]));
    let status = yard.command(&["status"]).ok();
    assert!(status.out.contains("\nbackup off: last success "), "{status}");
    drop((yard, sshd));
    let names = blockyard(&["volume", "list", "-t", "snapshot", "-H", "-o", "name", &there]).ok();
    let name = names.out.trim();
    assert!(name.starts_with("v0@off-"), "{name}");
    let [sent, received] = [&pool, &there].map(|pool| {
        let image = format!("{pool}.raw");
        blockyard(&["volume", "export", pool, name, &image]).ok();
        fs::read(image).unwrap()
    });
    assert!(sent == received && sent.iter().any(|byte| *byte != 0));
    blockyard(&["volume", "check", &there]).ok();
}
