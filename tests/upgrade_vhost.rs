//! A daemon is replaced by another process while drivers use its vhost-user sockets.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::{Child, Stdio};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use virtio_driver::{VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags};
use vm_memory::{FileOffset, MmapRegion};

use crate::place::Place;
use crate::run::{bounded_by, ok};
use crate::upgrade::{Upgradable, ends_after_state, executable};
use crate::yard::BLOCKYARD;

const BLOCK_BYTES: usize = 4096;
/// Each request takes 500 ms.
const SLOW: &str = "null:///slow?size=16M&memory_backed=1&irqmode=timer&completion_nsec=500000000";
const RAM0: &str = "ram:///ram0?size=16M";

/// The front end of a device: a driver that others wrote, with one ring and memory for one block.
struct Driver {
    queue: VirtioBlkQueue<'static, ()>,
    transport: Box<VirtioBlkTransport>,
    memory: MmapRegion,
    /// Of the memory, which the device maps too.
    _file: File,
}

impl Driver {
    fn connect(socket: &str) -> Driver {
        let features = VirtioFeatureFlags::VERSION_1.bits() | 1 << 9 | 1 << 12;
        let transport = VhostUser::new(socket, features).unwrap();
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        let file = File::from(memfd_create("data", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, BLOCK_BYTES as u64).unwrap();
        let place = FileOffset::new(file.try_clone().unwrap(), 0);
        let memory = MmapRegion::from_file(place, BLOCK_BYTES).unwrap();
        let base = memory.as_ptr() as usize;
        transport.map_mem_region(base, BLOCK_BYTES, file.as_raw_fd(), 0).unwrap();
        let mut queues = VirtioBlkQueue::setup_queues(transport.as_mut(), 1, 16).unwrap();
        Driver { queue: queues.remove(0), transport, memory, _file: file }
    }

    fn data(&mut self) -> &mut [u8] {
        // SAFETY: the mapping lives as long as `self`, and no request is in flight.
        #[expect(unsafe_code, reason = "the driver has the addresses of mapped memory")]
        unsafe {
            std::slice::from_raw_parts_mut(self.memory.as_ptr(), BLOCK_BYTES)
        }
    }

    fn notify(&self) {
        self.transport.get_submission_notifier(0).notify().unwrap();
    }

    /// Begins to write a block.
    fn begin_write(&mut self, at: u64, byte: u8) {
        self.data().fill(byte);
        // SAFETY: the memory has a block.
        #[expect(unsafe_code, reason = "as above")]
        unsafe {
            self.queue.write_raw(at, self.memory.as_ptr(), BLOCK_BYTES, ()).unwrap();
        }
        self.notify();
    }

    /// Waits for the answer.
    fn wait(&mut self) {
        let done = loop {
            if let Some(done) = self.queue.completions().next() {
                break done;
            }
            std::thread::yield_now();
        };
        assert_eq!(done.ret, 0);
    }

    fn write(&mut self, at: u64, byte: u8) {
        self.begin_write(at, byte);
        self.wait();
    }

    fn verify(&mut self, at: u64, byte: u8) {
        self.data().fill(!byte);
        // SAFETY: the memory has a block.
        #[expect(unsafe_code, reason = "as above")]
        unsafe {
            self.queue.read_raw(at, self.memory.as_ptr(), BLOCK_BYTES, ()).unwrap();
        }
        self.notify();
        self.wait();
        assert!(self.data().iter().all(|have| *have == byte), "other data at {at}");
    }
}

/// A yard with a socket for each device.
fn yard(place: Place) -> (Upgradable, [String; 2]) {
    let sockets = ["slow", "ram0"].map(|name| place.file(name));
    let places =
        [("slow", 0), ("ram0", 1)].map(|(name, at)| format!("{name}=unix:{}", sockets[at]));
    let args = [SLOW, RAM0, "--vhost", &places[0], "--vhost", &places[1]];
    (Upgradable::new(place, &args), sockets)
}

/// The connected devices.
fn connected(yard: &Upgradable) -> Vec<String> {
    let listed = yard.yard.command(&["vhost", "list", "--json"]).ok().json();
    let devices = listed.as_array().unwrap().iter().filter(|it| it["is_connected"] == true);
    devices.map(|it| it["device"].as_str().unwrap().to_owned()).collect()
}

fn begin_upgrade(yard: &Upgradable, args: &[&str]) -> Child {
    let control = yard.yard.control();
    let line = [&[BLOCKYARD, "upgrade", "--json", "--control", &control], args].concat();
    let mut command = bounded_by(60, &line);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn requests_in_flight_are_answered_and_the_socket_is_that_of_the_new_process() {
    let (mut yard, sockets) = yard(Place::new());
    let mut round = 0;
    while round < 3 {
        let mut drivers = sockets.each_ref().map(|socket| Driver::connect(socket));
        assert_eq!(connected(&yard).len(), 2);
        if round > 0 {
            drivers.iter_mut().for_each(|driver| driver.verify(0, round));
        }
        round += 1;
        drivers.iter_mut().for_each(|driver| driver.write(0, 100));
        drivers.iter_mut().for_each(|driver| driver.begin_write(0, round));
        yard.upgrade(&[]);
        drivers.iter_mut().for_each(Driver::wait);
        assert_eq!(connected(&yard), [""; 0]);
    }
    yard.end();
    for socket in sockets {
        assert!(!std::path::Path::new(&socket).exists(), "{socket} outlives the process");
    }
}

/// While the new process has everything, a request is made, and another driver connects.
#[test]
fn drivers_stay_connected_when_an_upgrade_fails() {
    let place = Place::new();
    let [program, begun, goes] = ["program", "begun", "goes"].map(|name| place.file(name));
    let wait = format!("open('{begun}', 'w').close()\nwhile not os.path.exists('{goes}'): pass\n");
    executable(&program, &ends_after_state(&wait));
    let (yard, sockets) = yard(place);
    let mut driver = Driver::connect(&sockets[1]);
    driver.write(0, 1);
    let upgrade = begin_upgrade(&yard, &["--program", &program]);
    ok(&["sh", "-c", "while [ ! -e $0 ]; do :; done", &begun]);
    driver.begin_write(0, 2);
    let socket = sockets[0].clone();
    let other = std::thread::spawn(move || {
        let mut other = Driver::connect(&socket);
        other.write(0, 3);
        other.verify(0, 3);
    });
    std::fs::write(&goes, "").unwrap();
    driver.wait();
    driver.verify(0, 2);
    other.join().unwrap();
    let said = upgrade.wait_with_output().unwrap();
    assert_eq!(said.status.code(), Some(6), "{said:?}");
    assert_eq!(yard.serving_pid(), u64::from(yard.yard.pid()));
    assert!(connected(&yard).contains(&"ram0".to_owned()));
}

/// A socket that a request has made, and one of the configuration whose device was removed.
#[test]
fn sockets_are_those_of_the_running_yard() {
    let (mut yard, sockets) = yard(Place::new());
    yard.yard.command(&["remove", "slow"]).ok();
    yard.yard.command(&["add", "null:///late?size=16M&memory_backed=1"]).ok();
    let late = yard.yard.place.file("late");
    yard.yard.command(&["vhost", "listen", "late", &format!("unix:{late}")]).ok();
    Driver::connect(&late).write(4096, 1);
    for _ in 0..2 {
        yard.upgrade(&[]);
    }
    Driver::connect(&late).verify(4096, 1);
    Driver::connect(&sockets[1]).write(0, 1);
    assert!(!std::path::Path::new(&sockets[0]).exists());
    yard.end();
    assert!(!std::path::Path::new(&late).exists(), "the socket outlives the process");
}
