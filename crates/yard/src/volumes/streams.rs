//! Requests and results of sending and receiving streams.

use blockyard_store::PoolBacking;
use blockyard_volume::Running;
use blockyard_volume_admin::receive::{self, PartialReceive, Received};
use blockyard_volume_admin::send::{SendOptions, Sending};
use blockyard_volume_format::stream::ResumeToken;
use serde::{Deserialize, Serialize};

use super::{VolumeDone, VolumeRequest, argument, counted};
use crate::error::YardError;
use crate::param::shown;
use crate::size::rounded;

/// The destination of a stream.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ReceiveQuery {
    /// The pool; needed if the yard has several pools open.
    pub(crate) pool: Option<String>,
    /// The volume, or VOLUME@SNAPSHOT; without it the names that the streams have.
    pub(crate) name: Option<String>,
    /// Whether what was received is kept if the stream is interrupted.
    pub(crate) resumable: bool,
}

/// The result of receiving streams.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ReceivedView {
    /// The snapshot that was made; the last one, if there are several.
    pub name: String,
    /// All snapshots that were made, if there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// The number of blocks in the streams.
    pub blocks: u64,
    /// The length of the streams.
    pub stream_bytes: u64,
    /// Snapshots of raw streams that open by the passphrase or key of this pool, which is not the
    /// sender's: one of both was changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_secret: Vec<String>,
}

impl From<Received> for ReceivedView {
    fn from(received: Received) -> ReceivedView {
        let Received { snapshots: mut names, blocks, bytes, other_secret } = received;
        let name = names.last().cloned().unwrap_or_default();
        if names.len() == 1 {
            names.clear();
        }
        ReceivedView { name, names, blocks, stream_bytes: bytes, other_secret }
    }
}

/// A receive that was interrupted and can be continued.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct PartialReceiveView {
    /// The volume that it makes or updates.
    pub volume: String,
    /// The snapshot at the sender.
    pub snapshot: String,
    /// The length of the part of the volume that was received.
    pub received_bytes: u64,
    /// The length of the volume.
    pub size_bytes: u64,
    /// The token by which the sender continues.
    pub token: String,
}

impl From<PartialReceive> for PartialReceiveView {
    fn from(partial: PartialReceive) -> PartialReceiveView {
        let PartialReceive { volume, head } = partial;
        let bytes = |blocks: u64| blocks * u64::from(head.block_bytes);
        PartialReceiveView {
            volume,
            received_bytes: bytes(head.start),
            size_bytes: bytes(head.blocks),
            token: head.token().to_string(),
            snapshot: head.name,
        }
    }
}

impl VolumeRequest {
    /// Prepares the streams that the request asks for.
    ///
    /// # Errors
    /// If the token is invalid, or the pool has not the snapshots.
    pub fn sending(&self, running: &Running) -> Result<Sending<PoolBacking>, YardError> {
        let options = SendOptions {
            snapshot: &self.name,
            base: self.from.as_deref(),
            intermediate: self.intermediate,
            replicate: self.replicate,
            is_compressed: self.compressed,
            is_raw: self.raw,
        };
        let Some(token) = &self.token else {
            return Ok(Sending::begin(running, &options)?);
        };
        let others = [
            ("name", !self.name.is_empty()),
            ("from", self.from.is_some()),
            ("intermediate", self.intermediate),
            ("replicate", self.replicate),
        ];
        if let Some((field, _)) = others.iter().find(|(_, given)| *given) {
            return Err(argument("field", field, "none of this name with `token`"));
        }
        let token: ResumeToken = token.parse().map_err(|wanted: &str| {
            argument("token", shown(token), wanted.trim_start_matches("expected "))
        })?;
        Ok(Sending::resume(running, &token, &options)?)
    }
}

/// Counts the bytes of the streams that the request asks for.
pub(super) fn estimate(
    running: &Running,
    request: &VolumeRequest,
) -> Result<VolumeDone, YardError> {
    let sending = request.sending(running)?;
    let bytes = sending.stream_bytes()?;
    let most = if sending.is_exact() { "" } else { "at most " };
    let done = format!("{most}{} ({bytes} bytes)", rounded(bytes));
    let (name, stream_bytes) = (request.name.clone(), Some(bytes));
    Ok(VolumeDone { name, done, stream_bytes, ..VolumeDone::default() })
}

/// The interrupted receives of a pool, or that of one volume.
pub(super) fn receives(running: &Running, name: &str) -> Result<VolumeDone, YardError> {
    let all = receive::interrupted(running).into_iter().map(PartialReceiveView::from);
    let receives: Vec<_> = all.filter(|it| name.is_empty() || it.volume == name).collect();
    if receives.is_empty() && !name.is_empty() {
        return Err(argument("name", shown(name), "a volume that was partly received"));
    }
    let done = counted(receives.len(), "interrupted receive");
    Ok(VolumeDone { name: name.to_owned(), done, receives, ..VolumeDone::default() })
}
