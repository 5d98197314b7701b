//! A device of another project's NVMe/TCP target that listens already.

use std::net::SocketAddr;
use std::str::FromStr;

use crate::tools::peer::PeerProcess;

/// The form of [`NvmePeer`] on the command line.
const EXPECTED: &str = "expected DEVICE=ADDRESS:PORT,NQN,PID or DEVICE=ADDRESS:PORT,NQN,PID,RPC, \
                        where DEVICE is null, memory or zoned";

/// The device of a subsystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvmeDevice {
    /// A device without memory.
    Null,
    /// A device with its data in memory.
    Memory,
    /// A zoned device without memory.
    Zoned,
}

/// A subsystem of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmePeer {
    /// The device.
    pub device: NvmeDevice,
    /// Where the target listens.
    pub address: SocketAddr,
    /// The subsystem, whose namespace 1 is the device.
    pub nqn: String,
    /// The target.
    pub process: PeerProcess,
}

impl FromStr for NvmePeer {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<NvmePeer, &'static str> {
        NvmePeer::read(text).ok_or(EXPECTED)
    }
}

impl NvmePeer {
    fn read(text: &str) -> Option<NvmePeer> {
        let (device, rest) = text.split_once('=')?;
        let device = match device {
            "null" => NvmeDevice::Null,
            "memory" => NvmeDevice::Memory,
            "zoned" => NvmeDevice::Zoned,
            _ => return None,
        };
        let mut parts = rest.splitn(3, ',');
        Some(NvmePeer {
            device,
            address: parts.next()?.parse().ok()?,
            nqn: parts.next()?.to_owned(),
            process: PeerProcess::read(parts.next()?)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_read_from_its_text() {
        let peer: NvmePeer = "zoned=127.0.0.1:4420,nqn.a:b,17,/tmp/a,b".parse().unwrap();
        assert_eq!((peer.device, peer.nqn.as_str()), (NvmeDevice::Zoned, "nqn.a:b"));
        assert_eq!((peer.process.pid, peer.process.rpc), (17, Some("/tmp/a,b".into())));
        let peer: NvmePeer = "null=[::1]:1,nqn,1".parse().unwrap();
        assert_eq!(peer.process.rpc, None);
        for text in ["", "null", "disk=127.0.0.1:1,n,1", "null=127.0.0.1,n,1", "null=[::1]:1,n"] {
            assert_eq!(text.parse::<NvmePeer>(), Err(EXPECTED), "{text}");
        }
    }
}
