//! vhost-user-blk: a device as a disk of a virtual machine, in the memory of the guest.
//!
//! ```text
//! server ─ accepts ▸ backend: memory, features, rings ─ starts ▸ queue thread
//! guest ring ─ virtqueue ▸ request ▸ channel, inline or by bios ▸ status byte, used ring, call
//! ```
//!
//! - [`request`] and [`config_space`] have the formats of VIRTIO 1.3, section 5.2. They do no I/O,
//!   and a fuzzer drives them, and the reading of chains ([`walk_image`]).
//! - The messages of vhost-user are parsed by crate `vhost`; [`backend`] does what they ask for.
//! - Each ring has a thread and a channel of its own ([`queue`]). Bios point into the memory of the
//!   guest, so that data are not copied beyond what the device copies.
//! - The hypervisor (QEMU, cloud-hypervisor, crosvm) is the client. The guest is not trusted: its
//!   rings and descriptors are checked, and read once. The hypervisor is trusted as far as a
//!   process that shares its memory has to be: it can end this process by truncating that memory,
//!   if the memory is not sealed ([`memory`]).
//!
//! Standards: VIRTIO 1.3 (OASIS); "Vhost-user Protocol" of the QEMU documentation.

mod backend;
mod backend_channel;
pub mod config_space;
mod device;
mod inflight;
mod latency_sampler;
mod memory;
mod queue;
pub mod request;
mod server;
mod spin;
mod virtqueue;

pub use device::{DeviceShape, QUEUE_ENTRIES_MAX, QUEUES_MAX, RingCounts};
pub use server::{VhostInfo, VhostServer};
pub use virtqueue::{ChainBuffers, walk_image};
