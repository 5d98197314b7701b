//! The crier: wakes for the committer those who wait for a group, where they are many. Each of them
//! costs a system call, and the next group could be on its way meanwhile.
//!
//! There is one list, which goes to the crier and comes back: as long as it has not, the committer
//! wakes everybody by itself.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use blockyard_sync::mailbox::{Mailbox, Owner};

use crate::record::Reply;

/// Who is to be woken.
pub(super) type Names = Vec<Arc<Mailbox<Reply>>>;

/// So many are woken by the crier; fewer are awake sooner without it.
pub(super) const MANY: usize = 6;

/// So many of them the committer wakes itself, while the crier wakes up.
const FIRST: usize = 2;

/// Longest sleep before another look.
const LOOK: Duration = Duration::from_secs(1);

/// Wakes everybody of a list, which is empty then.
pub(super) fn ring(names: &mut Names) {
    for name in names.drain(..) {
        name.bell().ring();
    }
}

/// See the module.
pub(super) struct Crier {
    /// Nothing more comes behind a list that is not there.
    to: Arc<Mailbox<Option<Names>>>,
    back: Owner<Names>,
    thread: Option<JoinHandle<()>>,
}

impl Crier {
    /// A crier with its thread.
    ///
    /// # Errors
    /// If the system refuses the thread.
    pub(super) fn start() -> io::Result<Crier> {
        // The list, and the end.
        let mut mail: Owner<Option<Names>> = Mailbox::open(2);
        let back: Owner<Names> = Mailbox::open(1);
        let (to, home) = (Arc::clone(mail.mailbox()), Arc::clone(back.mailbox()));
        home.post([Names::new()].into_iter());
        let builder = std::thread::Builder::new().name("volume-crier".to_owned());
        let run = move || {
            loop {
                match mail.take() {
                    Some(Some(mut names)) => {
                        ring(&mut names);
                        home.post([names].into_iter());
                    }
                    Some(None) => return,
                    None => mail.mailbox().bell().sleep(LOOK, || mail.is_any()),
                }
            }
        };
        Ok(Crier { to, back, thread: Some(builder.spawn(run)?) })
    }

    /// Wakes everybody of a list, which is empty then.
    pub(super) fn cry(&mut self, names: &mut Names) {
        if names.len() >= MANY
            && let Some(mut empty) = self.back.take()
        {
            empty.extend(names.drain(FIRST..));
            self.to.post([Some(empty)].into_iter());
            self.to.bell().ring();
        }
        ring(names);
    }
}

impl Drop for Crier {
    fn drop(&mut self) {
        self.to.post([None].into_iter());
        self.to.bell().ring();
        if let Some(thread) = self.thread.take() {
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Crier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crier").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever sleeps is woken, whether the committer does that or the crier.
    #[test]
    fn everybody_is_woken() {
        let mut crier = Crier::start().unwrap();
        for count in [1, MANY - 1, MANY, 4 * MANY] {
            for _ in 0..20 {
                let mut owners: Vec<Owner<Reply>> = (0..count).map(|_| Mailbox::open(1)).collect();
                let mut names: Names =
                    owners.iter().map(|owner| Arc::clone(owner.mailbox())).collect();
                std::thread::scope(|scope| {
                    for owner in &mut owners {
                        scope.spawn(|| {
                            while owner.take().is_none() {
                                let bell = owner.mailbox().bell();
                                bell.sleep(Duration::from_secs(3600), || owner.is_any());
                            }
                        });
                    }
                    let reply = Reply { token: 0, status: blockyard_core::Status::Ok };
                    names.iter().for_each(|name| name.post([reply].into_iter()));
                    crier.cry(&mut names);
                    assert!(names.is_empty());
                });
            }
        }
    }
}
