//! Traces: recorded as a stream, and replayed from one.

use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use blockyard_trace::{ReplayStop, ReplayView, write_trace};

use super::{Answer, Asked, ErrorResponse, Name, Shared, blocking, path, query, read, stream};
use crate::http::PeerWatch;
use crate::trace::{self, ReplayQuery, ReplayStopQuery, ReplayStopped, TraceRequest, TraceStopped};

/// How often the reader of a body looks whether its replay was stopped, or its connection closed.
const STOP_INTERVAL: Duration = Duration::from_millis(50);

/// A trace of a device, as a stream that lasts until the trace ends.
pub(super) async fn record(
    State(control): Shared,
    name: Name,
    body: Result<axum::body::Bytes, axum::extract::rejection::BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let (name, request): (String, TraceRequest) = (path(name)?, read(body)?);
    let limits = request.limits()?;
    let entry = control.devices.find(&name)?;
    let (recording, title) = trace::begin(&entry)?;
    let (answer, mut out) = stream::outgoing();
    let open = control.streams.begin(format!("`{name}` is traced, by `blockyard trace`"));
    let (disk, is_gone) = (std::sync::Arc::downgrade(&entry.disk), out.closed_check());
    tracing::info!(device = name, "trace started");
    tokio::task::spawn_blocking(move || {
        // A trace keeps no device open.
        let is_closed = || disk.strong_count() == 0 || is_gone();
        match write_trace(&recording, &title, limits, is_closed, &mut out) {
            Ok((_, tally)) => {
                let (events, lost) = (tally.events, tally.lost);
                tracing::info!(device = name, events, lost, "trace ended");
            }
            Err(error) => out.fail(&name, error),
        }
        drop(open);
    });
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], answer).into_response())
}

/// Ends the trace of a device; its stream ends too.
pub(super) async fn stop(State(control): Shared, name: Name) -> Answer<TraceStopped> {
    Ok(axum::Json(trace::stop(&control.devices.find(&path(name)?)?)?))
}

/// Stops a replay when it is dropped: with the request, if hyper finds that its connection has
/// ended.
struct StopOnDrop(ReplayStop);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Replays a trace, which is the body, on a device.
pub(super) async fn replay(
    State(control): Shared,
    name: Name,
    asked: Asked,
    Extension(peer): Extension<PeerWatch>,
    body: Body,
) -> Answer<ReplayView> {
    let (name, asked): (String, ReplayQuery) = (path(name)?, query(asked)?);
    // Before the trace is read.
    asked.scope(asked.options()?.speed)?;
    let entry = control.devices.find(&name)?;
    let place = entry.begin_work()?;
    let (sender, input) = stream::incoming();
    let stop = ReplayStop::new();
    let request = StopOnDrop(stop.clone());
    let replayed = blocking(move || {
        let _place = place;
        let view = trace::replay_on(&control.devices, entry, &asked, input, &stop)?;
        let (operations, stopped) = (view.total().operations, view.is_stopped);
        tracing::info!(device = name, operations, stopped, "trace replayed");
        Ok(view)
    });
    let stopped = async {
        while !request.0.is_stopped() {
            if peer.has_closed() {
                request.0.stop();
            }
            tokio::time::sleep(STOP_INTERVAL).await;
        }
    };
    // The reader of the trace must not wait for a client that sends nothing.
    let passed = async {
        tokio::select! {
            _ = stream::pass_on(body, sender) => {}
            () = stopped => {}
        }
    };
    let (replayed, ()) = tokio::join!(replayed, passed);
    replayed
}

/// Stops the replays on a device, or one of them; their responses tell what was done.
pub(super) async fn stop_replay(
    State(control): Shared,
    name: Name,
    asked: Asked,
) -> Answer<ReplayStopped> {
    let (name, asked): (String, ReplayStopQuery) = (path(name)?, query(asked)?);
    control.devices.find(&name)?;
    let replays = control.devices.replays().stop(&name, asked.id);
    Ok(axum::Json(ReplayStopped { device: name, replays }))
}
