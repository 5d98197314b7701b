//! The stream of samples as server-sent events, and the history of devices.

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use super::stream::StreamBody;
use super::{Asked, ErrorResponse, Shared, query, waited_for};
use crate::api::Control;
use crate::error::YardError;
use crate::monitor::history::{MINUTES, Resolution, SECONDS};

/// The type of a stream of events.
const EVENTS: &str = "text/event-stream";

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct StreamQuery {
    zones: Option<String>,
}

/// `GET /v1/stream` of the control socket.
pub(super) async fn stream(
    State(control): Shared,
    asked: Asked,
) -> Result<Response, ErrorResponse> {
    open(&control, asked, false)
}

/// A stream of events; `is_web` if the client came to the web listener.
pub(super) fn open(
    control: &Control,
    asked: Asked,
    is_web: bool,
) -> Result<Response, ErrorResponse> {
    let StreamQuery { zones } = query(asked)?;
    if let Some(name) = &zones
        && control.devices.find(name)?.disk.geometry().zones.is_none()
    {
        return Err(YardError::NotZoned { name: name.clone() }.into());
    }
    let receiver = control.monitor.subscribe(zones, is_web).map_err(|error| {
        ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", error.to_string())
    })?;
    let headers = [(header::CONTENT_TYPE, EVENTS), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::new(StreamBody(receiver))).into_response())
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct HistoryQuery {
    device: Option<String>,
    step: Option<u64>,
}

/// The resolution whose points are this many seconds apart.
fn resolution(seconds: Option<u64>) -> Result<Resolution, YardError> {
    let wanted = seconds.unwrap_or(1);
    let found = [SECONDS, MINUTES].into_iter().find(|it| it.step_ms == wanted.saturating_mul(1000));
    found.ok_or_else(|| YardError::Argument {
        field: "step",
        value: wanted.to_string(),
        wanted: "1 or 60 seconds".to_owned(),
    })
}

/// `GET /v1/history`: the history of a device, or which devices have one.
pub(super) async fn history(
    State(control): Shared,
    asked: Asked,
) -> Result<Response, ErrorResponse> {
    let HistoryQuery { device, step } = query(asked)?;
    let resolution = resolution(step)?;
    // A week of points is some milliseconds of work.
    waited_for(move || {
        Ok(match device {
            Some(device) => {
                axum::Json(control.monitor.history(&device, resolution)).into_response()
            }
            None => axum::Json(control.monitor.history_overview()).into_response(),
        })
    })
    .await
}
