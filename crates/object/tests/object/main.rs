//! The client and the preflight, with stores that behave well, badly and not at all.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only whole test functions.

mod client;
mod doubles;
mod preflight;
