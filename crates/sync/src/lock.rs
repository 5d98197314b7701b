//! The common interface of the spinning and the sleeping lock, so that a lock can be a type
//! parameter.
//!
//! A critical section is a closure, not a guard. Its scope shows as indentation, it cannot be kept
//! across a submit, and the lock of a model or a baseline fits in the same place.

/// A lock around a value.
pub trait Lock<T>: Send + Sync {
    /// An unlocked lock.
    fn new(value: T) -> Self;

    /// Calls `f` with exclusive access to the value. A panic in `f` unlocks and keeps the value.
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R;

    /// Calls `f` if no thread holds the lock now; otherwise returns `f` without waiting.
    ///
    /// # Errors
    /// `f`, if the lock is held.
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F>;
}
