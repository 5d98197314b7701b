//! The threads of a mount: started with it, and ended with it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{Builder, JoinHandle};

use fuser::{Filesystem, Session};

use crate::fuse::device::{DeviceThread, clone_queue};
use crate::fuse::ring::Prepared;
use crate::fuse::server::Server;

/// Starts the threads of a mount. With rings a single thread reads the device, for messages that
/// need no reply.
///
/// # Errors
/// If there is no memory, thread or descriptor, or the kernel refuses a ring. Threads that were
/// started end with the session, which the caller drops.
pub(crate) fn start<F: Filesystem>(
    server: &Arc<Server>,
    session: &Session<F>,
    count: usize,
    rings: Vec<Prepared>,
) -> io::Result<Vec<JoinHandle<()>>> {
    let device = session.as_fd().try_clone_to_owned()?;
    let count = if rings.is_empty() { count.max(1) } else { 1 };
    let mut threads = start_rings(server, &device, count, rings)?;
    let device = Arc::new(device);
    for seat in 0..count {
        let own = (seat > 0).then(|| clone_queue(&device)).flatten();
        let queue = own.map_or_else(|| Arc::clone(&device), Arc::new);
        let thread = DeviceThread::new(Arc::clone(server), seat, queue)?;
        threads.push(spawn(format!("files-serve-{seat}"), move || thread.serve())?);
    }
    Ok(threads)
}

/// Starts a thread for each ring, from a seat on. The kernel waits until all are registered.
fn start_rings(
    server: &Arc<Server>,
    device: &OwnedFd,
    first_seat: usize,
    rings: Vec<Prepared>,
) -> io::Result<Vec<JoinHandle<()>>> {
    let (sender, registered) = channel();
    let count = rings.len();
    let mut threads = Vec::new();
    for (index, ring) in rings.into_iter().enumerate() {
        let mut thread = ring.thread(Arc::clone(server), first_seat + index, device.try_clone()?);
        let sender = sender.clone();
        threads.push(spawn(format!("files-ring-{index}"), move || {
            let result = thread.register();
            let is_registered = result.is_ok();
            // The thread that started this one waits for the result.
            let _ = sender.send(result);
            if is_registered {
                thread.serve();
            }
        })?);
    }
    drop(sender);
    registered.iter().take(count).collect::<io::Result<()>>()?;
    Ok(threads)
}

fn spawn(name: String, serve: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    Builder::new().name(name).spawn(serve)
}
