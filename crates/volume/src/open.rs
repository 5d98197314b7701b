//! Opening a pool: recovers what is on disk, and makes the pool and its committer of it.

use std::sync::Arc;

use blockyard_store::SegmentStore;
use blockyard_sync::completion_queue::{CompletionQueue, Receiver};
use blockyard_volume_format::superblock::{LogPlace, SEGMENT_NONE};

use crate::committer::Committer;
use crate::error::VolumeError;
use crate::options::Options;
use crate::pool::Pool;
use crate::record::Record;
use crate::recovery::{self, Recovered};

impl<D: SegmentStore> Pool<D> {
    /// Opens the pool of a directory, or creates one. The caller runs the returned committer.
    ///
    /// # Errors
    /// If the pool contains something that cannot be read, or the system refuses a write.
    pub fn open(
        directory: D,
        options: Options,
    ) -> Result<(Arc<Pool<D>>, Committer<D>), VolumeError> {
        let (mut recovered, segments) = recovery::open(directory, &options)?;
        recovered.volumes.gone.clear();
        let records: Receiver<Record> = CompletionQueue::open(options.records_max as usize);
        // Open the segments that will be written to. The others are opened when they are used.
        let LogPlace { segment, next, .. } = recovered.log.place;
        let pages = recovered.page_place.map(|(segment, _)| segment);
        for number in [segment, next].into_iter().filter(|it| *it != SEGMENT_NONE).chain(pages) {
            let failed = VolumeError::io(format!("cannot open segment {number}"));
            segments.pin(number).map_err(failed)?;
        }
        let Recovered { superblock, volumes, page_place, roots, log, .. } = recovered;
        let pool = Pool::new(options, segments, &records, superblock, volumes, page_place, roots);
        pool.meters().recovered(log.found_bytes);
        let pool = Arc::new(pool);
        let committer = Committer::new(Arc::clone(&pool), records, log);
        Ok((pool, committer))
    }
}
