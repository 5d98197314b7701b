//! Requests about injected faults: rules, a device's own faults, scenarios.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use blockyard_core::inject::Injection;
use blockyard_core::{DeviceError, Disk};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::channel;
use tokio::time::{Instant, sleep};

use super::stream::StreamBody;
use super::{Answer, Asked, ErrorResponse, Name, Shared, blocking, path, query, read, whole};
use crate::error::{FaultError, ScenarioError, YardError};
use crate::http::PeerWatch;
use crate::inject::{self, Fault};
use crate::scenario::{STEPS_MAX, Scenario, ScenarioLine, ScenarioRun};
use crate::view::{FaultsRemoved, InjectRequest, Injected};

/// How often a scenario looks whether its client has closed the connection, or has stopped it.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Injects a fault.
pub(super) async fn inject(
    State(control): Shared,
    name: Name,
    body: Result<Bytes, BytesRejection>,
) -> Answer<Injected> {
    let (name, InjectRequest { fault }) = (path(name)?, read(body)?);
    let parsed = inject::parse(&fault).map_err(YardError::from)?;
    let entry = control.devices.find(&name)?;
    let place = entry.begin_work()?;
    blocking(move || {
        let _place = place;
        let id = inject_into(entry.disk.as_ref(), &parsed).map_err(|error| match error {
            YardError::Device(DeviceError::NoSuchFault { fault }) => {
                YardError::no_such_fault(&name, entry.spec.kind(), &fault)
            }
            other => other,
        })?;
        tracing::info!(device = name, fault, "fault injected");
        Ok(Injected { id })
    })
    .await
}

/// Injects a fault; returns the number of the rule if it is one.
fn inject_into(disk: &dyn Disk, fault: &Fault) -> Result<Option<u64>, YardError> {
    let injection = match (fault, disk.fault_injector()) {
        (Fault::Rule(rule), Some(injector)) => {
            return Ok(Some(injector.add(rule.resolve(disk.geometry())?)?));
        }
        (Fault::Rule(rule), None) => Injection::AddRule(rule.resolve(disk.geometry())?),
        (Fault::RemoveRules, _) => Injection::RemoveRules,
        (Fault::Device { name, value }, _) => {
            Injection::Device { name: name.clone(), value: value.clone() }
        }
    };
    disk.inject(&injection)?;
    Ok(None)
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RuleQuery {
    id: Option<u64>,
}

/// Removes all rules of a device, or one.
pub(super) async fn remove(
    State(control): Shared,
    name: Name,
    asked: Asked,
) -> Answer<FaultsRemoved> {
    let (device, RuleQuery { id }): (String, RuleQuery) = (path(name)?, query(asked)?);
    let entry = control.devices.find(&device)?;
    let injector = entry.disk.fault_injector();
    let removed = match (id, injector) {
        (_, None) => 0,
        (None, Some(injector)) => injector.remove_all() as u64,
        (Some(id), Some(injector)) => injector.remove(id).iter().count() as u64,
    };
    if let Some(id) = id.filter(|_| removed == 0) {
        return Err(YardError::Fault(FaultError::NoSuchRule { name: device, id }).into());
    }
    tracing::info!(device, removed, "fault rules removed");
    Ok(axum::Json(FaultsRemoved { device, removed }))
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ScenarioQuery {
    device: Option<String>,
    id: Option<u64>,
}

/// Runs a scenario, which is the body, as long as the client is connected: sends lines of JSON.
pub(super) async fn run(
    State(control): Shared,
    asked: Asked,
    Extension(peer): Extension<PeerWatch>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let ScenarioQuery { device, id } = query(asked)?;
    let body = whole(body)?;
    let text = std::str::from_utf8(&body).map_err(|error| {
        let message = format!("no UTF-8 after {} bytes", error.valid_up_to());
        YardError::from(FaultError::from(ScenarioError { line: 1, message }))
    })?;
    let scenario = Scenario::parse(text, device.as_deref())
        .map_err(|error| YardError::from(FaultError::from(error)))?;
    let stop = control.scenarios.enter(id.unwrap_or(0))?;
    let find = |name: &str| control.devices.find(name).map(|entry| entry.disk);
    let mut run = ScenarioRun::begin(&scenario, find)?;
    // All lines fit, so that a client that does not read them delays no step.
    let (sender, receiver) = channel::<io::Result<Bytes>>(2 * STEPS_MAX + 2);
    tracing::info!(length_ns = scenario.length_ns(), "scenario begins");
    tokio::spawn(async move {
        let began = Instant::now();
        let elapsed_ns = || began.elapsed().as_nanos() as u64;
        let send = |lines: Vec<ScenarioLine>| {
            for line in lines {
                let mut text = serde_json::to_vec(&line).expect("lines are plain data");
                let (step, device) = (line.step.unwrap_or(0), line.device.unwrap_or_default());
                tracing::info!(step, device, "scenario: {}", line.event);
                text.push(b'\n');
                // A client that has disconnected gets none.
                let _ = sender.try_send(Ok(text.into()));
            }
        };
        loop {
            send(run.advance(elapsed_ns()));
            let Some(due_ns) = run.due_ns() else { return };
            let left = Duration::from_nanos(due_ns.saturating_sub(elapsed_ns()));
            sleep(left.min(LOOK_INTERVAL)).await;
            // Relaxed: the flag publishes nothing but itself.
            if stop.load(Ordering::Relaxed) || peer.has_closed() || sender.is_closed() {
                let now_ns = elapsed_ns();
                let mut lines = run.end(now_ns);
                lines.push(ScenarioLine::last(now_ns, "stopped"));
                return send(lines);
            }
        }
    });
    let answer = Body::new(StreamBody(receiver));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], answer).into_response())
}

/// The result of stopping scenarios.
#[derive(Debug, Serialize)]
pub(super) struct ScenariosStopped {
    scenarios: u64,
}

/// Stops the scenario of a number; its stream ends after its rules are removed.
pub(super) async fn stop(State(control): Shared, asked: Asked) -> Answer<ScenariosStopped> {
    let ScenarioQuery { id, .. } = query(asked)?;
    Ok(axum::Json(ScenariosStopped { scenarios: control.scenarios.stop(id.unwrap_or(0)) }))
}
