//! Durable volumes through the whole program, with faults around them: the server is killed, the
//! power is cut, the disk fails, files are damaged. Data that a client was told are durable must be
//! present each time.
//!
//! All tests need root, for mounts. A missing program fails the test, and `make deps` installs it.
//! `make crash` and `make postgres` run more rounds.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only whole test functions.
#![allow(clippy::disallowed_types)] // The state of a disk that is in memory; no product's lock.

#[allow(dead_code)] // As below.
#[path = "../attach.rs"]
mod attach;
#[path = "../left.rs"]
mod left;
#[allow(dead_code)] // Other tests of the program use the rest.
#[path = "../place.rs"]
mod place;
#[allow(dead_code)] // As above.
#[path = "../run.rs"]
mod run;
#[allow(dead_code)] // As above.
#[path = "../yard.rs"]
mod yard;

// A machine with a pool in an object store in memory, of the tests of blockyard-object.
#[allow(dead_code)] // As above.
#[path = "../../crates/object/tests/pool/connection.rs"]
mod connection;
#[allow(dead_code)] // As above.
#[path = "../../crates/object/tests/pool/machine.rs"]
mod machine;

mod client;
mod cuts;
mod damage;
mod disk;
mod errors;
mod file;
mod fio;
mod history;
mod kills;
mod latched;
mod late;
mod local_log;
mod mounted;
mod nbdkit;
mod places;
mod postgres;
mod replace;
mod rot;
mod rounds;
mod secret;
mod workload;
