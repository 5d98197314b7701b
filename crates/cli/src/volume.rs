//! `volume`: pools of durable volumes that no other process has open.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;

use blockyard_volume::check::{Report, check};
use blockyard_volume::device::is_pool;
use blockyard_volume::format::catalogue::Traits;
use blockyard_volume::{Options, Running, VolumeError};
use blockyard_yard::size::Bytes;
use serde_json::{Value, json};

use crate::args::{VolumeCommand, VolumePoolArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};

pub(crate) fn run(command: &VolumeCommand, out: &mut impl Write) -> Result<(), Failure> {
    match command {
        VolumeCommand::Create(args) => {
            let block_bytes = u32::try_from(args.volblocksize).unwrap_or(u32::MAX);
            let pool = open(&args.at.pool, true)?;
            pool.create(&args.at.name, args.size, block_bytes).map_err(refused)?;
            said(out, &args.at.name, "created")
        }
        VolumeCommand::List(args) => list(args, out),
        VolumeCommand::Snapshot(args) => {
            open(&args.pool, false)?.snapshot(&args.name).map_err(refused)?;
            said(out, &args.name, "made")
        }
        VolumeCommand::Clone(args) => {
            let pool = open(&args.at.pool, false)?;
            pool.clone_of(&args.at.name, &args.new).map_err(refused)?;
            said(out, &args.new, &format!("made from {}", args.at.name))
        }
        VolumeCommand::Rollback(args) => {
            open(&args.pool, false)?.rollback(&args.name).map_err(refused)?;
            said(out, &args.name, "its volume is as it was then")
        }
        VolumeCommand::Resize(args) => {
            open(&args.at.pool, false)?.resize(&args.at.name, args.size).map_err(refused)?;
            said(out, &args.at.name, &format!("{} now", Bytes(args.size)))
        }
        VolumeCommand::Destroy(args) => {
            open(&args.pool, false)?.destroy(&args.name).map_err(refused)?;
            said(out, &args.name, "removed")
        }
        VolumeCommand::Check(args) => verify(args, out),
    }
}

fn said(out: &mut impl Write, name: &str, what: &str) -> Result<(), Failure> {
    Ok(writeln!(out, "{name}: {what}")?)
}

fn refused(error: VolumeError) -> Failure {
    let code = match &error {
        VolumeError::Invalid { .. } => Code::Usage,
        VolumeError::NoSuchVolume { .. } => Code::NoSuchDevice,
        VolumeError::Exists { .. } | VolumeError::Busy { .. } | VolumeError::InUse { .. } => {
            Code::Refused
        }
        _ => Code::Failed,
    };
    Failure::new(code, error)
}

/// Opens the pool of a directory; makes one only where a volume is made.
fn open(path: &Path, make: bool) -> Result<Arc<Running>, Failure> {
    if !make && !is_pool(path) {
        let text = format!("{} holds no pool of volumes; wanted its directory", path.display());
        return Err(Failure::new(Code::Usage, text));
    }
    Running::open(path, Options::default()).map_err(refused)
}

fn of(traits: &Traits) -> Value {
    json!({
        "name": traits.name,
        "snapshot": traits.is_snapshot,
        "size_bytes": traits.blocks * u64::from(traits.block_bytes),
        "volblocksize_bytes": traits.block_bytes,
    })
}

fn list(args: &VolumePoolArgs, out: &mut impl Write) -> Result<(), Failure> {
    let volumes = open(&args.pool, false)?.pool().list();
    if args.json {
        return print_json(&volumes.iter().map(of).collect::<Vec<_>>(), out);
    }
    for traits in volumes {
        let size = Bytes(traits.blocks * u64::from(traits.block_bytes));
        let block = Bytes(traits.block_bytes.into());
        writeln!(out, "{}: {size}, blocks of {block}", traits.name)?;
    }
    Ok(())
}

fn verify(args: &VolumePoolArgs, out: &mut impl Write) -> Result<(), Failure> {
    const TOLD_EACH: u64 = 64 << 20;
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
    let report = report.map_err(refused)?;
    if args.json {
        print_json(&shown(&report), out)?;
    } else {
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
    }
    if report.damaged > 0 { Err(Failure::Silent(Code::Failed)) } else { Ok(()) }
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
