//! Values that the first cell makes and later cells share: filling a device takes longer than the
//! measurement.
#![allow(clippy::disallowed_types)] // Cells of one variant share its device: control plane.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::LabError;

/// A value that is made once, and kept until the experiment is over.
pub(super) struct Cached<T: ?Sized> {
    made: Arc<Mutex<Option<Arc<T>>>>,
}

impl<T: ?Sized> Clone for Cached<T> {
    fn clone(&self) -> Cached<T> {
        Cached { made: Arc::clone(&self.made) }
    }
}

impl<T: ?Sized> Cached<T> {
    pub(super) fn new() -> Cached<T> {
        Cached { made: Arc::new(Mutex::new(None)) }
    }

    /// Returns the kept value, made by `make` if there is none yet.
    pub(super) fn get(
        &self,
        make: impl FnOnce() -> Result<Arc<T>, LabError>,
    ) -> Result<Arc<T>, LabError> {
        // A cell that panicked has left a consistent value, because storing it is the last step.
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        match &*made {
            Some(made) => Ok(Arc::clone(made)),
            None => Ok(Arc::clone(made.insert(make()?))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_made_once_and_again_after_a_failure() {
        let (kept, failed) = (Cached::new(), || Err(LabError::failed("it", "not yet")));
        assert!(kept.get(failed).is_err());
        let first = kept.get(|| Ok(Arc::new(5))).unwrap();
        let other = kept.clone().get(|| panic!("there is one")).unwrap();
        assert!(Arc::ptr_eq(&first, &other));
    }
}
