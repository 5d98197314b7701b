//! Imports a disk image: raw, or qcow2 with the chain of its backing files. The image becomes a
//! full stream ([`crate::send`]), so a pool receives it completely or not at all, wherever the pool
//! is open.
//!
//! Images are input from outside: everything in them is checked before it is used, memory is
//! bounded, and a backing file is opened only where [`BackingPolicy`] permits it: before that its
//! path is only looked up.

mod image_file;
mod qcow2;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use blockyard_volume::VolumeError;
use blockyard_volume::admin::now;
use blockyard_volume::config::SIZE_MAX;
use blockyard_volume_format::stream::{Head, Kind, PAYLOAD_MAX};

use crate::image::is_zero;
use crate::send::StreamPrinter;

use image_file::{FoundFile, ImageFile};
use qcow2::Qcow2Image;

/// Most files of a chain.
const CHAIN_MAX: usize = 64;

/// Most memory for the level-1 tables of a chain, in bytes: that of the largest one in QEMU. The
/// table of 1 TiB with the usual clusters of 64 KiB has 16 KiB; a sparse file has a long one for
/// free.
const TABLE_BYTES_MAX: u64 = 32 << 20;

/// The snapshot of the volume in the stream of an image, which the importer destroys afterwards.
pub const IMPORT_SNAPSHOT: &str = "import";

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFormat {
    /// The bytes of the disk in order.
    Raw,
    /// QEMU's own format.
    Qcow2,
}

/// Which backing files are opened. An image names them, so an image of unknown origin could name
/// any file of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackingPolicy {
    /// None: an image that has a backing file is refused.
    None,
    /// Those in the directory of the image, or below.
    SameDirectory,
    /// All that the image names.
    Any,
}

/// Why an image is not imported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// A file cannot be read.
    #[error("cannot read `{path}`: {source}")]
    Io {
        /// The file.
        path: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The image has a feature that is not supported, or that is not permitted.
    #[error("cannot import `{path}`: {why}")]
    Refused {
        /// The file.
        path: String,
        /// The feature, and the way out.
        why: String,
    },
    /// The image is damaged or truncated.
    #[error("cannot import `{path}`, which is damaged: {why}")]
    Damaged {
        /// The file.
        path: String,
        /// What is wrong, and where.
        why: String,
    },
    /// The stream cannot be written.
    #[error(transparent)]
    Stream(#[from] VolumeError),
}

/// A range of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ImageRange {
    kind: RangeKind,
    len: u64,
}

/// What a file of a chain has of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RangeKind {
    /// Bytes.
    Data,
    /// Zeros.
    Zeros,
    /// Nothing: the backing file has it.
    Backing,
}

/// A file of a chain.
enum Layer {
    Raw(ImageFile),
    Qcow2(Qcow2Image),
}

impl Layer {
    fn size_bytes(&self) -> u64 {
        match self {
            Layer::Raw(file) => file.len,
            Layer::Qcow2(image) => image.size_bytes,
        }
    }

    /// The range that begins at an offset below the size. It is not empty.
    fn range(&mut self, at: u64) -> Result<ImageRange, ImportError> {
        match self {
            Layer::Raw(file) => file.range(at),
            Layer::Qcow2(image) => image.range(at),
        }
    }

    /// Reads a part of a range of data.
    fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), ImportError> {
        match self {
            Layer::Raw(file) => file.read(at, into),
            Layer::Qcow2(image) => image.read(at, into),
        }
    }
}

/// A disk image that is open for reading.
pub struct DiskImage {
    /// The files, each before its backing file.
    layers: Vec<Layer>,
    /// The format of the first file.
    format: DiskFormat,
    /// The capacity of the disk in bytes.
    size_bytes: u64,
}

/// The result of an import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// The capacity of the volume in bytes.
    pub size_bytes: u64,
    /// Bytes of blocks that are not zeros.
    pub data_bytes: u64,
}

