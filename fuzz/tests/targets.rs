//! The fuzz targets, one test each.
//!
//! In `cargo test` each runs a bounded number of random inputs. With `BOLERO_RANDOM_TEST_TIME_MS`
//! it runs for that time instead, and with cargo-bolero a coverage-guided engine drives it; see
//! `fuzz/run`. A finding prints `BOLERO_RANDOM_SEED=...`, which replays it.

use bolero::check;
#[cfg(not(fuzzing))]
use bolero::generator::produce;

/// The number of random inputs of one target in `cargo test`.
const ITERATIONS: usize = 200;

/// The longest input, in bytes.
const LEN_MAX: usize = 4096;

macro_rules! target {
    ($name:ident, $run:path) => {
        #[test]
        fn $name() {
            let target = check!().with_max_len(LEN_MAX);
            // By default a random input has at most 64 bytes.
            #[cfg(not(fuzzing))]
            let target = target.with_generator(produce::<Vec<u8>>().with().len(0..=LEN_MAX));
            let timed = std::env::var_os("BOLERO_RANDOM_TEST_TIME_MS").is_some();
            let target = if timed { target } else { target.with_iterations(ITERATIONS) };
            target.for_each(|bytes| $run(bytes));
        }
    };
}

target!(bios_model, blockyard_fuzz::bios::bios_model);
target!(bios_gate, blockyard_fuzz::bios::bios_gate);
target!(bios_smr, blockyard_fuzz::bios::bios_smr);
target!(bios_ram, blockyard_fuzz::bios::bios_ram);
target!(blktrace_file, blockyard_fuzz::blktrace::blktrace_file);
target!(ram_snapshot, blockyard_fuzz::ram::snapshot);
target!(ram_codecs, blockyard_fuzz::ram::codecs);
target!(ram_refusals, blockyard_fuzz::refusals::refusals);
target!(cdb, blockyard_fuzz::cdb::cdb);
target!(deadline_steps, blockyard_fuzz::deadline::steps);
target!(deadline_tunables, blockyard_fuzz::deadline::tunables);
target!(disk_image, blockyard_fuzz::disk_image::disk_image);
target!(drive_answers, blockyard_fuzz::drive::drive_answers);
target!(fuse_wire, blockyard_fuzz::fuse::fuse_wire);
target!(local_log, blockyard_fuzz::object::local_log);
target!(media, blockyard_fuzz::media::media);
target!(nbd_wire, blockyard_fuzz::nbd::nbd_wire);
target!(nvme_wire, blockyard_fuzz::nvme::nvme_wire);
target!(object, blockyard_fuzz::object::object);
target!(trace, blockyard_fuzz::trace::trace);
target!(uri, blockyard_fuzz::texts::uri);
target!(config, blockyard_fuzz::texts::config);
target!(fault, blockyard_fuzz::texts::fault);
target!(scenario, blockyard_fuzz::texts::scenario);
target!(web_access, blockyard_fuzz::texts::web_access);
target!(stream, blockyard_fuzz::stream::stream);
target!(ublk_requests, blockyard_fuzz::ublk::requests);
target!(upgrade_message, blockyard_fuzz::upgrade::message);
target!(vhost_chains, blockyard_fuzz::vhost::chains);
target!(vhost_requests, blockyard_fuzz::vhost::requests);
target!(volume, blockyard_fuzz::volume::volume);
target!(zonefs_superblock, blockyard_fuzz::zonefs::superblock);
target!(zonefs_options, blockyard_fuzz::zonefs::options);
target!(zoned_files, blockyard_fuzz::zoned::files);
target!(zoned_image, blockyard_fuzz::zoned::image);
