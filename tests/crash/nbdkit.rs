//! A failing disk made of other projects' programs: nbdkit, mounted as a file by nbdfuse, with the
//! kernel's ext4 on it.

use std::fs;
use std::process::{Child, Stdio};

use crate::attach::{FileSystem, Loop, unmount_lazily};
use crate::client::Client;
use crate::history::{History, PAGE};
use crate::place::Place;
use crate::run::{bounded_by, ok, run};
use crate::workload::{End, Workload};
use crate::yard::Yard;

const VOLUME_BYTES: u64 = 8 << 20;

/// A disk in nbdkit's memory, as a file. Dropping it ends both programs.
struct Disk {
    nbdfuse: Child,
    dir: String,
    place: Place,
}

impl Disk {
    fn new() -> Disk {
        let place = Place::new();
        let (dir, ready) = (place.file("disk"), place.file("ready"));
        fs::create_dir(&dir).unwrap();
        let trigger = format!("error-pwrite-file={}", place.file("broken"));
        let nbdkit = ["nbdkit", "-s", "--exit-with-parent", "--filter=error", "memory", "512M"];
        let faults = ["error=EIO", "error-pwrite-rate=100%", &trigger];
        let line = [&["nbdfuse", "-P", &ready, &dir, "--command"], &nbdkit[..], &faults].concat();
        let mut command = bounded_by(300, &line);
        let nbdfuse = command.stdout(Stdio::null()).spawn().unwrap();
        let disk = Disk { nbdfuse, dir, place };
        let pid = disk.nbdfuse.id();
        let wait = format!(
            "until [ -s {ready} ]; do kill -0 {pid} && read -t 0.02 <> <(:); \
                            [ $? -gt 128 ] || exit 1; done"
        );
        run(&["bash", "-c", &wait]).ok();
        disk
    }

    fn file(&self) -> String {
        format!("{}/nbd", self.dir)
    }

    /// From now on every write fails, or none does.
    fn breaks(&self, is_broken: bool) {
        let trigger = self.place.file("broken");
        if is_broken { fs::write(trigger, "").unwrap() } else { fs::remove_file(trigger).unwrap() }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        unmount_lazily(&self.dir);
        let _ = self.nbdfuse.kill();
        let _ = self.nbdfuse.wait();
    }
}

#[test]
fn errors_of_an_nbdkit_disk_are_reported_and_nothing_is_lost() {
    let disk = Disk::new();
    let device = Loop::attach(&disk.file());
    ok(&["mke2fs", "-q", "-t", "ext4", &device.0]);
    let at = disk.place.file("at");
    let mount = || FileSystem::mount("ext4", &device.0, &at);
    let serve = || Yard::serve(&[&format!("volume:///v0?path={at}/pool&size={VOLUME_BYTES}")]);
    let mounted = mount();
    let mut yard = serve();
    let mut history = History::new(VOLUME_BYTES / PAGE as u64);
    let client = Client::connect(&yard.socket(), "v0").unwrap();
    let mut workload = Workload::new(client, &mut history, 1).depth(16);
    assert!(matches!(workload.run(500), End::Done));
    disk.breaks(true);
    assert!(matches!(workload.run(u64::MAX), End::Refused(5)));
    workload.drain();
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    let mut refuses = || {
        for page in 0..10 {
            client.write(page, page * PAGE as u64, &[1; PAGE], page % 2 == 0).unwrap();
            assert_eq!(client.answer().unwrap().error, 5);
            assert_eq!(client.flush().unwrap().error, 5);
        }
    };
    refuses();
    // The disk works again; no program may treat the failed data as stored.
    disk.breaks(false);
    refuses();
    yard.signal("KILL");
    yard.end();
    drop(yard);
    drop(mounted);
    let mounted = mount();
    let mut yard = serve();
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    history.check(&client.contents().unwrap(), false);
    assert!(matches!(Workload::new(client, &mut history, 2).run(200), End::Done));
    yard.signal("TERM");
    assert!(yard.end().success());
    mounted.unmount();
    device.detach();
}
