//! Traces: recorded as a stream, and replayed from one.

use axum::body::Body;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use blockyard_trace::{ReplayView, write_trace};

use super::{Answer, Asked, ErrorResponse, Name, Shared, blocking, path, query, read, stream};
use crate::trace::{self, ReplayQuery, TraceRequest, TraceStopped};

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
    });
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], answer).into_response())
}

/// Ends the trace of a device; its stream ends too.
pub(super) async fn stop(State(control): Shared, name: Name) -> Answer<TraceStopped> {
    Ok(axum::Json(trace::stop(&control.devices.find(&path(name)?)?)?))
}

/// Replays a trace, which is the body, on a device.
pub(super) async fn replay(
    State(control): Shared,
    name: Name,
    asked: Asked,
    body: Body,
) -> Answer<ReplayView> {
    let (name, asked): (String, ReplayQuery) = (path(name)?, query(asked)?);
    let options = asked.options()?;
    let entry = control.devices.find(&name)?;
    let place = entry.begin_work()?;
    let (sender, input) = stream::incoming();
    let replayed = blocking(move || {
        let _place = place;
        let view = trace::replay_on(&control.devices, &entry, &asked, &options, input)?;
        tracing::info!(device = name, operations = view.total().operations, "trace replayed");
        Ok(view)
    });
    let (replayed, _) = tokio::join!(replayed, stream::pass_on(body, sender));
    replayed
}
