//! The process of another project's server that was started by hand: its CPU time, and a stop while
//! another server is measured.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::error::LabError;
use crate::tools::cpu;

/// A server that says nothing for this long has failed.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// The process of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerProcess {
    /// The process id.
    pub pid: u32,
    /// The socket for SPDK's JSON-RPC, if the server polls: its process then is always busy.
    pub rpc: Option<PathBuf>,
}

impl PeerProcess {
    /// Reads `PID` or `PID,RPC`.
    pub fn read(text: &str) -> Option<PeerProcess> {
        let (pid, rpc) = match text.split_once(',') {
            Some((pid, rpc)) => (pid, Some(rpc.into())),
            None => (text, None),
        };
        Some(PeerProcess { pid: pid.parse().ok()?, rpc })
    }

    /// The CPU time of the server until now: of all its threads, or, where it polls, the time in
    /// which a poll found work.
    ///
    /// # Errors
    /// If the system or the server does not report it.
    pub fn cpu(&self) -> Result<Duration, LabError> {
        let what = format!("CPU time of the server with process id {}", self.pid);
        match &self.rpc {
            None => cpu::of_process(self.pid).map_err(LabError::io(what)),
            Some(rpc) => {
                let stats = call(rpc, "thread_get_stats").map_err(LabError::io(what.clone()))?;
                busy(&stats).ok_or_else(|| LabError::failed(what, stats))
            }
        }
    }
}

/// Servers that are stopped until this is dropped.
#[derive(Debug)]
pub struct StoppedPeers(Vec<Pid>);

impl StoppedPeers {
    /// Stops the servers that poll: they would keep processors busy while another one is measured.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn stop<'p>(
        peers: impl Iterator<Item = &'p PeerProcess>,
    ) -> Result<StoppedPeers, LabError> {
        let mut stopped = StoppedPeers(Vec::new());
        for peer in peers.filter(|peer| peer.rpc.is_some()) {
            let what = || format!("stopping the server with process id {}", peer.pid);
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
            // A server that has ended need not go on.
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
    fn a_server_that_polls_is_stopped_for_a_while() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let state = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
            stat.rsplit(") ").next().unwrap().chars().next().unwrap()
        };
        let peer = |rpc: &str| PeerProcess::read(&format!("{}{rpc}", child.id())).unwrap();
        let peers = [peer(""), peer(",/rpc")];
        drop(StoppedPeers::stop(peers[..1].iter()).unwrap());
        let stopped = StoppedPeers::stop(peers.iter()).unwrap();
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
        let this = PeerProcess::read(&std::process::id().to_string()).unwrap();
        assert!(this.cpu().unwrap() > Duration::ZERO);
        let stats =
            r#"{"result": {"tick_rate": 1000, "threads": [{"busy": 1500}, {"busy": 500}]}}"#;
        assert_eq!(busy(&serde_json::from_str(stats).unwrap()), Some(Duration::from_secs(2)));
        assert_eq!(busy(&Value::Null), None);
    }
}
