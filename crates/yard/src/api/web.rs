//! The dashboard: a page that looks and changes nothing, for a listener that browsers can reach.
//!
//! It has the page, the stream, the history, and the numbers of one zone; no path of it changes
//! anything. Each request names its host, which must be an address, `localhost` or the host of the
//! listener: a page of another site whose name leads to this machine (DNS rebinding) has the name
//! of that site. With a token, each request has to show it.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::Deserialize;
use tokio::sync::Semaphore;

use super::{
    Answer, Asked, Control, ErrorResponse, Name, Shared, blocking, monitor, no_such_method,
    no_such_path, path, query, version,
};
use crate::view::ZonesView;
use crate::web_access::WebAccess;
use crate::zones;

/// The most requests for a zone at once: each waits for a device.
const ZONE_REQUESTS_MAX: usize = 4;

/// The permits for requests for a zone. The page of one user never needs more than one.
static ZONE_REQUESTS: Semaphore = Semaphore::const_new(ZONE_REQUESTS_MAX);

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SVG: &str = "image/svg+xml";
const TEXT: &str = "text/plain; charset=utf-8";

/// A file of the page.
struct Asset {
    path: &'static str,
    content_type: &'static str,
    content: &'static str,
}

macro_rules! asset {
    ($path:literal, $type:expr, $file:literal) => {
        Asset {
            path: $path,
            content_type: $type,
            content: include_str!(concat!("../../assets/", $file)),
        }
    };
}

/// The files of the page.
const ASSETS: [Asset; 12] = [
    asset!("/", HTML, "dashboard/index.html"),
    asset!("/dashboard.css", STYLE, "dashboard/dashboard.css"),
    asset!("/dashboard.js", SCRIPT, "dashboard/dashboard.js"),
    asset!("/units.js", SCRIPT, "dashboard/units.js"),
    asset!("/tables.js", SCRIPT, "dashboard/tables.js"),
    asset!("/charts.js", SCRIPT, "dashboard/charts.js"),
    asset!("/heatmap.js", SCRIPT, "dashboard/heatmap.js"),
    asset!("/zonemap.js", SCRIPT, "dashboard/zonemap.js"),
    asset!("/icon.svg", SVG, "dashboard/icon.svg"),
    asset!("/uplot.js", SCRIPT, "uplot/uPlot-1.6.32.iife.min.js"),
    asset!("/uplot.css", STYLE, "uplot/uPlot-1.6.32.min.css"),
    // Each copy of uPlot must have its licence.
    asset!("/uplot.LICENSE", TEXT, "uplot/uPlot-1.6.32.LICENSE"),
];

/// The headers of all responses. The page loads nothing from elsewhere, is in no frame, and is not
/// readable by pages of other sites.
const HEADERS: [(HeaderName, &str); 5] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (header::CACHE_CONTROL, "no-store"),
];

/// The routes of the dashboard.
pub(crate) fn routes(control: Arc<Control>, access: Arc<WebAccess>) -> Router {
    let mut routes = Router::new()
        .route("/v1/version", get(version))
        .route("/v1/stream", get(stream))
        .route("/v1/history", get(monitor::history))
        .route("/v1/devices/{name}/zones", get(zone));
    for Asset { path, content_type, content } in ASSETS {
        let file = async move || ([(header::CONTENT_TYPE, content_type)], content);
        routes = routes.route(path, get(file));
    }
    routes
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(middleware::from_fn_with_state(access, guard))
        .with_state(control)
}

/// Refuses requests that are not allowed, and completes the headers of all responses.
async fn guard(State(access): State<Arc<WebAccess>>, request: Request, next: Next) -> Response {
    let mut response = match refusal(&access, request.headers(), request.uri().path()) {
        Some(refusal) => refusal,
        None => next.run(request).await,
    };
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Refuses requests that name a host which is none of the listener.
pub(super) async fn check_host(
    State(access): State<Arc<WebAccess>>,
    request: Request,
    next: Next,
) -> Response {
    match text_of(request.headers(), header::HOST).filter(|host| access.is_own_host(host)) {
        Some(_) => next.run(request).await,
        None => misdirected(),
    }
}

fn misdirected() -> Response {
    let message = "the name of the host is not one of this listener: use its address, localhost, \
                   or the name in the configuration";
    ErrorResponse::new(StatusCode::MISDIRECTED_REQUEST, "misdirected", message).into_response()
}

/// The value of a header; empty if it is no text.
fn text_of(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name).map(|value| value.to_str().unwrap_or_default())
}

