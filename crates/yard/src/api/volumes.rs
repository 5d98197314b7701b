//! Requests about volumes.

use std::io::{self, Write};
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use blockyard_store::PoolBacking;
use blockyard_volume::VolumeError;
use blockyard_volume_admin::diff::diff as compare;
use blockyard_volume_admin::receive::{ReceiveTarget, receive as receive_into};
use blockyard_volume_admin::send::{SendOptions, Sending};

use super::stream::{incoming, outgoing, pass_on};
use super::{Answer, Asked, ErrorResponse, Name, Shared, blocking, path, query, read, waited_for};
use crate::backup::BackupView;
use crate::error::YardError;
use crate::param::shown;
use crate::scrubs::being_scrubbed;
use crate::streams::OpenStream;
use crate::volume_diff::each_line;
use crate::volumes::{
    PoolView, RESUME_SCRUB, ReceiveQuery, ReceivedView, ScrubLine, ScrubView, VolumeDone,
    VolumeRequest, VolumeView, VolumesQuery,
};

/// The number of bytes between two progress messages.
const TOLD_BYTES: u64 = 16 << 20;

pub(super) async fn list(State(control): Shared, asked: Asked) -> Answer<Vec<VolumeView>> {
    let asked: VolumesQuery = query(asked)?;
    // This reads a whole map.
    blocking(move || control.devices.volumes(&asked)).await
}

pub(super) async fn pools(State(control): Shared) -> Answer<Vec<PoolView>> {
    blocking(move || Ok(control.devices.pool_views())).await
}

pub(super) async fn backups(State(control): Shared) -> axum::Json<Vec<BackupView>> {
    axum::Json(control.backups.views())
}

pub(super) async fn work(
    State(control): Shared,
    verb: Name,
    body: Result<Bytes, BytesRejection>,
) -> Answer<VolumeDone> {
    let (verb, request): (String, VolumeRequest) = (path(verb)?, read(body)?);
    blocking(move || {
        let done = control.devices.work_on_volume(&verb, &request)?;
        tracing::info!(volume = done.name, verb, "volume worked on");
        if verb == RESUME_SCRUB {
            control.upkeep.notify_one();
        }
        Ok(done)
    })
    .await
}

/// Sends the stream of a snapshot. An invalid request fails before the stream begins; a later error
/// aborts the stream.
pub(super) async fn send(
    State(control): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let request: VolumeRequest = read(body)?;
    let open = control.streams.begin(format!("`{}` is being sent", shown(&request.name)));
    let axum::Json(sending) = blocking(move || {
        request.check("send")?;
        let pool = control.devices.pool(request.pool.as_deref())?;
        Ok((request.sending(&pool)?, request.name))
    })
    .await?;
    Ok(answered(sending, open))
}

/// Sends a volume in its present state, or a snapshot, as a stream.
pub(super) async fn export(
    State(control): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let request: VolumeRequest = read(body)?;
    let open = control.streams.begin(format!("`{}` is being exported", shown(&request.name)));
    let axum::Json(sending) = blocking(move || {
        request.check("export")?;
        let (pool, name) = (control.devices.pool(request.pool.as_deref())?, request.name);
        let options = SendOptions { snapshot: &name, ..SendOptions::default() };
        let sending = match name.contains('@') {
            true => Sending::begin(&pool, &options),
            false => Sending::begin_now(&pool, &name),
        };
        Ok((sending?, name))
    })
    .await?;
    Ok(answered(sending, open))
}

/// The response with a stream. The producing thread notices when the client disconnects.
fn answered((sending, name): (Sending<PoolBacking>, String), open: OpenStream) -> Response {
    let (answer, mut out) = outgoing();
    tokio::task::spawn_blocking(move || {
        match sending.run(&mut out, &mut |_| {}) {
            Ok(sent) => tracing::info!(name, bytes = sent.bytes, "snapshot sent"),
            Err(error) => out.fail(&name, io::Error::other(error)),
        }
        drop(open);
    });
    ([(header::CONTENT_TYPE, "application/octet-stream")], answer).into_response()
}

