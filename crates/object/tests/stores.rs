//! The client, the preflight and openers that race, with stores that others wrote, MinIO and
//! versitygw, directly and through a proxy that breaks connections; boto3 says what is there.
//!
//! `make object-stores` builds the stores and runs this.
//! `BLOCKYARD_TEST_SKIP=object-stores` skips it, as `make test` does.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only whole test functions.

use std::path::PathBuf;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use blockyard_object::preflight::preflight;
use blockyard_object::{
    Access, BucketError, BucketSettings, BucketStore, Created, ObjectClient, ObjectUri, Opening,
    Retries, Swapped,
};
use blockyard_store::{SegmentFiles as _, StoreFile as _};
use blockyard_testing::http_proxy::{HttpProxy, ProxyAction};
use blockyard_testing::s3_server::{KEY_ID, S3Program, S3Server, SECRET_KEY};
use blockyard_testing::s3_witness::S3Witness;
use blockyard_testing::seed::Seed;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume_format::object::manifest::Manifest;
use bytes::Bytes;
use futures::future::{join_all, try_join_all};
use tokio::runtime::Runtime;

/// A running store with a bucket, and its witness.
struct Fixture {
    server: S3Server,
    witness: S3Witness,
    runtime: Runtime,
    _folder: TempDir,
}

const BUCKET: &str = "vol";

impl Fixture {
    fn start(program: S3Program, test: &str) -> Option<Fixture> {
        let parent = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let folder = TempDir::new(&parent, &format!("{test}-{}", program.name()));
        let server = program.start(folder.path())?;
        let witness = S3Witness::start(&server.endpoint(), BUCKET)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Some(Fixture { server, witness, runtime, _folder: folder })
    }

    fn client(&self, endpoint: &str, retries: Retries) -> ObjectClient {
        let uri = ObjectUri::parse(&format!("s3://{BUCKET}/pool")).unwrap();
        let access = Access::to_endpoint(endpoint, KEY_ID, SECRET_KEY).unwrap();
        ObjectClient::connect(&uri, &access, retries).unwrap()
    }

    fn direct(&self) -> ObjectClient {
        self.client(&self.server.endpoint(), Retries::default())
    }
}

/// Short times, so that tests of time-outs end soon.
fn hasty() -> Retries {
    Retries {
        try_time: Duration::from_secs(2),
        give_up: Duration::from_secs(60),
        pause_min: Duration::from_millis(5),
        pause_max: Duration::from_millis(200),
    }
}

fn body(text: &str) -> Bytes {
    Bytes::from(text.to_owned())
}

fn primitives(program: S3Program) {
    let Some(mut it) = Fixture::start(program, "primitives") else { return };
    let client = it.direct();
    let etag = it.runtime.block_on(async {
        assert_eq!(client.get("a/1", None).await.unwrap(), None);
        let Created::New { etag } = client.create("a/1", &body("first")).await.unwrap() else {
            panic!("a fresh name is taken")
        };
        let Created::Taken(object) = client.create("a/1", &body("other")).await.unwrap() else {
            panic!("an object was created twice")
        };
        assert_eq!((&object.bytes[..], &object.etag), (&b"first"[..], &etag));
        // The same bytes are this client's own, as after a lost answer.
        let again = client.create("a/1", &body("first")).await.unwrap();
        assert_eq!(again, Created::New { etag: etag.clone() });
        let Swapped::New { etag: second } =
            client.swap("a/1", &body("second"), &etag).await.unwrap()
        else {
            panic!("a swap with the present ETag is refused")
        };
        let Swapped::Changed(Some(object)) = client.swap("a/1", &body("x"), &etag).await.unwrap()
        else {
            panic!("a swap with a stale ETag succeeds")
        };
        assert_eq!((&object.bytes[..], &object.etag), (&b"second"[..], &second));
        let missing = client.swap("a/2", &body("x"), &etag).await.unwrap();
        assert_eq!(missing, Swapped::Changed(None));
        second
    });
    assert_eq!(it.witness.list(""), ["pool/a/1"]);
    assert_eq!(it.witness.get("pool/a/1").unwrap(), b"second");
    // boto3 changes the object: the ETag is stale.
    it.witness.put("pool/a/1", b"third");
    it.witness.put("pool/b/0", &vec![7; 100_000]);
    it.runtime.block_on(async {
        let Swapped::Changed(Some(object)) = client.swap("a/1", &body("x"), &etag).await.unwrap()
        else {
            panic!("a swap after another client's PUT succeeds")
        };
        assert_eq!(object.bytes, "third");
        let part = client.get("b/0", Some(99_990..200_000)).await.unwrap().unwrap();
        assert_eq!(part.bytes, [7; 10][..]);
        let names: Vec<String> = (0..1100).map(|at| format!("many/{at:04}")).collect();
        let empty = Bytes::new();
        for names in names.chunks(50) {
            try_join_all(names.iter().map(|name| client.put(name, &empty))).await.unwrap();
        }
        // More than one page, and more than one deletion.
        let listed = client.list("many").await.unwrap();
        assert_eq!(listed.into_iter().map(|it| it.name).collect::<Vec<_>>(), names);
        client.delete(&names).await.unwrap();
        client.delete(&["a/1", "never"]).await.unwrap();
        let left: Vec<String> =
            client.list("").await.unwrap().into_iter().map(|it| it.name).collect();
        assert_eq!(left, ["b/0"]);
    });
    assert_eq!(it.witness.list(""), ["pool/b/0"]);
    refusals(&it);
}

