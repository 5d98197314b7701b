//! The lease of a pool: an object that its opener renews, so that a standby sees that the opener
//! lives, and the opener knows that it may serve.
//!
//! Which writes a later opener finds does not depend on it: an opener is fenced by the seal of its
//! epoch, whatever the lease says ([`crate::recovery`]). The lease decides until when an opener
//! serves that has not noticed that it is fenced: [`blockyard_store::lease`] has the proof.
//!
//! ```text
//!  opener of epoch e ─ renew ─▸ version of e ─ a later opener ─▸ version of e + 1
//!                                   └ a standby claims it ─▸ claim: epoch e, the standby's number
//! ```
//!
//! A renewal replaces the version before, so that an opener whose pool was taken over learns it by
//! its next renewal, also if no client writes.

use std::sync::Arc;
use std::time::Duration;

use blockyard_store::LeaseTerm;
use blockyard_store::lease::{boot_ns, serving_ns};
use blockyard_store::remote::Lease;
use blockyard_volume_format::FormatError;
use blockyard_volume_format::object::{LEASE, LEASE_BYTES, ObjectHeader};
use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::bucket_error::{BucketError, taken_over};
use crate::client::{Created, Object, ObjectClient, Swapped};

/// How often a lease is renewed in its length.
const RENEWALS: u32 = 3;

/// After a renewal that failed, the next one follows after this part (1/10) of the length, so that
/// one lost request does not end the lease.
const RETRY_PART: u32 = 10;

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Reads the object; not all of it, if another program has put a long one there.
async fn get(client: &ObjectClient) -> Result<Option<Object>, BucketError> {
    Ok(client.get(LEASE, Some(0..LEASE_BYTES as u64 + 1)).await?)
}

/// The lease of the pool with this mark; `None` if no opener keeps one.
///
/// # Errors
/// If the object is of another pool, or is no lease.
pub(crate) async fn read(client: &ObjectClient, pool: u64) -> Result<Option<Lease>, BucketError> {
    let Some(found) = get(client).await? else { return Ok(None) };
    let (header, length_ms) = ObjectHeader::parse_lease(&found.bytes)?;
    if header.pool != pool {
        return Err(BucketError::Foreign { name: LEASE.to_owned() });
    }
    let lease = Lease {
        opener: header.writer,
        epoch: header.epoch,
        renewals: header.number,
        length: Duration::from_millis(length_ms),
    };
    Ok(Some(lease).filter(|lease| !lease.length.is_zero()))
}

/// Claims a lease for a standby: replaces it, if it is still this one. Returns whether it was.
pub(crate) async fn claim(
    client: &ObjectClient,
    pool: u64,
    seen: &Lease,
    standby: [u8; 16],
) -> Result<bool, BucketError> {
    let Some(found) = get(client).await? else { return Ok(false) };
    let (header, length_ms) = ObjectHeader::parse_lease(&found.bytes)?;
    let is_seen = (header.pool, header.writer) == (pool, seen.opener)
        && (header.epoch, header.number) == (seen.epoch, seen.renewals);
    if !is_seen {
        return Ok(false);
    }
    // The epoch stays: an opener that takes the next one replaces the claim.
    let claim = ObjectHeader { writer: standby, number: 0, ..header };
    let swapped = client.swap(LEASE, &claim.lease(length_ms).into(), &found.etag).await?;
    Ok(matches!(swapped, Swapped::New { .. }))
}

/// What an opener without a lease does with the lease of an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Earlier {
    /// The opener continues to renew it.
    Kept,
    /// The opener withdraws it: no standby takes the pool over any more.
    Withdrawn,
}

/// The length of the lease that an opener keeps which was given none.
pub(crate) async fn inherit(
    client: &ObjectClient,
    header: &ObjectHeader,
    earlier: Earlier,
) -> Result<Option<Duration>, BucketError> {
    let Some(found) = get(client).await? else { return Ok(None) };
    let found_ms = match ObjectHeader::parse_lease(&found.bytes) {
        Ok((lease, length_ms)) if lease.pool == header.pool => length_ms,
        _ => 0,
    };
    if earlier == Earlier::Kept && found_ms > 0 {
        return Ok(Some(Duration::from_millis(found_ms)));
    }
    // The object stays, and names the new epoch: an earlier opener would create it again.
    renew(client, header, 0, Some(found.etag)).await?;
    Ok(None)
}

/// What renews a lease.
#[derive(Debug)]
pub(crate) struct LeaseKeeper {
    pub(crate) client: Arc<ObjectClient>,
    /// The header of the objects of the opener.
    pub(crate) header: ObjectHeader,
    pub(crate) length: Duration,
    pub(crate) term: Arc<LeaseTerm>,
    /// Signalled when the opener may serve again.
    pub(crate) changed: Arc<Notify>,
    /// Without a renewal for this time requests are refused, in addition to the length.
    pub(crate) outage_max: Duration,
}

/// How the renewals of a lease go.
#[derive(Debug, Default)]
struct Renewals {
    /// When the last confirmed version lets the opener serve no longer; `None`: none is confirmed.
    until: Option<Instant>,
    /// Whether the last renewal failed.
    has_failed: bool,
    /// Whether requests are held.
    is_held: bool,
}

