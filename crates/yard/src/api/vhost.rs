//! Requests about the sockets at which hypervisors find devices.

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use serde::Deserialize;

use super::{Answer, Asked, DRAIN_MS, ErrorResponse, Shared, blocking, query, read};
use crate::error::YardError;
use crate::vhost::{BoundVhost, VhostPlace};
use crate::view::{VhostRequest, VhostView};

pub(super) async fn list(State(control): Shared) -> axum::Json<Vec<VhostView>> {
    axum::Json(control.devices.vhost().list().into_iter().map(VhostView::from).collect())
}

pub(super) async fn listen(
    State(control): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, axum::Json<VhostView>), ErrorResponse> {
    let VhostRequest { device, place } = read(body)?;
    let started = blocking(move || {
        let mut wanted = VhostPlace::of(&device, &place).map_err(|refusal| {
            let wanted = refusal.strip_prefix("expected ").unwrap_or(&refusal).to_owned();
            YardError::Argument { field: "place", value: place, wanted }
        })?;
        wanted.place.path = control.paths.check("place", &wanted.place.path)?;
        // Before a socket is made.
        control.devices.find(&device)?;
        let bound = BoundVhost::bind(&wanted)?;
        control.cleanup.add(&wanted.place.path);
        control.devices.serve_vhost(bound)?;
        let served = control.devices.vhost().find(&device);
        served.map(VhostView::from).ok_or(YardError::NoVhost { name: device })
    });
    Ok((StatusCode::CREATED, started.await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UnlistenQuery {
    device: String,
    #[serde(default)]
    force: bool,
}

pub(super) async fn unlisten(State(control): Shared, asked: Asked) -> Answer<VhostView> {
    let UnlistenQuery { device, force } = query(asked)?;
    blocking(move || {
        control.devices.find(&device)?;
        let servers = control.devices.vhost();
        let before = servers.find(&device).map(VhostView::from);
        let before = before.ok_or_else(|| YardError::NoVhost { name: device.clone() })?;
        if before.is_connected && !force {
            return Err(YardError::VhostUsed { name: device, at: before.place });
        }
        let removed = servers.remove(&device, std::time::Duration::from_millis(DRAIN_MS));
        // The device is being replaced.
        removed.ok_or_else(|| YardError::VhostBusy { name: device.clone() })?;
        tracing::info!(device, "no longer served to hypervisors");
        Ok(before)
    })
    .await
}
