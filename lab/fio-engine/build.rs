//! Compiles the C shim against the fio source tree that `FIO_SRC` names, and links it into the
//! cdylib only: unit tests and other crates do not depend on fio. Without `FIO_SRC` there is no
//! shim.

use std::path::Path;
use std::{env, fs, process};

fn main() {
    println!("cargo::rerun-if-env-changed=FIO_SRC");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/shim.c");
    println!("cargo::rustc-check-cfg=cfg(fio_shim)");
    let Some(fio) = env::var_os("FIO_SRC").filter(|fio| !fio.is_empty()) else { return };
    let fio = Path::new(&fio);
    for (file, advice) in [
        ("ioengines.h", "expected the folder of an unpacked fio source package"),
        ("config-host.h", "run `./configure --disable-native` in it"),
    ] {
        if !fio.join(file).is_file() {
            println!("cargo::error=FIO_SRC: `{}` has no {file}: {advice}", fio.display());
            process::exit(1);
        }
        println!("cargo::rerun-if-changed={}", fio.join(file).display());
    }
    let Some(version) = version(fio) else {
        println!("cargo::error=FIO_SRC: `{}` does not say which fio it is", fio.display());
        process::exit(1);
    };
    let objects = cc::Build::new()
        .cargo_metadata(false)
        .file("src/shim.c")
        .include(fio)
        .flag("-include")
        .flag(fio.join("config-host.h"))
        .define("BUILT_FOR", &*format!("\"{version}\""))
        .define("_GNU_SOURCE", None)
        .define("_LARGEFILE_SOURCE", None)
        .define("_FILE_OFFSET_BITS", "64")
        .std("gnu11")
        // fio's hooks have parameters that not every engine reads.
        .extra_warnings(false)
        // Otherwise a missing declaration would show only when fio loads the library.
        .flag("-Werror=implicit-function-declaration")
        .opt_level(2)
        .force_frame_pointer(false)
        .pic(true)
        .compile_intermediates();
    for object in objects {
        println!("cargo::rustc-link-arg-cdylib={}", object.display());
    }
    // The library stays in memory until the process ends, even after fio's dlclose: it holds the
    // devices, and stonewalled jobs read the data of earlier jobs.
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");
    println!("cargo::rustc-cfg=fio_shim");
}

/// The version of a source tree, `fio-3.33`: the default in its `FIO-VERSION-GEN`.
fn version(fio: &Path) -> Option<String> {
    let script = fs::read_to_string(fio.join("FIO-VERSION-GEN")).ok()?;
    let version = script.lines().find_map(|line| line.strip_prefix("DEF_VER="))?.trim();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-.".contains(c);
    version.chars().all(is_plain).then(|| version.to_owned())
}
