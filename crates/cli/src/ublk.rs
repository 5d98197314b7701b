//! `ublk`: the ublk devices of this machine, which the kernel knows, and those of a running yard.

use std::io::Write;

use blockyard_yard::table::Table;
use blockyard_yard::ublk::{self, UblkError};
use blockyard_yard::view::UblkRequest;
use serde_json::json;

use crate::args::{UblkAddArgs, UblkCommand, UblkListArgs, UblkRemoveArgs, UblkTarget};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::human::print_table;

pub(crate) fn run(command: &UblkCommand, out: &mut impl Write) -> Result<(), Failure> {
    match command {
        UblkCommand::Add(args) => add(args, out),
        UblkCommand::List(args) => list(args, out),
        UblkCommand::Remove(args) => remove(args, out),
    }
}

fn failure(error: UblkError) -> Failure {
    let code = match error {
        UblkError::Unknown { .. } => Code::NoSuchDevice,
        UblkError::InUse { .. } | UblkError::NotOurs { .. } => Code::Refused,
        _ => Code::Failed,
    };
    Failure::new(code, error)
}

fn add(args: &UblkAddArgs, out: &mut impl Write) -> Result<(), Failure> {
    let ublk::UblkPlace { device, id } = args.place.clone();
    let served = client(&args.talk).add_ublk(&UblkRequest { device, id })?;
    if args.talk.json {
        return print_json(&served, out);
    }
    Ok(writeln!(out, "{}: {}", served.device, served.path)?)
}

fn list(args: &UblkListArgs, out: &mut impl Write) -> Result<(), Failure> {
    let devices = ublk::list().map_err(failure)?;
    if args.json {
        let view = |it: &ublk::MachineDevice| {
            json!({
                "id": it.id,
                "path": ublk::block_path(it.id),
                "state": it.state,
                "pid": it.pid,
                "device": it.device,
                "is_ours": it.is_ours,
                "queues": it.queues,
                "depth": it.depth,
            })
        };
        return print_json(&devices.iter().map(view).collect::<Vec<_>>(), out);
    }
    let mut table = Table::new(["ID", "STATE", "PID", "DEVICE", "QUEUES", "DEPTH"]);
    for device in devices {
        table.row([
            device.id.to_string(),
            device.state.to_owned(),
            device.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
            device.device.unwrap_or_else(|| "-".to_owned()),
            device.queues.to_string(),
            device.depth.to_string(),
        ]);
    }
    Ok(print_table(table, &["STATE", "DEVICE"], out)?)
}

fn remove(args: &UblkRemoveArgs, out: &mut impl Write) -> Result<(), Failure> {
    let (id, path) = match &args.target {
        UblkTarget::Left(id) => {
            ublk::remove(*id, args.force).map_err(failure)?;
            (*id, ublk::block_path(*id))
        }
        UblkTarget::Device(device) => {
            let removed = client(&args.talk).remove_ublk(device, args.force)?;
            (removed.id, removed.path)
        }
    };
    if args.talk.json {
        return print_json(&json!({ "id": id, "path": path }), out);
    }
    Ok(writeln!(out, "{path}: removed")?)
}
