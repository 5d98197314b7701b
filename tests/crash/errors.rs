//! Disk errors: the replies that clients get, the state of the pool afterwards, and its contents
//! when it is opened again. Also counts how often flush and FUA reach the disk.

use fastrand::Rng;

use crate::client::{Answer, Client, Command};
use crate::disk::{Counts, Fault};
use crate::history::{History, PAGE};
use crate::mounted::Mounted;
use crate::rounds::{Seed, seeds};
use crate::workload::{End, Workload};
use crate::yard::Yard;

/// The number of disks in `make test`.
const FEW: u64 = 4;

const VOLUME_BYTES: u64 = 8 << 20;
const EIO: u32 = 5;
const ENOSPC: u32 = 28;

fn serve(mounted: &Mounted, more: &str) -> Yard {
    let path = mounted.file("pool");
    Yard::serve(&[&format!("volume:///v0?path={path}&size={VOLUME_BYTES}{more}")])
}

fn kill(mut yard: Yard) {
    yard.signal("KILL");
    yard.end();
}

/// Writes a page filled with `byte`, and returns the error.
fn write(client: &mut Client, page: u64, byte: u8, fua: bool) -> u32 {
    client.write(page, page * PAGE as u64, &[byte; PAGE], fua).unwrap();
    let Answer { cookie, error } = client.answer().unwrap();
    assert_eq!(cookie, page);
    error
}

/// Asserts the state after a failed write or sync: no write is acknowledged, the disk gets no more
/// requests, and existing data can be read.
fn is_read_only(mounted: &Mounted, yard: &Yard) {
    mounted.disk().fail(None);
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    for page in 0..20 {
        assert_eq!(write(&mut client, page, 1, page % 2 == 0), EIO);
        client.send(Command::Trim, page, 0, PAGE as u32, false).unwrap();
        assert_eq!(client.answer().unwrap().error, EIO);
        assert_eq!(client.flush().unwrap().error, EIO);
    }
    client.contents().unwrap();
    let Counts { writes, syncs, .. } = mounted.disk().counts();
    assert_eq!((writes, syncs), (0, 0), "of a failed pool");
    assert!(yard.complained().contains("read-only until it is opened again"));
}

/// A disk that fails once, at any moment. Then the power may be cut before the pool is opened
/// again.
fn fails_once(seed: u64, fault: impl Fn(u64) -> Fault) {
    let seed = Seed(seed);
    let mut random = Rng::with_seed(seed.0);
    let mounted = Mounted::new(seed.0);
    let mut history = History::new(VOLUME_BYTES / PAGE as u64);
    let yard = serve(&mounted, "");
    mounted.disk().fail(Some(fault(random.u64(..60))));
    let client = Client::connect(&yard.socket(), "v0").unwrap();
    let mut workload = Workload::new(client, &mut history, seed.0);
    assert!(matches!(workload.run(u64::MAX), End::Refused(EIO)), "{seed}");
    assert!(matches!(workload.drain(), End::Done | End::Refused(EIO)), "{seed}");
    is_read_only(&mounted, &yard);
    // The end of the server changes nothing either.
    if random.bool() {
        kill(yard);
    } else {
        let mut yard = yard;
        yard.signal("TERM");
        yard.end();
    }
    let counts = mounted.disk().counts();
    assert_eq!((counts.writes, counts.syncs), (0, 0), "{seed}: the end of a failed pool");
    mounted.disk().cut();
    mounted.disk().switch_on();
    let yard = serve(&mounted, "");
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    history.check(&client.contents().unwrap(), true);
    assert!(matches!(Workload::new(client, &mut history, seed.0).run(300), End::Done), "{seed}");
}

#[test]
fn a_failed_sync_is_reported_and_never_repeated() {
    seeds(FEW).for_each(|seed| fails_once(seed, Fault::Sync));
}

#[test]
fn a_failed_write_is_reported_and_nothing_is_written_after_it() {
    seeds(FEW).for_each(|seed| fails_once(seed, Fault::Write));
}

