//! Pools on an S3-compatible object store.
//!
//! Start at [`client`]: its primitives create, swap, read, list and delete objects below a prefix.
//! Each primitive resolves an ambiguous answer by reading the object back, so that a caller learns
//! whether its own write took effect or another writer's.
//!
//! [`location`] has the URI and the credentials, [`answer`] names what a store answers, and
//! [`preflight`] refuses a store whose conditional writes do not exclude a second writer.

pub mod answer;
pub mod client;
pub mod cost;
pub mod location;
pub mod preflight;
pub mod requests;

pub use client::{Created, ListedObject, Object, ObjectClient, Retries, Swapped};
pub use location::{Access, ObjectUri};
pub use requests::{RequestCount, RequestKind, Requests};

/// Why a request to an object store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// A parameter is wrong.
    #[error("invalid {field}{}: expected {wanted}", shown(.value))]
    Invalid {
        /// Which parameter.
        field: &'static str,
        /// The value, unless it may contain a secret.
        value: Option<String>,
        /// What is valid.
        wanted: String,
    },
    /// There are no credentials, or the file with them is unusable.
    #[error("cannot find credentials for the object store: {0}")]
    Credentials(String),
    /// The store answered that it does not do this. A repetition would get this answer too.
    #[error("cannot {doing}: {why}")]
    Refused {
        /// The verb and the object.
        doing: String,
        /// What the store answered.
        why: String,
    },
    /// No request succeeded before the client gave up. The write may have taken effect.
    #[error("cannot {doing}: no success in {tries} tries within {seconds} s; the last: {last}")]
    Unavailable {
        /// The verb and the object.
        doing: String,
        /// How often it was tried.
        tries: u32,
        /// For how long.
        seconds: u64,
        /// Why the last try failed.
        last: String,
    },
}

impl ObjectError {
    /// Whether the operation may succeed later without a change by the user: the store was not
    /// reachable, or overloaded.
    pub fn is_transient(&self) -> bool {
        matches!(self, ObjectError::Unavailable { .. })
    }
}

fn shown(value: &Option<String>) -> String {
    value.as_ref().map(|value| format!(" `{value}`")).unwrap_or_default()
}