impl DiskImage {
    /// Opens an image with its backing files. Without a format, a file that begins as a qcow2 image
    /// does is one, and any other file is a raw image.
    ///
    /// # Errors
    /// If a file cannot be read, is damaged, or has a feature that is not supported or permitted.
    pub fn open(
        path: &Path,
        format: Option<DiskFormat>,
        policy: BackingPolicy,
    ) -> Result<DiskImage, ImportError> {
        let table_bytes_left = TABLE_BYTES_MAX;
        let mut chain = Chain { policy, layers: Vec::new(), known: Vec::new(), table_bytes_left };
        let file = FoundFile::find(path)?.open()?;
        let unknown = |source| ImportError::Io { path: path.display().to_string(), source };
        let directory = directory_of(path).canonicalize().map_err(unknown)?;
        let first = match format {
            Some(format) => format,
            None => file.probe()?,
        };
        let mut next = chain.push(file, first, directory_of(path))?;
        while let Some((path, format)) = next {
            let found = FoundFile::find(&path)?;
            if policy == BackingPolicy::SameDirectory && !found.real_path()?.starts_with(&directory)
            {
                let directory = directory.display();
                let why =
                    format!("a backing file outside of `{directory}`; --backing any permits that");
                return Err(found.refused(why));
            }
            let file = found.open()?;
            let format = match format {
                Some(format) => format,
                None => file.probe()?,
            };
            next = chain.push(file, format, directory_of(&path))?;
        }
        let layers = chain.layers;
        let size_bytes = layers[0].size_bytes();
        Ok(DiskImage { layers, format: first, size_bytes })
    }

    /// The format of the image.
    pub fn format(&self) -> DiskFormat {
        self.format
    }

    /// The number of files: the image, and its backing files.
    pub fn files(&self) -> usize {
        self.layers.len()
    }

    /// The capacity of a volume with blocks of this length that takes the image, in bytes.
    pub fn volume_bytes(&self, block_bytes: u32) -> u64 {
        self.size_bytes.div_ceil(u64::from(block_bytes).max(1)) * u64::from(block_bytes)
    }

    /// Writes the image as the stream of a snapshot of a volume. `progress` is called with the
    /// bytes of the disk that are done, and its size.
    ///
    /// # Errors
    /// If the image cannot be read or is damaged, or the receiver is gone.
    pub fn send(
        mut self,
        volume: &str,
        block_bytes: u32,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Imported, ImportError> {
        let id = blockyard_os::fresh_id().map_err(VolumeError::io("cannot draw an identity"))?;
        let block = u64::from(block_bytes);
        let size_bytes = self.volume_bytes(block_bytes);
        let head = Head {
            block_bytes,
            blocks: size_bytes / block,
            guid: blockyard_volume_format::bytes::u64_at(&id, 0).max(1),
            name: format!("{volume}@{IMPORT_SNAPSHOT}"),
            base: None,
            created: now(),
            start: 0,
            is_followed: false,
            is_clone: false,
            key: 0,
        };
        let mut stream = StreamPrinter::begin(&mut *out, &head, false)?;
        let mut window = vec![0; PAYLOAD_MAX];
        let (mut at, mut data_bytes) = (0, 0);
        while at < self.size_bytes {
            progress(at, self.size_bytes);
            let (layer, len) = self.find(at)?;
            // Whole blocks without data are left out, and the last ones of the disk.
            if layer.is_none() && (len >= block || at + len >= self.size_bytes) {
                at += if at + len >= self.size_bytes { len } else { len / block * block };
                continue;
            }
            let len = (size_bytes - at).min(window.len() as u64) as usize;
            self.fill(at, &mut window[..len])?;
            let mut from = 0;
            while from < len {
                let blocks = window[from..len].chunks(block as usize);
                let zeros = blocks.take_while(|part| is_zero(part)).count();
                let blocks = window[from..len].chunks(block as usize).skip(zeros);
                let count = blocks.take_while(|part| !is_zero(part)).count();
                let first = from + zeros * block as usize;
                let end = first + count * block as usize;
                if count > 0 {
                    let number = (at + first as u64) / block;
                    stream.record(Kind::Data, number, count as u64, &window[first..end])?;
                    data_bytes += (end - first) as u64;
                }
                from = end;
            }
            at += len as u64;
        }
        stream.record(Kind::End, head.blocks, 0, &[])?;
        out.flush().map_err(VolumeError::stream())?;
        progress(self.size_bytes, self.size_bytes);
        Ok(Imported { size_bytes, data_bytes })
    }

    /// The file that has the data at an offset below the size, and how many bytes from there on it
    /// has; zeros have no file.
    fn find(&mut self, at: u64) -> Result<(Option<usize>, u64), ImportError> {
        let mut len = self.size_bytes - at;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            // A disk is zeros beyond the end of its backing file.
            let Some(left) = layer.size_bytes().checked_sub(at).filter(|left| *left > 0) else {
                return Ok((None, len));
            };
            let range = layer.range(at)?;
            len = len.min(left).min(range.len);
            match range.kind {
                RangeKind::Data => return Ok((Some(index), len)),
                RangeKind::Zeros => return Ok((None, len)),
                RangeKind::Backing => {}
            }
        }
        Ok((None, len))
    }

