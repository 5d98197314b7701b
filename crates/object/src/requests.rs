//! How many requests a client has sent, by kind.

use std::time::Duration;

use blockyard_store::remote::RequestTotals;
use serde::Serialize;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// A PUT that only creates.
    Create,
    /// A PUT that replaces one version by another.
    Swap,
    /// A PUT without a condition.
    Put,
    /// A read of an object, or of a part of one.
    Get,
    /// A page of a listing.
    List,
    /// A deletion of up to 1,000 objects.
    Delete,
}

impl RequestKind {
    const ALL: [RequestKind; 6] = [
        RequestKind::Create,
        RequestKind::Swap,
        RequestKind::Put,
        RequestKind::Get,
        RequestKind::List,
        RequestKind::Delete,
    ];
}

/// Requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestCount {
    /// Requests that were sent, repetitions included.
    pub requests: u64,
    /// Requests without an answer that says what happened: time-outs, lost connections, 5xx, 429.
    pub failed: u64,
    /// Bytes of objects sent or received.
    pub bytes: u64,
}

/// The requests of a client since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Requests {
    /// PUTs that only create.
    pub create: RequestCount,
    /// PUTs that replace one version by another.
    pub swap: RequestCount,
    /// PUTs without a condition.
    pub put: RequestCount,
    /// Reads.
    pub get: RequestCount,
    /// Pages of listings.
    pub list: RequestCount,
    /// Deletions.
    pub delete: RequestCount,
}

impl Requests {
    /// The requests of one kind.
    pub(crate) fn of(&mut self, kind: RequestKind) -> &mut RequestCount {
        match kind {
            RequestKind::Create => &mut self.create,
            RequestKind::Swap => &mut self.swap,
            RequestKind::Put => &mut self.put,
            RequestKind::Get => &mut self.get,
            RequestKind::List => &mut self.list,
            RequestKind::Delete => &mut self.delete,
        }
    }

    /// The requests after `before`, an earlier state of the same client.
    #[must_use]
    pub fn since(mut self, before: &Requests) -> Requests {
        let mut before = *before;
        for kind in RequestKind::ALL {
            let (now, before) = (self.of(kind), before.of(kind));
            now.requests -= before.requests;
            now.failed -= before.failed;
            now.bytes -= before.bytes;
        }
        self
    }

    /// The sums that a bill has, of requests that were sent in the time `over`. Deletions are free.
    pub fn totals(&self, over: Duration) -> RequestTotals {
        let sent = [self.create, self.swap, self.put];
        RequestTotals {
            puts: sent.iter().map(|tally| tally.requests).sum::<u64>() + self.list.requests,
            gets: self.get.requests,
            sent_bytes: sent.iter().map(|tally| tally.bytes).sum(),
            read_bytes: self.get.bytes,
            over_ms: u64::try_from(over.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// All requests.
    pub fn total(&self) -> u64 {
        let all = [self.create, self.swap, self.put, self.get, self.list, self.delete];
        all.iter().map(|tally| tally.requests).sum()
    }
}
