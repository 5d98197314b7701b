//! Zoned devices in files, and volumes, on a disk that fails a sync: completed writes may be lost,
//! so an upgrade does not open the device again under its clients, whose next flush would succeed.

use crate::client::{Answer, Client};
use crate::disk::Fault;
use crate::history::PAGE;
use crate::mounted::Mounted;
use crate::yard::Yard;

const EIO: u32 = 5;

/// The device of each kind, without the place of its files, and what has failed when it is latched.
const DEVICES: [(&str, &str); 3] = [
    ("null:///d0?zoned=1&size=16M&zone_size=1M&backing=", "a write or a sync of its files"),
    ("smr:///d0?size=16M&zone_size=1M&backing=", "a write or a sync of its files"),
    ("volume:///d0?size=16M&path=", "a write or a sync of its pool"),
];

/// Writes the page of this number, to which the device has come, and returns the error.
fn write(client: &mut Client, page: u64) -> u32 {
    client.write(page, page * PAGE as u64, &[page as u8 + 1; PAGE], false).unwrap();
    let Answer { cookie, error } = client.answer().unwrap();
    assert_eq!(cookie, page);
    error
}

/// A yard with a device on a new disk, and a client with a flushed write and one that is not.
fn begin(device: &str) -> (Mounted, String, Yard, Client) {
    let mounted = Mounted::new(1);
    let device = format!("{device}{}", mounted.file("data"));
    let yard = Yard::serve(&[&device]);
    let mut client = Client::connect(&yard.socket(), "d0").unwrap();
    assert_eq!((write(&mut client, 0), client.flush().unwrap().error), (0, 0));
    assert_eq!(write(&mut client, 1), 0);
    (mounted, device, yard, client)
}

/// Asserts that the device is latched under a client that is still connected, until it is served
/// by another process.
fn is_latched(device: &str, by: &str, yard: Yard, mut client: Client) {
    let refused = yard.command(&["upgrade"]);
    assert!(refused.code == Some(6), "{refused:?}");
    assert!(refused.err.contains(&format!("`d0` cannot be opened again: {by}")), "{refused:?}");
    assert_eq!((client.flush().unwrap().error, write(&mut client, 2)), (EIO, EIO), "{device}");
    let mut page = [0; PAGE];
    client.read(0, &mut page).unwrap();
    assert_eq!(page, [1; PAGE], "{device}");
    for shows in [&["show", "d0"][..], &["list"]] {
        let shown = yard.command(shows).ok().out;
        assert!(shown.contains(&format!("latched, because {by} has failed")), "{shown}");
    }
    let (status, is_volume) = (yard.command(&["status"]), device.starts_with("volume"));
    let warning = if is_volume { "pool_read_only" } else { "device_latched d0" };
    assert!(status.code == Some(2) && status.out.contains(warning), "{status:?}");
    drop((client, yard));
    let yard = Yard::serve(&[device]);
    let mut client = Client::connect(&yard.socket(), "d0").unwrap();
    client.read(0, &mut page).unwrap();
    assert_eq!(page, [1; PAGE], "{device}: it was flushed");
    assert!(!yard.command(&["list"]).ok().out.contains("latched"), "{device}");
}

/// The bug: the new process opened the state of the last flush, and the client, which was still
/// connected, got no error for the write that was gone.
#[test]
fn device_with_a_failed_flush_is_not_handed_over() {
    for (device, by) in DEVICES {
        let (mounted, device, yard, mut client) = begin(device);
        mounted.disk().fail(Some(Fault::Sync(0)));
        assert_eq!(client.flush().unwrap().error, EIO, "{device}");
        mounted.disk().fail(None);
        is_latched(&device, by, yard, client);
    }
}

/// The bug: the old process ignored the error, and the client lost a completed write without one.
#[test]
fn device_whose_sync_fails_at_an_upgrade_stays_with_its_process() {
    for (device, by) in DEVICES {
        let (mounted, device, yard, client) = begin(device);
        mounted.disk().fail(Some(Fault::Sync(0)));
        let failed = yard.command(&["upgrade"]);
        assert!(failed.err.contains(&format!("{by} has failed")), "{failed:?}");
        assert!(!failed.err.contains("WITHOUT"), "{failed:?}");
        mounted.disk().fail(None);
        is_latched(&device, by, yard, client);
    }
}
