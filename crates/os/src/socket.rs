//! Socket calls of exporters that the standard library does not offer in the needed form: receiving
//! into and sending from a region, waiting for descriptors, and sockets with an owner.
//!
//! Regions are accessed by checked ranges only.
#![allow(unsafe_code)] // Raw system calls.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use blockyard_core::Region;
use rustix::process::{Resource, getrlimit};

/// The most pieces in one system call, below the system's 1024.
const PIECES_MAX: usize = 256;

/// The descriptors that clients leave to the rest of the process, and the fraction of all that they
/// leave if there are few: a device must be able to open files although idle clients are connected.
const DESCRIPTORS_LEFT: u64 = 256;
const PART_LEFT: u64 = 4;

/// Whether a new client leaves enough descriptors to the rest of the process. The system assigns
/// the lowest free number, so all numbers below this one are in use.
pub fn leaves_descriptors(socket: impl AsFd) -> bool {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let number = u64::from(socket.as_fd().as_raw_fd().cast_unsigned());
    number < limit - (limit / PART_LEFT).min(DESCRIPTORS_LEFT)
}

/// Converts the result of a system call.
fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Repeats a call that a signal interrupted.
fn uninterrupted(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match check(call()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// The wait mode of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMode {
    /// Sleep until there are bytes.
    AnyBytes,
    /// Sleep until all bytes have arrived, or the end.
    AllBytes,
    /// Take the bytes that are there; without any `WouldBlock`.
    NonBlocking,
}

/// The address of a checked range of a region.
fn range(region: &Region, offset: u64, len: usize) -> io::Result<NonNull<u8>> {
    let outside = || io::Error::new(io::ErrorKind::InvalidInput, "range outside the region");
    region.range(offset, len as u64).ok_or_else(outside)
}

/// Receives from a socket into a region.
///
/// # Errors
/// If the system call fails, or an argument is invalid; `Interrupted` if a signal came before the
/// first byte.
pub fn recv(
    socket: impl AsFd,
    region: &Region,
    offset: u64,
    len: usize,
    mode: WaitMode,
) -> io::Result<usize> {
    let fd = socket.as_fd().as_raw_fd();
    let into = range(region, offset, len)?;
    let flags = match mode {
        WaitMode::AnyBytes => 0,
        WaitMode::AllBytes => libc::MSG_WAITALL,
        WaitMode::NonBlocking => libc::MSG_DONTWAIT,
    };
    // SAFETY: `range` checked that the bytes lie in the region, which lives through the call, and
    // there are no references to region memory.
    check(unsafe { libc::recv(fd, into.as_ptr().cast(), len, flags) })
}

/// Reads from a pipe into a region.
///
/// # Errors
/// If the system call fails, or an argument is invalid.
pub fn read(pipe: impl AsFd, region: &Region, offset: u64, len: usize) -> io::Result<usize> {
    let fd = pipe.as_fd().as_raw_fd();
    let into = range(region, offset, len)?;
    // SAFETY: as for `recv`.
    uninterrupted(|| unsafe { libc::read(fd, into.as_ptr().cast(), len) })
}

/// Receives from a descriptor of any kind into ordinary memory; sleeps until there are bytes.
///
/// # Errors
/// If the system call fails, or an argument is invalid.
pub fn read_slice(from: impl AsFd, into: &mut [u8]) -> io::Result<usize> {
    let fd = from.as_fd().as_raw_fd();
    // SAFETY: the slice is writable for its length.
    uninterrupted(|| unsafe { libc::read(fd, into.as_mut_ptr().cast(), into.len()) })
}

/// Sends ordinary memory to a socket without sleeping, and never raises a signal.
///
/// # Errors
/// If the system call fails, or an argument is invalid.
pub fn send_slice(socket: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    let fd = socket.as_fd().as_raw_fd();
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the slice is readable for its length.
    uninterrupted(|| unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), flags) })
}

/// Writes ordinary memory to a pipe.
///
/// # Errors
/// If the system call fails, or an argument is invalid.
pub fn write_slice(pipe: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    let fd = pipe.as_fd().as_raw_fd();
    // SAFETY: the slice is readable for its length.
    uninterrupted(|| unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) })
}

/// A contiguous range of bytes to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendPiece {
    /// The memory.
    pub source: PieceSource,
    /// Offset in the source.
    pub offset: u64,
    /// Length in bytes.
    pub len: usize,
}

/// The memory of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceSource {
    /// In the connection's region.
    Region,
    /// In the bytes that are passed with the pieces.
    Bytes,
}

/// The kind of descriptor to which pieces are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendMode {
    /// A pipe.
    Pipe,
    /// A socket, without sleeping: `WouldBlock` if it accepts nothing. A closed peer is an error
    /// and never a signal.
    SocketNow,
}

