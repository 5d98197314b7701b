//! The copies of a pool, and the verbs about them: `attach`, `detach`, `replace`, and those of a
//! resync.

use std::path::Path;

use blockyard_store::mirror::CopyStatus;
use blockyard_volume::Running;
use blockyard_volume::resync::ResyncProgress;
use serde::{Deserialize, Serialize};

use super::{PoolView, VolumeDone, VolumeRequest, argument};
use crate::error::YardError;
use crate::param::shown;

/// A copy of a pool.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct CopyView {
    /// The copy's directory.
    pub path: String,
    /// The state: `good`, `stale`, `resyncing` or `failed`.
    #[serde(default)]
    pub state: String,
    /// Whether the state is `good`.
    pub good: bool,
    /// The reason for which it is not good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The number of repairs from the other copy since the pool was opened.
    pub mended: u64,
}

impl From<CopyStatus> for CopyView {
    fn from(status: CopyStatus) -> CopyView {
        let CopyStatus { path, state, why, repaired: mended, .. } = status;
        CopyView { path, state: state.to_string(), good: state.is_good(), why, mended }
    }
}

/// The resync of a copy that has joined a pool in use, or come back.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct ResyncView {
    /// The copy.
    pub path: String,
    /// The copy that leaves the pool when this one is good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replaces: Option<String>,
    /// The bytes of the pool that are equal there.
    pub done_bytes: u64,
    /// The bytes of the pool.
    pub total_bytes: u64,
    /// The mean rate since the pool was opened or the copy joined, in bytes per second.
    pub rate_bytes: u64,
    /// The most bytes that are compared per second; 0: any number.
    pub limit_bytes: u64,
    /// Whether it is paused by a command.
    pub paused: bool,
    /// While the good copies are verified and repaired, before anything is copied or before a copy
    /// leaves: the bytes that were verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verified_bytes: Option<u64>,
    /// How many bytes are to be verified then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_verify_bytes: Option<u64>,
    /// The seconds until its end at this rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_s: Option<u64>,
    /// Why the resync does not continue now. The pool tries again each minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl From<ResyncProgress> for ResyncView {
    fn from(progress: ResyncProgress) -> ResyncView {
        ResyncView {
            path: progress.path.display().to_string(),
            replaces: progress.replaces.as_ref().map(|path| path.display().to_string()),
            done_bytes: progress.done_bytes,
            total_bytes: progress.total_bytes,
            rate_bytes: progress.rate_bytes,
            limit_bytes: progress.limit_bytes,
            paused: progress.is_paused,
            verified_bytes: progress.verified_bytes.map(|(verified, _)| verified),
            to_verify_bytes: progress.verified_bytes.map(|(_, all)| all),
            left_s: progress.left_s(),
            error: progress.error,
        }
    }
}

impl PoolView {
    /// Whether this is the pool with a copy at a path, or that had one there.
    pub fn is_at(&self, path: &Path) -> bool {
        let copies = self.copies.iter().map(|copy| &copy.path);
        let mut paths = copies.chain(&self.former_paths).chain([&self.path]);
        paths.any(|it| Path::new(it) == path)
    }

    /// Adds what only an open pool has: its resync, and the copies that have left.
    pub(super) fn with_copies_of(self, running: &Running) -> PoolView {
        let former = running.former_paths();
        let former_paths = former.iter().map(|path| path.display().to_string()).collect();
        let resync = running.resync_progress().map(ResyncView::from);
        PoolView { resync, former_paths, ..self }
    }
}

impl VolumeRequest {
    /// The path of the empty directory or disk that becomes a copy.
    fn new_copy(&self) -> Result<&Path, YardError> {
        let wanted = "the path of an empty directory or disk".to_owned();
        absolute("new", self.new.as_deref().ok_or(YardError::Missing { field: "new", wanted })?)
    }

    /// The path of the copy that leaves.
    fn old_copy(&self) -> Result<&Path, YardError> {
        let wanted = "the path of a copy of the pool".to_owned();
        absolute("copy", self.copy.as_deref().ok_or(YardError::Missing { field: "copy", wanted })?)
    }
}

/// A path that does not depend on the directory in which the yard was started.
fn absolute<'p>(field: &'static str, path: &'p str) -> Result<&'p Path, YardError> {
    match Path::new(path) {
        found if found.is_absolute() => Ok(found),
        _ => Err(argument(field, shown(path), "an absolute path")),
    }
}

/// Executes a verb about the copies of a pool.
///
/// # Errors
/// If a field is missing, or the pool refuses.
pub(super) fn work(
    running: &Running,
    verb: &str,
    request: &VolumeRequest,
) -> Result<VolumeDone, YardError> {
    let name = running.path().display().to_string();
    let done = match verb {
        "attach" => {
            let new = request.new_copy()?;
            running.attach(new, None, request.force)?;
            format!("attached {} as a copy, which resyncs", new.display())
        }
        "replace" => {
            let (old, new) = (request.old_copy()?, request.new_copy()?);
            running.attach(new, Some(old), request.force)?;
            format!("attached {}, which resyncs and replaces {}", new.display(), old.display())
        }
        "detach" => {
            let old = request.old_copy()?;
            running.detach(old)?;
            format!("detached {}", old.display())
        }
        "pause-resync" if running.resync_progress().is_none() => {
            return Err(argument("pool", shown(&name), "a pool with a copy that is resyncing"));
        }
        "pause-resync" => {
            running.pause_resync(true);
            "paused the resync".to_owned()
        }
        "resume-resync" => {
            running.pause_resync(false);
            "the resync continues".to_owned()
        }
        _ if request.rate_bytes.is_none() => {
            let wanted = "the most bytes per second, or 0".to_owned();
            return Err(YardError::Missing { field: "rate_bytes", wanted });
        }
        _ => "changed the rate of the resync".to_owned(),
    };
    if let Some(rate) = request.rate_bytes {
        running.set_resync_rate(rate);
    }
    Ok(VolumeDone { name, done, ..VolumeDone::default() })
}
