//! Volume handles that are being closed. Closing waits for the answers to the handle's own records
//! only, and its writes no longer wait for space.

use std::fmt;
use std::sync::{Arc, PoisonError};

use blockyard_sync::mailbox::Mailbox;

use super::Pool;
use crate::record::{Record, Reply};
use crate::store::Directory;

/// Marks the owner of a mailbox as closing, until this is dropped.
pub(crate) struct Leaving<'a, D: Directory> {
    pool: &'a Pool<D>,
    mailbox: Arc<Mailbox<Reply>>,
}

impl<D: Directory> Pool<D> {
    /// Marks the owner of this mailbox as closing.
    pub(crate) fn leave(&self, mailbox: &Arc<Mailbox<Reply>>) -> Leaving<'_, D> {
        let mailbox = Arc::clone(mailbox);
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&mailbox));
        self.mail.bell().ring();
        Leaving { pool: self, mailbox }
    }

    /// Whether any volume handle is closing.
    pub(crate) fn is_any_leaving(&self) -> bool {
        !self.leaving.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Whether the receiver of a record's answer is closing.
    pub(crate) fn is_left(&self, record: &Record) -> bool {
        let leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        let reply = record.reply.as_ref();
        reply.is_some_and(|reply| leaving.iter().any(|it| reply.is_to(it)))
    }
}

impl<D: Directory> Drop for Leaving<'_, D> {
    fn drop(&mut self) {
        let mut leaving = self.pool.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        leaving.retain(|it| !Arc::ptr_eq(it, &self.mailbox));
    }
}

impl<D: Directory> fmt::Debug for Leaving<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leaving").finish_non_exhaustive()
    }
}
