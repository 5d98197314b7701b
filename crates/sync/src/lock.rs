//! "Which lock?" is a type parameter: what the spinning and the sleeping lock have in common.
//!
//! A critical section is a closure, not a guard: its scope shows as indentation, it cannot be kept
//! across a submit, and a lock of a model or a baseline fits in the same place.

/// A lock around a value.
pub trait Lock<T>: Send + Sync {
    /// An unlocked lock.
    fn new(value: T) -> Self;

    /// Runs `f` on the value, alone. A panic in `f` unlocks, and leaves the value as it then is.
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R;

    /// The same if nobody holds the lock now; else gives `f` back without waiting.
    ///
    /// # Errors
    /// `f`, if the lock is held.
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F>;
}
