//! `volume-encryption`: an encrypted volume, compared with one that is not.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::Disk;
use blockyard_volume::{SecretFile, Volume, VolumeConfig};

use crate::error::LabError;
use crate::experiment::{Cell, Comparison, Experiment, Settings, Variant, VariantRole, Workload};
use crate::experiments::sync_writes::Clients;
use crate::load::durable::{Ask, Ios};
use crate::metric::Metric;
use crate::sample::Round;
use crate::stop::Stop;
use crate::tools::pool_place::{self, Commit, PoolShape};

/// The experiment's name on the command line.
pub const NAME: &str = "volume-encryption";

const PLAIN: &str = "plain";
const ENCRYPTED: &str = "encrypted";

const READ: Workload = Workload {
    name: "read-16k",
    about: "16 KiB random reads by one thread; jobs are the reads in flight",
};
const WRITE: Workload = Workload {
    name: "write-16k",
    about: "16 KiB random overwrites without FUA or flush by one thread, as fast as the volume \
            accepts them; jobs are the writes in flight",
};

/// The least throughput of an encrypted volume, as a fraction of the other's.
const AIM: f64 = 0.8;
const JOBS: u32 = 32;
/// Both volumes. Their pools begin empty.
static SHAPE: PoolShape =
    PoolShape { name: "pool", block_bytes: 16 << 10, volume_bytes: 512 << 20, pool_bytes: 0 };
/// The time that opening a pool takes.
const OVERHEAD: Duration = Duration::from_millis(60);

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let mut cells = Vec::new();
    for (workload, ask) in [(READ, Ask::Read), (WRITE, Ask::Write)] {
        for (variant, is_encrypted) in [(PLAIN, false), (ENCRYPTED, true)] {
            let settings = settings.clone();
            let body = move |round: &Round<'_>| {
                let disk = filled(&settings, is_encrypted, round.stop)?;
                let ios = Ios { ask, len: SHAPE.block_bytes.into(), depth: JOBS as usize };
                let (commit, delay) = (Commit::Group, Duration::ZERO);
                Clients { threads: 1, ios, pool: &SHAPE, commit, delay }.measure(&*disk, round)
            };
            cells.push(Cell::new(variant, workload.name, JOBS, body).overhead(OVERHEAD));
        }
    }
    let variant = |name, about| Variant { name, kind: VariantRole::Product, about };
    let ratio =
        |metric, workload: Workload| Comparison::new(PLAIN, ENCRYPTED, metric).under(workload.name);
    Experiment {
        name: NAME,
        title: "the throughput of an encrypted volume",
        about: "An encrypted volume (AES-256-GCM) and one that is not, in process, with blocks of \
                16 KiB and data that do not compress, for which encryption costs most. The pools \
                lie in the directory for temporary files (TMPDIR), which must be on a disk.",
        published: Vec::new(),
        variants: vec![
            variant(PLAIN, "a volume that is not encrypted"),
            variant(ENCRYPTED, "a volume that is encrypted by a key file"),
        ],
        workloads: vec![READ, WRITE],
        comparisons: vec![
            ratio(Metric::IOPS, READ).aim(AIM),
            ratio(Metric::IOPS, WRITE).aim(AIM),
            ratio(Metric::CPU_PER_IO, READ),
            ratio(Metric::CPU_PER_IO, WRITE),
        ],
        plots: vec![Metric::IOPS, Metric::CPU_PER_IO],
        cells,
    }
}

/// A volume that was filled once in this run.
fn filled(settings: &Settings, is_encrypted: bool, stop: &Stop) -> Result<Arc<dyn Disk>, LabError> {
    let place = pool_place::place(settings)?;
    let path = place.join(if is_encrypted { "pool-encrypted" } else { "pool-plain" });
    let is_new = !path.exists();
    fs::create_dir_all(&path).map_err(LabError::io(path.display().to_string()))?;
    let secret = is_encrypted.then(|| key_file(place)).transpose()?.map(SecretFile::Key);
    let config = VolumeConfig {
        size: SHAPE.volume_bytes,
        volblocksize: SHAPE.block_bytes,
        secret,
        ..VolumeConfig::new(&path, pool_place::VOLUME)
    };
    let volume = Volume::open(config);
    let volume = volume.map_err(|error| LabError::failed(path.display().to_string(), error))?;
    let disk = pool_place::disk(volume);
    if is_new {
        pool_place::fill(&*disk, stop)?;
    }
    Ok(disk)
}

/// The key of the encrypted volume, in a file that is made once in a run.
fn key_file(place: &Path) -> Result<PathBuf, LabError> {
    let path = place.join("key");
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    match made.and_then(|mut file| file.write_all(&[0x5a; 32])) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(LabError::io(path.display().to_string())(error))
        }
        _ => Ok(path),
    }
}
