//! Files of all shapes as devices: what is opened, what is refused, and what happens to the bytes.
#![allow(clippy::unwrap_used)] // Test code.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Bio, BufRef, Completion, Device, DeviceError, Flags, Geometry, Limits, Op, Region, Sector,
    Status,
};
use blockyard_file::{Direct, FileConfig, FileDevice, FileDeviceError, IoEngine};
use blockyard_testing::channel::{channel, handle};
use blockyard_testing::log_lines::LogLines;
use blockyard_testing::temp_dir::TempDir;

const MIB: u64 = 1 << 20;

fn place(name: &str) -> TempDir {
    TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name)
}

fn open(config: &FileConfig) -> Arc<FileDevice> {
    Arc::new(FileDevice::open(config).unwrap())
}

fn sized(path: &Path, len: u64) -> FileConfig {
    File::create(path).unwrap().set_len(len).unwrap();
    FileConfig::new(path)
}

/// The configuration by each way to execute requests, with and without the page cache.
fn variants(config: &FileConfig) -> Vec<FileConfig> {
    let mut all = Vec::new();
    for direct in [Direct::Auto, Direct::Off] {
        for io in [IoEngine::Auto, IoEngine::Blocking] {
            all.push(FileConfig { direct, io, ..config.clone() });
        }
    }
    all
}

#[test]
fn created_file_has_its_length_and_belongs_to_its_owner() {
    let place = place("created");
    let path = place.fresh();
    let config = FileConfig { size: 4 * MIB, ..FileConfig::new(&path) };
    let device = open(&config);
    assert_eq!(device.geometry().len_bytes(), 4 * MIB);
    let found = path.metadata().unwrap();
    assert_eq!((found.len(), found.mode() & 0o777, found.blocks()), (4 * MIB, 0o600, 0));
    drop(device);
    // Both sizes are named, and the file stays as it is.
    let error = FileDevice::open(&FileConfig { size: 8 * MIB, ..config.clone() }).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("8388608") && text.contains("4194304"), "{text}");
    assert_eq!(error.field(), "size");
    drop(open(&config));
    drop(open(&FileConfig::new(&path)));
    // A file of an opening that is not accepted is removed, an existing one is not.
    drop(FileDevice::open_provisional(&config).unwrap());
    assert!(path.exists());
    let other = FileConfig { path: place.fresh(), ..config };
    drop(FileDevice::open_provisional(&other).unwrap());
    assert!(!other.path.exists());
}

#[test]
fn unsuitable_file_is_refused_with_a_way_out() {
    let place = place("refused");
    let refused = |config: &FileConfig| {
        let error = FileDevice::open(config).unwrap_err();
        (error.field(), error.to_string())
    };
    let missing = FileConfig::new(place.fresh());
    let (field, text) = refused(&missing);
    assert!(field == "path" && text.ends_with("; size=SIZE creates the file"), "{text}");
    let (field, text) = refused(&FileConfig { read_only: true, size: MIB, ..missing });
    assert!(field == "path" && text.contains("expected an existing file"), "{text}");
    let (_, text) = refused(&FileConfig::new(place.path()));
    assert!(
        text.ends_with("expected a regular file or a block device; it is a directory"),
        "{text}"
    );
    let (_, text) = refused(&FileConfig::new("/dev/null"));
    assert!(text.ends_with("it is a character device"), "{text}");
    let fifo = place.fresh();
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    assert!(refused(&FileConfig::new(fifo)).1.ends_with("it is a FIFO"));
    let socket = place.fresh();
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    assert!(refused(&FileConfig::new(socket)).1.ends_with("it is a socket"));
    for len in [0, 100, 513] {
        let (_, text) = refused(&sized(&place.fresh(), len));
        assert!(text.contains("a multiple of 512 bytes, and not 0"), "{text}");
    }
    // Direct I/O in blocks that do not divide the length of the file.
    let config = sized(&place.fresh(), 513 * 512);
    let device = open(&config);
    assert_eq!(device.geometry().logical_block_bytes, 512);
}

