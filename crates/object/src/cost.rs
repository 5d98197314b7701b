//! What a pool on an object store costs: requests, bytes and money in a month, from requests that
//! were counted, and as a forecast for another policy of acknowledgement.
//!
//! A month has 30 days and a GB here is 2^30 bytes, as on the bills of AWS.

use std::time::Duration;

use blockyard_store::remote::RequestTotals;
use serde::Serialize;

/// A month.
const MONTH: Duration = Duration::from_secs(30 * 24 * 3600);
const GB: f64 = (1u64 << 30) as f64;

/// Prices of a store in US dollars.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prices {
    /// The store.
    pub name: &'static str,
    /// 1,000 PUTs or pages of listings.
    pub put_1000: f64,
    /// 1,000 reads.
    pub get_1000: f64,
    /// A GB sent to the store.
    pub upload_gb: f64,
    /// A GB read, within the region.
    pub read_gb: f64,
    /// A GB stored for a month.
    pub stored_gb: f64,
}

/// AWS S3 Standard in US East (N. Virginia): the pricing page of AWS S3, November 2026. Deletions
/// are free.
pub const S3_STANDARD: Prices = Prices {
    name: "S3 Standard",
    put_1000: 0.005,
    get_1000: 0.0004,
    upload_gb: 0.0,
    read_gb: 0.0,
    stored_gb: 0.023,
};

/// What a pool asks of a store in a month.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Month {
    /// PUTs and pages of listings.
    pub puts: f64,
    /// Reads.
    pub gets: f64,
    /// Bytes sent.
    pub sent_bytes: f64,
    /// Bytes read.
    pub read_bytes: f64,
    /// Bytes that the store holds.
    pub stored_bytes: f64,
}

impl Month {
    /// A month in which the store is used as in the time in which these requests were counted.
    pub fn of(requests: &RequestTotals, stored_bytes: u64) -> Month {
        let seconds = (requests.over_ms as f64 / 1000.0).max(1.0);
        let of_month = |count: u64| count as f64 * MONTH.as_secs_f64() / seconds;
        Month {
            puts: of_month(requests.puts),
            gets: of_month(requests.gets),
            sent_bytes: of_month(requests.sent_bytes),
            read_bytes: of_month(requests.read_bytes),
            stored_bytes: stored_bytes as f64,
        }
    }

    /// What the month costs, in US dollars: requests, transfer, storage.
    pub fn cost(&self, prices: &Prices) -> Cost {
        Cost {
            requests: (self.puts * prices.put_1000 + self.gets * prices.get_1000) / 1000.0,
            transfer: (self.sent_bytes * prices.upload_gb + self.read_bytes * prices.read_gb) / GB,
            storage: self.stored_bytes * prices.stored_gb / GB,
        }
    }
}

/// US dollars in a month.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// Requests.
    pub requests: f64,
    /// Bytes sent and read.
    pub transfer: f64,
    /// Bytes stored.
    pub storage: f64,
}

impl Cost {
    /// All of it.
    pub fn total(&self) -> f64 {
        self.requests + self.transfer + self.storage
    }
}

/// Writes of clients, for a forecast.
///
/// The forecasts have the PUTs of write batches alone, and are upper bounds of these for as many
/// bytes and groups. They count as if writes came evenly: bursts with pauses between them take
/// fewer PUTs. Syncs of superblocks, tables and names are not in the groups, and end batches too.
/// Under another policy clients may write faster or more slowly, and a slower store has more syncs
/// in a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Writes {
    /// Bytes per second, after compression.
    pub bytes_per_s: f64,
    /// Groups of syncs per second that are committed together.
    pub groups_per_s: f64,
}

impl Writes {
    /// Most PUTs of batches in a month if each group is acknowledged after its PUT (`ack=object`).
    /// A batch is sent when it has `batch_bytes`, or at the end of a group.
    pub fn puts_if_acknowledged_by_store(&self, batch_bytes: u64) -> f64 {
        self.puts(batch_bytes, self.groups_per_s)
    }

    /// Most PUTs of batches in a month if groups are acknowledged by the local log (`ack=local`). A
    /// batch is sent when it has `batch_bytes`, or `delay` after its first write.
    pub fn puts_if_acknowledged_locally(&self, batch_bytes: u64, delay: Duration) -> f64 {
        self.puts(batch_bytes, self.groups_per_s.min(1.0 / delay.as_secs_f64()))
    }

