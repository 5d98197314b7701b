//! The experiments there are. To add one: a file in `experiments/`, and a row here.

use crate::experiment::Experiment;
use crate::experiments;
use crate::settings::Settings;

/// Lists an experiment's cells under these settings. It measures and opens nothing.
pub type Build = fn(&Settings) -> Experiment;

/// Every experiment, by name.
pub fn experiments() -> Vec<(&'static str, Build)> {
    vec![
        (experiments::clock::NAME, experiments::clock::build),
        (experiments::fio_engine::NAME, experiments::fio_engine::build),
        (experiments::hot_path::NAME, experiments::hot_path::build),
        (experiments::limits::NAME, experiments::limits::build),
        (experiments::nbd::NAME, experiments::nbd::build),
        (experiments::zone_locks::NAME, experiments::zone_locks::build),
    ]
}
