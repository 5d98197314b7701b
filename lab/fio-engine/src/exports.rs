//! The functions that `shim.c` calls. They turn pointers into references and errors into numbers,
//! and no panic leaves Rust.
//!
//! **The shim's promise**, on which every `SAFETY` below relies. Pointers are those that functions
//! here returned, from `blockyard_fio_job` until `blockyard_fio_end`. A job and its handles
//! (`FileHandle`) are used by one thread at a time, and never by a call inside another. Texts end
//! in NUL and live as long as the call. Arrays have the stated length. fio's buffers stay until
//! `blockyard_fio_forget` or the next `blockyard_fio_memory`, and an I/O's data lie in them.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};

use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneType};
use blockyard_core::{Op, Prio, SECTOR_BYTES, Sector, Status};

use crate::devices::{Devices, Wanted};
use crate::file_handle::{self, FileHandle, IoRequest};
use crate::job::Job;
use crate::scheduler;

/// A job's options for one of its files: `struct ask` of the shim.
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

/// A completed I/O: `struct end` of the shim.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct End {
    io_u: *mut c_void,
    error: c_int,
}

/// A zone: `struct row` of the shim. In bytes, with Linux's numbers for type and condition.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ZoneRow {
    start: u64,
    wp: u64,
    len: u64,
    capacity: u64,
    kind: c_uint,
    cond: c_uint,
}

impl Ask {
    /// Prints a line for fio's user.
    fn say(&self, line: &str) {
        let line = line.replace(['\0', '\n'], " ");
        let line = CString::new(line).expect("it has no NUL any more");
        (self.say)(line.as_ptr());
    }
}

/// The text at a pointer, `None` for NULL.
///
/// # Safety
/// The pointer is NULL or points to a text that lives for `'a`.
unsafe fn text<'a>(pointer: *const c_char) -> Option<std::borrow::Cow<'a, str>> {
    // SAFETY: by this function's own contract.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy())
}

/// Runs `body`; if it panics, returns `broken`. The panic has been printed by then.
#[inline(always)]
fn guard<T>(broken: T, body: impl FnOnce() -> T) -> T {
    // Only the state of a job can be left inconsistent: see `guard_job` and `guard_handle`.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(broken)
}

/// Runs `body` for the I/O of a job. A panic closes all handles of the job permanently, because fio
/// goes on asking for the I/Os in flight.
#[inline(always)]
fn guard_job<T>(job: &mut Job, broken: T, body: impl FnOnce(&mut Job) -> T) -> T {
    catch_unwind(AssertUnwindSafe(|| body(job))).unwrap_or_else(|_| {
        job.give_up();
        broken
    })
}

/// Runs `body` for one handle. After a panic the next call of its job finds the handle broken.
#[inline(always)]
fn guard_handle<T>(
    handle: &mut FileHandle,
    broken: T,
    body: impl FnOnce(&mut FileHandle) -> T,
) -> T {
    catch_unwind(AssertUnwindSafe(|| body(handle))).unwrap_or_else(|_| {
        // A channel in which a panic occurred may panic again on drop.
        guard((), || handle.give_up());
        broken
    })
}

#[inline]
fn errno(status: Status) -> c_int {
    if status.is_ok() { 0 } else { status.errno() }
}

/// 0, or the negative error number.
fn answer(result: Result<(), Status>) -> c_int {
    result.map_or_else(|status| -errno(status), |()| 0)
}

/// Makes a job.
#[unsafe(no_mangle)]
extern "C" fn blockyard_fio_job() -> *mut Job {
    guard(ptr::null_mut(), || Box::into_raw(Box::default()))
}

/// Ends a job.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_end(job: *mut Job) {
    // SAFETY: the shim does not use the job after this call.
    guard((), || drop(unsafe { Box::from_raw(job) }));
}

/// A handle to the device of one of the job's files; NULL after an error, which has been printed.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_handle(job: *mut Job, ask: *const Ask) -> *mut FileHandle {
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
            Ok(disk) => job.add(FileHandle::new(disk)).as_ptr(),
            Err(error) => {
                ask.say(&error.to_string());
                ptr::null_mut()
            }
        }
    })
}

/// Opens the job's handles; not 0 after an error, which has been printed.
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

/// Forgets fio's buffers, which fio is about to free.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_forget(job: *mut Job) {
    // SAFETY: by the shim's promise.
    guard((), || unsafe { (*job).close() });
}

/// Registers fio's buffers; not 0 if the handle is not open.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_memory(
    handle: *mut FileHandle,
    base: *mut u8,
    len: u64,
) -> c_int {
    // SAFETY: by the shim's promise, the memory included.
    guard(1, || errno(unsafe { (*handle).adopt(base, len as usize) }.err().unwrap_or(Status::Ok)))
}

/// The device's length in bytes.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_size(handle: *const FileHandle) -> u64 {
    // SAFETY: by the shim's promise.
    guard(0, || unsafe { &*handle }.disk().geometry().len_bytes())
}

