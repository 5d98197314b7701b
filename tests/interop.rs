//! The whole program, tested by clients of other projects.
//!
//! Each test serves from a temporary folder of its own on unix sockets of its own, so that all of
//! them run at once. Every program has a time limit, and no test sleeps. A missing client fails the
//! test: `make deps` installs it.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only whole test functions.
#![allow(clippy::disallowed_types)] // A counter of places, which no I/O passes.

mod attach;
mod backup_ssh;
mod bad_input;
mod block_file;
mod browser;
mod control;
mod copy;
mod dashboard;
mod dashboard_pictures;
mod dashboard_tables;
mod engine;
mod failover;
mod file;
mod fio;
mod guides;
mod info;
mod left;
mod listeners;
mod modes;
mod nvme_host;
mod object_faults;
mod object_store;
mod place;
mod qemu;
mod ram;
mod readme;
mod run;
mod scheduler;
mod smr;
mod tls;
mod top;
mod trace;
mod upgrade;
mod upgrade_nvme;
mod upgrade_vhost;
mod user;
mod volume;
mod yard;
mod zfs_session;
mod zoned;
mod zoned_files;
mod zonefs;
