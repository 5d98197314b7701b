//! A driver that others wrote (crate virtio-driver, the engine of libblkio): random requests over
//! several rings, compared with a model of the disk.
#![allow(clippy::unwrap_used)] // A test may.

mod guest;

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

use guest::{disk, plain, serve};
use virtio_driver::{VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags};
use vm_memory::{FileOffset, MmapRegion};

const DISK_BYTES: u64 = 16 << 20;
const BLOCK_BYTES: u64 = 512;
const QUEUES: usize = 2;
const DEPTH: usize = 16;
/// The longest request.
const REQUEST_BYTES: u64 = 64 << 10;
const ROUNDS: u64 = 400;

/// What a request in flight does. Its buffer is that of its number.
#[derive(Clone, Copy, Debug)]
enum Asked {
    Read { at: u64, len: u64 },
    Change,
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[test]
fn a_foreign_driver_finds_what_it_wrote() {
    for features in [
        VirtioFeatureFlags::VERSION_1,
        VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX,
    ] {
        let served = serve(disk("d", plain()));
        let path = served.path.to_str().unwrap();
        let wanted = features.bits() | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 14;
        let mut transport: Box<VirtioBlkTransport> =
            Box::new(VhostUser::new(path, wanted).unwrap());
        assert_eq!(transport.get_config().unwrap().capacity.to_native(), DISK_BYTES >> 9);
        drive(transport.as_mut(), features.contains(VirtioFeatureFlags::RING_EVENT_IDX));
    }
}

/// The driver's memory for data: a buffer for each request of a batch.
struct Buffers {
    memory: MmapRegion,
    file: File,
}

impl Buffers {
    fn new() -> Buffers {
        let bytes = (QUEUES * DEPTH) as u64 * REQUEST_BYTES;
        let file = guest::memfd(bytes);
        let place = FileOffset::new(file.try_clone().unwrap(), 0);
        Buffers { memory: MmapRegion::from_file(place, bytes as usize).unwrap(), file }
    }

    /// The buffer of a request.
    fn of(&self, queue: usize, slot: usize) -> *mut u8 {
        let at = (queue * DEPTH + slot) * REQUEST_BYTES as usize;
        // SAFETY: each slot has its own part of the mapping.
        #[expect(unsafe_code, reason = "the driver wants the addresses of mapped memory")]
        unsafe {
            self.memory.as_ptr().add(at)
        }
    }
}

type Queue<'q> = VirtioBlkQueue<'q, (usize, Asked)>;

/// Makes one random request, and changes the model as it will change the disk.
fn ask(
    queue: &mut Queue<'_>,
    random: &mut Random,
    model: &mut [u8],
    data: *mut u8,
    slot: usize,
    part: Range<u64>,
) {
    let len = BLOCK_BYTES * (1 + random.below(REQUEST_BYTES / BLOCK_BYTES));
    let at =
        part.start + BLOCK_BYTES * random.below((part.end - part.start - len) / BLOCK_BYTES + 1);
    let range = at as usize..(at + len) as usize;
    let change = (slot, Asked::Change);
    match random.below(8) {
        0..=3 => {
            model[range.clone()].fill(random.below(256) as u8);
            model[range.start] = slot as u8;
            // SAFETY: the buffer has the length of the longest request.
            #[expect(unsafe_code, reason = "as above")]
            unsafe {
                data.copy_from_nonoverlapping(model[range].as_ptr(), len as usize);
                queue.write_raw(at, data, len as usize, change).unwrap();
            }
        }
        4 => {
            model[range].fill(0);
            queue.discard(at, len, change).unwrap();
        }
        5 => {
            model[range].fill(0);
            queue.write_zeroes(at, len, slot.is_multiple_of(2), change).unwrap();
        }
        // SAFETY: as above.
        #[expect(unsafe_code, reason = "as above")]
        6 => unsafe {
            let read = (slot, Asked::Read { at, len });
            queue.read_raw(at, data, len as usize, read).unwrap();
        },
        _ => queue.flush(change).unwrap(),
    }
}

/// Takes the answers that are there, and compares what was read. Returns their number.
fn take_answers(queue: &mut Queue<'_>, model: &[u8], buffer: impl Fn(usize) -> *mut u8) -> usize {
    let done: Vec<_> = queue.completions().collect();
    for completion in &done {
        assert_eq!(completion.ret, 0, "{:?}", completion.context);
        let (slot, asked) = completion.context;
        if let Asked::Read { at, len } = asked {
            // SAFETY: the request has ended.
            #[expect(unsafe_code, reason = "as above")]
            let data = unsafe { std::slice::from_raw_parts(buffer(slot), len as usize) };
            assert!(data == &model[at as usize..(at + len) as usize], "at {at}");
        }
    }
    done.len()
}

fn drive(transport: &mut VirtioBlkTransport, has_event_idx: bool) {
    let buffers = Buffers::new();
    let (base, len) = (buffers.memory.as_ptr() as usize, buffers.memory.size());
    transport.map_mem_region(base, len, buffers.file.as_raw_fd(), 0).unwrap();
    let mut queues = Queue::setup_queues(transport, QUEUES, 64).unwrap();
    queues.iter_mut().for_each(|queue| queue.set_used_notif_enabled(true));
    let notifiers: Vec<_> = (0..QUEUES).map(|at| transport.get_submission_notifier(at)).collect();
    let calls: Vec<_> = (0..QUEUES).map(|at| transport.get_completion_fd(at)).collect();
    let mut model = vec![0_u8; DISK_BYTES as usize];
    let mut random = Random(0x1234_5678_9abc_def1);
    // Each request of a batch has a part of the disk to itself, so that the model is exact.
    let part_bytes = DISK_BYTES / (QUEUES * DEPTH) as u64;
    for _ in 0..ROUNDS {
        for (number, queue) in queues.iter_mut().enumerate() {
            for slot in 0..DEPTH {
                let start = (number * DEPTH + slot) as u64 * part_bytes;
                let (part, data) = (start..start + part_bytes, buffers.of(number, slot));
                ask(queue, &mut random, &mut model, data, slot, part);
            }
            // Without the event index the driver has no fence before it reads the device's flag, so
            // that its answer is not reliable.
            if queue.avail_notif_needed() || !has_event_idx {
                notifiers[number].notify().unwrap();
            }
        }
        for (number, queue) in queues.iter_mut().enumerate() {
            let mut left = DEPTH;
            while left > 0 {
                match take_answers(queue, &model, |slot| buffers.of(number, slot)) {
                    0 => _ = calls[number].read().unwrap(),
                    answers => left -= answers,
                }
            }
        }
    }
}
