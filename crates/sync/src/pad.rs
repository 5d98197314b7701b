//! A value with its own cache lines, which prevents false sharing.

use std::ops::{Deref, DerefMut};

/// Keeps `T` on cache lines that no other value shares.
///
/// 128 bytes: x86 CPUs prefetch cache lines in pairs, and large ARM cores have lines of that size.
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