/// Sends pieces in order, as many as one call accepts, and returns the number of bytes sent.
///
/// # Errors
/// If the system call fails, or an argument is invalid.
pub fn send(
    to: impl AsFd,
    mode: SendMode,
    region: &Region,
    bytes: &[u8],
    pieces: &[SendPiece],
) -> io::Result<usize> {
    let fd = to.as_fd().as_raw_fd();
    let mut vector = [MaybeUninit::<libc::iovec>::uninit(); PIECES_MAX];
    let count = pieces.len().min(PIECES_MAX);
    for (slot, piece) in vector.iter_mut().zip(pieces) {
        let base = match piece.source {
            PieceSource::Region => range(region, piece.offset, piece.len)?.as_ptr(),
            PieceSource::Bytes => {
                let from = piece.offset as usize;
                let outside =
                    || io::Error::new(io::ErrorKind::InvalidInput, "piece outside its bytes");
                let slice = bytes.get(from..from + piece.len).ok_or_else(outside)?;
                slice.as_ptr().cast_mut()
            }
        };
        slot.write(libc::iovec { iov_base: base.cast(), iov_len: piece.len });
    }
    let vector = vector.as_mut_ptr().cast::<libc::iovec>();
    let flags = match mode {
        SendMode::Pipe => {
            // SAFETY: the first `count` entries are initialised above and point to memory that
            // lives through the call; the system only reads it.
            return uninterrupted(|| unsafe { libc::writev(fd, vector, count as i32) });
        }
        SendMode::SocketNow => libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
    };
    // SAFETY: a header of zeros is a valid empty one.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = vector;
    header.msg_iovlen = count;
    // SAFETY: as for `writev`; the header has no name and no control data.
    uninterrupted(|| unsafe { libc::sendmsg(fd, &raw const header, flags) })
}

/// The result of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// The descriptor is ready, or at its end.
    Yes,
    /// The wake was raised.
    Woken,
    /// The time is up.
    No,
}

/// The event to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Bytes to read, or the end.
    Readable,
    /// Room to write, or the end.
    Writable,
}

/// Waits until a descriptor is ready, a wake is raised, or the time is up.
///
/// # Errors
/// If the system call fails, or an argument is invalid.
pub fn wait(
    fd: impl AsFd,
    interest: Interest,
    wake: Option<&Wake>,
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let events = match interest {
        Interest::Readable => libc::POLLIN,
        Interest::Writable => libc::POLLOUT,
    };
    let entry = |fd: BorrowedFd<'_>| libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    let mut entries = [entry(fd.as_fd()), entry(fd.as_fd())];
    let mut count = 1;
    if let Some(wake) = wake {
        entries[1] = entry(wake.0.as_fd());
        entries[1].events = libc::POLLIN;
        count = 2;
    }
    poll(&mut entries[..count], timeout)?;
    Ok(match entries {
        [_, wake] if count == 2 && wake.revents != 0 => Ready::Woken,
        [entry, _] if entry.revents != 0 => Ready::Yes,
        _ => Ready::No,
    })
}

/// Waits until a descriptor is readable or at its end, or another one is, or the time is up. A wake
/// counts only if neither is ready.
///
/// # Errors
/// If the system call fails, or an argument is invalid.
pub fn wait_either(
    fd: impl AsFd,
    other: Option<RawFd>,
    wake: Option<&Wake>,
    timeout: Duration,
) -> io::Result<Ready> {
    let entry = |fd: RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // A descriptor of -1 is ignored by the kernel.
    let wake = wake.map_or(-1, |wake| wake.0.as_fd().as_raw_fd());
    let fd = fd.as_fd().as_raw_fd();
    let mut entries = [entry(wake), entry(fd), entry(other.unwrap_or(-1))];
    poll(&mut entries, Some(timeout))?;
    let [wake, fds @ ..] = entries.map(|entry| entry.revents != 0);
    Ok(match fds.contains(&true) {
        true => Ready::Yes,
        false if wake => Ready::Woken,
        false => Ready::No,
    })
}

/// Waits until one of several descriptors has something to read, or its end, or a wake is raised.
///
/// # Errors
/// If the system call fails, or an argument is invalid.
pub fn wait_readable(fds: &[impl AsFd], wake: &Wake) -> io::Result<Ready> {
    let entry =
        |fd: BorrowedFd<'_>| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut entries = vec![entry(wake.0.as_fd())];
    entries.extend(fds.iter().map(|fd| entry(fd.as_fd())));
    poll(&mut entries, None)?;
    let mut ready = entries.iter().map(|entry| entry.revents != 0);
    Ok(match ready.next() {
        Some(true) => Ready::Woken,
        _ if ready.any(|ready| ready) => Ready::Yes,
        _ => Ready::No,
    })
}

