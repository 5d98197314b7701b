//! The block layer: from a bio that a program pushes to a request that a device completes.
//!
//! ```text
//! exporter ─ push ▸ channel: check ▸ split ▸ plug (merge) ▸ zone write plug ▸ channel tag ▸ device
//! exporter ◂ reap ─ channel ◂ completion batch ◂ tag freed ◂ zone write plug released ◂──────┘
//! device = [scheduler: submit rings ▸ mq-deadline ▸ device tag] ▸ [fault injector] ▸ device queue
//! ```
//!
//! A part in brackets wraps the device and passes requests through while it is not in use.
//!
//! A request goes down through the layers once, and its completion goes up once. Each layer turns a
//! batch into a batch, and no layer calls the layer above it. A channel belongs to one thread and
//! shares only its statistics with other threads.

pub mod bio;
pub mod blocking;
pub mod channel;
pub mod claim;
pub mod clock;
pub mod composed;
pub mod device;
pub mod disk;
pub mod future;
pub mod geometry;
pub mod inject;
pub mod limits;
pub mod middleware;
pub mod owner_only;
pub mod provisional;
pub mod region;
pub mod request;
pub mod rmw;
pub mod sched;
pub mod units;
pub mod work;
pub mod zone;

pub use bio::{Bio, BufRef, Completion, Flags, Op, Prio, RegionId, Status};
pub use channel::Channel;
pub use composed::Composed;
pub use device::{Device, DeviceError, DeviceQueue, Due, Extent};
pub use disk::Disk;
pub use geometry::{Geometry, ZoneGeometry};
pub use limits::Limits;
pub use region::{Pieces, Region};
pub use request::{Batch, CompletionBatch, Segment, Started};
pub use units::{Bytes, Nanos, SECTOR_BYTES, SECTOR_SHIFT, Sector, Tag, ZoneNo};
pub use work::{InlineRequest, Work};