    /// Reads bytes of the disk; there are zeros after its end.
    fn fill(&mut self, at: u64, into: &mut [u8]) -> Result<(), ImportError> {
        let mut done = 0;
        while done < into.len() {
            let from = at + done as u64;
            if from >= self.size_bytes {
                into[done..].fill(0);
                break;
            }
            let (layer, len) = self.find(from)?;
            let end = done + len.min((into.len() - done) as u64) as usize;
            match layer {
                Some(index) => self.layers[index].read(from, &mut into[done..end])?,
                None => into[done..end].fill(0),
            }
            done = end;
        }
        Ok(())
    }
}

/// A chain of files that is being opened.
struct Chain {
    policy: BackingPolicy,
    layers: Vec<Layer>,
    /// Device and inode of each file.
    known: Vec<(u64, u64)>,
    /// Memory that the level-1 tables of further files may take.
    table_bytes_left: u64,
}

impl Chain {
    /// Adds a file. Returns the path of its backing file, and the format if the file names it.
    fn push(
        &mut self,
        file: ImageFile,
        format: DiskFormat,
        directory: &Path,
    ) -> Result<Option<(PathBuf, Option<DiskFormat>)>, ImportError> {
        if self.known.contains(&file.id) {
            return Err(file.refused("the file is its own backing file"));
        }
        if self.layers.len() == CHAIN_MAX {
            let why =
                format!("more than {CHAIN_MAX} files in a chain; `qemu-img convert` joins them");
            return Err(file.refused(why));
        }
        self.known.push(file.id);
        if file.len == 0 {
            return Err(file.refused("it is empty"));
        }
        if format == DiskFormat::Raw {
            self.add(Layer::Raw(file))?;
            return Ok(None);
        }
        let image = Qcow2Image::open(file, self.table_bytes_left)?;
        self.table_bytes_left -= image.l1_bytes();
        let Some(backing) = image.backing.clone() else {
            self.add(Layer::Qcow2(image))?;
            return Ok(None);
        };
        let format = match backing.format.as_deref() {
            None => None,
            Some("raw") => Some(DiskFormat::Raw),
            Some("qcow2") => Some(DiskFormat::Qcow2),
            Some(other) => {
                let why = format!("its backing file has the format `{other}`, not raw or qcow2");
                return Err(image.file.refused(why));
            }
        };
        let name = backing.name.as_str();
        if self.policy == BackingPolicy::None {
            let why = format!("it has the backing file `{name}`, and --backing none permits none");
            return Err(image.file.refused(why));
        }
        // `nbd://host`, `json:{}`: what is before a colon is a protocol, as in QEMU.
        let start = name.split('/').next().unwrap_or_default();
        if name.is_empty() || start.contains(':') {
            let why = format!("its backing file `{name}` is not a path");
            return Err(image.file.refused(why));
        }
        let path = directory.join(name);
        self.add(Layer::Qcow2(image))?;
        Ok(Some((path, format)))
    }

    fn add(&mut self, layer: Layer) -> Result<(), ImportError> {
        let size = layer.size_bytes();
        if size == 0 || size > SIZE_MAX {
            let file = match &layer {
                Layer::Raw(file) => file,
                Layer::Qcow2(image) => &image.file,
            };
            return Err(file.refused(format!("a disk of {size} bytes; expected 1 byte to 1P")));
        }
        self.layers.push(layer);
        Ok(())
    }
}

