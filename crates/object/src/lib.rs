//! Pools on an S3-compatible object store.
//!
//! Start at [`client`]: its primitives create, swap, read, list and delete objects below a prefix.
//! Each primitive resolves an ambiguous answer by reading the object back, so that a caller learns
//! whether its own write took effect or another writer's.
//!
//! [`location`] has the URI and the credentials, [`answer`] names what a store answers, and
//! [`preflight`] refuses a store whose conditional writes do not exclude a second writer.
//!
//! [`store`] is a pool's [`SegmentStore`](blockyard_store::SegmentStore) above the client, and
//! [`provider`] opens it by its URI.

pub mod answer;
mod bucket_error;
mod cache;
pub mod client;
mod compaction;
pub mod cost;
mod image;
mod journal;
mod lease;
mod local_log;
pub mod location;
mod object_reader;
pub mod preflight;
pub mod provider;
mod read_ahead;
mod reads;
mod recovery;
pub mod requests;
mod segment_reads;
pub mod store;

use std::time::Duration;

use blockyard_store::remote::MAX_LAG;

pub use bucket_error::BucketError;
pub use client::{Created, ListedObject, Object, ObjectClient, Retries, Swapped};
pub use journal::Lag;
pub use location::{Access, ObjectUri};
pub use provider::{ProvidedStore, Provider};
pub use reads::BucketReads;
pub use requests::{RequestCount, RequestKind, Requests};
pub use store::{BucketStore, Opening};

/// Why a request to an object store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// A parameter is wrong.
    #[error("invalid {field}{}: expected {wanted}", shown(.value))]
    Invalid {
        /// Which parameter.
        field: &'static str,
        /// The value, unless it may contain a secret.
        value: Option<String>,
        /// What is valid.
        wanted: String,
    },
    /// There are no credentials, or the file with them is unusable.
    #[error("cannot find credentials for the object store: {0}")]
    Credentials(String),
    /// The store answered that it does not do this. A repetition would get this answer too.
    #[error("cannot {doing}: {why}")]
    Refused {
        /// The verb and the object.
        doing: String,
        /// What the store answered.
        why: String,
    },
    /// The object ends before the part that was to be read.
    #[error("cannot {doing}: {why}")]
    Shorter {
        /// The verb and the object.
        doing: String,
        /// What the store answered.
        why: String,
    },
    /// No request succeeded before the client gave up. The write may have taken effect.
    #[error("cannot {doing}: no success in {tries} tries within {seconds} s; the last: {last}")]
    Unavailable {
        /// The verb and the object.
        doing: String,
        /// How often it was tried.
        tries: u32,
        /// For how long.
        seconds: u64,
        /// Why the last try failed.
        last: String,
    },
}

impl ObjectError {
    /// Whether the operation may succeed later without a change by the user: the store was not
    /// reachable, or overloaded.
    pub fn is_transient(&self) -> bool {
        matches!(self, ObjectError::Unavailable { .. })
    }
}

fn shown(value: &Option<String>) -> String {
    value.as_ref().map(|value| format!(" `{value}`")).unwrap_or_default()
}

/// Most uploads of batches at once that any program may use. A recovery concludes from a batch that
/// the one this many numbers before it was acknowledged.
const UPLOADS_MAX: usize = 16;

/// Limits of a pool in an object store.
#[derive(Clone, Copy, Debug)]
pub struct BucketSettings {
    /// Longest segment of a new pool, in bytes. A PUT of a whole segment must not take long.
    pub segment_bytes: u32,
    /// A batch ends without a sync after this many bytes.
    pub batch_bytes: usize,
    /// Most uploads of batches in flight, 16 at most.
    pub uploads_max: usize,
    /// Batches of this length stay as they are; shorter ones are copied into segments.
    pub keep_bytes: usize,
    /// Writes wait while batches of this many bytes are in memory.
    pub memory_bytes: u64,
    /// A compaction starts after this many bytes of batches.
    pub compact_bytes: u64,
    /// A compaction starts after this many batches: an opening reads each of them.
    pub compact_batches: u64,
    /// An object that is not needed any more is removed after this time. A process that reads the
    /// pool must read a newer manifest within it.
    pub removal_delay: Duration,
    /// A write fails, and with it the pool until it is opened again, if the object store does not
    /// take it within this time.
    pub outage_max: Duration,
    /// Most bytes of the cache.
    pub cache_bytes: u64,
    /// How a sync is acknowledged by the local log; `None`: the object store acknowledges it.
    pub local: Option<LocalAcknowledgement>,
    /// The length of the lease that an opener keeps; `None`: it has none.
    pub lease: Option<Duration>,
}

/// Limits of acknowledgements by the local log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalAcknowledgement {
    /// Most bytes of batches that the object store lacks: writes wait while there are more.
    pub lag_bytes_max: u64,
    /// A sync waits for the object store while it lacks a write that is older.
    pub lag_time_max: Duration,
    /// A batch is uploaded this time after its first write, or when it is long enough.
    pub upload_delay: Duration,
    /// An orderly close waits this long for the uploads. The clients of a live upgrade wait
    /// meanwhile, for 20 s at most. What is left stays in the log for the next opening.
    pub close_time: Duration,
}

impl LocalAcknowledgement {
    /// With another limit of the age of writes. A batch is uploaded after a quarter of it at most.
    pub fn with_lag_time_max(self, lag_time_max: Duration) -> LocalAcknowledgement {
        let upload_delay = self.upload_delay.min(lag_time_max / 4);
        LocalAcknowledgement { lag_time_max, upload_delay, ..self }
    }
}

impl Default for LocalAcknowledgement {
    fn default() -> LocalAcknowledgement {
        LocalAcknowledgement {
            lag_bytes_max: MAX_LAG.0,
            lag_time_max: Duration::from_millis(MAX_LAG.1),
            upload_delay: Duration::from_secs(1),
            close_time: Duration::from_secs(10),
        }
    }
}

impl Default for BucketSettings {
    fn default() -> BucketSettings {
        BucketSettings {
            segment_bytes: 16 << 20,
            batch_bytes: 4 << 20,
            uploads_max: UPLOADS_MAX,
            keep_bytes: 1 << 20,
            memory_bytes: 128 << 20,
            compact_bytes: 32 << 20,
            compact_batches: 1024,
            removal_delay: Duration::from_secs(600),
            outage_max: Duration::from_secs(600),
            cache_bytes: 4 << 30,
            local: None,
            lease: None,
        }
    }
}
