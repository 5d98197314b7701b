//! The rules of the scheduler `deadline`, each as a small table of insertions and dispatches.
#![allow(clippy::unwrap_used)] // A test that cannot continue fails at once.

mod capacity;
mod classes;
mod decisions;
mod fixture;
mod merges;
mod zones;