#[test]
fn a_failed_read_is_reported_and_nothing_else_is_lost() {
    let mounted = Mounted::new(1);
    let yard = serve(&mounted, "");
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    assert_eq!(write(&mut client, 7, 7, true), 0);
    let mut page = vec![0; PAGE];
    mounted.disk().fail(Some(Fault::Read));
    let error = client.read(7 * PAGE as u64, &mut page).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(EIO as i32));
    mounted.disk().fail(None);
    client.read(7 * PAGE as u64, &mut page).unwrap();
    assert_eq!(page, [7; PAGE]);
    assert_eq!(write(&mut client, 8, 8, true), 0);
}

#[test]
fn a_disk_that_is_full_refuses_writes_and_loses_nothing() {
    let mounted = Mounted::new(1);
    let path = mounted.file("pool");
    // More data than the first segments hold.
    let yard = Yard::serve(&[&format!("volume:///v0?path={path}&size=256M&compress=none")]);
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    mounted.disk().fail(Some(Fault::Full));
    let mut bytes = vec![0; 1 << 20];
    let mut put = |client: &mut Client, at: u64| {
        Rng::with_seed(at).fill(&mut bytes);
        client.write(at, at << 20, &bytes, false).unwrap();
        client.answer().unwrap().error
    };
    let written = (0..256).find(|at| match put(&mut client, *at) {
        0 => false,
        error => {
            assert_eq!(error, ENOSPC, "at {at} MiB");
            true
        }
    });
    let written = written.expect("the disk is smaller than the volume");
    assert!(written > 0);
    assert_eq!(client.flush().unwrap().error, 0);
    let check = |client: &mut Client| {
        let (mut found, mut wanted) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        for at in 0..written {
            client.read(at << 20, &mut found).unwrap();
            Rng::with_seed(at).fill(&mut wanted);
            assert!(found == wanted, "at {at} MiB");
        }
    };
    check(&mut client);
    // With free space the pool accepts writes again.
    mounted.disk().fail(None);
    let again = (0..64).any(|_| put(&mut client, written) == 0);
    assert!(again, "there is space again");
    check(&mut client);
    kill(yard);
    mounted.disk().cut();
    mounted.disk().switch_on();
    let yard = Yard::serve(&[&format!("volume:///v0?path={path}")]);
    check(&mut Client::connect(&yard.socket(), "v0").unwrap());
}

/// Flush and FUA reach the disk. They are counted there, however the pool requests them.
#[test]
fn flush_and_fua_reach_the_disk() {
    let mounted = Mounted::new(1);
    let yard = serve(&mounted, "");
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    let reach = |counts: Counts| counts.syncs + counts.durable_writes;
    let mut before = reach(mounted.disk().counts());
    let mut data = [0; PAGE];
    // Sequential requests each need a sync of their own, and leave none of their data that a cut
    // might lose. A checkpoint may write other data at any time.
    for number in 0..100 {
        let fua = number % 2 == 0;
        Rng::with_seed(number).fill(&mut data);
        client.write(number, number * PAGE as u64, &data, fua).unwrap();
        assert_eq!(client.answer().unwrap(), Answer { cookie: number, error: 0 });
        if !fua {
            assert_eq!(client.flush().unwrap().error, 0);
        }
        let now = reach(mounted.disk().counts());
        assert!(now > before, "request {number}: {now}");
        assert!(!mounted.disk().has_unsynced(&data), "request {number}");
        before = now;
    }
    // Data that were not synced are found.
    std::fs::write(mounted.file("unsynced"), data).unwrap();
    assert!(mounted.disk().has_unsynced(&data));
    // Concurrent requests share syncs.
    mounted.disk().fail(None);
    let mut history = History::new(VOLUME_BYTES / PAGE as u64);
    let mut workload = Workload::new(client, &mut history, 1).depth(32);
    assert!(matches!(workload.run(2000), End::Done));
    assert!(matches!(workload.drain(), End::Done));
    let (asked, counts) = (workload.durable_requests, mounted.disk().counts());
    println!("{asked} requests to be durable, 32 in flight: {counts:?}");
    assert!(reach(counts) > 0 && reach(counts) < asked, "{counts:?} for {asked}");
}