/// A store that cannot be used is named, and no secret is in any text.
fn refusals(it: &Fixture) {
    let connect = |uri: &str, secret: &str| {
        let access = Access::to_endpoint(&it.server.endpoint(), KEY_ID, secret).unwrap();
        ObjectClient::connect(&ObjectUri::parse(uri).unwrap(), &access, hasty()).unwrap()
    };
    for (uri, secret, expected) in [
        ("s3://vol/pool", "a-secret-that-is-wrong", "403 SignatureDoesNotMatch"),
        ("s3://other/pool", SECRET_KEY, "404 NoSuchBucket"),
    ] {
        let client = connect(uri, secret);
        it.runtime.block_on(async {
            let text = body("x");
            let get = client.get("a", None).await.unwrap_err();
            let create = client.create("a", &text).await.unwrap_err();
            let swap = client.swap("a", &text, "\"1\"").await.unwrap_err();
            let check = preflight(&client).await.unwrap_err();
            for error in [get, create, swap, check] {
                let shown = format!("{error} {error:?} {client:?}");
                assert!(shown.contains(expected), "{shown}");
                assert!(!shown.contains(secret) && !shown.contains(KEY_ID), "{shown}");
            }
        });
    }
}

fn passes_the_preflight(program: S3Program) {
    let Some(mut it) = Fixture::start(program, "preflight") else { return };
    let client = it.direct();
    let report = it.runtime.block_on(preflight(&client)).unwrap();
    assert_eq!(report.failure(), None, "{report:?}");
    assert!(it.witness.list("").is_empty());
    let requests = report.requests.total();
    let took: u64 = report.checks.iter().map(|check| check.took_ms).sum();
    eprintln!("{}: preflight: {requests} requests, {took} ms", program.name());

    // The same through a connection that breaks.
    let proxy = HttpProxy::start(&it.server.address());
    let mut rng = Seed::from_env().rng(program as u64);
    proxy.set(move |_| match rng.u32(..40) {
        0 => ProxyAction::CutBefore,
        1 => ProxyAction::CutAfter,
        2 => ProxyAction::AnswerBefore(503),
        3 => ProxyAction::AnswerAfter(500),
        _ => ProxyAction::Pass,
    });
    let client = it.client(&proxy.endpoint(), hasty());
    let report = it.runtime.block_on(preflight(&client)).unwrap();
    assert_eq!(report.failure(), None, "{report:?}");
    assert!(report.requests.create.failed + report.requests.swap.failed > 0, "{report:?}");
    assert!(it.witness.list("").is_empty());
}

