//! The bytes of FUSE's messages: parses requests, prints replies, and does nothing else.
//!
//! The layouts are those of the public header `linux/fuse.h`, protocol 7.x, in the machine's own
//! byte order. A request is a header, a structure of the call's own (the *fixed* part) and the
//! *rest*: a name, or the data of a write. In `/dev/fuse` they follow each other; io_uring puts
//! each into memory of its own.

use std::time::{SystemTime, UNIX_EPOCH};

/// The length of a request's header.
pub const IN_HEADER_BYTES: usize = 40;
/// The length of a reply's header.
pub const OUT_HEADER_BYTES: usize = 16;
/// The length of the fixed part of a write.
pub const WRITE_IN_BYTES: usize = 40;

/// The numbers of the supported calls.
mod opcode {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const READDIR: u32 = 28;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const IOCTL: u32 = 39;
    pub(super) const BATCH_FORGET: u32 = 42;
    pub(super) const FALLOCATE: u32 = 43;
    pub(super) const LSEEK: u32 = 46;
}

/// Bits of `fuse_setattr_in.valid`.
mod valid {
    pub(super) const MODE: u32 = 1;
    pub(super) const UID: u32 = 1 << 1;
    pub(super) const GID: u32 = 1 << 2;
    pub(super) const SIZE: u32 = 1 << 3;
    pub(super) const HANDLE: u32 = 1 << 6;
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The length of the message, including a write's data.
    pub len: u32,
    /// The number of the call.
    pub opcode: u32,
    /// The request's number, which the reply repeats.
    pub unique: u64,
    /// The inode number.
    pub node: u64,
}

impl Header {
    /// Parses a header at the start of some bytes; `None` if they are too few.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Option<Header> {
        let bytes = bytes.first_chunk::<IN_HEADER_BYTES>()?;
        Some(Header {
            len: u32_at(bytes, 0)?,
            opcode: u32_at(bytes, 4)?,
            unique: u64_at(bytes, 8)?,
            node: u64_at(bytes, 16)?,
        })
    }

    /// Whether it is a write, whose data follow the fixed part.
    #[inline]
    pub fn is_write(&self) -> bool {
        self.opcode == opcode::WRITE
    }

    /// The length of this call's fixed part.
    #[inline]
    pub fn fixed_bytes(&self) -> usize {
        match self.opcode {
            opcode::READ | opcode::WRITE | opcode::READDIR => WRITE_IN_BYTES,
            opcode::SETATTR => 88,
            opcode::FALLOCATE | opcode::IOCTL => 32,
            opcode::RELEASE | opcode::RELEASEDIR | opcode::LSEEK => 24,
            opcode::GETATTR | opcode::FSYNC => 16,
            opcode::OPEN | opcode::OPENDIR => 8,
            _ => 0,
        }
    }
}

/// A request's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call<'m> {
    /// Find the file of a name in a directory.
    Lookup(&'m [u8]),
    /// The kernel no longer caches an inode; needs no reply.
    Forget,
    /// Get attributes.
    GetAttr,
    /// Set attributes.
    SetAttr(AttrChanges),
    /// Open a file, with the flags of open(2).
    Open(i32),
    /// Read a file.
    Read {
        /// The offset.
        offset: u64,
        /// The length.
        len: u32,
    },
    /// Write a file, with the rest of the message as data.
    Write {
        /// The offset.
        offset: u64,
        /// The length.
        len: u32,
        /// The flags of the open file.
        flags: i32,
    },
    /// Get the sizes of the file system.
    StatFs,
    /// A file is no longer open.
    Release,
    /// Make written data durable.
    Fsync,
    /// Open a directory.
    OpenDir,
    /// Read the entries of a directory.
    ReadDir {
        /// The offset of the last entry that is known.
        offset: u64,
        /// The room for entries, in bytes.
        len: u32,
    },
    /// A directory is no longer open.
    ReleaseDir,
    /// The file system is being unmounted.
    Destroy,
    /// ioctl(2).
    Ioctl,
    /// fallocate(2).
    Fallocate {
        /// The offset.
        offset: u64,
        /// The length, in bytes.
        len: u64,
        /// As in fallocate(2).
        mode: i32,
    },
    /// lseek(2) to data or to a hole.
    Lseek {
        /// The offset.
        offset: i64,
        /// As in lseek(2).
        whence: i32,
    },
    /// Any other call, by its number.
    Other(u32),
}

/// The changes of `setattr` that matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttrChanges {
    /// Mode or owner.
    pub rights: bool,
    /// The size.
    pub size: Option<u64>,
    /// Whether the change is made through an open file, not by path.
    pub by_handle: bool,
}