/// Waits for one of the entries; returns without an event if a signal comes.
fn poll(entries: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().min(i32::MAX as u64) as libc::time_t,
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let count = entries.len() as libc::nfds_t;
    // SAFETY: `count` entries and the time live through the call; no signal mask is passed.
    let result = unsafe { libc::ppoll(entries.as_mut_ptr(), count, timeout, std::ptr::null()) };
    match check(result as isize) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Ok(()),
    }
}

/// An error for a client that did nothing for too long.
pub fn timed_out(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, what)
}

/// The time left until a deadline.
pub fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Reads from a socket into ordinary memory, before the deadline if there is one.
///
/// # Errors
/// If the system call fails, or an argument is invalid.
pub fn read_socket(
    socket: &OwnedFd,
    into: &mut [u8],
    deadline: Option<Instant>,
) -> io::Result<usize> {
    if let Some(deadline) = deadline
        && wait(socket, Interest::Readable, None, Some(left(deadline)))? != Ready::Yes
        && left(deadline).is_zero()
    {
        return Err(timed_out("the client said nothing for too long"));
    }
    read_slice(socket, into)
}

/// Writes to a socket from ordinary memory, before the deadline if there is one; calls `full`
/// before it sleeps.
///
/// # Errors
/// If the system call fails, or an argument is invalid.
pub fn write_socket(
    socket: &OwnedFd,
    bytes: &[u8],
    deadline: Option<Instant>,
    full: &mut dyn FnMut(),
) -> io::Result<usize> {
    loop {
        match send_slice(socket, bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => full(),
            result => return result,
        }
        if deadline.is_some_and(|deadline| left(deadline).is_zero()) {
            return Err(timed_out("the client did not read for too long"));
        }
        wait(socket, Interest::Writable, None, deadline.map(left))?;
    }
}

/// Whether the peer has ended its direction of a connection or reset it, or this side has shut down
/// one, also while received bytes are unread; `true` too if the system does not tell.
pub fn has_ended(socket: impl AsFd) -> bool {
    const ENDS: libc::c_short = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR;
    let fd = socket.as_fd().as_raw_fd();
    let mut entries = [libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 }];
    poll(&mut entries, Some(Duration::ZERO)).is_err() || entries[0].revents & ENDS != 0
}

/// The bytes that a socket has received and a receive would return now, without the end of the
/// stream.
///
/// # Errors
/// If the descriptor is no stream socket.
pub fn unread_bytes(socket: impl AsFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: FIONREAD writes an `int`, for which there is room.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::FIONREAD, &mut bytes) };
    check(result as isize)?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Shuts down one or both directions of a socket, for every holder of it. Does nothing to a socket
/// that has ended.
pub fn shutdown(socket: impl AsFd, how: Shutdown) {
    let how = match how {
        Shutdown::Read => libc::SHUT_RD,
        Shutdown::Write => libc::SHUT_WR,
        Shutdown::Both => libc::SHUT_RDWR,
    };
    // SAFETY: no memory is involved. A failure means that the socket has already ended.
    let _ = unsafe { libc::shutdown(socket.as_fd().as_raw_fd(), how) };
}

/// Reads an integer option of a socket; `None` if the descriptor is no socket.
fn socket_option(fd: impl AsFd, name: libc::c_int) -> Option<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the value and its length live through the call and match.
    let result = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    (result == 0).then_some(value)
}

/// The kind of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// A stream socket of the unix family.
    Unix,
    /// A stream socket of an internet family.
    Inet,
    /// A socket of another kind.
    OtherSocket,
    /// No socket.
    NoSocket,
}

/// The kind of a descriptor.
pub fn family(fd: impl AsFd) -> Family {
    let fd = fd.as_fd();
    let Some(domain) = socket_option(fd, libc::SO_DOMAIN) else { return Family::NoSocket };
    if socket_option(fd, libc::SO_TYPE) != Some(libc::SOCK_STREAM) {
        return Family::OtherSocket;
    }
    match domain {
        libc::AF_UNIX => Family::Unix,
        libc::AF_INET | libc::AF_INET6 => Family::Inet,
        _ => Family::OtherSocket,
    }
}

/// Whether a descriptor is a socket that listens.
pub fn is_listening(fd: impl AsFd) -> bool {
    socket_option(fd, libc::SO_ACCEPTCONN) == Some(1)
}

/// The process at the other end of a unix socket.
pub fn peer_pid(socket: impl AsFd) -> Option<i32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the structure and its length live through the call and match.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    (result == 0).then_some(peer.pid)
}

/// Sets an integer option of a socket; `false` if the system refuses.
fn set_option(
    socket: impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> bool {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the value lives through the call and its length is passed.
    unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), len) == 0 }
}

/// Requests a send buffer of this size; the system may grant less.
pub fn set_send_buffer(socket: impl AsFd, bytes: libc::c_int) {
    // Only privileged processes may exceed the system's maximum; others get up to that.
    let socket = socket.as_fd();
    if !set_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, bytes) {
        set_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, bytes);
    }
}