/// Two clients race through proxies with each fault: one wins, and both know who.
fn races_with_faults(program: S3Program) {
    let Some(mut it) = Fixture::start(program, "races") else { return };
    let proxies = [0, 1].map(|_| HttpProxy::start(&it.server.address()));
    let retries = Retries { try_time: Duration::from_millis(300), ..hasty() };
    let clients = [0, 1].map(|at: usize| it.client(&proxies[at].endpoint(), retries));
    let late = Duration::from_millis(600);
    let actions = [
        ProxyAction::Pass,
        ProxyAction::CutBefore,
        ProxyAction::CutAfter,
        ProxyAction::AnswerBefore(503),
        ProxyAction::AnswerAfter(500),
        ProxyAction::DelayRequest(late),
        ProxyAction::DelayAnswer(late),
    ];
    let mut present = None;
    for (round, (mine, other)) in
        actions.iter().flat_map(|mine| actions.map(|other| (*mine, other))).enumerate()
    {
        // The first PUT of each client meets its action.
        for (proxy, action) in proxies.iter().zip([mine, other]) {
            let mut is_done = false;
            proxy.set(move |request| match request.method == "PUT" && !is_done {
                true => {
                    is_done = true;
                    action
                }
                false => ProxyAction::Pass,
            });
        }
        let name = format!("race/{round}");
        let bodies = [format!("mine {round}"), format!("other {round}")].map(Bytes::from);
        let racing = [0, 1].map(|at| clients[at].create(&name, &bodies[at]));
        let created = it.runtime.block_on(join_all(racing));
        let object = it.witness.get(&format!("pool/{name}")).unwrap();
        for (created, body) in created.into_iter().zip(&bodies) {
            match created.unwrap() {
                Created::New { .. } => assert_eq!(object, body[..], "{mine:?} {other:?}"),
                Created::Taken(taken) => {
                    assert_eq!(object, taken.bytes, "{mine:?} {other:?}");
                    assert_ne!(object, body[..], "{mine:?} {other:?}");
                }
            }
        }
        present = Some(object);
    }
    assert!(present.is_some());
}

/// The store is paused, killed and started again: the client goes on by itself.
fn outages(program: S3Program) {
    let Some(mut it) = Fixture::start(program, "outages") else { return };
    let proxy = HttpProxy::start(&it.server.address());
    let client = it.client(&proxy.endpoint(), hasty());
    let brief = Retries { give_up: Duration::from_millis(300), ..hasty() };
    let brief = it.client(&it.server.endpoint(), brief);
    let Fixture { server, runtime, witness, .. } = &mut it;
    runtime.block_on(client.put("a", &body("before"))).unwrap();
    // Each request says that it has come.
    let arrivals = || {
        let (sender, receiver) = std::sync::mpsc::channel();
        proxy.set(move |_| {
            _ = sender.send(());
            ProxyAction::Pass
        });
        receiver
    };

    // Of a paused store the second request comes when the first one has had no answer in time.
    server.pause();
    let arrived = arrivals();
    let created = std::thread::scope(|scope| {
        let server = &*server;
        scope.spawn(move || {
            _ = (arrived.recv(), arrived.recv());
            server.resume();
        });
        runtime.block_on(client.create("b", &body("paused")))
    });
    assert!(matches!(created.unwrap(), Created::New { .. }));

    server.kill();
    let error = runtime.block_on(brief.put("c", &body("down"))).unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert!(error.to_string().contains("Connection refused"), "{error}");
    let arrived = arrivals();
    let put = std::thread::scope(|scope| {
        scope.spawn(move || {
            _ = (arrived.recv(), arrived.recv());
            server.restart();
        });
        runtime.block_on(client.put("c", &body("after")))
    });
    put.unwrap();
    assert_eq!(witness.list("pool/"), ["pool/a", "pool/b", "pool/c"]);
    assert_eq!(witness.get("pool/b").unwrap(), b"paused");
    assert_eq!(witness.get("pool/c").unwrap(), b"after");
}

/// Openers of a pool at once.
const OPENERS: usize = 32;

