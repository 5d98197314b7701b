//! The lease of a pool: an object that its opener renews, so that a standby sees that the opener
//! lives.
//!
//! Safety does not depend on it: an opener is fenced by the seal of its epoch, whatever the lease
//! says ([`crate::recovery`]). A renewal replaces the version before, so that an opener whose pool
//! was taken over learns it by its next renewal, also if no client writes.

use std::sync::Arc;
use std::time::Duration;

use blockyard_store::remote::Lease;
use blockyard_volume_format::object::{LEASE, ObjectHeader, ObjectKind};

use crate::bucket_error::BucketError;
use crate::client::{Created, Object, ObjectClient, Swapped};
use crate::journal::{Journal, taken_over};

/// How often a lease is renewed in its length.
const RENEWALS: u32 = 3;

/// After a renewal that failed, the next one follows after this part (1/10) of the length, so that
/// one lost request does not end the lease.
const RETRY_PART: u32 = 10;

/// The lease of a pool; `None` if there is none.
pub(crate) async fn read(client: &ObjectClient) -> Result<Option<Lease>, BucketError> {
    let Some(found) = client.get(LEASE, None).await? else { return Ok(None) };
    let (header, _) = ObjectHeader::parse_as(&found.bytes, ObjectKind::Lease)?;
    Ok(Some(Lease { opener: header.writer, renewals: header.number }))
}

/// Renews the lease of this length until the journal ends.
pub(crate) async fn keep(journal: Arc<Journal>, length: Duration) {
    let mut header = ObjectHeader { number: 0, ..journal.state().header };
    let (mut e_tag, mut has_failed) = (None, false);
    while journal.failure().is_none() {
        let renewal = renew(&journal.client, &header, e_tag.take());
        let failure = match tokio::time::timeout(length / RENEWALS, renewal).await {
            Ok(Ok(Renewal::Done(new))) => {
                e_tag = Some(new);
                None
            }
            Ok(Ok(Renewal::TakenOver(other))) => {
                return journal.fail(&taken_over(LEASE, Some(&other.bytes)));
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("the object store does not answer".to_owned()),
        };
        // A standby may take the pool over. If none does, the next renewal keeps it.
        if let Some(error) = failure.as_ref().filter(|_| !has_failed) {
            tracing::warn!("{}: cannot renew the lease: {error}", journal.title);
        }
        has_failed = failure.is_some();
        header.number += 1;
        let part = if has_failed { RETRY_PART } else { RENEWALS };
        tokio::time::sleep(length / part).await;
    }
}

/// How a renewal ended.
enum Renewal {
    /// The lease has this entity tag.
    Done(String),
    /// The lease is that of a later opener.
    TakenOver(Object),
}

/// Writes the lease in place of the version with the entity tag, or of that of an earlier opener.
async fn renew(
    client: &ObjectClient,
    header: &ObjectHeader,
    mut e_tag: Option<String>,
) -> Result<Renewal, BucketError> {
    let bytes = header.lease().into();
    loop {
        let other = match &e_tag {
            Some(e_tag) => match client.swap(LEASE, &bytes, e_tag).await? {
                Swapped::New { etag } => return Ok(Renewal::Done(etag)),
                Swapped::Changed(other) => other,
            },
            None => match client.create(LEASE, &bytes).await? {
                Created::New { etag } => return Ok(Renewal::Done(etag)),
                Created::Taken(other) => Some(other),
            },
        };
        e_tag = match other {
            None => None,
            Some(other) => {
                let (found, _) = ObjectHeader::parse_as(&other.bytes, ObjectKind::Lease)?;
                if found.epoch > header.epoch {
                    return Ok(Renewal::TakenOver(other));
                }
                Some(other.etag)
            }
        };
    }
}
