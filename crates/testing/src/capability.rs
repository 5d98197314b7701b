//! What a test needs and a machine may lack. A test that cannot run fails, unless the environment
//! variable `BLOCKYARD_TEST_SKIP` names what is missing: no test passes without having run, unless
//! the variable asks for that.

use std::env;
use std::fmt::Display;

/// The variable: names of capabilities, separated by commas.
const SKIP: &str = "BLOCKYARD_TEST_SKIP";

/// Something that a test needs and a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// The engine for fio: `make test` builds it and names it in `BLOCKYARD_FIO_ENGINE`.
    Fio,
    /// FUSE over io_uring: Linux 6.14 with CONFIG_FUSE_IO_URING, and root, who enables it.
    FuseUring,
    /// Transparent huge pages, and root, who reads in `/proc/kpageflags` which pages are huge.
    HugePages,
    /// MinIO and versitygw, which `make object-stores` builds, and boto3 in a Python.
    ObjectStores,
    /// The rights of root.
    Root,
    /// The system calls of io_uring, which containers often refuse.
    Uring,
}

const ALL: [Capability; 6] = [
    Capability::Fio,
    Capability::FuseUring,
    Capability::HugePages,
    Capability::ObjectStores,
    Capability::Root,
    Capability::Uring,
];

impl Capability {
    /// The name in `BLOCKYARD_TEST_SKIP`.
    fn name(self) -> &'static str {
        match self {
            Capability::Fio => "fio",
            Capability::FuseUring => "fuse-uring",
            Capability::HugePages => "huge-pages",
            Capability::ObjectStores => "object-stores",
            Capability::Root => "root",
            Capability::Uring => "uring",
        }
    }

    /// Whether `BLOCKYARD_TEST_SKIP` names the capability, for a test that takes too long for each
    /// run: it ends although the machine has the capability.
    ///
    /// # Panics
    /// If the variable names an unknown capability.
    pub fn is_skipped(self) -> bool {
        let list = env::var(SKIP).unwrap_or_default();
        let is_skipped = is_listed(&list, self).unwrap_or_else(|unknown| panic!("{unknown}"));
        if is_skipped {
            eprintln!("skipped, because {SKIP} has `{}`", self.name());
        }
        is_skipped
    }

    /// Ends a test that lacks this capability because of `why`: the caller returns if this does.
    ///
    /// # Panics
    /// Unless `BLOCKYARD_TEST_SKIP` names the capability; also if it names an unknown one.
    #[track_caller]
    pub fn is_missing(self, why: impl Display) {
        let list = env::var(SKIP).unwrap_or_default();
        let name = self.name();
        match is_listed(&list, self) {
            Ok(true) => eprintln!("skipped, because {SKIP} has `{name}`: {why}"),
            Ok(false) => panic!("cannot run: {why}; {SKIP}={name} skips the tests that need it"),
            Err(unknown) => panic!("{unknown}"),
        }
    }
}

/// Whether the list names the capability.
///
/// # Errors
/// If the list names an unknown capability: the message.
fn is_listed(list: &str, wanted: Capability) -> Result<bool, String> {
    let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
    let known = |name: &str| ALL.into_iter().find(|capability| capability.name() == name);
    let found = names.map(|name| {
        known(name).ok_or_else(|| {
            let expected = ALL.map(Capability::name).join(", ");
            format!("invalid {SKIP} `{name}`: expected some of {expected}, separated by commas")
        })
    });
    Ok(found.collect::<Result<Vec<Capability>, String>>()?.contains(&wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_is_skipped_only_by_the_name_of_what_it_lacks() {
        assert_eq!(is_listed("", Capability::Uring), Ok(false));
        assert_eq!(is_listed("fio", Capability::Uring), Ok(false));
        assert_eq!(is_listed("fio, uring", Capability::Uring), Ok(true));
        let unknown = is_listed("fio,io_uring", Capability::Fio).unwrap_err();
        let expected = "invalid BLOCKYARD_TEST_SKIP `io_uring`: expected some of fio, \
                        fuse-uring, huge-pages, object-stores, root, uring, separated by \
                        commas";
        assert_eq!(unknown, expected);
    }
}
