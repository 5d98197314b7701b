//! A value with cache lines of its own, so that neighbours do not slow it down.

use std::ops::{Deref, DerefMut};

/// Keeps `T` on cache lines that nothing else uses.
///
/// 128 bytes: x86 processors fetch lines in pairs, and big ARM cores have lines of that size.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Padded<T>(pub T);

impl<T> Deref for Padded<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Padded<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