/// Waits for the only I/O in flight and returns its error.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_await(handle: *mut FileHandle) -> c_int {
    // SAFETY: by the shim's promise.
    let handle = unsafe { &mut *handle };
    guard_handle(handle, errno(Status::IoErr), |handle| errno(handle.await_one()))
}

/// Executes an I/O inline. Returns its error, 0 for none, or -1 if it has to be pushed.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_carry(
    handle: *mut FileHandle,
    ddir: c_uint,
    offset: u64,
    buf: *mut u8,
    len: u64,
) -> c_int {
    // An inline I/O waits in no queue, so its class does not matter.
    let asked = IoRequest { ddir, prio: Prio::BestEffort, offset, buf: buf as usize, len };
    // SAFETY: by the shim's promise.
    let handle = unsafe { &mut *handle };
    guard_handle(handle, errno(Status::IoErr), |handle| handle.carry(&asked).map_or(-1, errno))
}

/// Queues an I/O; returns an error if it is invalid.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_push(
    handle: *mut FileHandle,
    ddir: c_uint,
    offset: u64,
    buf: *mut u8,
    len: u64,
    ioprio: c_uint,
    io_u: *mut c_void,
) -> c_int {
    let asked = IoRequest { ddir, prio: file_handle::prio(ioprio), offset, buf: buf as usize, len };
    // SAFETY: by the shim's promise.
    let handle = unsafe { &mut *handle };
    guard_handle(handle, errno(Status::IoErr), |handle| {
        handle.push(&asked, io_u as u64).map_or_else(errno, |()| 0)
    })
}

/// Submits the queued I/Os.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_submit(job: *mut Job) {
    // SAFETY: by the shim's promise.
    guard_job(unsafe { &mut *job }, (), Job::submit);
}

/// Fills in `min` to `max` completed I/Os, and returns their number; below 0 if all I/Os in flight
/// fail with that error.
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
unsafe extern "C" fn blockyard_fio_zoned(handle: *const FileHandle) -> c_int {
    // SAFETY: by the shim's promise.
    guard(0, || c_int::from(unsafe { &*handle }.disk().geometry().zones.is_some()))
}

/// The limit of open, or of active, zones; 0 without a limit.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_limit(handle: *const FileHandle, active: c_int) -> c_int {
    guard(0, || {
        // SAFETY: by the shim's promise.
        let zones = &unsafe { &*handle }.disk().geometry().zones;
        let limit = |zones: &blockyard_core::geometry::ZoneGeometry| match active {
            0 => zones.open_max,
            _ => zones.active_max,
        };
        zones.as_ref().map_or(0, limit) as c_int
    })
}

/// Reports up to `max` zones, starting with the one that holds byte `from`. Returns their number,
/// or a negative error number.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_report(
    handle: *const FileHandle,
    from: u64,
    rows: *mut ZoneRow,
    max: c_uint,
) -> c_int {
    guard(-errno(Status::IoErr), || {
        let mut zones = Vec::with_capacity(max as usize);
        // SAFETY: by the shim's promise.
        let disk = unsafe { &*handle }.disk();
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

/// A zone as fio expects it. fio ends with an error at a write pointer outside of its zone, but a
/// zone that cannot be written has no write pointer; it gets the zone's start.
fn row(zone: &ZoneInfo) -> ZoneRow {
    let no_wp = matches!(zone.cond, ZoneCond::ReadOnly | ZoneCond::Offline);
    let wp = if no_wp { zone.start } else { zone.wp };
    ZoneRow {
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

/// Resets or finishes the sequential zones of a range.
///
/// # Safety
/// See the head of this file.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_manage(
    handle: *mut FileHandle,
    finish: c_int,
    from: u64,
    len: u64,
) -> c_int {
    let op = if finish == 0 { Op::ZoneReset } else { Op::ZoneFinish };
    // SAFETY: by the shim's promise.
    guard(-errno(Status::IoErr), || answer(unsafe { (*handle).manage(op, from, len) }))
}

/// Writes bytes that are not in fio's buffers.
///
/// # Safety
/// See the head of this file; `buf` has `len` bytes, which do not change during the call.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockyard_fio_write(
    handle: *mut FileHandle,
    offset: u64,
    buf: *const u8,
    len: u64,
) -> c_int {
    guard(-errno(Status::IoErr), || {
        let Some(buf) = NonNull::new(buf.cast_mut()) else { return -errno(Status::Inval) };
        // SAFETY: by this function's own contract.
        let bytes = unsafe { std::slice::from_raw_parts(buf.as_ptr(), len as usize) };
        // SAFETY: by the shim's promise.
        answer(unsafe { (*handle).write(offset, bytes) })
    })
}

/// Drops every device at the end of the process.
#[unsafe(no_mangle)]
extern "C" fn blockyard_fio_exit() {
    guard((), || Devices::of_process().clear());
}

/// Returns fio's table of hooks; fio looks this symbol up.
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
    // SAFETY: by this function's own contract; the table itself is not accessed.
    unsafe { table.write(&raw mut blockyard_fio_table) };
}
