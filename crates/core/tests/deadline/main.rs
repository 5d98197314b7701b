//! The rules of the scheduler `deadline`, each as a small table of insertions and dispatches.
#![allow(clippy::unwrap_used)] // A test that cannot continue fails at once.

mod classes;
mod decisions;
mod merges;
mod rig;
mod room;
mod zones;
