//! PostgreSQL on ext4 on a volume of a pool in a directory, or in an object store: everything is
//! killed while it commits. Afterwards all transactions that clients were told are committed must
//! exist and be consistent.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use blockyard_testing::s3_server::{KEY_ID, S3Program, SECRET_KEY};
use blockyard_testing::s3_witness::S3Witness;

use crate::attach::{FileSystem, Loop, unmount_lazily};
use crate::place::Place;
use crate::run::{Run, bounded_by, ok, run, within};
use crate::yard::{Yard, blockyard};

/// Debian's programs of this version.
const BIN: &str = "/usr/lib/postgresql/15/bin";

/// The time of commits before the kill: in `make test`, and the variable by which `make postgres`
/// changes it.
const SECONDS: u32 = 5;
const ASKED: &str = "BLOCKYARD_POSTGRES_SECONDS";

const CLIENTS: u64 = 8;

/// Every commit waits for the disk, and checkpoints are frequent.
const CONFIG: &str = "listen_addresses = ''\nfsync = on\nsynchronous_commit = on\n\
                      full_page_writes = on\nlog_checkpoints = on\nshared_buffers = 32MB\n\
                      max_wal_size = 64MB\nmin_wal_size = 32MB\ncheckpoint_timeout = 30s\n";

/// The layers: a file system on a loop device on a block file of a served volume.
struct Stack {
    file_system: FileSystem,
    device: Loop,
    yard: Yard,
    dir: String,
    /// The mount point of the file system.
    at: String,
}

impl Stack {
    /// Serves the volume and mounts it; makes the file system first if `is_new`. The server has
    /// these variables of the environment, and a state directory of its own.
    fn up(device: &str, variables: &[String], is_new: bool) -> Stack {
        let place = Place::new();
        let (dir, at) = (place.file("files"), place.file("at"));
        std::fs::create_dir(&dir).unwrap();
        let env = ["env"].into_iter().chain(variables.iter().map(String::as_str));
        let env: Vec<&str> = env.collect();
        let yard = Yard::serve_below(place, &env, &[device, "--fuse", &dir]);
        let device = Loop::attach(&format!("{dir}/v0"));
        if is_new {
            ok(&["mke2fs", "-q", "-t", "ext4", &device.0]);
        }
        let file_system = FileSystem::mount("ext4", &device.0, &at);
        Stack { file_system, device, yard, dir, at }
    }

    /// Kills the server, then ends the layers above it without notice.
    fn kill(self, postgres: Postgres) {
        let Stack { file_system, device, mut yard, dir, at } = self;
        yard.signal("KILL");
        drop(postgres);
        yard.end();
        unmount_lazily(&at);
        drop(file_system);
        drop(device);
        unmount_lazily(&dir);
    }
}

/// A command line that runs as the user that PostgreSQL requires.
fn as_postgres<'l>(line: &[&'l str]) -> Vec<&'l str> {
    let user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"];
    [&user[..], line].concat()
}

fn tool(name: &str, args: &[&str]) -> Run {
    let program = format!("{BIN}/{name}");
    within(300, &as_postgres(&[&[program.as_str()], args].concat()))
}

/// A running PostgreSQL server. Dropping it kills the server.
struct Postgres {
    data: String,
    /// A child of this process: the next server checks whether a process of this number still
    /// exists.
    process: Child,
}

impl Postgres {
    /// Makes an empty database directory.
    fn make(at: &str) -> String {
        let data = format!("{at}/data");
        std::fs::create_dir(&data).unwrap();
        ok(&["chown", "postgres:", &data]);
        tool("initdb", &["-D", &data, "-A", "trust", "--data-checksums"]).ok();
        let config = format!("{data}/postgresql.conf");
        let has = std::fs::read_to_string(&config).unwrap();
        std::fs::write(&config, format!("{has}{CONFIG}")).unwrap();
        data
    }

