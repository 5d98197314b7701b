//! The functions that `shim.c` calls: pointers to references, errors to numbers, and no panic that
//! leaves Rust.
//!
//! **What the shim promises**, and every `SAFETY` below stands on. Pointers are those that it got
//! here, from `blockyard_fio_job` until `blockyard_fio_end`; a job and its doors are used by one
//! thread at a time, and in no call within a call; texts end in NUL and live as long as the call;
//! arrays have the length that is said; fio's buffers stay until `blockyard_fio_forget`, or until
//! the next `blockyard_fio_memory`, and an I/O's data lie in them.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};

use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneType};
use blockyard_core::{Op, Prio, SECTOR_BYTES, Sector, Status};

use crate::devices::{Devices, Wanted};
use crate::door::{self, Asked, Door};
use crate::job::Job;
use crate::scheduler;

/// What a job says of itself and of one of its files: `struct ask` of the shim.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Ask {
    dev: *const c_char,
    before: *const c_char,
    scheduler: *const c_char,
    file: *const c_char,
    say: extern "C" fn(*const c_char),
    depth: c_uint,
    zbd: c_uint,
    durable: c_uint,
}

/// An I/O that has ended: `struct end` of the shim.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct End {
    io_u: *mut c_void,
    error: c_int,
}

/// A zone: `struct row` of the shim. Bytes, and Linux's numbers.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Row {
    start: u64,
    wp: u64,
    len: u64,
    capacity: u64,
    kind: c_uint,
    cond: c_uint,
}

impl Ask {
    /// Tells fio's user a line.
    fn say(&self, line: &str) {
        let line = line.replace(['\0', '\n'], " ");
        let line = CString::new(line).expect("it has no NUL any more");
        (self.say)(line.as_ptr());
    }
}

/// The text at a pointer, `None` for no pointer.
///
/// # Safety
/// The pointer is NULL or a text's that lives for `'a`.
unsafe fn text<'a>(pointer: *const c_char) -> Option<std::borrow::Cow<'a, str>> {
    // SAFETY: by this function's own contract.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy())
}

/// Runs `body`; where it panics, the answer is `broken`. The panic has been printed by then.
#[inline(always)]
fn guard<T>(broken: T, body: impl FnOnce() -> T) -> T {
    // What a panic leaves half done is a job's own: see `guard_job` and `guard_door`.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(broken)
}

/// The same for what a job does with its I/O. A panic closes the job's doors for good, since fio
/// goes on asking for what is in flight.
#[inline(always)]
fn guard_job<T>(job: &mut Job, broken: T, body: impl FnOnce(&mut Job) -> T) -> T {
    catch_unwind(AssertUnwindSafe(|| body(job))).unwrap_or_else(|_| {
        job.give_up();
        broken
    })
}

/// The same for a door; the next call of its job finds it broken.
#[inline(always)]
fn guard_door<T>(door: &mut Door, broken: T, body: impl FnOnce(&mut Door) -> T) -> T {
    catch_unwind(AssertUnwindSafe(|| body(door))).unwrap_or_else(|_| {
        // A channel in whose middle something panicked may do so again on its way out.
        guard((), || door.give_up());
        broken
    })
}

#[inline]
fn errno(status: Status) -> c_int {
    if status.is_ok() { 0 } else { status.errno() }
}

/// 0, or minus the error's number.
fn answer(result: Result<(), Status>) -> c_int {
    result.map_or_else(|status| -errno(status), |()| 0)
}

/// A new job.
#[unsafe(no_mangle)]
extern "C" fn blockyard_fio_job() -> *mut Job {
    guard(ptr::null_mut(), || Box::into_raw(Box::default()))
}

/// The end of a job.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_end(job: *mut Job) {
    // SAFETY: the shim gives the job up.
    guard((), || drop(unsafe { Box::from_raw(job) }));
}

