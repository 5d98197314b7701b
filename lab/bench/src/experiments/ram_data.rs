//! The data that fill our RAM disks and the kernel's: the same bytes at the same offsets.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Composed, Disk, Region};
use blockyard_ram::{Ram, RamConfig};
use fastrand::Rng;

use crate::corpus::{CORPUS_BYTES, corpus};
use crate::error::LabError;
use crate::fio_bytes;
use crate::load::records::{Does, Order, Part, Records, Task, Way, pass};
use crate::sample::Round;
use crate::stop::Stop;
use crate::tools::direct;
use crate::tools::zram_device::ZramDevice;

/// The compression algorithm of both sides.
pub(super) const ALGORITHM: &str = "lz4";
/// The length of a write when a device is filled, in bytes.
const FILL_BYTES: usize = 1 << 20;
/// The least amount of data, in bytes, that one turn of our compactor processes when they compress
/// by half.
const TURN_BYTES: usize = 64 << 20;
/// The seed of the noise, constant so that all runs use equal bytes.
const NOISE_SEED: u64 = 100;

/// The data that fill a device and that are written to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FillData {
    /// The text corpus of [`crate::corpus`].
    Corpus,
    /// fio's data that compress by half, from [`crate::fio_bytes`].
    Half,
    /// Incompressible data, which fio writes by default.
    Noise,
}

impl FillData {
    /// A name for file names.
    fn name(self) -> &'static str {
        match self {
            FillData::Corpus => "corpus",
            FillData::Half => "half",
            FillData::Noise => "noise",
        }
    }

    /// As many bytes as the corpus has.
    pub(super) fn bytes(
        self,
        scratch: &Path,
        stop: &Stop,
    ) -> Result<&'static Arc<Region>, LabError> {
        match self {
            FillData::Corpus => corpus(),
            FillData::Half => fio_bytes::half(scratch, stop),
            FillData::Noise => Ok(noise()),
        }
    }
}

fn noise() -> &'static Arc<Region> {
    static NOISE: OnceLock<Arc<Region>> = OnceLock::new();
    NOISE.get_or_init(|| {
        let (region, mut rng) = (Region::alloc(CORPUS_BYTES), Rng::with_seed(NOISE_SEED));
        let mut bytes = vec![0; CORPUS_BYTES];
        rng.fill(&mut bytes);
        region.write(0, &bytes);
        region
    })
}

/// A device and the data that fill it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Filling {
    /// The data, repeated as often as needed.
    pub(super) data: FillData,
    /// The device's size in bytes.
    pub(super) size: u64,
    /// The number of bytes from the start that are written, a multiple of a MiB.
    pub(super) filled: u64,
}

impl Filling {
    /// A device of `size` bytes that is wholly filled.
    pub(super) fn whole(data: FillData, size: u64) -> Filling {
        Filling { data, size, filled: size }
    }

    /// Makes and fills a device of the kernel. Dropping it removes the device.
    pub(super) fn zram(&self, scratch: &Path, round: &Round<'_>) -> Result<ZramDevice, LabError> {
        let source = self.data.bytes(scratch, round.stop)?;
        let device = ZramDevice::new(self.size, ALGORITHM)?;
        let file = device.open()?;
        let what = || device.path().display().to_string();
        for at in (0..self.filled).step_by(FILL_BYTES) {
            if round.stop.is_set() {
                return Err(LabError::Interrupted);
            }
            let from = at % CORPUS_BYTES as u64;
            let written = direct::write(&file, source, from, FILL_BYTES, at);
            written.map_err(|error| LabError::io(what())(error))?;
        }
        Ok(device)
    }

    /// Our device in its state some seconds later: the compactor has examined the pool and has
    /// asked the system for huge pages. The kernel maps its own memory with huge pages from the
    /// beginning.
    pub(super) fn ram(&self, scratch: &Path, round: &Round<'_>) -> Result<Arc<Ram>, LabError> {
        let source = self.data.bytes(scratch, round.stop)?;
        let ram = Ram::open(RamConfig { size: self.size, ..RamConfig::default() });
        let ram = ram.map_err(|error| LabError::failed("blockyard", error))?;
        let (does, order, way) = (Does::Write, Order::Forward, Way::Push);
        let task = Task { does, order, way, record_bytes: FILL_BYTES as u64 };
        let part = Part { from: 0, len_bytes: self.filled };
        pass(vec![Records::open_with(source, &disk(&ram), task, part, 0)?], round)?;
        for _ in (0..self.filled).step_by(TURN_BYTES) {
            ram.compact_in_background();
        }
        Ok(ram)
    }

    /// The path of [`Filling::snapshot`].
    pub(super) fn path(&self, scratch: &Path) -> PathBuf {
        let Filling { data, size, filled } = self;
        scratch.join(format!("ram-{size}-{filled}-{}.ram", data.name()))
    }

    /// A snapshot of our device, for the parameter `load` of a device in another process; made once
    /// in a run.
    pub(super) fn snapshot(&self, scratch: &Path, round: &Round<'_>) -> Result<PathBuf, LabError> {
        let path = self.path(scratch);
        if !path.exists() {
            let saved = self.ram(scratch, round)?.save(&path, blockyard_ram::Replace::Own);
            saved.map_err(|error| LabError::failed(path.display().to_string(), error))?;
        }
        Ok(path)
    }
}

/// A disk over a RAM disk.
pub(super) fn disk(ram: &Arc<Ram>) -> impl Disk + use<> {
    let (name, channels) = ("r".to_owned(), ChannelConfig::default());
    Composed::new(name, "ram", Arc::clone(ram), channels)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn a_snapshot_holds_what_compresses_or_does_not() {
        let (scratch, stop) = (Scratch::new().unwrap(), Stop::new());
        let none = Duration::ZERO;
        let round = Round { warm_up: none, duration: none, number: 0, seed: 3, stop: &stop };
        let (size, filled) = (10 << 20, 8 << 20);
        for (data, huge) in [(FillData::Noise, filled / 4096), (FillData::Half, 0)] {
            let filling = Filling { data, size, filled };
            let path = filling.snapshot(scratch.path(), &round).unwrap();
            assert_eq!(filling.snapshot(scratch.path(), &round).unwrap(), path);
            let config = RamConfig { size, load: Some(path), ..RamConfig::default() };
            let stats = Ram::open(config).unwrap().stats().mm;
            assert_eq!((stats.orig_data_size, stats.huge_pages), (filled, huge));
        }
        stop.set();
        let filled = Filling::whole(FillData::Noise, size).zram(scratch.path(), &round);
        assert!(matches!(filled, Err(LabError::Interrupted)));
    }
}