    /// Starts PostgreSQL, and waits until it has recovered.
    fn start(data: &str) -> Postgres {
        let program = format!("{BIN}/postgres");
        let line = as_postgres(&[&program, "-D", data, "-k", data]);
        let mut command = Command::new(line[0]);
        command.args(&line[1..]).current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
        let log = File::options().create(true).append(true).open(format!("{data}/log")).unwrap();
        let process = command.stderr(log).spawn().unwrap();
        let postgres = Postgres { data: data.to_owned(), process };
        let (id, ready) = (postgres.process.id(), format!("{BIN}/pg_isready -q -h {data}"));
        let wait = format!("until {ready}; do grep -q ^State:.[RSD] /proc/{id}/status; done");
        let waited = within(100, &["bash", "-e", "-c", &wait]);
        assert!(waited.code == Some(0), "{waited}: {}", postgres.log());
        postgres
    }

    /// The log, including that of earlier servers.
    fn log(&self) -> String {
        std::fs::read_to_string(format!("{}/log", self.data)).unwrap_or_default()
    }

    fn stop(mut self) {
        run(&["kill", "-INT", &self.process.id().to_string()]).ok();
        assert!(self.process.wait().unwrap().success(), "{}", self.log());
    }

    fn ask(&self, query: &str) -> String {
        let line = ["-h", &self.data, "-d", "postgres", "-X", "-A", "-t", "-c", query];
        tool("psql", &line).ok().out.trim().to_owned()
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // The backend processes survive the server for a while.
        let id = self.process.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        let _ = self.process.kill();
        let _ = self.process.wait();
        let children = children.unwrap_or_default();
        if !children.is_empty() {
            let line = ["kill", "-KILL"].into_iter().chain(children.split_whitespace());
            let _ = run(&line.collect::<Vec<_>>());
        }
    }
}

/// Lets clients commit for a time, then kills everything. Returns the number of transactions that
/// clients were told are committed.
fn commit_until_killed(stack: Stack, postgres: Postgres, seconds: u32) -> u64 {
    let program = format!("{BIN}/pgbench");
    let clients = CLIENTS.to_string();
    let line = [&program, "-h", &postgres.data, "-c", &clients, "-j", "2", "-n"];
    let line = [&line[..], &["-T", "3600", "-P", "1", "postgres"]].concat();
    let mut command = bounded_by(seconds + 100, &as_postgres(&line));
    let mut bench = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(bench.stderr.take().unwrap()).lines().map(Result::unwrap);
    let running = (&mut said).filter(|line| line.starts_with("progress: "));
    assert_eq!(running.take(seconds as usize).count(), seconds as usize);
    stack.kill(postgres);
    let complaints: Vec<String> = said.collect();
    let mut report = String::new();
    bench.stdout.take().unwrap().read_to_string(&mut report).unwrap();
    bench.wait().unwrap();
    let count = "number of transactions actually processed: ";
    let line = report.lines().find_map(|line| line.strip_prefix(count));
    let count = line.and_then(|line| line.parse().ok());
    count.unwrap_or_else(|| panic!("{report}{complaints:?}"))
}

/// Checks that the database is consistent and that no committed transaction is missing.
fn check(postgres: &Postgres, committed: u64) {
    let log = postgres.log();
    assert!(log.contains("database system was not properly shut down"), "{log}");
    assert!(log.contains("redo done at"), "{log}");
    for bad in ["PANIC", "FATAL:  could not", "invalid page", "checksum"] {
        assert!(!log.contains(bad), "{bad}: {log}");
    }
    let amcheck = ["-h", &postgres.data, "--all", "--install-missing", "--heapallindexed"];
    tool("pg_amcheck", &amcheck).ok();
    let sum = |column: &str, table: &str| {
        postgres.ask(&format!("SELECT coalesce(sum({column}), 0) FROM pgbench_{table}"))
    };
    let sums = [("abalance", "accounts"), ("tbalance", "tellers"), ("bbalance", "branches")];
    let history = sum("delta", "history");
    for (column, table) in sums {
        assert_eq!(sum(column, table), history, "{table}");
    }
    let found: u64 = postgres.ask("SELECT count(*) FROM pgbench_history").parse().unwrap();
    println!("{committed} transactions were said to be committed, {found} are there");
    // Each client may have had one more transaction in flight.
    assert!((committed..=committed + CLIENTS).contains(&found), "{committed} became {found}");
}

