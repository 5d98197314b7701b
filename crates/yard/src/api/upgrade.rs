//! The request for an upgrade of the daemon.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::{Control, ErrorResponse, Shared, read, waited_for};
use crate::error::YardError;
use crate::http::FromOwner;
use crate::upgrade::{UpgradeRequest, outgoing};

/// How long other requests may take before an upgrade gives up. Meanwhile new ones wait.
const REQUESTS_MAX: Duration = Duration::from_secs(5);

/// How long this process stays after it has handed everything over, so that the response is sent.
const ANSWER_TIME: Duration = Duration::from_millis(200);

/// The code of an error for a request that came too late for this process. It was not executed.
pub(crate) const UPGRADED: &str = "upgraded";

/// Answers a request while no upgrade runs. After one, refuses it: the new process answers.
pub(super) async fn share(
    State(control): State<Arc<Control>>,
    request: Request,
    next: Next,
) -> Response {
    let _shared = Arc::clone(control.upgrade.requests()).read_owned().await;
    if let Some(pid) = control.upgrade.successor() {
        let message = format!("the yard was upgraded to process {pid}: send the request again");
        return ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, UPGRADED, message)
            .into_response();
    }
    next.run(request).await
}

pub(super) async fn upgrade(
    State(control): Shared,
    owner: Option<Extension<FromOwner>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    if owner.is_none() {
        // It starts a program as the daemon's user.
        let message = "only the yard's own user and root may upgrade it";
        return Err(ErrorResponse::new(StatusCode::FORBIDDEN, "forbidden", message));
    }
    let request: UpgradeRequest = read(body)?;
    let alone = Arc::clone(control.upgrade.requests()).write_owned();
    let Ok(alone) = tokio::time::timeout(REQUESTS_MAX, alone).await else {
        let seconds = REQUESTS_MAX.as_secs();
        let what = format!("requests of the control API have taken longer than {seconds} s");
        return Err(YardError::NotUpgradable { whys: vec![what] }.into());
    };
    let shared = Arc::clone(&control);
    let view = waited_for(move || outgoing::run(&shared, &request)).await?;
    drop(alone);
    tokio::spawn(async move {
        tokio::time::sleep(ANSWER_TIME).await;
        outgoing::end(&control);
    });
    Ok(([(header::CONNECTION, "close")], axum::Json(view)).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(control: &Arc<Control>, owner: Option<FromOwner>) -> (StatusCode, String) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let body = Ok(Bytes::from_static(b"{}"));
        let answer = upgrade(State(Arc::clone(control)), owner.map(Extension), body);
        let Err(ErrorResponse(status, error)) = runtime.block_on(answer) else {
            panic!("it is upgraded")
        };
        (status, error.message)
    }

    #[test]
    fn other_users_than_the_owner_are_refused() {
        let control = Arc::default();
        assert_eq!(answer(&control, None).0, StatusCode::FORBIDDEN);
        let (status, message) = answer(&control, Some(FromOwner));
        assert_eq!(status, StatusCode::CONFLICT);
        assert_eq!(message, "cannot upgrade: this yard is part of another program");
        assert!(control.upgrade.begin_end());
        let (status, message) = answer(&control, Some(FromOwner));
        assert_eq!((status, &*message), (StatusCode::CONFLICT, "cannot upgrade: the daemon ends"));
    }
}
