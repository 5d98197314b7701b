//! Catalogue changes that need more space than is known to be free wait for one liveness scan
//! before they are refused, if unknown bytes could cover them. Nothing else waits.

use blockyard_store::SegmentStore;

use super::Committer;
use crate::clean::Cleaning;
use crate::maintenance::{RoundCommand, Stage};
use crate::record::{Body, Record};
use crate::thread::Thread;

/// Most checkpoints made for one scan: a checkpoint may fail, or the scan may be interrupted.
const TRIES: u32 = 4;

impl<D: SegmentStore> Committer<D> {
    /// Whether a change must wait for a liveness scan.
    fn is_to_wait(&self, record: &Record) -> bool {
        match &record.body {
            Body::Catalogue(change) if !record.is_counted && !self.stopping => {
                !self.pool.affords(change) && self.pool.may_afford(change)
            }
            _ => false,
        }
    }

    /// Keeps a record that must wait for a liveness scan; returns any other record.
    pub(super) fn keep_awaiting_scan(&mut self, mut record: Record) -> Option<Record> {
        if !self.is_to_wait(&record) {
            return Some(record);
        }
        record.is_counted = true;
        let after = self.pool.segments().round() + 1;
        self.pool.maintenance().send(RoundCommand::Scan { after });
        if self.awaiting_scan.is_empty() {
            self.count_tries = 0;
        }
        self.awaiting_scan.push_back(record);
        None
    }

    /// Starts a liveness scan for the records that wait for it and for other requests, or releases
    /// these records. The scan runs concurrently with writes if the pool runs threads.
    pub(super) fn resume_after_scan(&mut self) {
        if self.awaiting_scan.is_empty() && self.pool.requested_scan().is_none() {
            self.count_tries = 0;
            return;
        }
        let gives_up = self.stopping || self.pool.is_latched() || self.count_tries >= TRIES;
        if gives_up || self.pool.requested_scan().is_none() {
            if self.count_tries >= TRIES && self.pool.requested_scan().is_some() {
                let title = self.pool.segments().directory().title();
                tracing::warn!("{title}: {TRIES} attempts at a liveness scan failed");
            }
            if gives_up {
                self.pool.maintenance().end_scan_requests(u64::MAX);
            }
            self.release_awaiting_scan();
            return;
        }
        if !self.pool.is_running() {
            self.count_tries += 1;
            self.checkpoint_now(Cleaning::Needed { counts: true });
            return;
        }
        if self.checkpoint.as_ref().is_some_and(Thread::is_ended) {
            self.join();
        }
        match &self.checkpoint {
            None => {
                self.count_tries += 1;
                self.start_checkpoint();
            }
            // The checkpoint thread scans only when it begins to clean.
            Some(_) => {
                let maintenance = self.pool.maintenance();
                let has_scanned = matches!(maintenance.stage(), Stage::Cleaning | Stage::Resting);
                let is_scanning = maintenance.scan().is_running();
                if has_scanned && !is_scanning && !maintenance.must_finish() {
                    maintenance.send(RoundCommand::Finish);
                }
            }
        }
    }

    /// Releases the records that wait for a scan.
    pub(super) fn release_awaiting_scan(&mut self) {
        while let Some(record) = self.awaiting_scan.pop_back() {
            self.held.push_front(record);
        }
    }
}
