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

use crate::ObjectError;
use crate::bucket_error::{BucketError, taken_over};
use crate::client::{Created, Object, ObjectClient, Swapped};
use crate::recovery;

/// How often a lease is renewed in its length.
const RENEWALS: u32 = 3;

/// After a renewal that failed, the next one follows after this part (1/10) of the length, so that
/// one lost request does not end the lease.
const RETRY_PART: u32 = 10;

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Reads the object; not all of it, if another program has put a long one there.
pub(crate) async fn get(client: &ObjectClient) -> Result<Option<Object>, BucketError> {
    match client.get(LEASE, Some(0..LEASE_BYTES as u64 + 1)).await {
        // A store refuses to read a part of an empty object.
        Err(ObjectError::Shorter { .. }) => Ok(client.get(LEASE, None).await?),
        part => Ok(part?),
    }
}

/// The lease of the pool with this mark; `None` if no opener keeps one.
///
/// # Errors
/// If the object is of another pool, or is no lease.
pub(crate) async fn read(client: &ObjectClient, pool: u64) -> Result<Option<Lease>, BucketError> {
    let Some(found) = get(client).await? else { return Ok(None) };
    let parsed = ObjectHeader::parse_lease(&found.bytes);
    let (header, length_ms) = parsed.map_err(BucketError::of_object(LEASE))?;
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

/// Claims a lease for a standby that can read the pool. Returns the epoch that the manifest named,
/// if the lease was claimed.
///
/// # Errors
/// If an object of the pool is missing or damaged: the machine that has the pool may still use it,
/// and its lease stays as it is.
pub(crate) async fn claim_readable(
    client: &Arc<ObjectClient>,
    seen: &Lease,
    standby: [u8; 16],
    keep_bytes: usize,
) -> Result<Option<u64>, BucketError> {
    let Some(found) = recovery::manifest(client).await? else { return Ok(None) };
    drop(recovery::look_first(client, found, keep_bytes).await?);
    // Another opener may have come meanwhile.
    let Some((manifest, _)) = recovery::manifest(client).await? else { return Ok(None) };
    let found = (manifest.mark(), manifest.epoch);
    Ok(claim(client, found, seen, standby).await?.then_some(manifest.epoch))
}

/// Claims a lease for a standby: replaces it, if it is still this one. Returns whether it was.
///
/// The claim has the epoch of the manifest that was read before. An opener that has taken that
/// epoch and did not write its lease yet finds the claim in its place, and serves nothing.
async fn claim(
    client: &ObjectClient,
    (pool, epoch): (u64, u64),
    seen: &Lease,
    standby: [u8; 16],
) -> Result<bool, BucketError> {
    let Some(found) = get(client).await? else { return Ok(false) };
    let parsed = ObjectHeader::parse_lease(&found.bytes);
    let (header, length_ms) = parsed.map_err(BucketError::of_object(LEASE))?;
    let is_seen = (header.pool, header.writer) == (pool, seen.opener)
        && (header.epoch, header.number) == (seen.epoch, seen.renewals);
    if !is_seen {
        return Ok(false);
    }
    // An opener that takes the next epoch replaces the claim.
    let claim = ObjectHeader { writer: standby, epoch, number: 0, ..header };
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
///
/// # Errors
/// If a later opener has written the lease, or a standby has claimed it.
pub(crate) async fn inherit(
    client: &ObjectClient,
    header: &ObjectHeader,
    earlier: Earlier,
) -> Result<Option<Duration>, BucketError> {
    let Some(found) = get(client).await? else { return Ok(None) };
    if is_later(&found.bytes, header) {
        return Err(BucketError::Lost { why: taken_over(LEASE, Some(&found.bytes)) });
    }
    let found_ms = match ObjectHeader::parse_lease(&found.bytes) {
        Ok((lease, length_ms)) if lease.pool == header.pool => length_ms,
        _ => 0,
    };
    if earlier == Earlier::Kept && found_ms > 0 {
        return Ok(Some(Duration::from_millis(found_ms)));
    }
    // The object stays, and names the new epoch: an earlier opener would create it again.
    let mut e_tag = Some(found.etag);
    loop {
        match renew(client, header, 0, e_tag.as_deref()).await? {
            Renewal::Done(_) => return Ok(None),
            Renewal::Changed(other) => e_tag = other,
            Renewal::TakenOver(other) => {
                return Err(BucketError::Lost { why: taken_over(LEASE, Some(&other)) });
            }
        }
    }
}

/// What renews a lease.
#[derive(Debug)]
pub(crate) struct LeaseKeeper {
    pub(crate) client: Arc<ObjectClient>,
    /// The header of the objects of the opener.
    pub(crate) header: ObjectHeader,
    pub(crate) length: Duration,
    pub(crate) term: Arc<LeaseTerm>,
    /// Signalled when the opener may serve again, and when it refuses requests.
    pub(crate) changed: Arc<Notify>,
    /// Without a renewal for this time requests are refused, in addition to the length.
    pub(crate) outage_max: Duration,
}

/// How the renewals of a lease go.
#[derive(Debug)]
struct Renewals {
    /// When the last confirmed version lets the opener serve no longer. Before the first one: when
    /// a version would end that was sent at the start.
    until: Instant,
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
        let mut renewals = self.served_from(Instant::now());
        let mut e_tag: Option<String> = None;
        loop {
            let sent = (Instant::now(), boot_ns());
            let renewal = renew(&self.client, &header, millis(self.length), e_tag.as_deref());
            // After a failure there is time for a second request: the object may have another
            // version than the last one that was confirmed, which is read then.
            let time = self.length / RENEWALS * (1 + u32::from(renewals.has_failed));
            let failure = match tokio::time::timeout(time, renewal).await {
                Ok(Ok(Renewal::Done(new))) => {
                    e_tag = Some(new);
                    None
                }
                Ok(Ok(Renewal::Changed(other))) => {
                    e_tag = other;
                    continue;
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

    /// The renewals after a version that was sent at a time.
    fn served_from(&self, sent: Instant) -> Renewals {
        let until = sent + Duration::from_nanos(serving_ns(self.length));
        Renewals { until, has_failed: false, is_held: false }
    }

    /// The object store has confirmed a version that was sent at a time: on the clock of the
    /// runtime, and in nanoseconds since the start of the machine.
    fn renewed(&self, renewals: &mut Renewals, (sent, sent_ns): (Instant, u64)) {
        self.term.renew(sent_ns.saturating_add(serving_ns(self.length)));
        self.changed.notify_waiters();
        if renewals.is_held {
            tracing::warn!("{}: the lease is renewed: requests are served", self.client.title());
        }
        *renewals = self.served_from(sent);
    }

    /// A renewal has failed. If no standby takes the pool over, a later one keeps the lease.
    fn missed(&self, renewals: &mut Renewals, error: &str) {
        let title = self.client.title();
        if !std::mem::replace(&mut renewals.has_failed, true) {
            tracing::warn!("{title}: cannot renew the lease: {error}");
        }
        let Some(over) = Instant::now().checked_duration_since(renewals.until) else { return };
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
            self.changed.notify_waiters();
        }
    }
}

/// How an attempt to renew a lease ended.
enum Renewal {
    /// The lease has this entity tag.
    Done(String),
    /// The object has another version than was expected, with this entity tag; `None`: there is
    /// none.
    Changed(Option<String>),
    /// The lease is that of a later opener, or a standby has claimed it: the object.
    TakenOver(Bytes),
}

/// Writes the lease in place of the version with the entity tag, or creates it.
async fn renew(
    client: &ObjectClient,
    header: &ObjectHeader,
    length_ms: u64,
    e_tag: Option<&str>,
) -> Result<Renewal, BucketError> {
    let bytes = header.lease(length_ms).into();
    let other = match e_tag {
        Some(e_tag) => match client.swap(LEASE, &bytes, e_tag).await? {
            Swapped::New { etag } => return Ok(Renewal::Done(etag)),
            Swapped::Changed(other) => other,
        },
        None => match client.create(LEASE, &bytes).await? {
            Created::New { etag } => return Ok(Renewal::Done(etag)),
            Created::Taken(other) => Some(other),
        },
    };
    Ok(match other {
        Some(other) if is_later(&other.bytes, header) => Renewal::TakenOver(other.bytes),
        other => Renewal::Changed(other.map(|other| other.etag)),
    })
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

    /// An opener took the epoch after the one that the lease names, and ended before it wrote its
    /// own lease. The claim has the epoch of the manifest: that of the last opener.
    #[test]
    fn a_claim_stops_also_an_opener_that_has_not_written_its_lease_yet() {
        let store = Arc::new(object_store::memory::InMemory::new());
        let client = ObjectClient::over(store, "pool", crate::Retries::default());
        let first =
            ObjectHeader { kind: ObjectKind::Batch, pool: 7, writer: [1; 16], epoch: 5, number: 3 };
        let late = ObjectHeader { writer: [2; 16], epoch: 6, number: 0, ..first };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            renew(&client, &first, 3000, None).await.unwrap();
            let seen = read(&client, 7).await.unwrap().unwrap();
            let renewed = Lease { renewals: 4, ..seen };
            assert!(!claim(&client, (7, 6), &renewed, [9; 16]).await.unwrap());
            assert!(claim(&client, (7, 6), &seen, [9; 16]).await.unwrap());
            let claimed = read(&client, 7).await.unwrap().unwrap();
            assert_eq!((claimed.opener, claimed.epoch), ([9; 16], 6));
            for earlier in [Earlier::Kept, Earlier::Withdrawn] {
                let error = inherit(&client, &late, earlier).await.unwrap_err();
                assert!(matches!(error, BucketError::Lost { .. }), "{error}");
            }
            let renewal = renew(&client, &late, 3000, None).await.unwrap();
            assert!(matches!(renewal, Renewal::TakenOver(_)));
            let next = ObjectHeader { epoch: 7, ..late };
            assert_eq!(inherit(&client, &next, Earlier::Withdrawn).await.unwrap(), None);
            assert_eq!(read(&client, 7).await.unwrap(), None);
        });
    }
    /// Regression: a standby claimed the lease of a pool that it could not read. The machine that
    /// could read it had lost it then.
    #[test]
    fn a_lease_of_a_pool_that_cannot_be_read_is_not_claimed() {
        let store = Arc::new(object_store::memory::InMemory::new());
        let client = Arc::new(ObjectClient::over(store, "pool", crate::Retries::default()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let made = recovery::make(&client, ([5; 16], [1; 16]), 1 << 30).await.unwrap();
            let header = recovery::header_of(&made.0);
            renew(&client, &header, 3000, None).await.unwrap();
            let seen = read(&client, header.pool).await.unwrap().unwrap();
            let name = blockyard_volume_format::object::ObjectId::batch(1, 0).to_string();
            client.put(&name, &Bytes::from_static(b"damaged")).await.unwrap();
            for _ in 0..2 {
                let error = claim_readable(&client, &seen, [9; 16], 0).await.unwrap_err();
                assert!(error.to_string().contains(&name), "{error}");
                assert_eq!(read(&client, header.pool).await.unwrap(), Some(seen));
            }
            client.delete(&[&name]).await.unwrap();
            let claimed = claim_readable(&client, &seen, [9; 16], 0).await.unwrap();
            assert_eq!(claimed, Some(1));
            let claim = read(&client, header.pool).await.unwrap().unwrap();
            assert_eq!((claim.opener, claim.epoch), ([9; 16], 1));
        });
    }
}
