//! Interrupting a system call of another thread of this process.
//!
//! A thread that sleeps in a receive can be woken by an end of its socket, which nothing undoes, or
//! by a signal. This is the signal: its handler does nothing, and the call returns `EINTR`. The
//! signal is SIGURG, which a process without a handler ignores, so a late one harms nothing.
//!
//! A signal that arrives just before the call starts does not interrupt it. The caller repeats the
//! signal until the thread has confirmed, by other means, that it noticed.
#![allow(unsafe_code)] // Raw system calls.

use std::io;
use std::sync::OnceLock;

/// A thread of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadNumber(libc::pid_t);

impl ThreadNumber {
    /// The calling thread.
    pub fn current() -> ThreadNumber {
        // SAFETY: no memory is involved, and the call cannot fail.
        ThreadNumber(unsafe { libc::gettid() })
    }

    /// Interrupts the present system call of the thread, if it is one that can be interrupted. Does
    /// nothing if the thread has ended. Needs [`catch_interrupts`].
    pub fn interrupt(self) {
        // SAFETY: no memory is involved. The number may be that of a later thread of this process,
        // whose calls the signal may interrupt too: all of them expect that, or are within
        // `uninterrupted`.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.0, libc::SIGURG) };
    }
}

/// Makes a system call that no interrupt ends: one that has an effect outside of this process,
/// which its end would leave unknown. An interrupt that comes meanwhile is delivered after it.
pub fn uninterrupted<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: a set of zeros is a valid value, and sigemptyset makes it the empty one.
    let (mut blocked, mut before): (libc::sigset_t, libc::sigset_t) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: both sets live through the calls. The mask is that of this thread alone; the calls
    // fail for an invalid signal or way only, and these are valid.
    unsafe {
        libc::sigemptyset(&raw mut blocked);
        libc::sigaddset(&raw mut blocked, libc::SIGURG);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, &raw mut before);
    }
    let result = call();
    // SAFETY: as above; `before` has the mask that the thread had.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    result
}

extern "C" fn nothing(_signal: libc::c_int) {}

/// Installs the handler that does nothing, once in a process.
///
/// # Errors
/// If the system refuses.
pub fn catch_interrupts() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        // SAFETY: an action of zeros is a valid one without flags; without SA_RESTART a call that
        // the signal interrupts returns.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = nothing as *const () as libc::sighandler_t;
        // SAFETY: the action lives through the call, and its handler touches nothing.
        let result =
            unsafe { libc::sigaction(libc::SIGURG, &raw const action, std::ptr::null_mut()) };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        }
    });
    (*installed).map_err(io::Error::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::map_region;
    use crate::socket::{WaitMode, recv};

    #[test]
    fn a_receive_is_interrupted_and_its_socket_stays_usable() {
        catch_interrupts().unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        let (started, threads) = channel();
        let (ended, ends) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let region = map_region(4096).unwrap();
                started.send(ThreadNumber::current()).unwrap();
                ended.send(recv(here.as_fd(), &region, 0, 16, WaitMode::AnyBytes)).unwrap();
                let again = recv(here.as_fd(), &region, 0, 16, WaitMode::AnyBytes);
                ended.send(again).unwrap();
            });
            let thread = threads.recv().unwrap();
            let error = loop {
                thread.interrupt();
                if let Ok(end) = ends.recv_timeout(Duration::from_millis(1)) {
                    break end.unwrap_err();
                }
            };
            assert_eq!(error.kind(), io::ErrorKind::Interrupted);
            std::io::Write::write_all(&mut &there, b"abc").unwrap();
            // A late signal may have interrupted the second receive before the bytes came.
            let second = ends.recv().unwrap();
            assert!(
                second.as_ref().is_ok_and(|len| *len == 3)
                    || second.is_err_and(|error| error.kind() == io::ErrorKind::Interrupted)
            );
        });
    }

    #[test]
    fn an_interrupt_waits_for_the_end_of_a_call() {
        catch_interrupts().unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let region = map_region(4096).unwrap();
            let receive = || recv(here.as_fd(), &region, 0, 16, WaitMode::AnyBytes);
            let received = uninterrupted(|| {
                let thread = ThreadNumber::current();
                let interrupts = scope.spawn(move || {
                    for _ in 0..100 {
                        thread.interrupt();
                    }
                    std::io::Write::write_all(&mut &there, b"abc").unwrap();
                });
                let received = receive();
                interrupts.join().unwrap();
                thread.interrupt();
                received
            });
            assert_eq!(received.unwrap(), 3);
        });
    }
}
