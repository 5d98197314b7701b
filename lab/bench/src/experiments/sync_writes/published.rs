//! Figures that others published, and figures of other servers on the machine where the aims were
//! set.

use super::*;
use crate::experiment::Published;

/// The source of the published change.
const ZVOL: &str = "a change of OpenZFS' zvol, 2020: iSCSI, one connection, 4 threads with random \
                    1 MiB sync writes";
/// The source of the other servers' figures.
const PEERS: &str = "2 virtual CPUs (AMD EPYC), virtio disk, ext4, loaded machine, at real-time \
                     priority: +-30 %";

/// The published rows of these workloads.
pub(super) fn rows(workloads: &[Workload]) -> Vec<Published> {
    let row = |variant, workload, jobs, metric, value, source| Published {
        variant,
        workload,
        jobs,
        metric,
        value,
        source,
    };
    let iops =
        |variant, workload, jobs, value| row(variant, workload, jobs, Metric::IOPS, value, PEERS);
    let bandwidth = |variant, workload, jobs, megabytes: f64| {
        row(variant, workload, jobs, Metric::BANDWIDTH, megabytes * 1e6, PEERS)
    };
    let slow = &DELAYED[PUBLISHED_DELAY];
    let slow_4k = slow.nbd_small.map_or("", |workload| workload.name);
    let all = [
        row(SERIAL, slow.nbd_large.name, 4, Metric::BANDWIDTH, 231e6, ZVOL),
        row(TASKQ, slow.nbd_large.name, 4, Metric::BANDWIDTH, 728e6, ZVOL),
        iops(RAW, W_4K.name, 1, 11_834.0),
        iops(RAW, W_4K.name, 4, 25_395.0),
        iops(RAW, W_4K.name, 8, 36_398.0),
        iops(RAW, W_4K.name, 32, 72_815.0),
        iops(RAW, W_16K.name, 1, 9_944.0),
        iops(RAW, W_16K.name, 32, 62_333.0),
        bandwidth(RAW, W_1M.name, 1, 3875.0),
        bandwidth(RAW, W_1M.name, 4, 3650.0),
        bandwidth(RAW, W_1M.name, 32, 2782.0),
        iops(QEMU, W_NBD_4K.name, 1, 4600.0),
        iops(QEMU, W_NBD_4K.name, 32, 16_536.0),
        iops(QEMU_4C, W_NBD_4K.name, 32, 38_564.0),
        iops(QCOW2, W_NBD_4K.name, 1, 589.0),
        iops(QCOW2, W_NBD_4K.name, 32, 937.0),
        iops(NBDKIT, W_NBD_4K.name, 1, 4479.0),
        iops(NBDKIT, W_NBD_4K.name, 32, 15_079.0),
        iops(NBDKIT_SERIAL, W_NBD_4K.name, 32, 5013.0),
        bandwidth(QEMU, W_NBD_1M.name, 4, 1416.0),
        bandwidth(NBDKIT, W_NBD_1M.name, 4, 1561.0),
        bandwidth(NBDKIT, slow.nbd_large.name, 4, 972.0),
        bandwidth(NBDKIT_SERIAL, slow.nbd_large.name, 4, 274.0),
        bandwidth(NBDKIT_4C, slow.nbd_large.name, 4, 867.0),
        iops(NBDKIT, slow_4k, 32, 5892.0),
        iops(NBDKIT_SERIAL, slow_4k, 32, 293.0),
    ];
    let listed = |row: &Published| workloads.iter().any(|workload| workload.name == row.workload);
    all.into_iter().filter(listed).collect()
}
