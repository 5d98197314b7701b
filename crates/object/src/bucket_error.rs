//! Why a pool in an object store could not be opened, or was lost.

use blockyard_store::StoreError;
use blockyard_volume_format::FormatError;
use blockyard_volume_format::object::{ObjectHeader, ObjectKind};

use crate::ObjectError;

/// Why a pool in an object store could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BucketError {
    /// A request failed.
    #[error(transparent)]
    Request(#[from] ObjectError),
    /// The object store does not fence a second opener.
    #[error(
        "cannot make a pool in `{place}`: this object store does not keep a second opener out: \
         {failure}; expected a store with conditional writes"
    )]
    Unfenced {
        /// The place of the pool.
        place: String,
        /// What the store did.
        failure: String,
    },
    /// The place contains no pool.
    #[error("`{place}` holds no pool of volumes; expected the place of a pool")]
    NoPool {
        /// The place that was named.
        place: String,
    },
    /// The place has objects of a pool, and no manifest.
    #[error(
        "cannot make a pool in `{place}`: it has `{name}`, and no manifest; restore the object \
         `manifest`, or name a place without objects"
    )]
    NoManifest {
        /// The place of the pool.
        place: String,
        /// An object that is there.
        name: String,
    },
    /// Another process may have the pool open, and it is not to be taken over.
    #[error("another process may have the pool in `{place}` open, and would lose it")]
    MayBeOpen {
        /// The place of the pool.
        place: String,
    },
    /// Another process has just made a pool at this place.
    #[error("another process has just made a pool in `{place}`; try again")]
    Replaced {
        /// The place of the pool.
        place: String,
    },
    /// An object that the manifest names is not there.
    #[error("`{name}` is missing from the object store; restore the object")]
    Missing {
        /// The name of the object below the prefix of the pool.
        name: String,
    },
    /// An object is damaged.
    #[error("`{name}` is damaged in the object store: {why}; restore the object")]
    Damaged {
        /// The name of the object below the prefix of the pool.
        name: String,
        /// What is wrong with its bytes.
        why: FormatError,
    },
    /// An object belongs to another pool, or in another place.
    #[error("`{name}` belongs to another pool or is in the place of another object; restore it")]
    Foreign {
        /// The name of the object below the prefix of the pool.
        name: String,
    },
    /// Another opener was faster.
    #[error(
        "another process has just opened the pool (epoch {epoch}); expected a pool that no other \
         process opens"
    )]
    Raced {
        /// The epoch that both wanted.
        epoch: u64,
    },
    /// Another opener has taken the pool over while this one replayed it.
    #[error("{why}")]
    Lost {
        /// What says so.
        why: String,
    },
    /// The object store did not confirm the lease of this opener.
    #[error(
        "cannot open the pool in `{place}`: the object store has not confirmed its lease, without \
         which it must not be served"
    )]
    Unconfirmed {
        /// The place of the pool.
        place: String,
    },
    /// The writer of the pool compacts it faster than this process reads it.
    #[error("cannot read the pool: its writer replaces the objects faster than they are read")]
    Changing,
    /// A file of the local log is damaged, missing, or of another pool.
    #[error(
        "cannot open the pool: `{path}`, a file of its local log, {why}; restore it, or move the \
         directory away to open the pool without the writes that only this log has"
    )]
    LocalLog {
        /// The path of the file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// A number is used up.
    #[error("the pool has too many {what}")]
    Exhausted {
        /// What there are too many of.
        what: &'static str,
    },
    /// The runtime of the requests was stopped.
    #[error("the requests to the object store were stopped")]
    Stopped,
    /// An object is of a newer version.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The cache cannot be used, or the pool's place is not valid.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl BucketError {
    /// The error for an object that cannot be parsed.
    pub(crate) fn of_object(name: &str) -> impl FnOnce(FormatError) -> BucketError + '_ {
        move |why| match why.is_of_newer() {
            true => BucketError::Format(why),
            false => BucketError::Damaged { name: name.to_owned(), why },
        }
    }
}

/// The message of a writer that a later opener has fenced: `other` is the object that it found
/// instead of its own.
pub(crate) fn taken_over(name: &str, other: Option<&[u8]>) -> String {
    let by = match other.map(ObjectHeader::parse) {
        Some(Ok((header, _))) if header.kind == ObjectKind::Seal => {
            "a seal of this epoch".to_owned()
        }
        Some(Ok((header, _))) => format!("written in epoch {}", header.epoch),
        Some(Err(error)) => format!("not an object of this pool ({error})"),
        None => "gone".to_owned(),
    };
    format!(
        "another opener has taken over the pool: `{name}` is {by}. This process acknowledges \
         nothing any more, and its data may be stale"
    )
}
