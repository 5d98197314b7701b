//! `nvme`: the places where NVMe hosts connect to a running yard.

use std::io::Write;

use blockyard_yard::table::Table;
use blockyard_yard::view::{ListenRequest, ListenerView};

use crate::args::{NvmeCommand, NvmeListenArgs, NvmeUnlistenArgs, TalkArgs};
use crate::devices::{client, print_json};
use crate::failure::Failure;

pub(crate) fn run(command: &NvmeCommand, out: &mut impl Write) -> Result<(), Failure> {
    match command {
        NvmeCommand::Listen(args) => listen(args, out),
        NvmeCommand::Unlisten(args) => unlisten(args, out),
        NvmeCommand::List(talk) => list(talk, out),
    }
}

/// The protocol of a listener, as `serve` prints it.
fn protocol(listener: &ListenerView) -> &'static str {
    if listener.discovery { "NVMe discovery" } else { "NVMe" }
}

fn listen(args: &NvmeListenArgs, out: &mut impl Write) -> Result<(), Failure> {
    let request = ListenRequest { place: args.place.to_string(), discovery: args.discovery };
    let listener = client(&args.talk).listen(&request)?;
    if args.talk.json {
        return print_json(&listener, out);
    }
    for address in &listener.addresses {
        writeln!(out, "{} at {address}", protocol(&listener))?;
    }
    for warning in &listener.warnings {
        writeln!(out, "  warning: {warning}")?;
    }
    Ok(())
}

fn unlisten(args: &NvmeUnlistenArgs, out: &mut impl Write) -> Result<(), Failure> {
    let listener = client(&args.talk).unlisten(&args.place.to_string(), args.force)?;
    if args.talk.json {
        return print_json(&listener, out);
    }
    for address in &listener.addresses {
        writeln!(out, "{} no longer at {address}", protocol(&listener))?;
    }
    Ok(())
}

fn list(talk: &TalkArgs, out: &mut impl Write) -> Result<(), Failure> {
    let listeners = client(talk).listeners()?;
    if talk.json {
        return print_json(&listeners, out);
    }
    let mut table = Table::new(["PLACE", "ADDRESS", "SERVES", "HOSTS"]);
    for listener in listeners {
        let serves = if listener.discovery { "discovery" } else { "devices" };
        let hosts = listener.hosts.to_string();
        table.row([listener.place, listener.addresses.join(" "), serves.to_owned(), hosts]);
    }
    Ok(table.print(3, out)?)
}