/// Compares a volume or snapshot with a snapshot: sends lines of JSON with the ranges, and the
/// totals last.
pub(super) async fn diff(
    State(control): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let request: VolumeRequest = read(body)?;
    let open = control.streams.begin(format!("`{}` is being compared", shown(&request.name)));
    let (diff, name) = waited_for(move || {
        request.check("diff")?;
        let wanted = "the snapshot to compare with".to_owned();
        let from = request.from.ok_or(YardError::Missing { field: "from", wanted })?;
        let pool = control.devices.pool(request.pool.as_deref())?;
        Ok((compare(&pool, &from, &request.name)?, request.name))
    })
    .await?;
    let (answer, mut out) = outgoing();
    tokio::task::spawn_blocking(move || {
        let told = each_line(diff, &mut |line| {
            let mut text = serde_json::to_vec(line).expect("lines are plain data");
            text.push(b'\n');
            out.write_all(&text).map_err(VolumeError::Pipe)
        });
        if let Err(error) = told.and_then(|()| out.flush().map_err(VolumeError::Pipe)) {
            out.fail(&name, io::Error::other(error));
        }
        drop(open);
    });
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], answer).into_response())
}

/// Receives the stream of a snapshot.
pub(super) async fn receive(
    State(control): Shared,
    asked: Asked,
    body: Body,
) -> Answer<ReceivedView> {
    let ReceiveQuery { pool, name, resumable } = query::<ReceiveQuery>(asked)?;
    let (sender, mut input) = incoming();
    let received = blocking(move || {
        let pool = control.devices.pool(pool.as_deref())?;
        let target = ReceiveTarget { name: name.as_deref(), is_resumable: resumable };
        let received = ReceivedView::from(receive_into(&pool, &target, &mut input, &mut |_| {})?);
        tracing::info!(name = received.name, bytes = received.stream_bytes, "snapshot received");
        Ok(received)
    });
    let (received, _) = tokio::join!(received, pass_on(body, sender));
    received
}

/// Scrubs a pool: sends lines of JSON with the progress, and the result last.
pub(super) async fn scrub(
    State(control): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let request: VolumeRequest = read(body)?;
    let rate = request.rate_bytes.unwrap_or(0);
    let devices = Arc::clone(&control.devices);
    let waited = waited_for(move || {
        request.check("scrub")?;
        let pool = devices.pool(request.pool.as_deref())?;
        let scrubbed = devices.scrubbed(&pool);
        match devices.scrubs().state(&scrubbed).is_some_and(|scrub| scrub.running) {
            true => Err(being_scrubbed(&pool.path())),
            false => Ok(scrubbed),
        }
    });
    let pool = waited.await?;
    let (answer, mut out) = outgoing();
    let open =
        control.streams.begin(format!("{} is being scrubbed", pool.running.path().display()));
    let is_gone = out.closed_check();
    tokio::task::spawn_blocking(move || {
        let (mut told, mut all) = (0, 0);
        let mut line = |line: &ScrubLine| {
            let mut text = serde_json::to_vec(line).expect("lines are plain data");
            text.push(b'\n');
            out.write_all(&text).and_then(|()| out.flush()).is_ok()
        };
        let scrubs = control.devices.scrubs();
        let path = pool.running.path();
        let scrubbed = scrubs.run(&pool, rate, false, &mut |verified_bytes, total_bytes| {
            let tell = verified_bytes >= told + TOLD_BYTES || told == 0;
            all = verified_bytes;
            if tell {
                told = verified_bytes.max(1);
            }
            !is_gone()
                && (!tell
                    || line(&ScrubLine { verified_bytes, total_bytes, ..ScrubLine::default() }))
        });
        match scrubbed {
            Ok(report) => {
                let (damaged, mended) = (report.damaged, report.repaired);
                tracing::info!(pool = %path.display(), damaged, mended, "scrubbed");
                let report = Some(ScrubView::from(report));
                // A client that has disconnected does not need it.
                let _ = line(&ScrubLine { verified_bytes: all, total_bytes: all, report });
            }
            Err(error) => tracing::info!(pool = %path.display(), "scrub: {error}"),
        }
        drop((pool, open));
    });
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], answer).into_response())
}

impl From<VolumeError> for ErrorResponse {
    fn from(error: VolumeError) -> ErrorResponse {
        YardError::from(error).into()
    }
}
