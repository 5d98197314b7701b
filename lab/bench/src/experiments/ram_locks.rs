//! `ram-locks`: the gain when readers of a compressed RAM disk take no exclusive lock.
//!
//! The rows of [`rows`] were published in 2014 for zram, by iozone. [`fio`] has the published fio
//! line, and some of iozone's rows by fio. [`paths`] measures further properties of the RAM disk.

mod fio;
mod paths;
mod rows;

use std::fmt;
use std::sync::Arc;

use blockyard_baselines::locked_ram;
use blockyard_baselines::ram_table::{BitEntry, Entry, LockPerEntry, SpinEntry, Table, WholeTable};
use blockyard_baselines::shared_lock::{CasLock, SpinRwLock};
use blockyard_core::Disk;
use blockyard_yard::{stack, uri};

use crate::counted::{Counted, ENTRIES, TABLE};
use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Comparison, Experiment, Variant, VariantRole, Workload};
use crate::metric::Metric;

/// The experiment's name on the command line.
pub const NAME: &str = "ram-locks";

pub use paths::BARE;

/// The product's name among the variants.
const PRODUCT: &str = "product";

/// The sizes of the device and its parts.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// The size of the device, in bytes.
    device: u64,
    /// The part of the device that each thread uses, in bytes.
    file: u64,
    /// The part of each thread in runs with counting locks, in bytes.
    counted_file: u64,
}

/// The published sizes.
const WHOLE: Sizes = Sizes { device: 1 << 30, file: 200 << 20, counted_file: 16 << 20 };
/// The sizes of a quick run.
const QUICK: Sizes = Sizes { device: 128 << 20, file: 25 << 20, counted_file: 4 << 20 };

/// Opens a new disk from a URI.
type Open = fn(&str) -> Result<Arc<dyn Disk>, LabError>;

/// A way to protect the table, and the disk that counts its locks' use.
struct Guarding {
    variant: Variant,
    /// The baseline's name; `None` for the product.
    before: Option<&'static str>,
    open_counted: Option<Open>,
    /// Whether a quick run includes the variant.
    quick: bool,
}

static GUARDINGS: [Guarding; 6] = [
    Guarding {
        variant: Variant {
            name: locked_ram::TABLE_LOCK,
            kind: VariantRole::Before,
            about: "one reader/writer lock over the block table, held while a block is \
                    decompressed",
        },
        before: Some(locked_ram::TABLE_LOCK),
        open_counted: Some(counted::<WholeTable<Counted<SpinRwLock<Box<[Entry]>>, TABLE>>>),
        quick: true,
    },
    Guarding {
        variant: Variant {
            name: locked_ram::CAS,
            kind: VariantRole::After,
            about: "a state per table entry, locked by compare-and-swap; it has published figures",
        },
        before: Some(locked_ram::CAS),
        open_counted: Some(counted::<LockPerEntry<Counted<CasLock<Entry>, ENTRIES>>>),
        quick: false,
    },
    Guarding {
        variant: Variant {
            name: locked_ram::SPIN,
            kind: VariantRole::After,
            about: "a spin lock per table entry; it has published figures",
        },
        before: Some(locked_ram::SPIN),
        open_counted: Some(counted::<LockPerEntry<Counted<SpinEntry, ENTRIES>>>),
        quick: false,
    },
    Guarding {
        variant: Variant {
            name: locked_ram::RWLOCK,
            kind: VariantRole::After,
            about: "a reader/writer lock per table entry; it has published figures",
        },
        before: Some(locked_ram::RWLOCK),
        open_counted: Some(counted::<LockPerEntry<Counted<SpinRwLock<Entry>, ENTRIES>>>),
        quick: false,
    },
    Guarding {
        variant: Variant {
            name: locked_ram::BIT_SPIN,
            kind: VariantRole::After,
            about: "the published change: a lock bit in each table entry, held while the block is \
                    decompressed",
        },
        before: Some(locked_ram::BIT_SPIN),
        open_counted: Some(counted::<LockPerEntry<Counted<BitEntry, ENTRIES>>>),
        quick: true,
    },
    Guarding {
        variant: Variant {
            name: PRODUCT,
            kind: VariantRole::Product,
            about: "an atomic word per block: a write exchanges it, and a read protects the object \
                    with a hazard pointer",
        },
        before: None,
        open_counted: None,
        quick: true,
    },
];