    /// Each batch is full, or is one of those that end for another reason.
    fn puts(&self, batch_bytes: u64, ended_per_s: f64) -> f64 {
        (self.bytes_per_s / batch_bytes as f64 + ended_per_s) * MONTH.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BucketSettings;
    use crate::requests::{RequestCount, Requests};

    fn near(value: f64, expected: f64) {
        assert!((value - expected).abs() < expected * 0.01, "{value}, expected {expected}");
    }

    fn of_puts(puts: f64) -> Month {
        Month { puts, ..Month::default() }
    }

    /// The length of a full batch.
    fn batch_bytes() -> u64 {
        BucketSettings::default().batch_bytes as u64
    }

    #[test]
    fn a_group_every_10_ms_costs_1300_dollars() {
        let writes = Writes { bytes_per_s: 4e5, groups_per_s: 100.0 };
        let puts = writes.puts_if_acknowledged_by_store(batch_bytes());
        near(puts, 259.2e6);
        near(of_puts(puts).cost(&S3_STANDARD).total(), 1296.0);
    }

    #[test]
    fn full_batches_cost_by_their_number_and_small_groups_by_the_delay() {
        let writes = Writes { bytes_per_s: 1e9, groups_per_s: 1000.0 };
        let second = Duration::from_secs(1);
        // 238.4 full batches a second, and one that is not.
        let puts = writes.puts_if_acknowledged_locally(batch_bytes(), second);
        near(puts, 620.6e6);
        near(of_puts(puts).cost(&S3_STANDARD).total(), 3103.0);
        // Many small syncs are sent together, and few not more often than they come.
        let small = Writes { bytes_per_s: 1e3, groups_per_s: 100.0 };
        near(small.puts_if_acknowledged_locally(batch_bytes(), second), 2.592e6);
        near(small.puts_if_acknowledged_locally(batch_bytes(), second / 4), 4.0 * 2.592e6);
        let rare = Writes { bytes_per_s: 10.0, groups_per_s: 0.001 };
        near(rare.puts_if_acknowledged_locally(batch_bytes(), second), 2592.0);
        near(rare.puts_if_acknowledged_by_store(batch_bytes()), 2592.0);
    }

    /// Writes that come in bursts take no more PUTs than the forecast has.
    #[test]
    fn the_forecast_is_an_upper_bound_for_bursts() {
        // In each of 100 minutes 600 groups of 100 KB within a second, and then nothing.
        let (minutes, groups, group_bytes, minute) = (100, 600, 100_000, 60.0);
        let delay = Duration::from_secs(1);
        let (mut puts, mut open_bytes) = (0, 0);
        for _ in 0..minutes {
            for _ in 0..groups {
                open_bytes += group_bytes;
                if open_bytes >= batch_bytes() {
                    (puts, open_bytes) = (puts + 1, 0);
                }
            }
            // The delay ends the last one.
            (puts, open_bytes) = (puts + 1, 0);
        }
        let per_s = |count: u64| count as f64 / minute;
        let writes =
            Writes { bytes_per_s: per_s(groups * group_bytes), groups_per_s: per_s(groups) };
        let months = MONTH.as_secs_f64() / (minutes as f64 * minute);
        let counted = puts as f64 * months;
        assert!(counted <= writes.puts_if_acknowledged_locally(batch_bytes(), delay));
        let by_store = (minutes * groups) as f64 * months;
        assert!(by_store <= writes.puts_if_acknowledged_by_store(batch_bytes()));
    }

    #[test]
    fn an_idle_pool_costs_its_storage_alone() {
        let none = Requests::default().totals(Duration::from_secs(60));
        let month = Month::of(&none, 100 << 30);
        let cost = month.cost(&S3_STANDARD);
        assert_eq!((cost.requests, cost.transfer), (0.0, 0.0));
        near(cost.total(), 2.3);
    }

    #[test]
    fn counted_requests_are_scaled_to_a_month() {
        let tally = |requests, bytes| RequestCount { requests, bytes, failed: 0 };
        let requests = Requests {
            create: tally(100, 10 << 30),
            swap: tally(10, 0),
            put: tally(5, 2 << 30),
            get: tally(1000, 1 << 30),
            list: tally(1, 0),
            delete: tally(1000, 0),
        };
        let month = Month::of(&requests.totals(MONTH / 10), 0);
        assert_eq!((month.puts, month.gets), (1160.0, 10_000.0));
        let prices = Prices { upload_gb: 0.0032, read_gb: 0.0006, ..S3_STANDARD };
        let cost = month.cost(&prices);
        near(cost.requests, 1160.0 * 0.005e-3 + 10_000.0 * 0.0004e-3);
        near(cost.transfer, 120.0 * 0.0032 + 10.0 * 0.0006);
    }
}
