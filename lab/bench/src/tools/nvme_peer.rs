//! A device of another project's NVMe/TCP target that listens already, and the CPU time of that
//! target.

use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::error::LabError;
use crate::tools::cpu;

/// The form of [`NvmePeer`] on the command line.
const EXPECTED: &str = "expected DEVICE=ADDRESS:PORT,NQN,PID or DEVICE=ADDRESS:PORT,NQN,PID,RPC, \
                        where DEVICE is null, memory or zoned";
/// A server that says nothing for this long has failed.
const SILENCE_MAX: Duration = Duration::from_secs(5);

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
    /// The target's process.
    pid: u32,
    /// The socket for SPDK's JSON-RPC, if the target polls: its process then is always busy.
    rpc: Option<PathBuf>,
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
        let mut parts = rest.splitn(4, ',');
        Some(NvmePeer {
            device,
            address: parts.next()?.parse().ok()?,
            nqn: parts.next()?.to_owned(),
            pid: parts.next()?.parse().ok()?,
            rpc: parts.next().map(PathBuf::from),
        })
    }

    /// The CPU time of the target until now: of all its threads, or, where it polls, the time in
    /// which a poll found work.
    ///
    /// # Errors
    /// If the system or the target does not report it.
    pub fn cpu(&self) -> Result<Duration, LabError> {
        let what = format!("CPU time of the target with process id {}", self.pid);
        match &self.rpc {
            None => cpu::of_process(self.pid).map_err(LabError::io(what)),
            Some(rpc) => {
                let stats = call(rpc, "thread_get_stats").map_err(LabError::io(what.clone()))?;
                busy(&stats).ok_or_else(|| LabError::failed(what, stats))
            }
        }
    }
}

/// Targets that are stopped until this is dropped.
#[derive(Debug)]
pub struct StoppedPeers(Vec<Pid>);

impl StoppedPeers {
    /// Stops the targets that poll: they would keep processors busy while another one is measured.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn stop(peers: &[NvmePeer]) -> Result<StoppedPeers, LabError> {
        let mut stopped = StoppedPeers(Vec::new());
        for peer in peers.iter().filter(|peer| peer.rpc.is_some()) {
            let what = || format!("stopping the target with process id {}", peer.pid);
            let pid = i32::try_from(peer.pid).ok().and_then(Pid::from_raw);
            let pid = pid.ok_or_else(|| LabError::failed(what(), "there is no such process"))?;
            kill_process(pid, Signal::STOP).map_err(|error| LabError::io(what())(error.into()))?;
            stopped.0.push(pid);
        }
        Ok(stopped)
    }
}

impl Drop for StoppedPeers {
    fn drop(&mut self) {
        for pid in &self.0 {
            // A target that has ended need not go on.
            let _ = kill_process(*pid, Signal::CONT);
        }
    }
}

/// Calls a method without parameters.
fn call(rpc: &PathBuf, method: &str) -> std::io::Result<Value> {
    let mut stream = UnixStream::connect(rpc)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    write!(stream, r#"{{"jsonrpc":"2.0","id":1,"method":"{method}"}}"#)?;
    // The server does not close the connection.
    let mut values = serde_json::Deserializer::from_reader(stream).into_iter();
    Ok(values.next().transpose()?.unwrap_or_default())
}

/// The busy time of all threads in an answer to `thread_get_stats`.
fn busy(stats: &Value) -> Option<Duration> {
    let result = &stats["result"];
    let rate = result["tick_rate"].as_f64().filter(|rate| *rate > 0.0)?;
    let threads = result["threads"].as_array()?;
    let ticks: Option<f64> = threads.iter().map(|thread| thread["busy"].as_f64()).sum();
    Some(Duration::from_secs_f64(ticks? / rate))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_read_from_its_text() {
        let peer: NvmePeer = "zoned=127.0.0.1:4420,nqn.a:b,17,/tmp/a,b".parse().unwrap();
        assert_eq!((peer.device, peer.nqn.as_str(), peer.pid), (NvmeDevice::Zoned, "nqn.a:b", 17));
        assert_eq!(peer.rpc, Some("/tmp/a,b".into()));
        let peer: NvmePeer = "null=[::1]:1,nqn,1".parse().unwrap();
        assert_eq!(peer.rpc, None);
        for text in ["", "null", "disk=127.0.0.1:1,n,1", "null=127.0.0.1,n,1", "null=[::1]:1,n"] {
            assert_eq!(text.parse::<NvmePeer>(), Err(EXPECTED), "{text}");
        }
    }

    #[test]
    fn a_target_that_polls_is_stopped_for_a_while() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let state = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
            stat.rsplit(") ").next().unwrap().chars().next().unwrap()
        };
        let peer = |rpc: &str| format!("null=[::1]:1,nqn,{}{rpc}", child.id()).parse().unwrap();
        let peers = [peer(""), peer(",/rpc")];
        drop(StoppedPeers::stop(&peers[..1]).unwrap());
        let stopped = StoppedPeers::stop(&peers).unwrap();
        assert_eq!(stopped.0.len(), 1);
        // The signal is delivered when the child next runs.
        while state() != 'T' {
            std::thread::yield_now();
        }
        drop(stopped);
        while state() == 'T' {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_cpu_time_is_that_of_the_process_or_of_busy_polls() {
        let text = format!("null=127.0.0.1:1,nqn,{}", std::process::id());
        assert!(text.parse::<NvmePeer>().unwrap().cpu().unwrap() > Duration::ZERO);
        let stats =
            r#"{"result": {"tick_rate": 1000, "threads": [{"busy": 1500}, {"busy": 500}]}}"#;
        assert_eq!(busy(&serde_json::from_str(stats).unwrap()), Some(Duration::from_secs(2)));
        assert_eq!(busy(&Value::Null), None);
    }
}
