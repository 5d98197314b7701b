//! Reads of segments: from memory, from the cache, and from the object store.

use std::io;
use std::ops::Range;

use blockyard_volume_format::object::ObjectId;
use tokio::runtime::Runtime;

use crate::journal::{Journal, Located};
use crate::object_reader::{ObjectPart, ReadError};
use crate::read_ahead::StreamId;
use crate::recovery;

impl Journal {
    /// Reads a range of a segment.
    ///
    /// # Errors
    /// If the journal has ended, or the object store does not return an object.
    pub(crate) fn read_segment(
        &self,
        runtime: &Runtime,
        (segment, offset): (u32, u32),
        into: &mut [u8],
    ) -> io::Result<()> {
        let stream = self.streams.add(segment, offset, into.len());
        let mut rest = into;
        for located in self.locate(segment, offset, rest.len() as u32)? {
            let len = match &located {
                Located::Zeros(len) | Located::Object(_, _, len) => *len,
                Located::Memory(bytes) => bytes.len(),
                Located::Copied(bytes) => bytes.len(),
            };
            let (part, after) = rest.split_at_mut(len);
            match located {
                Located::Zeros(_) => part.fill(0),
                Located::Memory(bytes) => part.copy_from_slice(&bytes),
                Located::Copied(bytes) => part.copy_from_slice(&bytes),
                Located::Object(object, at, _) => {
                    self.read_object(runtime, (object, at), part, stream)?;
                }
            }
            rest = after;
        }
        Ok(())
    }

    /// Reads a range of an object, from the cache or from the object store, for a read of a stream.
    fn read_object(
        &self,
        runtime: &Runtime,
        (object, at): (ObjectId, u32),
        into: &mut [u8],
        stream: StreamId,
    ) -> io::Result<()> {
        if let Some(cache) = &self.cache
            && cache.read(object, at, into)
        {
            return Ok(());
        }
        let (from, to) = (u64::from(at), u64::from(at) + into.len() as u64);
        // Without a cache, what is read beyond the range would be lost.
        let ahead = self.cache.as_ref().map(|_| self.streams.budget(stream));
        let fetch = self.fetches.join(object, from..to, ahead);
        let wanted = fetch.range.end - fetch.range.start;
        let mut is_own = false;
        let read = runtime.block_on(fetch.read.get_or_init(|| {
            is_own = true;
            self.streams.spend(stream, wanted);
            self.fetch(object, fetch.range.clone())
        }));
        if is_own {
            // The object may end before, or not have been read.
            let len = read.as_ref().map_or(0, ObjectPart::len) as u64;
            self.streams.give_back(stream, wanted.saturating_sub(len));
            if let (Some(cache), Ok(part)) = (&self.cache, read) {
                part.intact().for_each(|(chunk, bytes)| cache.insert(object, chunk, bytes));
            }
            self.fetches.remove(&fetch);
        }
        match read.as_ref().map_err(Clone::clone).and_then(|part| part.get(from..to)) {
            Ok(bytes) => into.copy_from_slice(&bytes),
            Err(error) => return Err(self.failure().unwrap_or_else(|| error.into())),
        }
        Ok(())
    }

    /// Reads a range of an object from the object store. If the object is missing, and another
    /// process has replaced the manifest, this ends the journal: a compaction has removed the
    /// object, which is not lost.
    async fn fetch(&self, object: ObjectId, range: Range<u64>) -> Result<ObjectPart, ReadError> {
        // No longer than the client tries: each read that waits has a thread, and they are bounded.
        let read = self.reader.read(object, range).await;
        if let Err(ReadError::Missing(_)) = read {
            let known = self.state().manifest.changes;
            if let Ok(Some((manifest, _))) = recovery::manifest(&self.client).await
                && manifest.changes > known
            {
                self.fail("the pool changes while it is read: its writer has removed an object");
            }
        }
        read
    }
}
