//! The stream of samples as server-sent events, and the history of devices.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use tokio::sync::Semaphore;

use super::stream::StreamBody;
use super::{Asked, ErrorResponse, Shared, query, waited_for};
use crate::api::Control;
use crate::error::YardError;
use crate::monitor::history::{MINUTES, Resolution, SECONDS};

/// A week of points is milliseconds of work: one request has it at a time, and the others wait, so
/// that clients of the dashboard keep no more than one processor busy.
static HISTORY_REQUESTS: Semaphore = Semaphore::const_new(1);

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
    control: &Arc<Control>,
    asked: Asked,
    is_web: bool,
) -> Result<Response, ErrorResponse> {
    let StreamQuery { zones } = query(asked)?;
    if let Some(name) = &zones
        && control.devices.find(name)?.disk.geometry().zones.is_none()
    {
        return Err(YardError::NotZoned { name: name.clone() }.into());
    }
    let receiver = control.monitor.subscribe(zones.clone(), is_web).map_err(|error| {
        ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", error.to_string())
    })?;
    if let Some(device) = zones {
        let control = Arc::clone(control);
        // The text of many zones takes long. The client waits for it, and no other does.
        tokio::task::spawn_blocking(move || control.monitor.send_all_zones(&device));
    }
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
    let place = HISTORY_REQUESTS.acquire().await.expect("the semaphore is never closed");
    waited_for(move || {
        let _place = place;
        Ok(match device {
            Some(device) => {
                axum::Json(control.monitor.history(&device, resolution)).into_response()
            }
            None => axum::Json(control.monitor.history_overview()).into_response(),
        })
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;

    use tokio::sync::watch;

    use super::*;
    use crate::http::{self, Waits};
    use crate::paths::TempDir;

    /// The response to a request for the stream. That of HTTP/1.0 has no chunks.
    fn connect(path: &Path) -> BufReader<UnixStream> {
        let mut client = UnixStream::connect(path).unwrap();
        client.write_all(b"GET /v1/stream HTTP/1.0\r\nHost: x\r\n\r\n").unwrap();
        let mut client = BufReader::new(client);
        assert!(next_line(&mut client).starts_with("HTTP/1.0 200 "));
        while next_line(&mut client) != "\r\n" {}
        client
    }

    fn next_line(client: &mut BufReader<UnixStream>) -> String {
        let mut line = String::new();
        client.read_line(&mut line).unwrap();
        line
    }

    /// The type and the length of the next event.
    fn next_event(client: &mut BufReader<UnixStream>) -> (String, usize) {
        let name = next_line(client);
        let length = next_line(client).len();
        assert_eq!(next_line(client), "\n");
        (name.trim_start_matches("event: ").trim().to_owned(), length)
    }

    /// Events of a MiB, of which a socket holds none as a whole: the client that stalls has what is
    /// under way and in its queue, and loses the rest.
    #[test]
    fn a_socket_that_is_not_read_delays_no_other_and_its_client_is_told_of_the_gap() {
        let temp = TempDir::new().unwrap();
        let path = temp.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let control = Arc::new(Control::default());
        let routes = crate::api::routes(Arc::clone(&control));
        let holding = control.upgrade.holding();
        let (stop, stopped) = watch::channel(false);
        let server = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let listener = tokio::net::UnixListener::from_std(listener).unwrap();
                let ends = http::Ends { stopped, holding };
                http::serve(listener, routes, Waits::default(), ends).await;
            });
        });
        let (mut reads, mut stalls) = (connect(&path), connect(&path));
        let big = "x".repeat(1 << 20);
        for _ in 0..30 {
            control.monitor.publish_for_test(&big);
            assert_eq!(next_event(&mut reads), ("sample".to_owned(), big.len() + 9));
        }
        let mut seen = 0;
        loop {
            // What waits is read, and then there is room for the next event.
            control.monitor.publish_for_test("small");
            assert_eq!(next_event(&mut reads).0, "sample");
            if next_event(&mut stalls).0 == "gap" {
                break;
            }
            seen += 1;
            assert!(seen < 30, "no gap");
        }
        assert_eq!(next_event(&mut stalls).0, "sample");
        stop.send(true).unwrap();
        server.join().unwrap();
    }
}