#[test]
fn file_has_one_writer_or_many_readers() {
    let place = place("locked");
    let config = sized(&place.fresh(), MIB);
    let writer = open(&config);
    let reader = FileConfig { read_only: true, ..config.clone() };
    for config in [&config, &reader] {
        let error = FileDevice::open(config).unwrap_err();
        assert!(matches!(error, FileDeviceError::InUse { .. }), "{error}");
        assert!(error.to_string().contains("by another device of this process"), "{error}");
    }
    drop(writer);
    let readers = [open(&reader), open(&reader)];
    assert!(matches!(FileDevice::open(&config), Err(FileDeviceError::InUse { .. })));
    drop(readers);
    drop(open(&config));
}

/// An open queue keeps its file and the lock after the device is gone.
#[test]
fn lock_lasts_as_long_as_the_queues() {
    let place = place("queue-lock");
    let config = sized(&place.fresh(), MIB);
    let device = open(&config);
    let queue = channel(&device);
    drop(device);
    assert!(matches!(FileDevice::open(&config), Err(FileDeviceError::InUse { .. })));
    drop(queue);
    drop(open(&config));
}

#[test]
fn read_only_file_is_opened_for_reading() {
    let place = place("read-only");
    let path = place.fresh();
    fs::write(&path, vec![7; 1 << 20]).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
    for config in variants(&FileConfig { read_only: true, ..FileConfig::new(&path) }) {
        let device = open(&config);
        assert!(device.limits().read_only && device.limits().discard_sectors_max == 0);
        let mut io = handle(&device);
        let mut bytes = vec![0; 4096];
        io.read(Sector(8), &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7));
        assert!(io.write(Sector(0), &bytes, Flags::NONE).is_err());
        io.run(Bio::flush()).unwrap();
    }
}

#[test]
fn bytes_reach_the_file_and_holes_come_back() {
    let place = place("bytes");
    for (number, config) in (0..).zip(variants(&sized(&place.fresh(), 4 * MIB))) {
        File::options().write(true).open(&config.path).unwrap().set_len(0).unwrap();
        File::options().write(true).open(&config.path).unwrap().set_len(4 * MIB).unwrap();
        let device = open(&config);
        let mut io = handle(&device);
        let bytes: Vec<u8> = (0..64 << 10).map(|at| (at % 251) as u8 + number).collect();
        io.write(Sector(2048), &bytes, Flags::FUA).unwrap();
        let file = File::open(&config.path).unwrap();
        let mut found = vec![0; bytes.len()];
        file.read_exact_at(&mut found, MIB).unwrap();
        assert_eq!(found, bytes, "{config:?}");
        let at = |sector| {
            let extent = device.extent(Sector(sector), 1 << 20);
            (extent.sectors, extent.allocated, extent.zero)
        };
        assert_eq!(at(0), (2048, false, true), "{config:?}");
        assert_eq!(at(2048), (128, true, false), "{config:?}");
        assert_eq!(at(2176), (8192 - 2176, false, true), "{config:?}");
        // A discard makes a hole, a write-zeroes as well, unless it must not deallocate.
        io.run(Bio::new(Op::Discard, Sector(2048), 32)).unwrap();
        assert!(!at(2048).1, "{config:?}");
        io.run(Bio::new(Op::WriteZeroes, Sector(2080), 32)).unwrap();
        assert_eq!(at(2048), (64, false, true), "{config:?}");
        let before = file.metadata().unwrap().blocks();
        let zeroes = Bio::new(Op::WriteZeroes, Sector(2112), 32);
        io.run(zeroes.with_flags(Flags::NOUNMAP | Flags::FUA)).unwrap();
        assert_eq!(file.metadata().unwrap().blocks(), before, "{config:?}");
        file.read_exact_at(&mut found, MIB).unwrap();
        assert!(found[..48 << 10].iter().all(|byte| *byte == 0), "{config:?}");
        assert_eq!(found[48 << 10..], bytes[48 << 10..], "{config:?}");
    }
}

