//! The rules of the scheduler `deadline`, each as a small table: what comes in, what goes out.
#![allow(clippy::unwrap_used)] // A test that cannot go on ends where it stands.

mod classes;
mod decisions;
mod merges;
mod rig;
mod room;
mod zones;