/// The variants that a run with these settings includes.
fn guardings(settings: &Settings) -> impl Iterator<Item = &'static Guarding> + use<> {
    let quick = settings.quick;
    GUARDINGS.iter().filter(move |guarding| guarding.quick || !quick)
}

/// Opens a new disk of a variant.
fn open(before: Option<&str>, uri: &str) -> Result<Arc<dyn Disk>, LabError> {
    let failed = |error: &dyn fmt::Display| LabError::failed(uri, error);
    let spec = uri::parse(uri).map_err(|error| failed(&error))?;
    match before {
        Some(name) => blockyard_baselines::open(name, &spec).map_err(|error| failed(&error)),
        None => Ok(stack::open(&spec).map_err(|error| failed(&error))?.disk),
    }
}

/// Opens a new disk with a table of type `T`, for types that no baseline's name stands for.
fn counted<T: Table>(uri: &str) -> Result<Arc<dyn Disk>, LabError> {
    let spec = uri::parse(uri).map_err(|error| LabError::failed(uri, error))?;
    Ok(locked_ram::made::<T>(&spec).map_err(|error| LabError::failed(uri, error))?.disk)
}

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    build_with(settings, if settings.quick { QUICK } else { WHOLE })
}

fn build_with(settings: &Settings, sizes: Sizes) -> Experiment {
    let mut cells = rows::cells(settings, sizes);
    cells.extend(fio::cells(settings));
    cells.extend(paths::cells(settings));
    let mut workloads: Vec<Workload> = rows::workloads(settings).collect();
    workloads.extend(fio::workloads(settings));
    workloads.extend(paths::WORKLOADS);
    let mut variants: Vec<Variant> = GUARDINGS.iter().map(|guarding| guarding.variant).collect();
    variants.extend(paths::VARIANTS);
    Experiment {
        name: NAME,
        title: "the block table of a RAM disk: one lock, a lock per entry, and no lock for reads",
        about: "Throughput and CPU time of a compressed RAM disk, by the technique that protects \
                its block table. The rows are those published for zram when a lock bit per entry \
                replaced its table lock (iozone -t 4 -r 16K -s 200M -I), here in process: each \
                thread uses its own part of the device, one record at a time, so that threads wait \
                for each other only because of the table's protection. All variants have the same \
                codec (lz4), memory pool, stack and load generator. The rows of one variant share \
                a device that is filled once, except for the initial write. The data are a corpus \
                from this machine: parts of /usr/bin, text, and noise that compresses by half, a \
                third each. With reader/writer locks and locks per entry a read seldom waits, but \
                its cache line moves between CPUs. Few CPUs therefore bound the gain, and a lock \
                that readers share loses little on two. Lock contention (`rooms`), counted in the \
                first round, states how often a thread waited. Further rows: the published fio \
                line in fio's process, whose buffers are noise, so that it measures blocks stored \
                raw (rows with -50 compress by half); some of iozone's rows by fio, with data that \
                compress by half; and rows of our own: the device compared with the bare codec in \
                a loop, one hot block, and 32 threads.",
        published: rows::published(settings).chain(fio::published(settings)).collect(),
        variants,
        workloads,
        comparisons: comparisons(settings),
        plots: vec![Metric::BANDWIDTH, Metric::CPU_PER_IO],
        cells,
    }
}

fn comparisons(settings: &Settings) -> Vec<Comparison> {
    let base = locked_ram::TABLE_LOCK;
    let mut comparisons: Vec<Comparison> = rows::comparisons(settings).collect();
    comparisons.extend(paths::comparisons());
    comparisons
        .extend(fio::workloads(settings).map(|workload| {
            Comparison::new(base, PRODUCT, Metric::BANDWIDTH).under(workload.name)
        }));
    for metric in [Metric::BANDWIDTH, Metric::CPU_PER_IO] {
        comparisons.push(Comparison::new(base, locked_ram::BIT_SPIN, metric));
        comparisons.push(Comparison::new(locked_ram::BIT_SPIN, PRODUCT, metric));
    }
    comparisons.push(Comparison::new(base, PRODUCT, Metric::CPU_PER_IO));
    comparisons
}
