//! All experiments. To add one: a file in `experiments/`, and a row here.

use crate::experiment::Experiment;
use crate::experiment::Settings;
use crate::experiments;

/// Lists an experiment's cells for these settings, without measuring or opening anything.
pub type Build = fn(&Settings) -> Experiment;

/// Every experiment, by name.
pub fn experiments() -> Vec<(&'static str, Build)> {
    vec![
        (experiments::clock::NAME, experiments::clock::build),
        (experiments::file::NAME, experiments::file::build),
        (experiments::file_vhost::NAME, experiments::file_vhost::build),
        (experiments::fio_engine::NAME, experiments::fio_engine::build),
        (experiments::fuse::NAME, experiments::fuse::build),
        (experiments::hot_path::NAME, experiments::hot_path::build),
        (experiments::limits::NAME, experiments::limits::build),
        (experiments::memory::NAME, experiments::memory::build),
        (experiments::nbd::NAME, experiments::nbd::build),
        (experiments::nvme::NAME, experiments::nvme::build),
        (experiments::nvme_threads::NAME, experiments::nvme_threads::build),
        (experiments::object_store::NAME, experiments::object_store::build),
        (experiments::observers::NAME, experiments::observers::build),
        (experiments::race::NAME, experiments::race::build),
        (experiments::ram_kernel::NAME, experiments::ram_kernel::build),
        (experiments::ram_locks::NAME, experiments::ram_locks::build),
        (experiments::scheduler::NAME, experiments::scheduler::build),
        (experiments::scheduler_kernel::NAME, experiments::scheduler_kernel::build),
        (experiments::scheduler_latency::NAME, experiments::scheduler_latency::build),
        (experiments::scheduler_merge::NAME, experiments::scheduler_merge::build),
        (experiments::smr_append::NAME, experiments::smr_append::build),
        (experiments::socket_waits::NAME, experiments::socket_waits::build),
        (experiments::sync_writes::NAME, experiments::sync_writes::build),
        (experiments::vhost::NAME, experiments::vhost::build),
        (experiments::volume_encryption::NAME, experiments::volume_encryption::build),
        (experiments::volume_limits::NAME, experiments::volume_limits::build),
        (experiments::zone_append::NAME, experiments::zone_append::build),
        (experiments::zone_gate::NAME, experiments::zone_gate::build),
        (experiments::zone_locks::NAME, experiments::zone_locks::build),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use super::*;
    use crate::run::RunPlan;

    fn settings(quick: bool) -> Settings {
        let none = std::path::PathBuf::new();
        Settings {
            quick,
            engine: None,
            program: none.clone(),
            lab: "blockyard-lab".into(),
            scratch: none,
            processors: 2,
            peers: Default::default(),
        }
    }

    #[test]
    fn the_parts_that_an_experiment_names_exist() {
        for (name, build) in experiments() {
            for quick in [false, true] {
                let experiment = build(&settings(quick));
                assert_eq!(experiment.name, name);
                let variants: BTreeSet<_> = experiment.variants.iter().map(|v| v.name).collect();
                let workloads: BTreeSet<_> = experiment.workloads.iter().map(|w| w.name).collect();
                for cell in &experiment.cells {
                    assert!(variants.contains(cell.variant), "{name}: {cell:?}");
                    assert!(workloads.contains(cell.workload), "{name}: {cell:?}");
                }
                for comparison in &experiment.comparisons {
                    let measured = [comparison.before, comparison.after];
                    let measured = &measured[usize::from(comparison.value.is_some())..];
                    let are_there = measured.iter().all(|v| variants.contains(v));
                    assert!(are_there, "{name}: {comparison:?}");
                    let workload = comparison.workload.filter(|_| !quick);
                    assert!(
                        workload.is_none_or(|w| workloads.contains(w)),
                        "{name}: {comparison:?}"
                    );
                }
                for row in &experiment.published {
                    assert!(variants.contains(row.variant), "{name}: {row:?}");
                }
            }
        }
    }

    /// The help promises this for `--quick`.
    #[test]
    fn a_first_look_takes_half_a_minute_at_most() {
        let plan = RunPlan { rounds: 3, measure: None, quick: true };
        for (name, build) in experiments() {
            let estimate = plan.estimate(&build(&settings(true)).cells);
            assert!(estimate <= Duration::from_secs(30), "{name}: {estimate:?}");
        }
    }

    /// The project's own figures come from full runs.
    #[test]
    fn full_runs_measure_long_enough_and_end_in_time() {
        let plan = RunPlan { rounds: 5, measure: None, quick: false };
        let mut whole = Duration::ZERO;
        for (name, build) in experiments() {
            let cells = build(&settings(false)).cells;
            let measure = plan.timing(&cells).measure;
            assert!(measure >= Duration::from_millis(250), "{name}: {measure:?}");
            let estimate = plan.estimate(&cells);
            println!("{name}: {} cells, {measure:?} each, {estimate:?}", cells.len());
            if ["hot-path", "zone-locks", "nbd", "limits"].contains(&name) {
                whole += estimate;
            }
        }
        assert!(whole < Duration::from_secs(600), "{whole:?}");
    }
}