/// Clients commit, everything is killed, and the volume is served again.
fn postgres_finds_what_it_committed(device: &str, variables: &[String]) {
    let seconds = std::env::var(ASKED).map_or(SECONDS, |text| text.parse().unwrap());
    let stack = Stack::up(device, variables, true);
    let data = Postgres::make(&stack.at);
    let postgres = Postgres::start(&data);
    let scale = if seconds > SECONDS { "10" } else { "2" };
    tool("pgbench", &["-h", &data, "-i", "-q", "-s", scale, "postgres"]).ok();
    let committed = commit_until_killed(stack, postgres, seconds);
    assert!(committed > 0);

    let stack = Stack::up(device, variables, false);
    let postgres = Postgres::start(&format!("{}/data", stack.at));
    check(&postgres, committed);
    postgres.stop();
    let device = stack.device.0.clone();
    let Stack { file_system, device: attached, yard, .. } = stack;
    file_system.unmount();
    ok(&["e2fsck", "-f", "-n", &device]);
    attached.detach();
    end(yard);
}

#[test]
fn postgres_finds_what_it_committed_when_everything_is_killed() {
    let pool = Place::new();
    let device = format!("volume:///v0?path={}&size=1G", pool.file("pool"));
    postgres_finds_what_it_committed(&device, &[]);
    copies(&pool);
}

/// The server that is started after the kill is another machine: it has neither the cache nor the
/// state directory of the first one.
fn an_object_store_has_what_postgres_committed(program: S3Program) {
    let folder = Place::new();
    let Some(store) = program.start(folder.path()) else { return };
    let Some(_witness) = S3Witness::start(&store.endpoint(), "vol") else { return };
    let variables = [
        format!("AWS_ENDPOINT_URL={}", store.endpoint()),
        format!("AWS_ACCESS_KEY_ID={KEY_ID}"),
        format!("AWS_SECRET_ACCESS_KEY={SECRET_KEY}"),
    ];
    let device = "volume:///v0?path=s3://vol/pool&pool_size=4G&size=1G&ack=object";
    postgres_finds_what_it_committed(device, &variables);
}

#[test]
fn an_object_store_of_minio_has_what_postgres_committed() {
    an_object_store_has_what_postgres_committed(S3Program::Minio);
}

#[test]
fn an_object_store_of_versitygw_has_what_postgres_committed() {
    an_object_store_has_what_postgres_committed(S3Program::Versitygw);
}

fn end(mut yard: Yard) {
    yard.signal("TERM");
    assert!(yard.end().success());
}

/// Checks that a snapshot, a clone, and everything made of them have equal bytes.
fn copies(pool: &Place) {
    let path = pool.file("pool");
    let volume = |args: &[&str]| {
        let (verb, rest) = args.split_first().unwrap();
        blockyard(&[&["volume", verb, &path], rest].concat()).ok()
    };
    volume(&["snapshot", "v0@after"]);
    volume(&["clone", "v0@after", "twin"]);
    let [stream, there, raw] = ["stream", "there", "raw"].map(|name| pool.file(name));
    volume(&["send", "v0@after", "-o", &stream]);
    blockyard(&["volume", "receive", &there, "copy", "-i", &stream]).ok();
    volume(&["export", "v0@after", &raw]);
    let [v0, twin] = ["v0", "twin"].map(|name| format!("volume:///{name}?path={path}"));
    let yard = Yard::serve(&[&v0, &twin, &format!("volume:///copy?path={there}")]);
    let same = |a: &str, b: &str| {
        ok(&["qemu-img", "compare", "-f", "raw", "-F", "raw", a, b]);
    };
    let first = yard.uri("v0");
    for other in [&yard.uri("twin"), &yard.uri("copy"), &raw] {
        same(&first, other);
    }
    end(yard);
}
