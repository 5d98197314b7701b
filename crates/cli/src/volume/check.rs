//! `volume check`: verifies a pool that nobody has open, and changes nothing.

use std::io::{IsTerminal, Write};

use blockyard_volume::VolumeError;
use blockyard_volume::check::{Report, check};
use blockyard_yard::size::Bytes;
use serde_json::{Value, json};

use super::refused;
use crate::args::VolumePoolArgs;
use crate::devices::print_json;
use crate::failure::{Code, Failure};

/// Progress is shown each time after so many bytes.
const TOLD_EACH: u64 = 64 << 20;

pub(super) fn run(args: &VolumePoolArgs, out: &mut impl Write) -> Result<(), Failure> {
    let shows = std::io::stderr().is_terminal();
    let mut told = 0;
    let report = check(&args.pool, &mut |bytes| {
        if shows && bytes >= told + TOLD_EACH {
            told = bytes;
            eprint!("\rverified {}", Bytes(bytes >> 20 << 20));
        }
    });
    if told > 0 {
        eprintln!();
    }
    let report = report.map_err(|error| match error {
        VolumeError::InUse { path, holder } => {
            let path = path.display();
            let text = format!(
                "path: `{path}` is in use by {holder}; while it is, `blockyard volume scrub \
                 {path}` verifies the blocks, and a check has to wait"
            );
            Failure::new(Code::Refused, text)
        }
        other => refused(other),
    })?;
    if args.talk.json {
        print_json(&shown(&report), out)?;
    } else {
        print(args, &report, out)?;
    }
    if report.damaged > 0 { Err(Failure::Silent(Code::Failed)) } else { Ok(()) }
}

fn print(args: &VolumePoolArgs, report: &Report, out: &mut impl Write) -> Result<(), Failure> {
    for damage in &report.damage {
        let (volume, block, address) = (&damage.volume, damage.block, damage.address);
        writeln!(out, "{volume}: block {block}, at {address} of the pool: {}", damage.what)?;
    }
    writeln!(
        out,
        "{}: {} volumes and snapshots, {} blocks of {} bytes verified, {} damaged",
        args.pool.display(),
        report.volumes,
        report.blocks,
        report.stored_bytes,
        report.damaged
    )?;
    Ok(())
}

fn shown(report: &Report) -> Value {
    let damage = report.damage.iter().map(|it| {
        let (volume, block, address) = (&it.volume, it.block, it.address);
        json!({ "volume": volume, "block": block, "address": address, "what": it.what })
    });
    json!({
        "volumes": report.volumes,
        "blocks": report.blocks,
        "stored_bytes": report.stored_bytes,
        "groups": report.groups,
        "damaged": report.damaged,
        "damage": damage.collect::<Vec<_>>(),
    })
}
