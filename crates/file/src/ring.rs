//! A queue by io_uring: one system call submits a batch, and completions arrive in shared memory.
//!
//! The file and the locked description are registered: the kernel keeps both open until the last
//! operation of the ring has ended, even if the process is killed.
//!
//! **Syncs.** One sync of a queue is in flight at a time, and completes all flushes that waited
//! when it started. So no flush can miss an error that the kernel has reported to another one.
//! Writes that sync their own data (`RWF_DSYNC`) would take such an error too: only a block device
//! with direct I/O gets them, which has no write-backs.
#![allow(unsafe_code)] // Submissions name memory by address.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::{Batch, CompletionBatch, Due, Nanos, Op, Status};
use blockyard_sync::rcu_cell::RcuReader;
use io_uring::squeue::Entry;
use io_uring::types::{Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode};

use crate::backing::Shared;
use crate::execution::{
    Bounces, Execution, FLUSH, FUA_WRITE, FileCall, Next, is_interrupted, status_of,
};

/// Requests that one queue executes at once.
pub(crate) const DEPTH: u16 = 128;

/// The registered description that is read and written.
const DATA: Fixed = Fixed(0);
/// The registered description that has the lock, and a block device exclusively.
const LOCKED: Fixed = Fixed(1);

/// User data of a sync. Other operations have the number of their slot.
const SYNC: u64 = u64::MAX;

/// The operations that are used.
const NEEDED: [u8; 4] =
    [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];

/// Shortest and longest time until the next look for completions, in nanoseconds, for callers that
/// do not wait on the descriptor.
const LOOK_NS: (u64, u64) = (20_000, 1_000_000);

/// Longest sleep in nanoseconds. Completions end it; the bound covers an error of the wait.
const SLEEP_NS_MAX: u64 = 50_000_000;

/// The wait before a submission that the system has refused for lack of memory is repeated.
const REFUSED_WAIT: Duration = Duration::from_millis(1);

/// Opens a ring, which one thread at a time uses.
fn open(entries: u32) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_coop_taskrun().setup_taskrun_flag();
    match builder.build(entries) {
        // Linux before 5.19 does not have these flags.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        result => result,
    }
}

/// Checks that the system allows rings to this process, with all operations that are needed.
///
/// # Errors
/// The reason why not.
pub(crate) fn probe() -> io::Result<()> {
    let ring = open(4)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    if let Some(code) = NEEDED.iter().find(|code| !probe.is_supported(**code)) {
        let text = format!("the kernel does not know operation {code} of io_uring");
        return Err(io::Error::other(text));
    }
    // A wait with a timeout, since Linux 5.11.
    if ring.params().is_feature_ext_arg() {
        Ok(())
    } else {
        Err(io::Error::other("the kernel has no io_uring wait with a timeout"))
    }
}

/// A queue by io_uring.
pub struct RingQueue {
    shared: Arc<Shared>,
    /// Kept open for the ring, which has it registered.
    _file: File,
    ring: IoUring,
    is_latched: RcuReader<bool>,
    bounces: Bounces,
    slots: Box<[Option<Execution>]>,
    free: Vec<u16>,
    /// Entries that were pushed and not submitted.
    pushed: usize,
    /// Slots that wait for the next sync, and slots that the sync in flight completes.
    sync_waiting: Vec<u16>,
    syncing: Vec<u16>,
    is_syncing: bool,
    /// The rest of the last batch waits for a bounce buffer.
    blocked: bool,
    /// The owner's event loop polls the descriptor.
    listens: bool,
    /// When the oldest request began to wait, and when to look next.
    since: Nanos,
    look_at: Nanos,
}