/// The directory of a path, to which names of backing files are relative.
fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_testing::temp_dir::TempDir;

    #[test]
    fn names_are_relative_to_the_directory_of_the_image() {
        for (path, directory) in [("a", "."), ("./a", "."), ("/x/a", "/x"), ("x/y/a", "x/y")] {
            assert_eq!(directory_of(Path::new(path)), Path::new(directory), "{path}");
        }
    }

    #[test]
    fn a_raw_image_keeps_its_holes_and_its_odd_end() {
        let place = TempDir::new(&std::env::temp_dir(), "import-raw");
        let path = place.path().join("disk");
        let mut bytes = vec![0; (3 << 20) + 512];
        bytes[5000] = 1;
        bytes[(2 << 20) - 1..(2 << 20) + 70_000].fill(2);
        bytes[(3 << 20) + 511] = 3;
        std::fs::write(&path, &bytes).unwrap();
        let image = DiskImage::open(&path, None, BackingPolicy::None).unwrap();
        assert_eq!((image.format(), image.files()), (DiskFormat::Raw, 1));
        let mut stream = Vec::new();
        let imported = image.send("v0", 4096, &mut stream, &mut |_, _| {}).unwrap();
        let size_bytes = (3 << 20) + 4096;
        // A block, the blocks from 2 MiB - 1 byte to 2 MiB + 70,000 bytes, and the last one.
        assert_eq!(imported, Imported { size_bytes, data_bytes: (1 + 1 + 18 + 1) * 4096 });
        let out = std::fs::File::create(place.path().join("out")).unwrap();
        let raw = crate::image::Image::Raw(&out);
        let exported = crate::image::export(&mut &stream[..], raw, &mut |_, _| {}).unwrap();
        assert_eq!(exported.size_bytes, size_bytes);
        bytes.resize(size_bytes as usize, 0);
        assert!(std::fs::read(place.path().join("out")).unwrap() == bytes);
    }

    /// Writes a qcow2 image of version 2 with empty tables, of a disk of `entries` level-1 entries.
    fn write_qcow2(path: &Path, cluster_bits: u32, entries: u64, backing: &str) {
        let cluster = 1_u64 << cluster_bits;
        let size_bytes = entries * (cluster / 8) * cluster;
        let mut header = Vec::from(*b"QFI\xfb");
        header.extend(2_u32.to_be_bytes());
        header.extend(if backing.is_empty() { 0_u64 } else { 80 }.to_be_bytes());
        header.extend((backing.len() as u32).to_be_bytes());
        header.extend(cluster_bits.to_be_bytes());
        header.extend(size_bytes.to_be_bytes());
        header.extend(0_u32.to_be_bytes());
        header.extend((entries as u32).to_be_bytes());
        header.extend(cluster.to_be_bytes());
        // The end of the extensions is before the name.
        header.resize(80, 0);
        header.extend(backing.as_bytes());
        std::fs::write(path, header).unwrap();
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_len(cluster + 8 * entries).unwrap();
    }

    fn refusal(path: &Path, policy: BackingPolicy) -> String {
        let Err(error) = DiskImage::open(path, None, policy).map(drop) else { panic!("{path:?}") };
        error.to_string()
    }

    /// A socket cannot be opened, so an error that is not about that shows that nothing tried.
    #[test]
    fn what_an_image_names_is_not_opened_before_it_is_permitted() {
        let place = TempDir::new(&std::env::temp_dir(), "import-named");
        let (inner, image) = (place.path().join("inner"), place.path().join("inner/image"));
        std::fs::create_dir(&inner).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(place.path().join("socket")).unwrap();
        write_qcow2(&image, 16, 1, "../socket");
        let said = refusal(&image, BackingPolicy::SameDirectory);
        assert!(said.contains("a backing file outside of"), "{said}");
        let said = refusal(&image, BackingPolicy::Any);
        assert!(said.contains("expected a file or a block device"), "{said}");
    }

    #[test]
    fn the_tables_of_a_chain_are_bounded_together() {
        let place = TempDir::new(&std::env::temp_dir(), "import-tables");
        // The backing file alone has all that is permitted; it is refused before it is read.
        write_qcow2(&place.path().join("a"), 9, 1, "b");
        write_qcow2(&place.path().join("b"), 9, TABLE_BYTES_MAX / 8, "");
        let said = refusal(&place.path().join("a"), BackingPolicy::SameDirectory);
        assert!(said.contains("more than 32 MiB of level-1 tables"), "{said}");
    }

    #[test]
    fn what_is_no_image_is_refused_by_path() {
        let place = TempDir::new(&std::env::temp_dir(), "import-none");
        let empty = place.path().join("empty");
        std::fs::write(&empty, "").unwrap();
        for (path, why) in [
            (empty, "it is empty"),
            (place.path().join("none"), "No such file"),
            (place.path().to_owned(), "expected a file or a block device"),
            ("/dev/null".into(), "expected a file or a block device"),
        ] {
            let refused = DiskImage::open(&path, None, BackingPolicy::None);
            let Err(error) = refused.map(drop) else { panic!("{path:?}") };
            let text = error.to_string();
            assert!(text.contains(why) && text.contains(&path.display().to_string()), "{text}");
        }
    }
}
