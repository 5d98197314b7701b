//! `ublk`: the ublk devices of this machine, which the kernel knows.

use std::io::Write;

use blockyard_yard::table::Table;
use blockyard_yard::ublk::{self, UblkError};
use serde_json::json;

use crate::args::{UblkCommand, UblkListArgs, UblkRemoveArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};

pub(crate) fn run(command: &UblkCommand, out: &mut impl Write) -> Result<(), Failure> {
    match command {
        UblkCommand::List(args) => list(args, out),
        UblkCommand::Remove(args) => remove(args, out),
    }
}

fn failure(error: UblkError) -> Failure {
    let code = match error {
        UblkError::Unknown { .. } => Code::NoSuchDevice,
        UblkError::InUse { .. } => Code::Refused,
        _ => Code::Failed,
    };
    Failure::new(code, error)
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
    Ok(table.print(4, out)?)
}

fn remove(args: &UblkRemoveArgs, out: &mut impl Write) -> Result<(), Failure> {
    ublk::remove(args.id).map_err(failure)?;
    Ok(writeln!(out, "{}: removed", ublk::block_path(args.id))?)
}
