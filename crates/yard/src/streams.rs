//! The streams that this yard produces after it has answered the requests for them, each with what
//! it is, so that an upgrade can name those that it would cut.
#![allow(clippy::disallowed_types)] // The list is control plane.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The streams that are being produced.
#[derive(Clone, Debug, Default)]
pub struct Streams(Arc<Mutex<StreamTable>>);

#[derive(Debug, Default)]
struct StreamTable {
    next: u64,
    all: BTreeMap<u64, String>,
}

/// A stream that is being produced, until this is dropped: after everything that the stream uses.
#[derive(Debug)]
pub(crate) struct OpenStream {
    streams: Streams,
    id: u64,
}

impl Streams {
    fn table(&self) -> MutexGuard<'_, StreamTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a stream; `what` is a sentence about it.
    pub(crate) fn begin(&self, what: String) -> OpenStream {
        let mut table = self.table();
        let id = table.next;
        table.next += 1;
        table.all.insert(id, what);
        OpenStream { streams: self.clone(), id }
    }

    /// What the streams are, the oldest first.
    pub(crate) fn list(&self) -> Vec<String> {
        self.table().all.values().cloned().collect()
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.streams.table().all.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_listed_until_it_ends() {
        let streams = Streams::default();
        let first = streams.begin("one".to_owned());
        let second = streams.begin("two".to_owned());
        assert_eq!(streams.list(), ["one", "two"]);
        drop(first);
        assert_eq!(streams.list(), ["two"]);
        drop(second);
        assert_eq!(streams.list(), Vec::<String>::new());
    }
}
