//! What is wrong with bytes that were read from a pool or a stream.

/// What is wrong with bytes that were read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The magic number is wrong.
    #[error("invalid `{what}`: expected its magic number at offset 0")]
    Magic {
        /// The kind of object that was read.
        what: &'static str,
    },
    /// A place has segments of a pool, but no superblock.
    #[error(
        "`{path}` has segments of a pool, but no superblock that can be read: restore the file \
         `superblock`, name the pool's other copy, or move the segments away"
    )]
    NoSuperblock {
        /// The path of the place.
        path: String,
    },
    /// An object of a pool in an object store is damaged, missing, or in a wrong place.
    #[error("{what}")]
    Object {
        /// The name of the object, and what is wrong with it.
        what: String,
    },
    /// A segment of a pool is missing, or shorter than it was.
    #[error("cannot open `{path}`: {what}")]
    Segment {
        /// The path of the segment, or of the pool.
        path: String,
        /// What is missing.
        what: String,
    },
    /// The checksum is wrong.
    #[error("`{what}` is damaged: its checksum is {found:#018x}, not {want:#018x}")]
    Checksum {
        /// The kind of object that was read.
        what: &'static str,
        /// The checksum of the bytes read.
        found: u64,
        /// The expected checksum.
        want: u64,
    },
    /// The version is newer than this program knows, or older than it reads.
    #[error("`{what}` is of version {found}; this program knows version {known}")]
    Version {
        /// The kind of object that was read.
        what: &'static str,
        /// The version that was read.
        found: u32,
        /// The newest version that this program knows.
        known: u32,
    },
    /// A field has an invalid value.
    #[error("`{what}` has {field} = {value}; expected {want}")]
    Field {
        /// The kind of object that was read.
        what: &'static str,
        /// The field.
        field: &'static str,
        /// The value of the field.
        value: u64,
        /// What is expected instead.
        want: &'static str,
    },
    /// A map page is damaged.
    #[error(
        "a page of the map, segment {segment} offset {offset}, is damaged: its checksum is \
         {found:#018x}, not {want:#018x}"
    )]
    Page {
        /// The segment.
        segment: u32,
        /// The offset in the segment, in bytes.
        offset: u64,
        /// The checksum of the bytes read.
        found: u64,
        /// The expected checksum.
        want: u64,
    },
    /// A group that was durable is missing from the log.
    #[error(
        "cannot read the log: group {number}, at offset {offset} of segment {segment}, was durable \
         and is missing or damaged, and the groups after it depend on it; restore the segment files"
    )]
    Log {
        /// The segment.
        segment: u32,
        /// The offset in the segment, in bytes.
        offset: u32,
        /// The number of the missing group.
        number: u64,
    },
    /// The bytes end too early.
    #[error("`{what}` ends after {len} bytes")]
    Short {
        /// The kind of object that was read.
        what: &'static str,
        /// The number of bytes that there are.
        len: u64,
    },
}

impl FormatError {
    /// Whether a newer program wrote the bytes, so that they are not damaged.
    pub fn is_of_newer(&self) -> bool {
        matches!(self, FormatError::Version { .. })
    }
}
