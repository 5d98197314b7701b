//! What a store answered, by name. [`NamingConnector`] sits between `object_store` and its HTTP
//! client: it turns an answer that is an error into a [`StoreAnswer`], which has the status and
//! S3's code, and nothing else of the store's text.

use std::error::Error;

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};

/// An answer other than success.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the store answered {status} {code}")]
pub struct StoreAnswer {
    /// The status of HTTP.
    pub status: u16,
    /// S3's code, such as `SlowDown`.
    pub code: String,
}

impl StoreAnswer {
    /// The answer that caused an error, if it was one.
    pub fn of<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a StoreAnswer> {
        causes(error).find_map(|cause| cause.downcast_ref())
    }

    /// Whether an object ends before the part that was to be read.
    pub fn is_shorter(&self) -> bool {
        self.status == 416
    }

    /// Whether the same request may get another answer soon.
    pub fn is_transient(&self) -> bool {
        (self.status >= 500 && self.status != 501)
            || matches!(self.status, 408 | 429)
            || matches!(&self.code[..], "RequestTimeout" | "SlowDown")
    }
}

/// An error and its causes.
pub(crate) fn causes<'a>(
    error: &'a (dyn Error + 'static),
) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&cause| cause.source())
}

/// Longest code that is shown, in bytes.
const CODE_MAX: usize = 64;

/// The code in the XML of an error of S3; empty if there is none.
fn code_in(body: &str) -> &str {
    let code = body.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>"));
    let is_code = |text: &&str| {
        text.len() <= CODE_MAX && text.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'.')
    };
    code.map(|(code, _)| code.trim()).filter(is_code).unwrap_or_default()
}

/// Connects as `object_store` does by default, and names answers.
#[derive(Debug)]
pub(crate) struct NamingConnector;

impl HttpConnector for NamingConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(NamingService(inner)))
    }
}

#[derive(Debug)]
struct NamingService(HttpClient);

#[async_trait]
impl HttpService for NamingService {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let wants_part = request.headers().contains_key("range");
        let response = self.0.execute(request).await?;
        let status = response.status();
        // Nothing can be the part of an empty object, and S3 answers 416. To a request for the last
        // bytes MinIO answers 206 with an invalid range, and versitygw 200.
        let len = response.headers().get("content-length");
        if wants_part && status.is_success() && len.is_some_and(|len| len == "0") {
            let answer = StoreAnswer { status: 416, code: "InvalidRange".to_owned() };
            return Err(HttpError::new(HttpErrorKind::Unknown, answer));
        }
        // `object_store` maps these, and their text is not needed.
        if status.is_success() || matches!(status.as_u16(), 304 | 409 | 412) {
            return Ok(response);
        }
        let (parts, body) = response.into_parts();
        let body = body.bytes().await?;
        let code = code_in(&String::from_utf8_lossy(&body)).to_owned();
        // The object is not there. Any other 404 says something else, such as that the bucket is
        // not there, and must not pass for that.
        if status.as_u16() == 404 && code == "NoSuchKey" {
            return Ok(HttpResponse::from_parts(parts, body.into()));
        }
        let answer = StoreAnswer { status: status.as_u16(), code };
        Err(HttpError::new(HttpErrorKind::Unknown, answer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_a_word() {
        let body = "<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>x</Message></Error>";
        assert_eq!(code_in(body), "SlowDown");
        for body in ["", "<html>404</html>", "<Code>a <b>c</b></Code>", "<Code>unclosed"] {
            assert_eq!(code_in(body), "", "{body}");
        }
    }

    #[test]
    fn overload_is_transient_and_a_refusal_is_not() {
        let is_transient =
            |status, code: &str| StoreAnswer { status, code: code.into() }.is_transient();
        for (status, code) in [(503, "SlowDown"), (500, ""), (429, ""), (400, "RequestTimeout")] {
            assert!(is_transient(status, code), "{status} {code}");
        }
        for (status, code) in [(403, "AccessDenied"), (404, "NoSuchBucket"), (400, ""), (501, "")] {
            assert!(!is_transient(status, code), "{status} {code}");
        }
    }

    #[test]
    fn the_answer_is_found_below_other_errors() {
        let answer = StoreAnswer { status: 403, code: "AccessDenied".into() };
        let error = HttpError::new(HttpErrorKind::Unknown, answer.clone());
        let error = object_store::Error::Generic { store: "S3", source: Box::new(error) };
        assert_eq!(StoreAnswer::of(&error), Some(&answer));
    }
}
