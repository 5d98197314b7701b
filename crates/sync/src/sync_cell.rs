//! The only import of interior mutability: the cell of the standard library, or of loom in a model.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// A value that a primitive hands out under its own rule.
#[derive(Debug, Default)]
pub struct SyncCell<T>(Inner<T>);

#[cfg(loom)]
type Inner<T> = loom::cell::UnsafeCell<T>;
#[cfg(not(loom))]
type Inner<T> = std::cell::UnsafeCell<T>;

impl<T> SyncCell<T> {
    /// A cell with a value.
    pub fn new(value: T) -> SyncCell<T> {
        SyncCell(Inner::new(value))
    }

    /// Calls `f` with the value.
    ///
    /// # Safety
    /// No other thread may access the value until `f` returns: the caller holds the primitive's
    /// lock.
    #[inline]
    pub unsafe fn with_mut<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        #[cfg(loom)]
        // SAFETY: the caller's contract; loom checks it in the model.
        return self.0.with_mut(|value| f(unsafe { &mut *value }));
        #[cfg(not(loom))]
        // SAFETY: the pointer is that of a live cell, and the caller's contract excludes others.
        return f(unsafe { &mut *self.0.get() });
    }

    /// Calls `f` with a shared reference to the value.
    ///
    /// # Safety
    /// No thread may change the value until `f` returns.
    #[inline]
    pub unsafe fn with<R>(&self, f: impl FnOnce(&T) -> R) -> R {
        #[cfg(loom)]
        // SAFETY: the caller's contract; loom checks it in the model.
        return self.0.with(|value| f(unsafe { &*value }));
        #[cfg(not(loom))]
        // SAFETY: the pointer is that of a live cell, and the caller's contract excludes writers.
        return f(unsafe { &*self.0.get() });
    }
}

impl<T> SyncCell<MaybeUninit<T>> {
    /// Cells without values. Nothing is written to them, so in a long allocation they take no
    /// physical memory before their first use.
    pub fn uninit_slice(count: usize) -> Box<[SyncCell<MaybeUninit<T>>]> {
        #[cfg(loom)]
        return (0..count).map(|_| SyncCell::new(MaybeUninit::uninit())).collect();
        #[cfg(not(loom))]
        // SAFETY: a cell consists of a `MaybeUninit`, for which all bytes are valid, also none.
        return unsafe { Box::new_uninit_slice(count).assume_init() };
    }
}