/// A door to the device of one of the job's files; NULL if it cannot be had, which was said then.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_door(job: *mut Job, ask: *const Ask) -> *mut Door {
    guard(ptr::null_mut(), || {
        // SAFETY: by the shim's promise.
        let (job, ask) = unsafe { (&mut *job, &*ask) };
        // SAFETY: by the shim's promise.
        let [dev, before, scheduler, file] =
            [ask.dev, ask.before, ask.scheduler, ask.file].map(|at| unsafe { text(at) });
        let wanted = Wanted {
            dev: dev.as_deref(),
            before: before.as_deref(),
            scheduler: scheduler.as_deref(),
            file: file.as_deref(),
            zbd: ask.zbd != 0,
        };
        match Devices::of_process().enter(&wanted, &mut |line| ask.say(line)) {
            Ok(disk) => job.add(Door::new(disk)).as_ptr(),
            Err(error) => {
                ask.say(&error.to_string());
                ptr::null_mut()
            }
        }
    })
}

/// Opens the job's doors; not 0 if one cannot be had, which was said then.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_open(job: *mut Job, ask: *const Ask) -> c_int {
    guard(1, || {
        // SAFETY: by the shim's promise.
        let (job, ask) = unsafe { (&mut *job, &*ask) };
        // SAFETY: by the shim's promise.
        let scheduler = unsafe { text(ask.scheduler) };
        let scheduler = scheduler.map(|name| scheduler::find(&name)).transpose();
        let opened = scheduler
            .map_err(|error| error.to_string())
            .and_then(|name| job.open(ask.depth as usize, ask.durable != 0, name));
        opened.map_or_else(
            |line| {
                ask.say(&line);
                1
            },
            |()| 0,
        )
    })
}

/// fio is about to free its buffers.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_forget(job: *mut Job) {
    // SAFETY: by the shim's promise.
    guard((), || unsafe { (*job).close() });
}

/// fio's buffers; not 0 if the door is not open.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_memory(door: *mut Door, base: *mut u8, len: u64) -> c_int {
    // SAFETY: by the shim's promise, the memory included.
    guard(1, || errno(unsafe { (*door).adopt(base, len as usize) }.err().unwrap_or(Status::Ok)))
}

/// The device's length in bytes.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_size(door: *const Door) -> u64 {
    // SAFETY: by the shim's promise.
    guard(0, || unsafe { &*door }.disk().geometry().len_bytes())
}

/// The error of the only I/O that was taken in.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_await(door: *mut Door) -> c_int {
    // SAFETY: by the shim's promise.
    let door = unsafe { &mut *door };
    guard_door(door, errno(Status::IoErr), |door| errno(door.await_one()))
}

/// Carries an I/O out on the spot; answers its error, 0 for none, or -1 if it has to be pushed.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_carry(
    door: *mut Door,
    ddir: c_uint,
    offset: u64,
    buf: *mut u8,
    len: u64,
) -> c_int {
    // Nothing lies between it and the device: no class goes before another.
    let asked = Asked { ddir, prio: Prio::BestEffort, offset, buf: buf as usize, len };
    // SAFETY: by the shim's promise.
    let door = unsafe { &mut *door };
    guard_door(door, errno(Status::IoErr), |door| door.carry(&asked).map_or(-1, errno))
}

/// Takes an I/O in; answers an error if it cannot be asked for.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_push(
    door: *mut Door,
    ddir: c_uint,
    offset: u64,
    buf: *mut u8,
    len: u64,
    ioprio: c_uint,
    io_u: *mut c_void,
) -> c_int {
    let asked = Asked { ddir, prio: door::prio(ioprio), offset, buf: buf as usize, len };
    // SAFETY: by the shim's promise.
    let door = unsafe { &mut *door };
    guard_door(door, errno(Status::IoErr), |door| {
        door.push(&asked, io_u as u64).map_or_else(errno, |()| 0)
    })
}

/// Starts what was taken in.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_submit(job: *mut Job) {
    // SAFETY: by the shim's promise.
    guard_job(unsafe { &mut *job }, (), Job::submit);
}

/// Fills in what has ended, from `min` to `max`, and answers how many; below 0 when all that is in
/// flight ends with that error.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_reap(
    job: *mut Job,
    ends: *mut End,
    min: c_uint,
    max: c_uint,
) -> c_int {
    // SAFETY: by the shim's promise.
    let job = unsafe { &mut *job };
    guard_job(job, -errno(Status::IoErr), |job| {
        let reaped = job.reap(min as usize, max as usize, |at, data, status| {
            // SAFETY: `at` is below `max`, the length of the array by the shim's promise.
            unsafe { ends.add(at).write(End { io_u: data as *mut c_void, error: errno(status) }) };
        });
        reaped.map_or(-errno(Status::IoErr), |count| count as c_int)
    })
}

