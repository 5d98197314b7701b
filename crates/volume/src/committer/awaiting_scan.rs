//! Catalogue changes that need more space than is known to be free wait for one liveness scan
//! before they are refused, if unknown bytes could cover them. Nothing else waits.

use std::collections::VecDeque;

use blockyard_store::SegmentStore;

use super::Committer;
use crate::clean::Cleaning;
use crate::maintenance::{RoundCommand, Stage};
use crate::record::{Body, Record};

/// Most checkpoints made for one scan: a checkpoint may fail, or the scan may be interrupted.
const TRIES: u32 = 4;

/// Changes of the catalogue that wait for a liveness scan.
#[derive(Default)]
pub(super) struct ScanWaiters {
    records: VecDeque<Record>,
    /// Number of checkpoints that were begun for a scan since one was requested.
    tries: u32,
}

impl ScanWaiters {
    /// Whether no record waits.
    pub(super) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }
}

impl<D: SegmentStore> Committer<D> {
    /// Whether a change must wait for a liveness scan.
    fn is_to_wait(&self, record: &Record) -> bool {
        match &record.body {
            Body::Catalogue(change) if !record.is_counted && !self.intake.is_stopping() => {
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
        if self.scan_waiters.is_empty() {
            self.scan_waiters.tries = 0;
        }
        self.scan_waiters.records.push_back(record);
        None
    }

    /// Starts a liveness scan for the records that wait for it and for other requests, or releases
    /// these records. The scan runs concurrently with writes if the pool runs threads.
    pub(super) fn resume_after_scan(&mut self) {
        if self.scan_waiters.is_empty() && self.pool.requested_scan().is_none() {
            self.scan_waiters.tries = 0;
            return;
        }
        let gives_up =
            self.intake.is_stopping() || self.pool.is_latched() || self.scan_waiters.tries >= TRIES;
        if gives_up || self.pool.requested_scan().is_none() {
            if self.scan_waiters.tries >= TRIES && self.pool.requested_scan().is_some() {
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
            self.scan_waiters.tries += 1;
            self.checkpoint_now(Cleaning::Needed { counts: true });
            return;
        }
        if self.round.has_ended() {
            self.join();
        }
        if self.round.is_none() {
            self.scan_waiters.tries += 1;
            self.start_checkpoint();
            return;
        }
        // The checkpoint thread scans only when it begins to clean.
        let maintenance = self.pool.maintenance();
        let has_scanned = matches!(maintenance.stage(), Stage::Cleaning | Stage::Resting);
        if has_scanned && !maintenance.scan().is_running() && !maintenance.must_finish() {
            maintenance.send(RoundCommand::Finish);
        }
    }

    /// Releases the records that wait for a scan.
    pub(super) fn release_awaiting_scan(&mut self) {
        self.intake.hold_all(self.scan_waiters.records.drain(..));
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_types)] // Two threads of a test that meet in a race.
mod tests {
    use std::hint::spin_loop;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
    use std::thread::yield_now;

    use super::*;
    use crate::stepped_pool::SteppedPool;

    /// Regression: the release of records that had waited for a scan withdrew every request for a
    /// scan, also one that a scrub sent between the check that there is none and the release. The
    /// scrub then ended without a scan, and the usage table kept its error.
    #[test]
    fn releasing_records_keeps_a_scan_request_that_arrives_meanwhile() {
        const ROUNDS: u64 = 5000;
        let mut stepped = SteppedPool::new("scan-request");
        let SteppedPool { pool, committer, .. } = &mut stepped;
        let [begun, sent, ended] = &[const { AtomicU64::new(0) }; 3];
        let mut lost = 0;
        std::thread::scope(|scope| {
            let pool = &*pool;
            scope.spawn(move || {
                let mut delay = 0_u32;
                for round in 1..=ROUNDS {
                    while begun.load(SeqCst) < round {
                        spin_loop();
                    }
                    let checkpoints = pool.segments().round();
                    (0..delay).for_each(|_| spin_loop());
                    pool.request_scan();
                    sent.fetch_add(1, SeqCst);
                    while ended.load(SeqCst) < round {
                        yield_now();
                    }
                    // The committer makes a checkpoint if it saw the request: the next one is sent
                    // later. Otherwise it is sent earlier, so that it meets the release.
                    delay = match pool.segments().round() > checkpoints {
                        true => delay + 1,
                        false => delay.saturating_sub(1),
                    };
                }
            });
            for round in 1..=ROUNDS {
                let checkpoints = pool.segments().round();
                committer.scan_waiters.tries = 0;
                committer.scan_waiters.records.push_back(Record::of(Body::Flush, None));
                begun.fetch_add(1, SeqCst);
                committer.resume_after_scan();
                while sent.load(SeqCst) < round {
                    yield_now();
                }
                let is_seen = pool.segments().round() > checkpoints;
                lost += u64::from(!is_seen && pool.requested_scan().is_none());
                pool.maintenance().end_scan_requests(u64::MAX);
                committer.scan_waiters.records.clear();
                committer.intake.held().clear();
                ended.fetch_add(1, SeqCst);
            }
        });
        assert_eq!(lost, 0);
    }
}
