//! How a pool in an object store acknowledges syncs, and what the object store lacks, as the
//! control API and the metrics show it.

use blockyard_store::remote::{RequestTotals, UploadStatus};
use serde::{Deserialize, Serialize};

/// How a pool in an object store acknowledges syncs, and what the object store lacks.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct UploadView {
    /// What acknowledges a sync: `object`, or `local` for the log on a disk of this machine.
    pub ack: String,
    /// The bytes of the write batches that the object store lacks.
    pub lag_bytes: u64,
    /// The number of these batches.
    pub lag_batches: u64,
    /// The age of the oldest write in them.
    pub lag_ms: u64,
    /// The limit of `lag_bytes`; 0 without a local log.
    pub max_lag_bytes: u64,
    /// The limit of `lag_ms`; 0 without a local log.
    pub max_lag_ms: u64,
    /// The length of the lease, which a standby watches; 0 without one.
    #[serde(default)]
    pub lease_ms: u64,
    /// The requests since the pool was opened.
    #[serde(default)]
    pub requests: RequestsView,
    /// How often writes have waited because of the limits, since the pool was opened.
    pub waits: u64,
    /// Whether writes wait now.
    pub waiting: bool,
    /// Whether all requests wait, because the lease was not renewed in time.
    #[serde(default)]
    pub held: bool,
    /// Whether the local log could not be written. Then each sync waits for the object store until
    /// the pool is opened again.
    #[serde(default)]
    pub log_failed: bool,
    /// The files of the local log with writes that this machine has acknowledged and the pool
    /// lacks, because another machine had taken it over. They are kept aside until they are
    /// deleted.
    #[serde(default)]
    pub lost_files: u64,
    /// The bytes of these files.
    #[serde(default)]
    pub lost_bytes: u64,
    /// Since when writes may be missing, in seconds since 1970 (UTC): another machine acknowledged
    /// them by its local log, and did not upload them before this one took the pool over. Absent if
    /// none is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_since: Option<u64>,
}

/// The requests that a yard has sent to the object store of a pool, repetitions included.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct RequestsView {
    /// PUTs and pages of listings.
    pub puts: u64,
    /// Reads.
    pub gets: u64,
    /// The bytes that were sent.
    pub sent_bytes: u64,
    /// The bytes that were read.
    pub read_bytes: u64,
    /// For how long the pool has been open, in milliseconds.
    pub over_ms: u64,
}

impl From<RequestTotals> for RequestsView {
    fn from(totals: RequestTotals) -> RequestsView {
        let RequestTotals { puts, gets, sent_bytes, read_bytes, over_ms } = totals;
        RequestsView { puts, gets, sent_bytes, read_bytes, over_ms }
    }
}

impl From<UploadStatus> for UploadView {
    fn from(status: UploadStatus) -> UploadView {
        let UploadStatus { lag_bytes, lag_batches, lag_ms, max_lag_bytes, max_lag_ms, .. } = status;
        UploadView {
            ack: status.acknowledge.to_string(),
            lag_bytes,
            lag_batches,
            lag_ms,
            max_lag_bytes,
            max_lag_ms,
            lease_ms: status.lease_ms,
            requests: status.requests.into(),
            waits: status.waits,
            waiting: status.is_waiting,
            held: status.is_held,
            log_failed: status.has_log_failed,
            lost_files: status.lost.files,
            lost_bytes: status.lost.bytes,
            missing_since: status.missing_since_ms.map(|ms| ms / 1000),
        }
    }
}

impl UploadView {
    /// The counters by name, for metrics.
    pub(crate) fn counters(&self) -> [(&'static str, &'static str, u64); 1] {
        [("pool_upload_waits", "Waits of writes for the object store", self.waits)]
    }

    /// The gauges by name, for metrics.
    pub(crate) fn gauges(&self) -> [(&'static str, &'static str, u64); 6] {
        [
            ("pool_upload_lag_bytes", "Bytes that the object store lacks", self.lag_bytes),
            ("pool_upload_lag_batches", "Batches that the object store lacks", self.lag_batches),
            (
                "pool_upload_lag_seconds",
                "Age of the oldest write that the object store lacks",
                self.lag_ms / 1000,
            ),
            (
                "pool_upload_waiting",
                "1 while writes wait for the object store because of the limits of the lag",
                self.waiting.into(),
            ),
            (
                "pool_held",
                "1 while all requests wait because the lease was not renewed in time",
                self.held.into(),
            ),
            (
                "pool_upload_log_failed",
                "1 if the local log cannot be written and each sync waits for the object store",
                self.log_failed.into(),
            ),
        ]
    }
}