impl<'m> Call<'m> {
    /// Parses a call from the contiguous bytes after its header; `None` if bytes are missing.
    #[inline]
    pub fn of_body(header: &Header, body: &'m [u8]) -> Option<Call<'m>> {
        let (fixed, rest) = body.split_at_checked(header.fixed_bytes())?;
        Call::parse(header.opcode, fixed, rest)
    }

    /// Parses a call from its fixed part, which may have extra bytes, and the rest; `None` if bytes
    /// are missing.
    #[inline]
    pub fn parse(opcode: u32, fixed: &'m [u8], rest: &'m [u8]) -> Option<Call<'m>> {
        Some(match opcode {
            opcode::READ => Call::Read { offset: u64_at(fixed, 8)?, len: u32_at(fixed, 16)? },
            opcode::WRITE => Call::Write {
                offset: u64_at(fixed, 8)?,
                len: u32_at(fixed, 16)?,
                flags: i32_at(fixed, 32)?,
            },
            opcode::LOOKUP => Call::Lookup(rest.split(|&byte| byte == 0).next()?),
            opcode::FORGET | opcode::BATCH_FORGET => Call::Forget,
            opcode::GETATTR => Call::GetAttr,
            opcode::SETATTR => Call::SetAttr(AttrChanges::parse(fixed)?),
            opcode::OPEN => Call::Open(i32_at(fixed, 0)?),
            opcode::STATFS => Call::StatFs,
            opcode::RELEASE => Call::Release,
            opcode::FSYNC => Call::Fsync,
            opcode::OPENDIR => Call::OpenDir,
            opcode::READDIR => Call::ReadDir { offset: u64_at(fixed, 8)?, len: u32_at(fixed, 16)? },
            opcode::RELEASEDIR => Call::ReleaseDir,
            opcode::DESTROY => Call::Destroy,
            opcode::IOCTL => Call::Ioctl,
            opcode::FALLOCATE => Call::Fallocate {
                offset: u64_at(fixed, 8)?,
                len: u64_at(fixed, 16)?,
                mode: i32_at(fixed, 24)?,
            },
            opcode::LSEEK => {
                Call::Lseek { offset: u64_at(fixed, 8)? as i64, whence: i32_at(fixed, 16)? }
            }
            other => Call::Other(other),
        })
    }
}

impl AttrChanges {
    fn parse(fixed: &[u8]) -> Option<AttrChanges> {
        let wanted = u32_at(fixed, 0)?;
        let size = u64_at(fixed, 16)?;
        Some(AttrChanges {
            rights: wanted & (valid::MODE | valid::UID | valid::GID) != 0,
            size: (wanted & valid::SIZE != 0).then_some(size),
            by_handle: wanted & valid::HANDLE != 0,
        })
    }
}

#[inline]
fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[inline]
fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[inline]
fn i32_at(bytes: &[u8], at: usize) -> Option<i32> {
    u32_at(bytes, at).map(|word| word as i32)
}

/// The header of a reply with `len` bytes of data; `error` is 0 or an error number.
#[inline]
pub fn out_header(unique: u64, error: i32, len: usize) -> [u8; OUT_HEADER_BYTES] {
    let mut bytes = [0; OUT_HEADER_BYTES];
    bytes[..4].copy_from_slice(&((OUT_HEADER_BYTES + len) as u32).to_ne_bytes());
    bytes[4..8].copy_from_slice(&(-error).to_ne_bytes());
    bytes[8..].copy_from_slice(&unique.to_ne_bytes());
    bytes
}

/// The reply to a write of `written` bytes.
#[inline]
pub fn write_out(written: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&written.to_ne_bytes());
    bytes
}

/// The attributes of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// The inode number.
    pub ino: u64,
    /// The length, in bytes.
    pub size: u64,
    /// The number of blocks of 512 bytes.
    pub blocks: u64,
    /// The time at which it was made, which also serves as time of access and change.
    pub time: SystemTime,
    /// The file type and permissions.
    pub mode: u32,
    /// The number of its names.
    pub links: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The preferred I/O size.
    pub block_bytes: u32,
}

/// Prints replies, one field after another.
#[derive(Debug, Default)]
pub struct Out(Vec<u8>);

