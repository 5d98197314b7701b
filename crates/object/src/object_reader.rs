//! Reads parts of batches and segments from the object store, and verifies each of their chunks by
//! the checksums at the end of the object. So what is damaged in the object store comes neither
//! into the cache nor into a copy, and a damaged chunk does not keep a reader from those around it.
#![allow(clippy::disallowed_types)] // A request to an object store takes far longer than a lock.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_store::remote::NoAnswer;
use blockyard_volume_format::FormatError;
use blockyard_volume_format::object::ObjectId;
use blockyard_volume_format::object::sums::{CHUNK_BYTES, ChunkSums, END_BYTES};
use bytes::Bytes;

use crate::ObjectError;
use crate::client::ObjectClient;

/// Objects whose checksums are in memory, 4 KiB for an object of 16 MiB. One more request reads
/// those of another object.
const OBJECTS_MAX: usize = 1024;

/// Why a part of an object cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ReadError {
    /// A request failed.
    #[error("{0}")]
    Request(Arc<ObjectError>),
    /// The object is not there, or ends before the part.
    #[error("`{0}` is missing from the object store, or shorter")]
    Missing(ObjectId),
    /// The object is damaged.
    #[error("`{0}` is damaged in the object store: {1}; restore the object")]
    Damaged(ObjectId, FormatError),
}

impl From<ReadError> for io::Error {
    fn from(error: ReadError) -> io::Error {
        match error {
            ReadError::Request(error) if error.is_transient() => {
                io::Error::other(NoAnswer(error.to_string()))
            }
            error => io::Error::other(error),
        }
    }
}

impl ReadError {
    fn of_request(object: ObjectId, error: ObjectError) -> ReadError {
        match error {
            ObjectError::Shorter { .. } => ReadError::Missing(object),
            error => ReadError::Request(Arc::new(error)),
        }
    }
}

/// Chunks of an object that follow each other, each of which was verified.
#[derive(Debug)]
pub(crate) struct ObjectPart {
    object: ObjectId,
    /// The number of the first chunk.
    first: usize,
    bytes: Bytes,
    /// The damaged chunks.
    damaged: Vec<(usize, FormatError)>,
}

impl ObjectPart {
    /// The length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes of a range of the object.
    ///
    /// # Errors
    /// If one of its chunks is damaged, or the object ends before.
    pub(crate) fn get(&self, range: Range<u64>) -> Result<Bytes, ReadError> {
        let chunk_bytes = CHUNK_BYTES as u64;
        let has = |chunk: usize| {
            let start = chunk as u64 * chunk_bytes;
            start < range.end && range.start < start + chunk_bytes
        };
        if let Some((_, error)) = self.damaged.iter().find(|(chunk, _)| has(*chunk)) {
            return Err(ReadError::Damaged(self.object, error.clone()));
        }
        let first = self.first as u64 * chunk_bytes;
        let at = |offset: u64| offset.checked_sub(first).and_then(|it| usize::try_from(it).ok());
        match (at(range.start), at(range.end)) {
            (Some(from), Some(to)) if to <= self.bytes.len() => Ok(self.bytes.slice(from..to)),
            _ => Err(ReadError::Missing(self.object)),
        }
    }

    /// The intact chunks and their numbers.
    pub(crate) fn intact(&self) -> impl Iterator<Item = (u32, &[u8])> {
        let chunks = (self.first..).zip(self.bytes.chunks(CHUNK_BYTES));
        let is_damaged = |chunk: usize| self.damaged.iter().any(|(damaged, _)| *damaged == chunk);
        let intact = chunks.filter(move |(chunk, _)| !is_damaged(*chunk));
        intact.map(|(chunk, bytes)| (chunk as u32, bytes))
    }
}

/// Reads objects of one pool.
#[derive(Debug)]
pub(crate) struct ObjectReader {
    client: Arc<ObjectClient>,
    /// The mark of the pool.
    pool: u64,
    /// The checksums that were read last, the newest at the end.
    sums: Mutex<VecDeque<(ObjectId, Arc<ChunkSums>)>>,
}

impl ObjectReader {
    pub(crate) fn new(client: Arc<ObjectClient>, pool: u64) -> ObjectReader {
        ObjectReader { client, pool, sums: Mutex::default() }
    }

    /// Reads the chunks that have a range of an object, as far as its body goes.
    pub(crate) async fn read(
        &self,
        object: ObjectId,
        range: Range<u64>,
    ) -> Result<ObjectPart, ReadError> {
        let sums = self.sums(object).await?;
        let chunk_bytes = CHUNK_BYTES as u64;
        let from = range.start / chunk_bytes * chunk_bytes;
        let to = range.end.next_multiple_of(chunk_bytes).min(sums.body_bytes());
        if from >= to {
            return Err(ReadError::Missing(object));
        }
        let bytes = match self.client.get(&object.to_string(), Some(from..to)).await {
            Ok(Some(found)) if found.bytes.len() as u64 == to - from => found.bytes,
            Ok(_) => return Err(ReadError::Missing(object)),
            Err(error) => return Err(ReadError::of_request(object, error)),
        };
        let first = (from / chunk_bytes) as usize;
        let chunks = (first..).zip(bytes.chunks(CHUNK_BYTES));
        let damaged = chunks.filter_map(|(chunk, it)| Some((chunk, sums.check(chunk, it).err()?)));
        let damaged: Vec<_> = damaged.collect();
        Ok(ObjectPart { object, first, bytes, damaged })
    }

    /// The checksums of an object.
    async fn sums(&self, object: ObjectId) -> Result<Arc<ChunkSums>, ReadError> {
        let known = {
            let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
            sums.iter().rev().find(|(known, _)| *known == object).map(|(_, sums)| Arc::clone(sums))
        };
        if let Some(sums) = known {
            return Ok(sums);
        }
        let damaged = |error| ReadError::Damaged(object, error);
        let mut end = self.end(object, END_BYTES).await?;
        let len = ChunkSums::len_of(&end).map_err(damaged)?;
        if len > end.len() {
            end = self.end(object, len).await?;
        }
        let parsed = Arc::new(ChunkSums::parse(&end, self.pool, object).map_err(damaged)?);
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        if sums.len() == OBJECTS_MAX {
            sums.pop_front();
        }
        sums.push_back((object, Arc::clone(&parsed)));
        Ok(parsed)
    }

    /// The last bytes of an object.
    async fn end(&self, object: ObjectId, len: usize) -> Result<Bytes, ReadError> {
        match self.client.get_end(&object.to_string(), len as u64).await {
            Ok(Some(found)) => Ok(found.bytes),
            Ok(None) => Err(ReadError::Missing(object)),
            Err(error) => Err(ReadError::of_request(object, error)),
        }
    }
}