/// Whether the device has zones.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_zoned(door: *const Door) -> c_int {
    // SAFETY: by the shim's promise.
    guard(0, || c_int::from(unsafe { &*door }.disk().geometry().zones.is_some()))
}

/// How many zones may be open, or active; 0 without a limit.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_limit(door: *const Door, active: c_int) -> c_int {
    guard(0, || {
        // SAFETY: by the shim's promise.
        let zones = &unsafe { &*door }.disk().geometry().zones;
        let limit = |zones: &blockyard_core::geometry::ZoneGeometry| match active {
            0 => zones.open_max,
            _ => zones.active_max,
        };
        zones.as_ref().map_or(0, limit) as c_int
    })
}

/// Reports up to `max` zones from the one that holds byte `from` on; answers how many, or minus
/// an error's number.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_report(
    door: *const Door,
    from: u64,
    rows: *mut Row,
    max: c_uint,
) -> c_int {
    guard(-errno(Status::IoErr), || {
        let mut zones = Vec::with_capacity(max as usize);
        // SAFETY: by the shim's promise.
        let disk = unsafe { &*door }.disk();
        if disk.report_zones(Sector(from / SECTOR_BYTES), max as usize, &mut zones).is_err() {
            return -errno(Status::Inval);
        }
        for (at, zone) in zones.iter().take(max as usize).enumerate() {
            // SAFETY: `at` is below `max`, the length of the array by the shim's promise.
            unsafe { rows.add(at).write(row(zone)) };
        }
        zones.len().min(max as usize) as c_int
    })
}

/// A zone as fio wants it. fio stops at a write pointer that lies outside its zone, but a zone that
/// cannot be written has none: there it is the zone's start.
fn row(zone: &ZoneInfo) -> Row {
    let no_wp = matches!(zone.cond, ZoneCond::ReadOnly | ZoneCond::Offline);
    let wp = if no_wp { zone.start } else { zone.wp };
    Row {
        start: zone.start.bytes(),
        wp: wp.bytes(),
        len: Sector(zone.sectors).bytes(),
        capacity: Sector(zone.capacity_sectors).bytes(),
        kind: match zone.kind {
            ZoneType::Conventional => 1,
            ZoneType::SequentialWriteRequired => 2,
        },
        cond: zone.cond as c_uint,
    }
}

/// Resets, or finishes, the sequential zones of a range.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_manage(
    door: *mut Door,
    finish: c_int,
    from: u64,
    len: u64,
) -> c_int {
    let op = if finish == 0 { Op::ZoneReset } else { Op::ZoneFinish };
    // SAFETY: by the shim's promise.
    guard(-errno(Status::IoErr), || answer(unsafe { (*door).manage(op, from, len) }))
}

/// Writes bytes that do not lie in fio's buffers.
///
/// # Safety
/// See the head of this file; `buf` has `len` bytes, which stay as they are during the call.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_write(
    door: *mut Door,
    offset: u64,
    buf: *const u8,
    len: u64,
) -> c_int {
    guard(-errno(Status::IoErr), || {
        let Some(buf) = NonNull::new(buf.cast_mut()) else { return -errno(Status::Inval) };
        // SAFETY: by this function's own contract.
        let bytes = unsafe { std::slice::from_raw_parts(buf.as_ptr(), len as usize) };
        // SAFETY: by the shim's promise.
        answer(unsafe { (*door).write(offset, bytes) })
    })
}

/// The process ends: every device goes.
#[unsafe(no_mangle)]
extern "C" fn blockyard_fio_exit() {
    guard((), || Devices::of_process().clear());
}

/// Where fio looks for the table of hooks.
///
/// # Safety
/// `table` is valid for a write.
#[cfg(fio_shim)]
#[unsafe(no_mangle)]
unsafe extern "C" fn get_ioengine(table: *mut *mut c_void) {
    unsafe extern "C" {
        /// `struct ioengine_ops`, in the shim.
        static mut blockyard_fio_table: c_void;
    }
    // SAFETY: by this function's own contract; the table itself is only pointed at.
    unsafe { table.write(&raw mut blockyard_fio_table) };
}