/// The response to a request that is refused.
fn refusal(access: &WebAccess, headers: &HeaderMap, path: &str) -> Option<Response> {
    let text = |name: HeaderName| text_of(headers, name);
    let Some(host) = text(header::HOST).filter(|host| access.is_own_host(host)) else {
        return Some(misdirected());
    };
    // Fetch Metadata, 2.4: browsers say whether a page of another site asks. A link to the page is
    // no harm.
    let site = text(HeaderName::from_static("sec-fetch-site")).unwrap_or("none");
    if path != "/" && !matches!(site, "none" | "same-origin") {
        tracing::debug!(host, site, "web: a page of another site asks");
        let message = "a page of another site may not ask";
        let status = StatusCode::FORBIDDEN;
        return Some(ErrorResponse::new(status, "cross_site", message).into_response());
    }
    if access.admits(text(header::AUTHORIZATION)) {
        return None;
    }
    let message = "a token is needed: as password of any user, or as bearer token";
    let refused = ErrorResponse::new(StatusCode::UNAUTHORIZED, "unauthorized", message);
    let challenge = [(header::WWW_AUTHENTICATE, "Basic realm=\"blockyard\", charset=\"UTF-8\"")];
    Some((challenge, refused).into_response())
}

async fn stream(State(control): Shared, asked: Asked) -> Result<Response, ErrorResponse> {
    monitor::open(&control, asked, true)
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ZoneQuery {
    from: u64,
}

/// One zone: the one that has the sector `from`.
async fn zone(State(control): Shared, name: Name, asked: Asked) -> Answer<ZonesView> {
    let (name, ZoneQuery { from }): (String, ZoneQuery) = (path(name)?, query(asked)?);
    let disk = control.devices.find(&name)?.disk;
    let permit = ZONE_REQUESTS.try_acquire().map_err(|_| {
        let message = format!("{ZONE_REQUESTS_MAX} requests wait for zones: try again");
        ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message)
    })?;
    // A drive may take long to answer.
    blocking(move || {
        let _permit = permit;
        zones::report(disk.as_ref(), from, 1)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_loads_its_own_files_and_nothing_else() {
        let page = ASSETS[0].content;
        for (before, _) in page.match_indices("src=\"").chain(page.match_indices("href=\"")) {
            let link = page[before..].split('"').nth(1).unwrap();
            assert!(ASSETS.iter().any(|asset| asset.path == link), "{link}");
        }
        for asset in ASSETS.iter().filter(|asset| asset.path.ends_with(".js")) {
            if asset.path == "/uplot.js" {
                continue;
            }
            for line in asset.content.lines().filter(|line| line.starts_with("import ")) {
                let file = line.split('"').nth(1).unwrap().trim_start_matches('.');
                assert!(ASSETS.iter().any(|other| other.path == file), "{line}");
            }
            for word in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "http://", "https://"]
            {
                assert!(!asset.content.contains(word), "{}: {word}", asset.path);
            }
        }
        assert!(!page.contains("<style") && !page.contains("style=") && !page.contains("onclick"));
    }

    fn status(access: &WebAccess, path: &str, headers: &[(&'static str, &str)]) -> Option<u16> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, HeaderValue::from_str(value).unwrap());
        }
        refusal(access, &map, path).map(|response| response.status().as_u16())
    }

    #[test]
    fn a_request_names_a_host_of_the_listener_and_shows_the_token() {
        let open = WebAccess::default();
        assert_eq!(status(&open, "/", &[]), Some(421));
        assert_eq!(status(&open, "/", &[("host", "evil.example:9465")]), Some(421));
        assert_eq!(status(&open, "/v1/stream", &[("host", "127.0.0.1:9465")]), None);
        let from = |site| [("host", "localhost:9465"), ("sec-fetch-site", site)];
        assert_eq!(status(&open, "/v1/stream", &from("cross-site")), Some(403));
        assert_eq!(status(&open, "/v1/stream", &from("same-site")), Some(403));
        assert_eq!(status(&open, "/v1/stream", &from("same-origin")), None);
        assert_eq!(status(&open, "/", &from("cross-site")), None);
        let closed = WebAccess::with_token("0123456789abcdef").unwrap().unwrap();
        let with = |token| [("host", "[::1]:9465"), ("authorization", token)];
        assert_eq!(status(&closed, "/", &[("host", "[::1]:9465")]), Some(401));
        assert_eq!(status(&closed, "/", &with("Bearer 0123456789abcdee")), Some(401));
        assert_eq!(status(&closed, "/", &with("Bearer 0123456789abcdef")), None);
    }
}