/// Sets the timeout of sends and receives, which then return `WouldBlock`.
pub fn set_timeouts(socket: impl AsFd, time: Duration) {
    let value = libc::timeval {
        tv_sec: time.as_secs() as libc::time_t,
        tv_usec: time.subsec_micros().into(),
    };
    let fd = socket.as_fd().as_raw_fd();
    let len = size_of::<libc::timeval>() as libc::socklen_t;
    for name in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        // SAFETY: the value lives through the call and its length is passed. A socket without the
        // option works too.
        let _ =
            unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, name, (&raw const value).cast(), len) };
    }
}

/// Has the kernel probe a silent TCP peer after a minute, and give it up after another. Otherwise
/// the connection of a host that lost its power would remain for ever.
pub fn keep_alive(socket: impl AsFd) {
    let socket = socket.as_fd();
    set_option(socket, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 60);
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 10);
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 6);
}

/// The most clients that wait to be accepted.
const BACKLOG: libc::c_int = 128;

/// The buffer for an entry of the user or group database, which may be long: a group has members.
const ENTRY_BYTES: usize = 64 << 10;

/// A stream socket of the unix family, bound at a path whose file has `mode`, less the umask. It
/// does not listen yet.
///
/// # Errors
/// If the system call fails, or an argument is invalid.
pub fn bind_unix(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    check(fd as isize)?;
    // SAFETY: the descriptor is new and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // Linux gives the file the mode of the socket. SAFETY: no memory is involved.
    check(unsafe { libc::fchmod(fd, mode as libc::mode_t) } as isize)?;
    let mut address =
        libc::sockaddr_un { sun_family: libc::AF_UNIX as libc::sa_family_t, sun_path: [0; 108] };
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    let len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address lives through the call and its length is passed.
    check(unsafe { libc::bind(fd, (&raw const address).cast(), len) } as isize)?;
    Ok(socket)
}

/// Lets clients connect to a bound socket.
///
/// # Errors
/// If the system call fails, or an argument is invalid.
pub fn listen(socket: impl AsFd) -> io::Result<()> {
    // SAFETY: no memory is involved.
    check(unsafe { libc::listen(socket.as_fd().as_raw_fd(), BACKLOG) } as isize)?;
    Ok(())
}

/// The number of a user, given by name or number; `None` if there is no such user.
pub fn user_id(name: &str) -> Option<u32> {
    if let Ok(id) = name.parse() {
        return Some(id);
    }
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; ENTRY_BYTES];
    let mut entry = MaybeUninit::<libc::passwd>::uninit();
    let mut found = std::ptr::null_mut();
    // SAFETY: the name ends with NUL, the buffer is writable for its length, and all of them live
    // through the call.
    let result = unsafe {
        libc::getpwnam_r(
            name.as_ptr(),
            entry.as_mut_ptr(),
            buffer.as_mut_ptr(),
            buffer.len(),
            &raw mut found,
        )
    };
    // SAFETY: success with a result means that the entry was written.
    (result == 0 && !found.is_null()).then(|| unsafe { entry.assume_init() }.pw_uid)
}

/// The number of a group, given by name or number; `None` if there is no such group.
pub fn group_id(name: &str) -> Option<u32> {
    if let Ok(id) = name.parse() {
        return Some(id);
    }
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; ENTRY_BYTES];
    let mut entry = MaybeUninit::<libc::group>::uninit();
    let mut found = std::ptr::null_mut();
    // SAFETY: as in `user_id`.
    let result = unsafe {
        libc::getgrnam_r(
            name.as_ptr(),
            entry.as_mut_ptr(),
            buffer.as_mut_ptr(),
            buffer.len(),
            &raw mut found,
        )
    };
    // SAFETY: as in `user_id`.
    (result == 0 && !found.is_null()).then(|| unsafe { entry.assume_init() }.gr_gid)
}

/// A flag that wakes a sleeping thread.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl AsFd for Wake {
    /// The descriptor, which is readable while the flag is raised.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Wake {
    /// A flag that is not raised.
    ///
    /// # Errors
    /// If the system call fails, or an argument is invalid.
    pub fn new() -> io::Result<Wake> {
        // SAFETY: no memory is involved.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        check(fd as isize)?;
        // SAFETY: the descriptor is new and has no other owner.
        Ok(Wake(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Lowers the flag.
    pub fn lower(&self) {
        let mut count: u64 = 0;
        // SAFETY: the eight bytes live through the call. It fails only when the flag is lowered.
        let _ = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }

    /// Raises the flag until it is lowered.
    pub fn raise(&self) {
        let one: u64 = 1;
        // SAFETY: the eight bytes live through the call. It fails only when the counter would
        // overflow, and then the flag is already raised.
        let _ = unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}
