//! An initiator in plain style, and targets for it.
#![allow(dead_code)] // Each test uses a part of it.

pub(crate) mod faulty;
pub(crate) mod host;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use blockyard_core::Disk;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_null::{Null, NullConfig};
use blockyard_nvme::{HostAccess, Subsystems, TargetOptions, TargetServer};

pub(crate) use host::*;

pub(crate) const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
pub(crate) const PLAIN: &str = "nqn.2026-11.io.blockyard:plain";
pub(crate) const ZONED: &str = "nqn.2026-11.io.blockyard:zoned";
pub(crate) const ALL: &str = "nqn.2026-11.io.blockyard:all";
/// A target with a plain device of 16 MiB and a zoned one of 8 zones of 4 MiB, 2 MiB of capacity.
pub(crate) struct Target {
    pub(crate) subsystems: Arc<Subsystems>,
    pub(crate) server: TargetServer,
}

pub(crate) fn target() -> Target {
    target_with(TargetOptions::default())
}

/// The configuration of the plain device.
pub(crate) fn plain() -> NullConfig {
    let (size, bs) = (16 << 20, 512);
    NullConfig { size, bs, memory_backed: true, discard: true, ..NullConfig::default() }
}

/// The configuration of the zoned device.
pub(crate) fn zoned() -> NullConfig {
    NullConfig {
        size: 32 << 20,
        bs: 4096,
        zoned: true,
        zone_size: 4 << 20,
        zone_capacity: 2 << 20,
        zone_max_open: 2,
        zone_max_active: 3,
        discard: false,
        ..plain()
    }
}

/// A device, which need not be served yet.
pub(crate) fn disk(name: &str, config: NullConfig) -> Arc<dyn Disk> {
    let null = Null::open(config).expect("the configuration fits");
    Arc::new(Composed::new(name.to_owned(), "null", null, ChannelConfig { depth: 64 }))
}

pub(crate) fn target_with(options: TargetOptions) -> Target {
    target_for(HostAccess::default(), options)
}

/// A target that listens at a place that no other test uses. When it has stopped, no other program
/// gets its port.
pub(crate) fn target_at(place: &str) -> Target {
    let Target { subsystems, server } = target();
    drop(server);
    let listener = TcpListener::bind(place).unwrap();
    let options = TargetOptions::default();
    let server = TargetServer::start(Arc::clone(&subsystems), vec![listener], options).unwrap();
    Target { subsystems, server }
}

/// A target with devices for the hosts that may use them.
pub(crate) fn target_for(access: HostAccess, options: TargetOptions) -> Target {
    start(Subsystems::new("test", access, None), options)
}

/// A target that has a subsystem of all devices too.
pub(crate) fn target_of_all(access: HostAccess) -> Target {
    start(Subsystems::new("test", access, Some(ALL.to_owned())), TargetOptions::default())
}

fn start(subsystems: Arc<Subsystems>, options: TargetOptions) -> Target {
    for (name, config) in [("plain", plain()), ("zoned", zoned())] {
        subsystems.add(name, disk(name, config)).expect("NVMe can describe it");
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = TargetServer::start(Arc::clone(&subsystems), vec![listener], options).unwrap();
    Target { subsystems, server }
}

/// A server for discovery alone, of the devices of a target.
pub(crate) fn discovery_of(target: &Target) -> Target {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = TargetOptions { discovery_only: true, ..TargetOptions::default() };
    let subsystems = Arc::clone(&target.subsystems);
    let server = TargetServer::start(Arc::clone(&subsystems), vec![listener], options).unwrap();
    Target { subsystems, server }
}

impl Target {
    pub(crate) fn address(&self) -> SocketAddr {
        self.server.local_addrs()[0]
    }

    /// A connection that has sent nothing.
    pub(crate) fn raw(&self) -> Initiator {
        Initiator::connect_to(self.address())
    }

    /// A connection after its ICReq.
    pub(crate) fn idle(&self, digests: u8) -> Initiator {
        let mut initiator = self.raw();
        initiator.initialize(digests);
        initiator
    }

    /// An enabled controller of a subsystem, and its id.
    pub(crate) fn admin(&self, nqn: &str, digests: u8) -> (Initiator, u16) {
        let mut initiator = self.idle(digests);
        let done = initiator.connect(nqn, 0, 0xffff, 31, 0);
        assert_eq!(done.status, 0, "{done:?}");
        initiator.enable();
        (initiator, done.result as u16)
    }

    /// An I/O queue of a controller. `flags` is CATTR.
    pub(crate) fn io(&self, nqn: &str, controller: u16, digests: u8, flags: u8) -> Initiator {
        let mut initiator = self.idle(digests);
        let done = initiator.connect(nqn, 1, controller, 127, flags);
        assert_eq!(done.status, 0, "{done:?}");
        initiator
    }
}
