//! `help-device`, `man` and `completions`: all made from the same declarations.

use std::io::Write;
use std::path::Path;

use blockyard_yard::param::{COMMON, DeviceKind, KINDS, Param};
use clap::CommandFactory;
use serde_json::json;

use crate::args::{Cli, HelpDeviceArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};
use crate::output_file::{Replace, file_failed};

/// How each manual page begins that this program has written.
const PAGE_START: &[u8] = b".ie \\n(.g .ds Aq";

pub(crate) fn help_device(args: &HelpDeviceArgs, out: &mut impl Write) -> Result<(), Failure> {
    let Some(kind) = &args.kind else {
        if args.json {
            let kinds: Vec<_> =
                KINDS.iter().map(|kind| json!({ "kind": kind.name, "doc": kind.doc })).collect();
            return print_json(&kinds, out);
        }
        for kind in KINDS {
            writeln!(out, "{:<8} {}", kind.name, kind.doc)?;
        }
        return Ok(writeln!(out, "\n`blockyard help-device KIND` lists its parameters.")?);
    };
    // Clap lets no other through.
    let kind = DeviceKind::find(kind).ok_or(Failure::Silent(Code::Usage))?;
    if args.json {
        let params: Vec<_> = kind.params().map(as_json).collect();
        return print_json(&params, out);
    }
    writeln!(out, "{}:///NAME?KEY=VALUE&...\n\n{}\n", kind.name, kind.doc)?;
    writeln!(out, "In TOML the same keys stand in a [[device]] table, with kind and name.")?;
    writeln!(
        out,
        "Sizes are binary: 4k is 4096; 10G, 10GB and 10GiB are the same; 8s is 8 sectors."
    )?;
    for (heading, params) in [("Parameters", kind.params), ("Every kind of device has", COMMON)] {
        writeln!(out, "\n{heading}:")?;
        for param in params {
            let default = if param.default.is_empty() { "nothing" } else { param.default };
            writeln!(out, "  {:<34} {} [{default}]", param.to_string(), param.doc)?;
        }
    }
    Ok(())
}

pub(crate) fn version(json: bool, out: &mut impl Write) -> Result<(), Failure> {
    let version = env!("CARGO_PKG_VERSION");
    match json {
        true => print_json(&json!({ "name": "blockyard", "version": version }), out),
        false => Ok(writeln!(out, "blockyard {version}")?),
    }
}

fn as_json(param: &'static Param) -> serde_json::Value {
    json!({
        "key": param.name,
        "form": param.placeholder(),
        "expected": param.wanted(),
        "default": param.default,
        "doc": param.doc,
    })
}

pub(crate) fn man(dir: &Path, force: bool) -> Result<(), Failure> {
    let replace = Replace { force, magic: PAGE_START };
    for entry in dir.read_dir().map_err(|error| file_failed(dir, &error))? {
        let path = entry.map_err(|error| file_failed(dir, &error))?.path();
        let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        if name.starts_with("blockyard") && name.ends_with(".1") {
            replace.check(&path)?;
        }
    }
    // `help` is the same pages on a terminal.
    clap_mangen::generate_to(Cli::command().disable_help_subcommand(true), dir)
        .map_err(|error| file_failed(dir, &error))
}

pub(crate) fn completions(
    shell: clap_complete::Shell,
    out: &mut impl Write,
) -> Result<(), Failure> {
    // Into memory first: the generator panics when its writer fails.
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "blockyard", &mut text);
    Ok(out.write_all(&text)?)
}
