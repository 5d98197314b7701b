//! Volume handles that are being closed. Closing waits for the answers to the handle's own records
//! only, and its writes no longer wait for space.

use std::fmt;
use std::sync::{Arc, PoisonError};

use blockyard_store::SegmentStore;
use blockyard_sync::completion_queue::CompletionQueue;

use super::Pool;
use crate::record::{Record, Reply};

/// Marks the owner of a completion queue as closing, until this is dropped.
pub(crate) struct Leaving<'a, D: SegmentStore> {
    pool: &'a Pool<D>,
    completion_queue: Arc<CompletionQueue<Reply>>,
}

impl<D: SegmentStore> Pool<D> {
    /// Marks the owner of this completion queue as closing.
    pub(crate) fn leave(&self, completion_queue: &Arc<CompletionQueue<Reply>>) -> Leaving<'_, D> {
        let completion_queue = Arc::clone(completion_queue);
        self.leaving
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::clone(&completion_queue));
        self.records.event_count().notify();
        Leaving { pool: self, completion_queue }
    }

    /// Whether any volume handle is closing.
    pub(crate) fn is_any_leaving(&self) -> bool {
        !self.leaving.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Whether the receiver of a record's answer is closing.
    pub(crate) fn is_leaving(&self, record: &Record) -> bool {
        let leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        let reply = record.reply.as_ref();
        reply.is_some_and(|reply| leaving.iter().any(|it| reply.is_to(it)))
    }
}

impl<D: SegmentStore> Drop for Leaving<'_, D> {
    fn drop(&mut self) {
        let mut leaving = self.pool.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        leaving.retain(|it| !Arc::ptr_eq(it, &self.completion_queue));
    }
}

impl<D: SegmentStore> fmt::Debug for Leaving<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leaving").finish_non_exhaustive()
    }
}
