//! `nvme` and `vhost`: the places where NVMe hosts and hypervisors connect to a running yard.

use std::io::Write;

use blockyard_yard::size::Bytes;
use blockyard_yard::table::{Table, duration};
use blockyard_yard::view::{ListenRequest, ListenerView, VhostRequest, VhostView};

use crate::args::{
    NvmeCommand, NvmeListenArgs, NvmeUnlistenArgs, TalkArgs, VhostCommand, VhostListArgs,
    VhostListenArgs, VhostUnlistenArgs,
};
use crate::devices::{client, print_json};
use crate::failure::Failure;
use crate::human::print_table;

pub(crate) fn run_nvme(command: &NvmeCommand, out: &mut impl Write) -> Result<(), Failure> {
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
    Ok(print_table(table, &["ADDRESS", "SERVES"], out)?)
}

pub(crate) fn run_vhost(command: &VhostCommand, out: &mut impl Write) -> Result<(), Failure> {
    match command {
        VhostCommand::Listen(args) => listen_vhost(args, out),
        VhostCommand::Unlisten(args) => unlisten_vhost(args, out),
        VhostCommand::List(args) => list_vhost(args, out),
    }
}

fn listen_vhost(args: &VhostListenArgs, out: &mut impl Write) -> Result<(), Failure> {
    let (device, place) = (args.device.clone(), args.place.clone());
    let served = client(&args.talk).listen_vhost(&VhostRequest { device, place })?;
    if args.talk.json {
        return print_json(&served, out);
    }
    writeln!(out, "{} at {}", served.device, served.place)?;
    Ok(())
}

fn unlisten_vhost(args: &VhostUnlistenArgs, out: &mut impl Write) -> Result<(), Failure> {
    let served = client(&args.talk).unlisten_vhost(&args.device, args.force)?;
    if args.talk.json {
        return print_json(&served, out);
    }
    writeln!(out, "{} no longer at {}", served.device, served.place)?;
    Ok(())
}

fn list_vhost(args: &VhostListArgs, out: &mut impl Write) -> Result<(), Failure> {
    let sockets = client(&args.talk).vhost()?;
    if args.talk.json {
        return print_json(&sockets, out);
    }
    if args.rings {
        return list_rings(&sockets, out);
    }
    let mut table = Table::new(["DEVICE", "PLACE", "HYPERVISOR", "QUEUES"]);
    for VhostView { device, place, is_connected, pid, queues, .. } in sockets {
        let hypervisor = match pid {
            Some(pid) => format!("process {pid}"),
            None if is_connected => "connected".to_owned(),
            None => "-".to_owned(),
        };
        table.row([device, place, hypervisor, queues.to_string()]);
    }
    Ok(print_table(table, &["PLACE", "HYPERVISOR"], out)?)
}

fn list_rings(sockets: &[VhostView], out: &mut impl Write) -> Result<(), Failure> {
    let mut table = Table::new([
        "DEVICE",
        "RING",
        "REQUESTS",
        "ERRORS",
        "FAULTS",
        "READ",
        "WRITTEN",
        "KICKS",
        "CALLS",
        "SLEEPS",
        "SPINS FOUND",
        "SPINS EMPTY",
        "SPUN",
    ]);
    for socket in sockets {
        for it in &socket.rings {
            let count = |count: u64| count.to_string();
            table.row([
                socket.device.clone(),
                count(it.ring),
                count(it.requests),
                count(it.errors),
                count(it.faults),
                Bytes(it.read_bytes).to_string(),
                Bytes(it.written_bytes).to_string(),
                count(it.kicks),
                count(it.calls),
                count(it.sleeps),
                count(it.spins_found),
                count(it.spins_empty),
                duration(it.spin_ns),
            ]);
        }
    }
    Ok(print_table(table, &[], out)?)
}
