//! What a pool in an object store costs in a month, and would cost under the other policy of
//! acknowledgement.

use std::time::Duration;

use blockyard_object::cost::{Cost, Month, S3_STANDARD, Writes};
use blockyard_object::{BucketSettings, LocalAcknowledgement};
use blockyard_store::remote::RequestTotals;
use blockyard_yard::volumes::{PoolView, RequestsView};

use crate::human::rounded;

/// The time for which requests and writes are counted before they are taken for those of a month.
const COUNTED_MS_MIN: u64 = 60_000;

/// The requests since the pool was opened, and what a month costs at this rate, in a line.
pub(crate) fn cost(requests: &RequestsView, stored_bytes: u64) -> String {
    let RequestsView { puts, gets, sent_bytes, read_bytes, over_ms } = *requests;
    let counted = format!("{puts} PUTs and {gets} GETs in {} s", over_ms / 1000);
    if over_ms < COUNTED_MS_MIN {
        return counted;
    }
    let totals = RequestTotals { puts, gets, sent_bytes, read_bytes, over_ms };
    let Cost { requests, transfer, storage } = Month::of(&totals, stored_bytes).cost(&S3_STANDARD);
    format!(
        "{counted}; a month at this rate: ${:.2} for requests, ${storage:.2} for {} in {}",
        requests + transfer,
        rounded(stored_bytes),
        S3_STANDARD.name
    )
}

/// The forecast for a pool that writes as it has since it was opened, in a line; `None` for a pool
/// that is not in an object store, or not open for a minute.
///
/// It is a rough figure: the PUTs of write batches for the counted bytes and groups of syncs.
/// Syncs of superblocks, tables and names, compactions and leases add theirs, under either policy;
/// under the other policy clients may have other rates ([`Writes`]).
pub(crate) fn forecast(pool: &PoolView) -> Option<String> {
    let upload = pool.upload.as_ref()?;
    let over_ms = upload.requests.over_ms;
    if over_ms < COUNTED_MS_MIN {
        return None;
    }
    let per_s = |count: u64| count as f64 * 1000.0 / over_ms as f64;
    let writes =
        Writes { bytes_per_s: per_s(pool.written_bytes()), groups_per_s: per_s(pool.syncs) };
    let batch_bytes = BucketSettings::default().batch_bytes as u64;
    let mut local = LocalAcknowledgement::default();
    if upload.max_lag_ms > 0 {
        local = local.with_lag_time_max(Duration::from_millis(upload.max_lag_ms));
    }
    let price = |puts: f64| {
        let month = Month { puts, ..Month::default() };
        format!("${:.2} with", month.cost(&S3_STANDARD).total())
    };
    Some(format!(
        "about {} ack=object, {} ack=local, for the PUTs of a month of such writes",
        price(writes.puts_if_acknowledged_by_store(batch_bytes)),
        price(writes.puts_if_acknowledged_locally(batch_bytes, local.upload_delay))
    ))
}

#[cfg(test)]
mod tests {
    use blockyard_yard::volumes::UploadView;

    use super::*;

    #[test]
    fn requests_are_a_line_with_the_price_of_a_month() {
        let requests =
            RequestsView { puts: 60, gets: 6, over_ms: 59_000, ..RequestsView::default() };
        assert_eq!(cost(&requests, 100 << 30), "60 PUTs and 6 GETs in 59 s");
        // 2,592,000 PUTs at $5 a million, 259,200 GETs at $0.4 a million, and $0.023 for a GB.
        let requests = RequestsView { over_ms: 60_000, ..requests };
        assert_eq!(
            cost(&requests, 100 << 30),
            "60 PUTs and 6 GETs in 60 s; a month at this rate: $13.06 for requests, $2.30 for 100G \
             in S3 Standard"
        );
    }

    #[test]
    fn a_forecast_has_both_policies() {
        let requests = RequestsView { over_ms: 100_000, ..RequestsView::default() };
        let upload = UploadView { requests, ..UploadView::default() };
        let pool = PoolView {
            // 100 syncs and 4 MiB a second.
            syncs: 10_000,
            log_bytes: 400 << 20,
            upload: Some(upload.clone()),
            ..PoolView::default()
        };
        // A full batch a second, and 100 others or one: 261.8 and 5.184 million PUTs at $5 a
        // million.
        assert_eq!(
            forecast(&pool).unwrap(),
            "about $1308.96 with ack=object, $25.92 with ack=local, for the PUTs of a month of \
             such writes"
        );
        // A batch waits for a quarter of a lag of two seconds.
        let short = UploadView { max_lag_ms: 2000, ..upload.clone() };
        let short = forecast(&PoolView { upload: Some(short), ..pool.clone() }).unwrap();
        assert!(short.contains("$38.88 with ack=local"), "{short}");
        let requests = RequestsView { over_ms: 59_999, ..requests };
        let young = UploadView { requests, ..upload };
        assert_eq!(forecast(&PoolView { upload: Some(young), ..pool.clone() }), None);
        assert_eq!(forecast(&PoolView { upload: None, ..pool }), None);
    }
}
