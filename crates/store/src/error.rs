//! Errors of storage: why a pool's place could not be opened, or an operation on it failed.

use std::io;
use std::path::PathBuf;

use blockyard_volume_format::FormatError;

use crate::lock_owner::LockOwner;

/// Why storage refused something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A parameter is invalid.
    #[error("invalid {field} `{value}`: expected {wanted}")]
    Invalid {
        /// The parameter.
        field: &'static str,
        /// What was given.
        value: String,
        /// What is expected instead.
        wanted: String,
    },
    /// The place contains no pool.
    #[error(
        "`{}` holds no pool of volumes: {why}; expected the directory or the disk of a pool",
        path.display()
    )]
    NoPool {
        /// The place that was named.
        path: PathBuf,
        /// What is there instead.
        why: String,
    },
    /// Another process has the pool open.
    #[error(
        "invalid path `{}`: it is in use by {lock_owner}; expected a pool that no other process \
         has open",
        path.display()
    )]
    InUse {
        /// The pool's directory.
        path: PathBuf,
        /// The process that has it open.
        lock_owner: LockOwner,
    },
    /// The pool is locked by a process that does not run here: its writes are still in flight, or
    /// it runs on another host.
    #[error(
        "cannot open the pool at `{}`: process {pid} holds its lock and does not run here: either \
         its last writes are still in flight, or it runs in another container or on another host; \
         try again when the disk answers",
        path.display()
    )]
    Unfinished {
        /// The pool's directory.
        path: PathBuf,
        /// The process ID.
        pid: u32,
    },
    /// A system call failed.
    #[error("{doing}: {source}")]
    Io {
        /// The operation that failed.
        doing: String,
        /// The cause.
        source: io::Error,
    },
    /// The pool's contents are invalid, or of an unknown version.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The copies of a pool do not match, or one is missing.
    #[error(transparent)]
    Copies(#[from] CopiesError),
}

impl StoreError {
    /// Adds to an I/O error what was being done.
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> StoreError {
        let doing = doing.into();
        move |source| StoreError::Io { doing, source }
    }
}

/// Why two copies cannot be assembled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CopiesError {
    /// The pool has only one copy.
    #[error(
        "`{path}` holds a pool of one copy; `blockyard volume attach {path} {other}` makes a \
         second one"
    )]
    Single {
        /// The path of the pool.
        path: String,
        /// The other path that was given.
        other: String,
    },
    /// Copies of two different pools.
    #[error(
        "`{first}` and `{second}` are copies of different pools; the other copy of the pool at \
         `{first}` was last at `{last}`: expected that one, or no `path2`"
    )]
    Foreign {
        /// The first path.
        first: String,
        /// The second path.
        second: String,
        /// Where the other copy of the first pool was last.
        last: String,
    },
    /// One path holds a copy of a pool, and the other path no copy of it.
    #[error(
        "{found}; the other copy of the pool at `{path}` was last at `{last}`: expected \
         that one, or no `path2`"
    )]
    NotACopy {
        /// The path without a copy, and what is there.
        found: String,
        /// The path of the copy.
        path: String,
        /// Where the other copy of the pool was last.
        last: String,
    },
    /// Both paths hold the same copy of the pool.
    #[error(
        "`{first}` and `{second}` are both copy {number} of the pool: one of them was copied by \
         other means. Expected the other copy; or empty one of the two, and `blockyard volume \
         attach` it to the other"
    )]
    Twice {
        /// The first path.
        first: String,
        /// The second path.
        second: String,
        /// The number that both copies have.
        number: usize,
    },
    /// Each copy was used without the other.
    #[error(
        "`{first}` and `{second}` have both been written to since they were together, each without \
         the other: nothing has everything. Keep one: take the files out of the other one, and \
         `blockyard volume attach KEPT EMPTIED`"
    )]
    Split {
        /// The first path.
        first: String,
        /// The second path.
        second: String,
    },
    /// The missing copy may be newer.
    #[error(
        "the copy at `{missing}` {why}, and may have been written to without the one at `{path}`: \
         expected both. If the other one is lost permanently, `degraded=yes` (`--degraded`) opens \
         the pool with this one"
    )]
    Missing {
        /// The path of the copy that is present.
        path: String,
        /// The path of the missing copy.
        missing: String,
        /// What is there instead of the copy, or why it cannot be read.
        why: String,
    },
    /// The only copy that is present is stale, or incomplete.
    #[error(
        "the copy at `{path}` is stale: it lacks the newest writes; \
         expected the copy at `{missing}`"
    )]
    Stale {
        /// The path of the copy that is present.
        path: String,
        /// The path of the missing copy.
        missing: String,
    },
    /// The copy that should hold all data has no pool.
    #[error(
        "`{path}` should have everything, and has no superblock that can be read; nothing is done \
         to the other copy. Restore the files at `{path}`"
    )]
    NoPool {
        /// The path of that copy.
        path: String,
    },
    /// A copy joined the pool, or left it, during the call.
    #[error("the copies of the pool at `{path}` have changed just now; try again")]
    Changed {
        /// The path of the directory.
        path: String,
    },
    /// A copy cannot join the pool now.
    #[error("cannot attach `{path}`: {why}")]
    NotAttached {
        /// The path of the new copy.
        path: String,
        /// The cause, and a way out.
        why: String,
    },
    /// A copy cannot leave the pool now.
    #[error("cannot detach `{path}`: {why}")]
    NotDetached {
        /// The path of the copy.
        path: String,
        /// The cause.
        why: String,
    },
    /// The path names a copy that was detached from a pool.
    #[error(
        "`{path}` was detached from the pool at `{pool}`, and lacks what was written there since: \
         expected the path of a copy that belongs to the pool"
    )]
    Detached {
        /// The path of the copy that was detached.
        path: String,
        /// The path of a copy that belonged to the pool then.
        pool: String,
    },
    /// The place for the second copy is not empty.
    #[error(
        "`{path}` is not empty: it holds {what}; expected an empty directory, or an \
         empty disk, for the second copy"
    )]
    NotEmpty {
        /// The path of the place.
        path: String,
        /// What it contains.
        what: String,
    },
}
