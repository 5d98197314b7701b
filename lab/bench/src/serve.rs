//! `blockyard-lab serve`: a volume over NBD on a slow disk or with an older commit mode, which the
//! product does not offer; for experiments, whose servers are processes of their own.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockyard_nbd::{Endpoint, ExportOptions, Exports, Server, ServerOptions};
use blockyard_volume::Options;
use clap::Args;

use crate::error::LabError;
use crate::tools::pool_place::{self, Commit, VOLUME};

/// `lab serve`.
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// The pool's directory, with a volume v0
    #[arg(value_name = "DIR")]
    pub pool: PathBuf,
    /// How writes become durable: group, serial, taskq-32 (DIR is a raw file then) or log-taskq-32
    #[arg(long, value_name = "WAY", default_value = "group", value_parser = Commit::from_name)]
    pub commit: Commit,
    /// Microseconds that each write to the disk takes longer
    #[arg(long, value_name = "US", default_value_t = 0,
        value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    pub delay_us: u64,
    /// Make a checkpoint after this many MiB of log [default: the product's]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub checkpoint_mib: Option<u64>,
    /// The unix socket
    #[arg(long, value_name = "PATH")]
    pub nbd: PathBuf,
}

/// Serves until the process is ended.
///
/// # Errors
/// If the pool cannot be opened, or the socket cannot be bound.
pub fn run(args: &ServeArgs) -> Result<(), LabError> {
    let delay = Duration::from_micros(args.delay_us);
    let mut options = Options::default();
    if let Some(mib) = args.checkpoint_mib {
        options.checkpoint_bytes = mib << 20;
    }
    let disk = pool_place::open(&args.pool, args.commit, delay, options)?;
    let exports = Exports::new();
    let failed = |error: &dyn ToString| LabError::failed("lab serve", error.to_string());
    exports.add(VOLUME, disk, ExportOptions::default()).map_err(|error| failed(&error))?;
    let endpoint = Endpoint::Unix(args.nbd.clone().into());
    let server = Server::start(Arc::clone(&exports), endpoint, ServerOptions::default());
    server.map_err(|error| failed(&error))?.wait();
    Ok(())
}