impl RingQueue {
    pub(crate) fn new(shared: Arc<Shared>) -> io::Result<RingQueue> {
        let ring = open(DEPTH.into())?;
        let file = shared.backing.reopen()?;
        let files = [file.as_raw_fd(), shared.backing.locked().as_raw_fd()];
        ring.submitter().register_files(&files)?;
        Ok(RingQueue {
            _file: file,
            ring,
            is_latched: RcuReader::new(&shared.is_latched),
            bounces: Bounces::new(shared.backing.memory_align)?,
            slots: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH).rev().collect(),
            pushed: 0,
            sync_waiting: Vec::with_capacity(DEPTH.into()),
            syncing: Vec::with_capacity(DEPTH.into()),
            is_syncing: false,
            blocked: false,
            listens: false,
            since: Nanos(0),
            look_at: Nanos(0),
            shared,
        })
    }

    /// Requests that were started and are not complete.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    #[inline]
    pub(crate) fn room(&self) -> usize {
        if self.blocked { 0 } else { self.free.len() }
    }

    pub(crate) fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        self.blocked = false;
        if self.in_flight() == 0 {
            self.since = now;
        }
        let is_latched = **self.is_latched.get();
        while let Some(started) = batch.next() {
            if is_latched && started.op() != Op::Read {
                done.complete(started, Status::IoErr);
                continue;
            }
            if let Some(status) = self.shared.manage_zones(&started) {
                done.complete(started, status);
                continue;
            }
            let Some(slot) = self.free.pop() else {
                batch.requeue(started);
                break;
            };
            match Execution::new(started, &mut self.bounces) {
                Ok(execution) => {
                    self.slots[usize::from(slot)] = Some(execution);
                    self.advance(slot);
                }
                Err(started) => {
                    self.free.push(slot);
                    self.blocked = true;
                    batch.requeue(started);
                    break;
                }
            }
        }
        self.look(now, done);
    }

    pub(crate) fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        if self.in_flight() > 0 {
            self.look(now, done);
        }
    }

    /// Submits what was pushed, and takes completions until there are none.
    fn look(&mut self, now: Nanos, done: &mut CompletionBatch) {
        let before = self.in_flight();
        loop {
            // The kernel posts some completions only when this thread enters it.
            if self.pushed > 0 || self.ring.submission().taskrun() {
                self.enter(0, 0);
            }
            if !self.reap(done) || self.pushed == 0 {
                break;
            }
        }
        if self.in_flight() < before {
            self.since = now;
        }
        let (first, last) = LOOK_NS;
        self.look_at = now + (now.since(self.since) / 8).clamp(first, last);
    }

    /// Pushes the next operation of a slot, or lets it wait for a sync.
    fn advance(&mut self, slot: u16) {
        let Some(execution) = &self.slots[usize::from(slot)] else { return };
        if execution.wants_sync() {
            self.sync_waiting.push(slot);
            return self.sync();
        }
        let call = execution.call(&self.shared, &self.bounces);
        self.push(&entry(call).user_data(slot.into()));
    }

    /// Starts a sync, unless one is in flight.
    fn sync(&mut self) {
        if self.is_syncing || self.sync_waiting.is_empty() {
            return;
        }
        std::mem::swap(&mut self.sync_waiting, &mut self.syncing);
        self.push_sync();
    }

    fn push_sync(&mut self) {
        self.is_syncing = true;
        self.push(&opcode::Fsync::new(DATA).flags(FsyncFlags::DATASYNC).build().user_data(SYNC));
    }

    /// Pushes an entry. The submission queue has space for one of each slot, and for a sync: while
    /// one is in flight or pushed, a slot waits for it.
    fn push(&mut self, entry: &Entry) {
        // SAFETY: the memory that an entry points to belongs to the request of its slot, to the
        // slot's bounce buffer, or to the zeros in `shared`. All three stay until the operation has
        // ended: `Drop` waits for it.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("a slot has one entry at a time, and there are as many as slots");
        self.pushed += 1;
    }

    /// Takes completions. Returns whether there were any.
    fn reap(&mut self, done: &mut CompletionBatch) -> bool {
        let mut found = false;
        loop {
            let Some(entry) = self.ring.completion().next() else { return found };
            found = true;
            match entry.user_data() {
                SYNC => self.synced(entry.result(), done),
                slot => self.ended(slot as u16, entry.result(), done),
            }
        }
    }

    #[inline]
    fn ended(&mut self, slot: u16, result: i32, done: &mut CompletionBatch) {
        let Some(execution) = &mut self.slots[usize::from(slot)] else { return };
        match execution.ended(result, &self.bounces) {
            Next::Again | Next::Sync => self.advance(slot),
            Next::Done(status) => {
                if execution.loses_writes(status) {
                    // The result is 0 if the file has become shorter.
                    self.shared.latch(FUA_WRITE, status.errno());
                }
                self.complete(slot, status, done);
            }
        }
    }

    #[inline]
    fn complete(&mut self, slot: u16, status: Status, done: &mut CompletionBatch) {
        let Some(execution) = self.slots[usize::from(slot)].take() else { return };
        done.complete(execution.into_started(&mut self.bounces), status);
        self.free.push(slot);
        // There may be a bounce buffer now, so the caller offers the remaining requests again.
        self.blocked = false;
    }

    /// Completes the flushes that a sync was for, and starts the next sync.
    fn synced(&mut self, result: i32, done: &mut CompletionBatch) {
        if is_interrupted(result, true) {
            return self.push_sync();
        }
        self.is_syncing = false;
        let mut status = if result < 0 { status_of(-result) } else { Status::Ok };
        if result < 0 {
            self.shared.latch(FLUSH, -result);
        }
        // Another queue may have latched the device since this sync began.
        if **self.is_latched.get() {
            status = Status::IoErr;
        }
        while let Some(slot) = self.syncing.pop() {
            self.complete(slot, status, done);
        }
        self.sync();
    }

    /// Submits the pushed entries, and waits for `want` completions for at most `ns`.
    fn enter(&mut self, want: usize, ns: u64) {
        let result = if want == 0 {
            self.ring.submitter().submit()
        } else {
            let time = Timespec::from(Duration::from_nanos(ns));
            self.ring.submitter().submit_with_args(want, &SubmitArgs::new().timespec(&time))
        };
        let code = result.as_ref().err().and_then(io::Error::raw_os_error);
        // What the kernel did not take stays in the submission queue.
        self.pushed = self.ring.submission().len();
        let is_usual = matches!(code, None | Some(libc::EINTR | libc::ETIME | libc::EBUSY));
        if want > 0 && !is_usual {
            // The requests stay in flight, because the kernel may still use their memory.
            std::thread::sleep(REFUSED_WAIT);
        }
    }

    /// Whether `poll` would find a completion.
    pub(crate) fn is_any(&mut self) -> bool {
        if self.in_flight() == 0 {
            return false;
        }
        if self.pushed > 0 || self.ring.submission().taskrun() {
            self.enter(0, 0);
        }
        !self.ring.completion().is_empty()
    }

    pub(crate) fn due(&self) -> Due {
        // A submission that the system has refused has to be repeated.
        let looks = !self.listens || self.pushed > 0 || self.blocked;
        if looks && self.in_flight() > 0 { Due::At(self.look_at) } else { Due::Never }
    }

    /// Sleeps until there is a completion, or for `ns` nanoseconds at most.
    pub(crate) fn sleep(&mut self, ns: Option<u64>) {
        if self.in_flight() > 0 && !self.is_any() {
            self.enter(1, ns.unwrap_or(SLEEP_NS_MAX).min(SLEEP_NS_MAX));
        }
    }

    /// The descriptor of the ring, which is readable while there are completions.
    pub(crate) fn descriptor(&mut self) -> RawFd {
        self.listens = true;
        self.ring.as_raw_fd()
    }
}

/// The submission for a call.
#[inline]
fn entry(call: FileCall) -> Entry {
    match call {
        FileCall::Read { into, len, at } => {
            opcode::Read::new(DATA, into.as_ptr(), len).offset(at).build()
        }
        FileCall::Write { from, len, at, dsync } => {
            let flags = if dsync { libc::RWF_DSYNC } else { 0 };
            opcode::Write::new(DATA, from.as_ptr(), len).offset(at).rw_flags(flags).build()
        }
        FileCall::Fallocate { mode, at, len } => {
            opcode::Fallocate::new(LOCKED, len).offset(at).mode(mode.bits() as i32).build()
        }
    }
}

/// Waits for the operations in flight, because the kernel uses their memory. The channel has waited
/// for its requests already, unless it panicked.
impl Drop for RingQueue {
    fn drop(&mut self) {
        let mut done = CompletionBatch::with_capacity(DEPTH.into());
        while self.in_flight() > 0 {
            self.enter(1, SLEEP_NS_MAX);
            self.reap(&mut done);
        }
        // The kernel closes a ring up to 50 ms later. Until then its files would keep their file
        // system busy for umount.
        _ = self.ring.submitter().unregister_files();
    }
}

impl fmt::Debug for RingQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingQueue").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}