impl Out {
    /// The printed bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Discards the printed bytes and keeps the memory.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Prints bytes unchanged.
    #[inline]
    pub fn raw(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Prints a number of 8 bytes.
    pub fn u64(&mut self, word: u64) -> &mut Out {
        self.0.extend_from_slice(&word.to_ne_bytes());
        self
    }

    /// Prints a number of 4 bytes.
    pub fn u32(&mut self, word: u32) -> &mut Out {
        self.0.extend_from_slice(&word.to_ne_bytes());
        self
    }

    /// Prints attributes as `fuse_attr`.
    fn attributes(&mut self, attributes: &Attributes) -> &mut Out {
        let time = attributes.time.duration_since(UNIX_EPOCH).unwrap_or_default();
        self.u64(attributes.ino).u64(attributes.size).u64(attributes.blocks);
        (0..3).for_each(|_| _ = self.u64(time.as_secs()));
        (0..3).for_each(|_| _ = self.u32(time.subsec_nanos()));
        self.u32(attributes.mode).u32(attributes.links).u32(attributes.uid).u32(attributes.gid);
        // No device number, the preferred I/O size, and no flags.
        self.u32(0).u32(attributes.block_bytes).u32(0)
    }

    /// The reply to `getattr` and `setattr`: attributes that may be cached for `seconds`.
    pub fn attr(&mut self, seconds: u64, attributes: &Attributes) {
        self.u64(seconds).u32(0).u32(0).attributes(attributes);
    }

    /// The reply to `lookup`: an inode of generation 0, which may be cached for `seconds`.
    pub fn entry(&mut self, seconds: u64, attributes: &Attributes) {
        self.u64(attributes.ino).u64(0).u64(seconds).u64(seconds).u32(0).u32(0);
        self.attributes(attributes);
    }

    /// The reply to `open` and `opendir`.
    pub fn open(&mut self, flags: u32) {
        self.u64(0).u32(flags).u32(0);
    }

    /// Prints an entry of a directory; `false` if `len_max` bytes have no room for it. The kind is
    /// bits 12 to 15 of a mode.
    pub fn dir_entry(
        &mut self,
        len_max: usize,
        ino: u64,
        offset: u64,
        mode: u32,
        name: &str,
    ) -> bool {
        const HEAD_BYTES: usize = 24;
        let len = (HEAD_BYTES + name.len()).next_multiple_of(8);
        if self.0.len() + len > len_max {
            return false;
        }
        let end = self.0.len() + len;
        self.u64(ino).u64(offset).u32(name.len() as u32).u32(mode >> 12 & 15);
        self.0.extend_from_slice(name.as_bytes());
        self.0.resize(end, 0);
        true
    }

    /// The reply to `statfs`: blocks, files, room for further files, and bytes of a block.
    pub fn statfs(&mut self, blocks: u64, files: u64, files_free: u64, block_bytes: u32) {
        const NAME_BYTES_MAX: u32 = 255;
        self.u64(blocks).u64(0).u64(0).u64(files).u64(files_free);
        self.u32(block_bytes).u32(NAME_BYTES_MAX).u32(block_bytes);
        (0..7).for_each(|_| _ = self.u32(0));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn a_header_is_read() {
        let bytes = message(&[80, 15, 7, 0, 9, 0, 1, 2, 3, 0]);
        let want = Header { len: 80, opcode: 15, unique: 7, node: 9 };
        assert_eq!(Header::parse(&bytes), Some(want));
        assert_eq!(Header::parse(&bytes[..39]), None);
    }

    #[test]
    fn calls_are_read() {
        let io = message(&[0, 0, 4096, 0, 512, 0, 0, 0, 0x1000, 0]);
        assert_eq!(Call::parse(15, &io, &[]), Some(Call::Read { offset: 4096, len: 512 }));
        let write = Call::Write { offset: 4096, len: 512, flags: 0x1000 };
        assert_eq!(Call::parse(16, &io, &[]), Some(write));
        assert_eq!(Call::parse(1, &[], b"mem0\0"), Some(Call::Lookup(b"mem0")));
        assert_eq!(Call::parse(1, &[], b""), Some(Call::Lookup(b"")));
        let mut change = message(&[1 << 3 | 1 << 6, 0, 0, 0, 512, 0]);
        change.resize(88, 0);
        let want = AttrChanges { rights: false, size: Some(512), by_handle: true };
        assert_eq!(Call::parse(4, &change, &[]), Some(Call::SetAttr(want)));
        assert_eq!(Call::parse(15, &io[..16], &[]), None);
        assert_eq!(Call::parse(4711, &[], &[]), Some(Call::Other(4711)));
    }

    #[test]
    fn answers_have_the_lengths_of_the_header_file() {
        let attributes = Attributes {
            ino: 2,
            size: 1 << 20,
            blocks: 2048,
            time: UNIX_EPOCH,
            mode: libc::S_IFREG | 0o600,
            links: 1,
            uid: 0,
            gid: 0,
            block_bytes: 4096,
        };
        let len = |print: &dyn Fn(&mut Out)| {
            let mut out = Out::default();
            print(&mut out);
            out.bytes().len()
        };
        assert_eq!(len(&|out| out.attr(1, &attributes)), 104);
        assert_eq!(len(&|out| out.entry(1, &attributes)), 128);
        assert_eq!(len(&|out| out.open(1)), 16);
        assert_eq!(len(&|out| out.statfs(1, 2, 3, 4096)), 80);
        assert_eq!(out_header(7, libc::EIO, 0)[4..8], (-libc::EIO).to_ne_bytes());
    }

    #[test]
    fn a_directory_ends_where_its_room_does() {
        let mut out = Out::default();
        assert!(out.dir_entry(64, 2, 3, libc::S_IFREG, "mem0"));
        assert_eq!(out.bytes().len(), 32);
        assert!(!out.dir_entry(63, 2, 3, libc::S_IFREG, "mem1"));
        assert!(out.dir_entry(64, 2, 3, libc::S_IFDIR, "mem1"));
        assert_eq!(out.bytes().len(), 64);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_call_or_none(
            opcode in 0_u32..64,
            fixed in proptest::collection::vec(any::<u8>(), 0..128),
            rest in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let call = Call::parse(opcode, &fixed, &rest);
            let head = Header { len: 0, opcode, unique: 1, node: 1 };
            if fixed.len() >= head.fixed_bytes() {
                prop_assert!(call.is_some());
            }
        }
    }
}