/// Rounds of the race of openers; `BLOCKYARD_RACE_ROUNDS` sets another number.
fn race_rounds() -> usize {
    std::env::var("BLOCKYARD_RACE_ROUNDS").map_or(2, |rounds| rounds.parse().unwrap())
}

/// Opens the pool by a client and a runtime of its own, as a machine does.
fn open_pool(
    endpoint: &str,
    capacity_bytes: Option<u64>,
) -> Result<(BucketStore, Arc<Runtime>), BucketError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let runtime = Arc::new(runtime);
    let uri = ObjectUri::parse(&format!("s3://{BUCKET}/pool")).unwrap();
    let access = Access::to_endpoint(endpoint, KEY_ID, SECRET_KEY).unwrap();
    let client = Arc::new(ObjectClient::connect(&uri, &access, Retries::default()).unwrap());
    let request = Opening { capacity_bytes, take_over: true, ..Opening::default() };
    let pool = BucketStore::open(client, BucketSettings::default(), request, &runtime)?;
    Ok((pool, runtime))
}

/// Writes to the superblock, and syncs it.
fn write(pool: &BucketStore) -> std::io::Result<()> {
    let file = pool.open("superblock")?.expect("the pool has a superblock");
    file.write_at(0, &[&[7; 512]])?;
    file.sync()
}

/// 32 openers want the pool at once. The one with the newest epoch has it, and each of the others
/// gets an error: some when they open it, and some when they write.
fn openers_race(program: S3Program) {
    let Some(mut it) = Fixture::start(program, "openers") else { return };
    let endpoint = it.server.endpoint();
    {
        let (pool, _runtime) = open_pool(&endpoint, Some(1 << 30)).unwrap();
        pool.create("new", 512).unwrap();
        pool.rename("new", "superblock").unwrap();
        pool.sync_names().unwrap();
    }
    let (mut refused, mut fenced) = (0, 0);
    for round in 0..race_rounds() {
        let [start, all_open] = [(); 2].map(|()| Arc::new(Barrier::new(OPENERS)));
        let openers: Vec<_> = (0..OPENERS)
            .map(|_| {
                let (start, all_open) = (Arc::clone(&start), Arc::clone(&all_open));
                let endpoint = endpoint.clone();
                std::thread::spawn(move || {
                    start.wait();
                    let opened = open_pool(&endpoint, None);
                    all_open.wait();
                    let written = opened.as_ref().ok().map(|(pool, _)| (pool.epoch(), write(pool)));
                    (opened.err().map(|error| error.to_string()), written)
                })
            })
            .collect();
        let ended: Vec<_> = openers.into_iter().map(|it| it.join().unwrap()).collect();
        let newest = Manifest::parse(&it.witness.get("pool/manifest").unwrap()).unwrap().epoch;
        let mut winners = 0;
        for (error, written) in ended {
            match (error, written) {
                (Some(error), _) => {
                    let expected = "another process has just opened the pool";
                    assert!(error.starts_with(expected), "round {round}: {error}");
                    refused += 1;
                }
                (None, Some((epoch, Ok(())))) => {
                    assert_eq!(epoch, newest, "round {round}");
                    winners += 1;
                }
                (None, Some((epoch, Err(error)))) => {
                    let error = error.to_string();
                    let expected = "another opener has taken over the pool: ";
                    assert!(error.starts_with(expected), "round {round}: {error}");
                    assert!(epoch < newest, "round {round}: the newest opener was refused");
                    fenced += 1;
                }
                (None, None) => unreachable!("an opener has an error or a pool"),
            }
        }
        assert_eq!(winners, 1, "round {round}");
    }
    eprintln!("{}: {refused} openers were refused, {fenced} when they wrote", program.name());
}

macro_rules! for_each_store {
    ($($test:ident)*) => {
        mod minio {
            $(#[test] fn $test() { super::$test(super::S3Program::Minio); })*
        }
        mod versitygw {
            $(#[test] fn $test() { super::$test(super::S3Program::Versitygw); })*
        }
    };
}

for_each_store! { primitives passes_the_preflight races_with_faults openers_race outages }
