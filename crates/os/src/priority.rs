//! The priority of threads that compute in the background.

/// The increment of the nice value. A thread with it gets about a tenth of a processor that another
/// thread wants too.
const NICE: i32 = 10;

/// Lets other threads of this machine run before this one. After a failure it has its priority as
/// before.
pub fn lower_priority() {
    // On Linux the nice value is that of the thread.
    let _ = rustix::process::nice(NICE);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_priority_of_this_thread_alone_is_lowered() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let before = nice();
        let lowered = std::thread::spawn(move || {
            lower_priority();
            nice()
        });
        assert_eq!(lowered.join().unwrap(), (before + NICE).min(19));
        assert_eq!(nice(), before);
    }
}
