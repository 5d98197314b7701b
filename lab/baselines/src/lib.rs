//! The coarser locks that the product replaced, each as a device of its own.
//!
//! A baseline is made from the same parameters as the product's device and goes through the same
//! stack; only the locking differs. A baseline is the "before" of a measurement. It is also the
//! reference that the product must agree with, because it is plainly correct. No product code names
//! a baseline.
//!
//! [`no_device`] is the other end of the scale: a device that does nothing at all.

pub mod lock_per_zone;
pub mod locked_ram;
pub mod locked_zones;
pub mod no_device;
pub mod null_blk;
pub mod one_lock;
pub mod queued_lock;
pub mod ram_table;
pub mod sched;
pub mod sched_buckets;
pub mod sched_fifo;
pub mod sched_lanes;
pub mod sched_lock;
pub mod sched_order;
pub mod serial_log;
pub mod shared_lock;
pub mod task_workers;
pub mod tokens;
pub mod write_lock;
pub mod zone_lock;
pub mod zone_table;

use std::sync::Arc;

use blockyard_core::Disk;
use blockyard_core::zone::{Zone, ZoneOp};
use blockyard_yard::error::StackError;
use blockyard_yard::spec::DeviceSpec;
use blockyard_yard::stack::{self, Made};

use lock_per_zone::LockPerZone;
use no_device::NoDevice;
use one_lock::{OneLock, QueuedZones};

/// A baseline: its name, and how it is opened.
#[derive(Clone, Copy, Debug)]
struct Baseline {
    name: &'static str,
    /// The kind of device that this baseline replaces.
    kind: &'static str,
    /// The device parameter without which the baseline does not differ from the product, if there
    /// is one.
    needs: Option<&'static str>,
    open: fn(&DeviceSpec) -> Result<Made, StackError>,
}

/// Every baseline.
const BASELINES: [Baseline; 12] = [
    Baseline {
        name: one_lock::NAME,
        kind: "null",
        needs: Some("zoned"),
        open: stack::open_with_zones::<OneLock>,
    },
    Baseline {
        name: one_lock::NAME_QUEUED,
        kind: "null",
        needs: Some("zoned"),
        open: stack::open_with_zones::<OneLock<QueuedZones>>,
    },
    Baseline {
        name: lock_per_zone::NAME,
        kind: "null",
        needs: Some("zoned"),
        open: stack::open_with_zones::<LockPerZone>,
    },
    Baseline { name: sched_lock::SPINNING, kind: "null", needs: None, open: sched::spinning },
    Baseline { name: sched_lock::PARKING, kind: "null", needs: None, open: sched::parking },
    Baseline { name: sched_buckets::NAME, kind: "null", needs: None, open: sched::buckets },
    Baseline {
        name: locked_ram::TABLE_LOCK,
        kind: "ram",
        needs: None,
        open: locked_ram::table_lock,
    },
    Baseline { name: locked_ram::CAS, kind: "ram", needs: None, open: locked_ram::cas },
    Baseline { name: locked_ram::SPIN, kind: "ram", needs: None, open: locked_ram::spin },
    Baseline { name: locked_ram::RWLOCK, kind: "ram", needs: None, open: locked_ram::rwlock },
    Baseline { name: locked_ram::BIT_SPIN, kind: "ram", needs: None, open: locked_ram::bit_spin },
    Baseline { name: no_device::NAME, kind: "null", needs: None, open: no_device },
];

fn no_device(spec: &DeviceSpec) -> Result<Made, StackError> {
    let made = stack::open(spec)?;
    let disk = Arc::new(NoDevice(Arc::clone(&made.disk)));
    Ok(made.with_disk(disk))
}

/// The reasons for which a baseline cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BaselineError {
    /// No baseline has this name.
    #[error("before: there is no baseline `{name}`; expected {known}")]
    Unknown {
        /// The name that was given.
        name: String,
        /// The names of all baselines.
        known: String,
    },
    /// The device has no state that the baseline's lock protects.
    #[error("before: `{name}` differs for {kind} devices{needs} only, and this is none")]
    NoEffect {
        /// The name of the baseline.
        name: &'static str,
        /// The kind of device that the baseline is for.
        kind: &'static str,
        /// " with ", the parameter that the device lacks, and "=1"; or empty.
        needs: String,
    },
    /// The device's parameters are invalid.
    #[error(transparent)]
    Stack(#[from] StackError),
}

