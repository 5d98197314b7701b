//! The settings of a run, from which experiments build their cells.

use std::path::PathBuf;

/// The settings that experiments may use to list their cells.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A quick run: an experiment lists fewer cells, so that it ends in under 30 seconds.
    pub quick: bool,
    /// Blockyard's engine for fio, if `--engine` names it or it is in the program's directory.
    /// Without it, cells that need it end with [`crate::LabError::Missing`].
    pub engine: Option<PathBuf>,
    /// The program `blockyard`, for servers that a cell starts.
    pub program: PathBuf,
    /// The program `blockyard-lab`, for servers that only measurements need.
    pub lab: PathBuf,
    /// A directory of the run's own for sockets and files; it is removed when the run ends.
    pub scratch: PathBuf,
    /// Processors that this process may use.
    pub processors: usize,
}
