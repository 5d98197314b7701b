//! Requests about the devices that are block devices of the kernel by ublk.

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use serde::Deserialize;

use super::{Answer, Asked, ErrorResponse, Shared, blocking, query, read};
use crate::error::YardError;
use crate::ublk::{ID_MAX, UblkPlace, check_kernel};
use crate::view::{UblkRequest, UblkView};

pub(super) async fn list(State(control): Shared) -> Answer<Vec<UblkView>> {
    let list = move || control.devices.ublk().list().into_iter().map(UblkView::from).collect();
    blocking(move || Ok(list())).await
}

pub(super) async fn add(
    State(control): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, axum::Json<UblkView>), ErrorResponse> {
    let UblkRequest { device, id } = read(body)?;
    let started = blocking(move || {
        if let Some(id) = id.filter(|id| *id > ID_MAX) {
            let wanted = format!("the N of /dev/ublkbN, 0 to {ID_MAX}");
            return Err(YardError::Argument { field: "id", value: id.to_string(), wanted });
        }
        control.devices.find(&device)?;
        check_kernel()?;
        control.devices.serve_ublk(&UblkPlace { device: device.clone(), id })?;
        let served = control.devices.ublk().find(&device);
        let served = served.map(|info| UblkView::from((device.clone(), info)));
        served.ok_or(YardError::NoUblk { name: device })
    });
    Ok((StatusCode::CREATED, started.await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RemoveQuery {
    device: String,
    #[serde(default)]
    force: bool,
}

pub(super) async fn remove(State(control): Shared, asked: Asked) -> Answer<UblkView> {
    let RemoveQuery { device, force } = query(asked)?;
    blocking(move || {
        let unserved = control.devices.ublk().unserve(&device, force);
        if let Err(YardError::NoUblk { name }) = &unserved {
            control.devices.find(name)?;
        }
        let before = unserved?;
        tracing::info!(device, "no longer a block device of the kernel");
        Ok(UblkView::from((device, before)))
    })
    .await
}
