//! What a run is given from outside, for experiments to build their cells from.

use std::path::PathBuf;

/// What experiments may ask before they list their cells.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A first look: an experiment lists fewer cells, so that it ends in under 30 seconds.
    pub quick: bool,
    /// Blockyard's engine for fio, if `--engine` named it or it lies in the program's directory.
    /// Without it, cells that need it end with [`crate::LabError::Missing`].
    pub engine: Option<PathBuf>,
    /// `blockyard`, for servers that a cell starts.
    pub program: PathBuf,
    /// `blockyard-lab` itself, for servers that only measurements need.
    pub lab: PathBuf,
    /// A directory of the run's own for sockets and files; it goes when the run ends.
    pub scratch: PathBuf,
    /// Processors that this process may use.
    pub processors: usize,
}