/// Data at odd addresses go through bounce buffers, of which there are fewer than requests.
#[test]
fn data_at_any_address_are_read_and_written() {
    let place = place("addresses");
    for config in variants(&sized(&place.fresh(), 16 * MIB)) {
        let device = open(&config);
        let mut channel = channel(&device);
        let region = Region::alloc(33 << 18);
        let bytes: Vec<u8> = (0..32 << 18).map(|at: u32| (at % 253) as u8).collect();
        region.write(3, &bytes);
        let id = channel.register(Arc::clone(&region));
        for op in [Op::Write, Op::Read] {
            if op == Op::Read {
                region.write(3, &vec![0; bytes.len()]);
            }
            for index in 0..32_u64 {
                let buf = BufRef { region: id, offset: 3 + (index << 18) };
                let bio = Bio::new(op, Sector(index << 9), 1 << 9).with_buf(buf);
                assert_eq!(channel.push(&[bio]), 1);
            }
            channel.submit();
            let mut out: Vec<Completion> = Vec::new();
            while out.len() < 32 {
                channel.reap(&mut out);
                channel.wait(None);
            }
            assert!(out.iter().all(|it| it.status.is_ok()), "{op} {config:?}");
            let file = fs::read(&config.path).unwrap();
            assert!(file[..bytes.len()] == bytes[..], "{op} {config:?}");
        }
        let mut back = vec![0; bytes.len()];
        region.read(3, &mut back);
        assert!(back == bytes, "{config:?}");
    }
}

/// A file that another program truncates is an error and no endless loop.
#[test]
fn read_after_the_end_of_a_truncated_file_fails() {
    let place = place("truncated");
    for config in variants(&sized(&place.fresh(), MIB)) {
        File::options().write(true).open(&config.path).unwrap().set_len(MIB).unwrap();
        let device = open(&config);
        File::options().write(true).open(&config.path).unwrap().set_len(4096).unwrap();
        let mut io = handle(&device);
        io.read(Sector(0), &mut [0; 4096]).unwrap();
        let error = io.read(Sector(1024), &mut [0; 4096]).unwrap_err();
        assert_eq!(error, Status::IoErr, "{config:?}");
    }
}

/// A file that is open for reading, as a device that is written and executes FUA itself.
struct Unwritable(FileDevice, Limits);

impl Device for Unwritable {
    type Queue = <FileDevice as Device>::Queue;

    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn limits(&self) -> &Limits {
        &self.1
    }

    fn open_queue(&self) -> Result<Self::Queue, DeviceError> {
        self.0.open_queue()
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        self.0.report_zones(from, zones_max, out)
    }
}

/// The bug: the log named a flush where a write with FUA had failed.
#[test]
fn failed_write_with_fua_latches_the_device_and_is_named() {
    let place = place("fua-refused");
    let log = LogLines::with("fua-refused");
    for (count, io) in [(1, IoEngine::Uring), (2, IoEngine::Blocking)] {
        let config = FileConfig { io, read_only: true, ..sized(&place.fresh(), MIB) };
        let device = FileDevice::open(&config).unwrap();
        let status = device.status();
        let limits = Limits { read_only: false, fua: true, ..*device.limits() };
        let mut io = handle(&Arc::new(Unwritable(device, limits)));
        assert_eq!(io.write(Sector(0), &[1; 4096], Flags::NONE), Err(Status::IoErr));
        assert!(!status.is_latched());
        assert_eq!(io.write(Sector(0), &[1; 4096], Flags::FUA), Err(Status::IoErr));
        assert!(status.is_latched());
        let named = log.lines().iter().filter(|it| it.contains("a write with FUA failed")).count();
        assert_eq!((named, log.lines().len()), (count, count), "{:?}", log.lines());
    }
}
