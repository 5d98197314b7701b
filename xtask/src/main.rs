//! `cargo run -p xtask -- COMMAND`: what the project needs done that is no part of the product.
//!
//! - `tidy` reads the tree and says where it breaks STYLE.md; `cargo test` runs it too.
//! - `crates` prints lines, files and the longest import cycle of each crate.
//! - `notices` writes the licences and the bill of materials of a package.

mod packages;
mod tidy;

use std::path::Path;
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo run -p xtask -- COMMAND
  tidy         what in the tree breaks the rules of STYLE.md, and what to write instead
  crates       lines, files and the longest import cycle of each crate
  notices DIR  DIR/copyright and DIR/sbom.cdx.json of a package: licences, and a list of crates";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let result = match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["tidy"] => tidy::run(root()),
        ["crates"] => tidy::shapes(root()).map(|table| print!("{table}")),
        ["notices", dir] => packages::write(root(), Path::new(dir)),
        _ => Err(USAGE.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the workspace, from where this crate was built.
fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}
