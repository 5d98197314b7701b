//! The schedulers that are compared, and a null device under each.

use std::sync::Arc;

pub(crate) use blockyard_baselines::sched::{NAMES, NONE, PRODUCT};
use blockyard_baselines::{sched, sched_buckets, sched_lock};
use blockyard_core::Disk;
use blockyard_core::clock::Monotonic;
use blockyard_null::{Null, NullConfig};
use blockyard_yard::{stack, uri};

use crate::error::LabError;
use crate::experiment::{Variant, VariantRole};
use crate::tap::Tapped;

/// A variant for each of [`NAMES`], in their order.
pub(crate) fn variants() -> Vec<Variant> {
    let variant = |name, kind, about| Variant { name, kind, about };
    vec![
        variant(
            sched_lock::SPINNING,
            VariantRole::Before,
            "mq-deadline under one unfair spin lock, taken for each insertion and for each \
             dispatched request",
        ),
        variant(
            sched_lock::PARKING,
            VariantRole::Before,
            "mq-deadline under one lock that parks its waiters",
        ),
        variant(
            sched_buckets::NAME,
            VariantRole::After,
            "mq-deadline with 32 insertion buckets and a dispatching bit: the Linux patches of \
             January 2024",
        ),
        variant(
            PRODUCT,
            VariantRole::Product,
            "mq-deadline with a submit ring per submitter, a combining lock, and leases for the \
             fast path",
        ),
        variant(
            NONE,
            VariantRole::Limit,
            "no scheduler: each channel dispatches its own requests, first in, first out",
        ),
    ]
}

/// A disk, and the tap that counts the requests that reach its device.
pub(crate) type TappedDisk = (Arc<dyn Disk>, Arc<Tapped<Arc<Null>>>);

/// The null device of a URI. `none` has no tags for a whole device. With `bounded` it uses the null
/// device's own, on one hardware queue that all channels share.
fn null(name: &str, uri: &str, bounded: bool) -> Result<Arc<Null>, LabError> {
    let spec = uri::parse(uri).map_err(|error| LabError::failed(uri, error))?;
    let config = stack::null_config(&spec).map_err(|error| LabError::failed(uri, error))?;
    let submit_queues = (bounded && name == NONE).then_some(1);
    let config = NullConfig { submit_queues, ..config };
    Null::open(config).map_err(|error| LabError::failed(uri, error))
}

/// The null device of a URI under the scheduler `name`. Under `none` each channel has the device's
/// depth for itself.
pub(crate) fn open(name: &'static str, uri: &str) -> Result<Arc<dyn Disk>, LabError> {
    let disk = sched::disk(name, name, null(name, uri, false)?, Monotonic);
    disk.map_err(|error| LabError::failed(uri, error))
}

/// The null device of a URI under the scheduler `name`, with a tap, and with the device's depth for
/// all channels together.
pub(crate) fn open_tapped(name: &'static str, uri: &str) -> Result<TappedDisk, LabError> {
    let tap = Arc::new(Tapped::new(null(name, uri, true)?));
    let disk = sched::disk(name, name, Arc::clone(&tap), Monotonic);
    Ok((disk.map_err(|error| LabError::failed(uri, error))?, tap))
}
