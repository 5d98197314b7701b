//! A device of another project's vhost-user-blk server that listens already.

use std::path::PathBuf;
use std::str::FromStr;

use crate::tools::peer::PeerProcess;

/// The form of [`VhostPeer`] on the command line.
const EXPECTED: &str = "expected DEVICE=SOCKET,PID or DEVICE=SOCKET,PID,RPC, where DEVICE is \
                        null, tmpfs or disk";

/// The device at a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VhostDevice {
    /// A device without memory.
    Null,
    /// A file in tmpfs.
    Tmpfs,
    /// A file on a disk.
    Disk,
}

/// A device of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostPeer {
    /// The device.
    pub device: VhostDevice,
    /// The socket.
    pub socket: PathBuf,
    /// The server.
    pub process: PeerProcess,
}

impl FromStr for VhostPeer {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<VhostPeer, &'static str> {
        VhostPeer::read(text).ok_or(EXPECTED)
    }
}

impl VhostPeer {
    fn read(text: &str) -> Option<VhostPeer> {
        let (device, rest) = text.split_once('=')?;
        let device = match device {
            "null" => VhostDevice::Null,
            "tmpfs" => VhostDevice::Tmpfs,
            "disk" => VhostDevice::Disk,
            _ => return None,
        };
        let (socket, process) = rest.split_once(',')?;
        if socket.is_empty() {
            return None;
        }
        Some(VhostPeer { device, socket: socket.into(), process: PeerProcess::read(process)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_read_from_its_text() {
        let peer: VhostPeer = "disk=/tmp/d.sock,17,/tmp/rpc".parse().unwrap();
        assert_eq!((peer.device, peer.socket), (VhostDevice::Disk, "/tmp/d.sock".into()));
        assert_eq!((peer.process.pid, peer.process.rpc), (17, Some("/tmp/rpc".into())));
        let peer: VhostPeer = "null=s,1".parse().unwrap();
        assert_eq!((peer.device, peer.process.rpc), (VhostDevice::Null, None));
        for text in ["", "null", "null=/s", "null=,1", "null=/s,x", "memory=/s,1"] {
            assert_eq!(text.parse::<VhostPeer>(), Err(EXPECTED), "{text}");
        }
    }
}