/// The names of all baselines.
pub fn names() -> Vec<&'static str> {
    BASELINES.iter().map(|baseline| baseline.name).collect()
}

/// The names of the baselines for one kind of device.
pub fn names_of(kind: &str) -> Vec<&'static str> {
    let of_kind = BASELINES.iter().filter(|baseline| baseline.kind == kind);
    of_kind.map(|baseline| baseline.name).collect()
}

/// Opens the device that `spec` describes, with a baseline in place of the product's locking.
///
/// # Errors
/// If the baseline does not exist, makes no difference to this device, or the device's parameters
/// are invalid.
pub fn open(name: &str, spec: &DeviceSpec) -> Result<Arc<dyn Disk>, BaselineError> {
    let Some(baseline) = BASELINES.iter().find(|baseline| baseline.name == name) else {
        let known = names().iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        return Err(BaselineError::Unknown { name: name.to_owned(), known });
    };
    let Baseline { name, kind, needs, open } = *baseline;
    if spec.kind().name != kind || needs.is_some_and(|switch| !spec.switch(switch)) {
        let needs = needs.map_or_else(String::new, |switch| format!(" with {switch}=1"));
        return Err(BaselineError::NoEffect { name, kind, needs });
    }
    if kind == "null" && spec.text("backing").is_some() {
        // Its zones are those of the medium, whatever guards those of a device in memory.
        return Err(BaselineError::NoEffect { name, kind, needs: " without backing".to_owned() });
    }
    Ok(open(spec)?.disk)
}

/// Closes an implicitly open zone, so that another zone can open.
fn close_implicitly(zone: &mut Zone) {
    let step = zone.step(ZoneOp::Close).expect("implicitly open zones can be closed");
    zone.enter(step.to);
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_core::Limits;
    use blockyard_yard::uri;

    #[test]
    fn a_baseline_is_a_device_of_the_same_shape() {
        let null = "null:///d?size=1G&zoned=1&zone_size=16M&zone_max_open=4";
        let both = [("null", null), ("ram", "ram:///d?size=64M&bs=512&unit=8k")];
        for (kind, uri) in both {
            let spec = uri::parse(uri).unwrap();
            let product = stack::open(&spec).unwrap().disk;
            same_shape(&names_of(kind), &spec, &*product);
        }
        assert_eq!(both.iter().map(|(kind, _)| names_of(kind).len()).sum::<usize>(), names().len());
    }

    fn same_shape(names: &[&str], spec: &DeviceSpec, product: &dyn Disk) {
        for name in names {
            let disk = open(name, spec).unwrap();
            assert_eq!(disk.name(), "d");
            assert_eq!(disk.kind(), product.kind());
            assert_eq!(disk.geometry(), product.geometry());
            // Below a scheduler that channels share, no channel owns the device's tags.
            let Limits { queue_depth, ordered, .. } = *disk.limits();
            let product = product.limits().clone();
            let product = match name.starts_with("sched") {
                true => Limits { queue_depth, ordered, ..product },
                false => product,
            };
            assert_eq!(disk.limits(), &product, "{name}");
        }
    }

    #[test]
    fn an_unsuitable_value_is_named_in_the_error() {
        let refused = |name: &str, uri: &str| match open(name, &uri::parse(uri).unwrap()) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{name} was made of {uri}"),
        };
        let zoned = "null:///d?zoned=1";
        assert_eq!(
            refused("no-lock", zoned),
            "before: there is no baseline `no-lock`; expected `one-lock`, `one-lock-queued`, \
             `lock-per-zone`, `sched-lock-spin`, `sched-lock-park`, `sched-buckets`, \
             `ram-table-lock`, `ram-cas`, `ram-spin`, `ram-rwlock`, `ram-bit-spin`, `no-device`"
        );
        let other = refused("ram-cas", zoned);
        assert_eq!(other, "before: `ram-cas` differs for ram devices only, and this is none");
        let limit = refused("ram-cas", "ram:///d?mem_limit=1M");
        assert!(limit.starts_with("before: a baseline of the RAM disk has size"), "{limit}");
        let plain = refused("one-lock", "null:///d");
        assert!(plain.contains("with zoned=1 only"), "{plain}");
        let backed = refused("one-lock", "null:///d?zoned=1&size=1G&backing=/no/such/directory");
        assert!(backed.contains("null devices without backing only"), "{backed}");
        let bad = refused("one-lock", "null:///d?zoned=1&zone_size=3M");
        assert!(bad.starts_with("invalid zone_size `3M`"), "{bad}");
    }
}