impl LeaseKeeper {
    /// Renews the lease, at first at once, until another opener takes the pool over. Returns what
    /// to say about that.
    pub(crate) async fn run(self) -> String {
        let mut header = ObjectHeader { number: 0, ..self.header };
        let (mut e_tag, mut renewals) = (None, Renewals::default());
        loop {
            let sent = (Instant::now(), boot_ns());
            let renewal = renew(&self.client, &header, millis(self.length), e_tag.take());
            let failure = match tokio::time::timeout(self.length / RENEWALS, renewal).await {
                Ok(Ok(Renewal::Done(new))) => {
                    e_tag = Some(new);
                    None
                }
                Ok(Ok(Renewal::TakenOver(other))) => return taken_over(LEASE, Some(&other)),
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("the object store does not answer".to_owned()),
            };
            let part = match failure {
                None => {
                    self.renewed(&mut renewals, sent);
                    RENEWALS
                }
                Some(error) => {
                    self.missed(&mut renewals, &error);
                    RETRY_PART
                }
            };
            header.number += 1;
            tokio::time::sleep(self.length / part).await;
        }
    }

    /// The object store has confirmed a version that was sent at a time: on the clock of the
    /// runtime, and in nanoseconds since the start of the machine.
    fn renewed(&self, renewals: &mut Renewals, (sent, sent_ns): (Instant, u64)) {
        let serving_ns = serving_ns(self.length);
        self.term.renew(sent_ns.saturating_add(serving_ns));
        self.changed.notify_waiters();
        if renewals.is_held {
            tracing::warn!("{}: the lease is renewed: requests are served", self.client.title());
        }
        let until = sent + Duration::from_nanos(serving_ns);
        *renewals = Renewals { until: Some(until), ..Renewals::default() };
    }

    /// A renewal has failed. If no standby takes the pool over, a later one keeps the lease.
    fn missed(&self, renewals: &mut Renewals, error: &str) {
        let title = self.client.title();
        if !std::mem::replace(&mut renewals.has_failed, true) {
            tracing::warn!("{title}: cannot renew the lease: {error}");
        }
        let over = renewals.until.map(|until| Instant::now().checked_duration_since(until));
        let over = over.unwrap_or(Some(Duration::ZERO));
        let Some(over) = over else { return };
        if !std::mem::replace(&mut renewals.is_held, true) {
            tracing::error!(
                "{title}: the lease was not renewed for {} s, and a standby may take the pool \
                 over: requests wait until it is",
                self.length.as_secs_f64()
            );
        }
        if over < self.outage_max {
            self.term.hold();
        } else {
            self.term.refuse();
        }
    }
}

/// How a renewal ended.
enum Renewal {
    /// The lease has this entity tag.
    Done(String),
    /// The lease is that of a later opener, or a standby has claimed it: the object.
    TakenOver(Bytes),
}

/// Writes the lease in place of the version with the entity tag, or of that of an earlier opener.
async fn renew(
    client: &ObjectClient,
    header: &ObjectHeader,
    length_ms: u64,
    mut e_tag: Option<String>,
) -> Result<Renewal, BucketError> {
    let bytes = header.lease(length_ms).into();
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
            Some(other) if is_later(&other.bytes, header) => {
                return Ok(Renewal::TakenOver(other.bytes));
            }
            other => other.map(|other| other.etag),
        };
    }
}

/// Whether a lease takes the pool from the opener with this header: it is of a later opener, or a
/// standby has claimed it. One that is damaged, or of another pool, is replaced.
fn is_later(bytes: &[u8], own: &ObjectHeader) -> bool {
    match ObjectHeader::parse_lease(bytes) {
        Ok((found, _)) => {
            let is_claim = found.epoch == own.epoch && found.writer != own.writer;
            found.pool == own.pool && (found.epoch > own.epoch || is_claim)
        }
        Err(FormatError::Version { found, known, .. }) => found > known,
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_volume_format::object::ObjectKind;

    #[test]
    fn a_lease_of_a_later_opener_or_a_claim_takes_the_pool_and_no_other_object_does() {
        let own =
            ObjectHeader { kind: ObjectKind::Batch, pool: 7, writer: [1; 16], epoch: 5, number: 0 };
        let is_later = |header: ObjectHeader| is_later(&header.lease(3000), &own);
        assert!(!is_later(ObjectHeader { number: 9, ..own }));
        assert!(!is_later(ObjectHeader { epoch: 4, writer: [2; 16], ..own }));
        assert!(is_later(ObjectHeader { epoch: 6, writer: [2; 16], ..own }));
        assert!(is_later(ObjectHeader { writer: [2; 16], ..own }), "a claim");
        assert!(!is_later(ObjectHeader { pool: 8, epoch: 6, ..own }), "another pool");
        assert!(!super::is_later(b"damaged", &own));
        let mut newer = own.lease(3000);
        newer[16] = 3;
        assert!(super::is_later(&newer, &own), "an opener of a newer program");
        newer[16] = 1;
        assert!(!super::is_later(&newer, &own), "an opener of an older program");
    }
}
