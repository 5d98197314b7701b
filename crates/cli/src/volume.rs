//! `volume`: pools of durable volumes. A pool that nobody has open is opened by the command itself;
//! one that a yard has open is worked on through that yard's control API.

mod check;
mod image;
mod pool;
mod progress;
mod stream;

use std::io::Write;

use blockyard_volume::VolumeError;
use blockyard_yard::error::YardError;
use blockyard_yard::size::Bytes;
use blockyard_yard::table::Table;
use blockyard_yard::volumes::{VolumeDone, VolumeRequest, VolumeView};

use crate::args::{VolumeAt, VolumeCommand, VolumePoolArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};

use pool::Pool;

pub(crate) fn run(command: &VolumeCommand, out: &mut impl Write) -> Result<(), Failure> {
    let nothing = VolumeRequest::default;
    match command {
        VolumeCommand::Create(args) => {
            let block_bytes = u32::try_from(args.volblocksize).unwrap_or(u32::MAX);
            let (size_bytes, volblocksize_bytes) = (Some(args.size), Some(block_bytes));
            let request = VolumeRequest { size_bytes, volblocksize_bytes, ..nothing() };
            work(&args.at, "create", request, out)
        }
        VolumeCommand::List(args) => list(args, out),
        VolumeCommand::Show(args) => show(&args.at, out),
        VolumeCommand::Snapshot(args) => work(&args.at, "snapshot", nothing(), out),
        VolumeCommand::Clone(args) => {
            let request = VolumeRequest { new: Some(args.new.clone()), ..nothing() };
            work(&args.at, "clone", request, out)
        }
        VolumeCommand::Rollback(args) => work(&args.at, "rollback", nothing(), out),
        VolumeCommand::Resize(args) => {
            let request = VolumeRequest { size_bytes: Some(args.size), ..nothing() };
            work(&args.at, "resize", request, out)
        }
        VolumeCommand::Destroy(args) => work(&args.at, "destroy", nothing(), out),
        VolumeCommand::Send(args) => stream::send(args, out),
        VolumeCommand::Receive(args) => stream::receive(args, out),
        VolumeCommand::Export(args) => image::export(args, out),
        VolumeCommand::Scrub(args) => check::scrub(args, out),
        VolumeCommand::Check(args) => check::run(args, out),
    }
}

/// What a pool that this process opens has refused.
fn refused(error: impl Into<YardError>) -> Failure {
    let error = error.into();
    let code = match &error {
        YardError::Argument { .. } => Code::Usage,
        YardError::Volume(VolumeError::NoSuchVolume { .. }) => Code::NoSuchDevice,
        YardError::Volume(
            VolumeError::Exists { .. } | VolumeError::Busy { .. } | VolumeError::InUse { .. },
        ) => Code::Refused,
        _ => Code::Failed,
    };
    Failure::new(code, error)
}

fn work(
    at: &VolumeAt,
    verb: &str,
    request: VolumeRequest,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let request = VolumeRequest { name: at.name.clone(), ..request };
    let done = Pool::find(&at.pool, verb == "create")?.work(verb, request)?;
    if at.pool.talk.json {
        return print_json(&done, out);
    }
    let VolumeDone { name, done } = done;
    Ok(writeln!(out, "{name}: {done}")?)
}

fn list(args: &VolumePoolArgs, out: &mut impl Write) -> Result<(), Failure> {
    let volumes = Pool::find(args, false)?.volumes(None)?;
    if args.talk.json {
        return print_json(&volumes, out);
    }
    let mut table = Table::new(["NAME", "SIZE", "BLOCKS OF", "DEVICE"]);
    for VolumeView { name, size_bytes, volblocksize_bytes, in_use, .. } in volumes {
        let device = if in_use { "yes" } else { "no" };
        let block = Bytes(volblocksize_bytes.into());
        table.row([name, Bytes(size_bytes).to_string(), block.to_string(), device.to_owned()]);
    }
    Ok(table.print(1, out)?)
}

fn show(at: &VolumeAt, out: &mut impl Write) -> Result<(), Failure> {
    let volumes = Pool::find(&at.pool, false)?.volumes(Some(&at.name))?;
    let volume = volumes.into_iter().next();
    let volume = volume.ok_or_else(|| Failure::new(Code::Failed, "the yard named no volume"))?;
    if at.pool.talk.json {
        return print_json(&volume, out);
    }
    let exact = |bytes: u64| format!("{} ({bytes} bytes)", Bytes(bytes));
    let rows = [
        ("name", volume.name),
        ("what", if volume.snapshot { "snapshot" } else { "volume" }.to_owned()),
        ("size", exact(volume.size_bytes)),
        ("blocks of", Bytes(volume.volblocksize_bytes.into()).to_string()),
        ("device", if volume.in_use { "yes" } else { "no" }.to_owned()),
        ("written", volume.referenced_bytes.map_or_else(String::new, exact)),
        ("stored as", volume.stored_bytes.map_or_else(String::new, exact)),
    ];
    for (name, value) in rows {
        writeln!(out, "{name:<16} {value}")?;
    }
    Ok(())
}
