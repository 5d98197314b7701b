//! `list`, `show`, `add`, `remove`, `rescan` and `connections`.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use blockyard_yard::client::{Client, Notice};
use blockyard_yard::inject::FaultRuleView;
use blockyard_yard::paths;
use blockyard_yard::size::Bytes;
use blockyard_yard::table::{Table, duration};
use blockyard_yard::view::{DeviceView, FileAccessView, HostView};

use crate::args::{AddArgs, DeviceArgs, RemoveArgs, TalkArgs};
use crate::failure::{Code, Failure};
use crate::human::print_table;

/// The yard that a command talks to.
pub(crate) fn client(talk: &TalkArgs) -> Client {
    // An empty variable is one that is not set.
    let named = talk.control.clone().filter(|path| !path.as_os_str().is_empty());
    client_of(&named.unwrap_or_else(paths::control_socket), talk)
}

/// The yard at a control socket.
pub(crate) fn client_of(control: &Path, talk: &TalkArgs) -> Client {
    Client::new(control).with_timeout(talk.timeout.map(Duration::from_secs)).with_notice(Notice(
        |path| {
            let seconds = Notice::AFTER.as_secs();
            eprintln!(
                "blockyard: the yard on {} has not answered for {seconds} s; still waiting \
                 (--timeout SECONDS bounds this)",
                path.display()
            );
        },
    ))
}

/// Prints JSON for programs.
pub(crate) fn print_json(
    value: &impl serde::Serialize,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::new(Code::Failed, format!("JSON: {error}")))?;
    Ok(writeln!(out, "{text}")?)
}

pub(crate) fn list(talk: &TalkArgs, out: &mut impl Write) -> Result<(), Failure> {
    let devices = client(talk).devices()?;
    if talk.json {
        return print_json(&devices, out);
    }
    if devices.iter().all(|device| device.file.is_none()) {
        let mut table = Table::new(["NAME", "WHAT", "CLIENTS"]);
        for device in devices {
            let what = what(&device);
            table.row([device.name, what, device.clients.to_string()]);
        }
        return Ok(print_table(table, &["WHAT"], out)?);
    }
    let mut table = Table::new(["NAME", "WHAT", "FILE", "CLIENTS", "OPENS"]);
    for device in devices {
        let (clients, opens) = (device.clients.to_string(), device.opens.to_string());
        let what = what(&device);
        let file = device.file.unwrap_or_else(|| "-".to_owned());
        table.row([device.name, what, file, clients, opens]);
    }
    Ok(print_table(table, &["WHAT", "FILE"], out)?)
}

pub(crate) fn show(args: &DeviceArgs, out: &mut impl Write) -> Result<(), Failure> {
    let device = client(&args.talk).device(&args.device)?;
    if args.talk.json {
        return print_json(&device, out);
    }
    print_device(&device, out)
}

fn print_device(device: &DeviceView, out: &mut impl Write) -> Result<(), Failure> {
    let sectors = |sectors: Option<u64>| match sectors {
        Some(0) => "none".to_owned(),
        None => "any length".to_owned(),
        Some(sectors) => Bytes(sectors.saturating_mul(512)).to_string(),
    };
    let yes = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
    let mut rows: Vec<(&str, String)> = vec![
        ("name", device.name.clone()),
        ("what", device.description.clone()),
        ("uri", device.uri.clone()),
        ("size", format!("{} ({} bytes)", Bytes(device.size_bytes), device.size_bytes)),
        (
            "blocks",
            format!(
                "{} logical, {} physical",
                Bytes(device.logical_block_bytes.into()),
                Bytes(device.physical_block_bytes.into())
            ),
        ),
        ("read-only", yes(device.read_only)),
        ("write cache", yes(device.limits.write_cache)),
        ("longest request", sectors(device.limits.sectors_max)),
        ("longest discard", sectors(device.limits.discard_sectors_max)),
        ("longest append", sectors(device.limits.zone_append_sectors_max)),
        ("queue depth", device.limits.queue_depth.to_string()),
        ("channels", device.channels.to_string()),
        ("clients", device.clients.to_string()),
        (
            "nvme",
            match (&device.nqn, device.nsid) {
                (Some(nqn), Some(nsid)) => format!("{nqn}, namespace {nsid} of all devices"),
                (Some(nqn), None) => nqn.clone(),
                (None, _) => "not served".to_owned(),
            },
        ),
        ("vhost", device.vhost.clone().unwrap_or_else(|| "not served".to_owned())),
        ("ublk", ublk_text(device).unwrap_or_else(|| "not served".to_owned())),
        ("file", device.file.clone().unwrap_or_else(|| "not mounted".to_owned())),
        ("file requests by", device.file_transport.clone().unwrap_or_else(|| "-".to_owned())),
        ("opens", device.opens.to_string()),
        ("age", duration(device.age_ns)),
    ];
    rows.extend(device.file_access.map(|file| ("file access", file_access_text(file))));
    rows.extend(latched_text(device).map(|text| ("state", text)));
    if let Some(zoned) = &device.zoned {
        let limit = |max: u32| if max == 0 { "no limit".to_owned() } else { max.to_string() };
        rows.push((
            "zones",
            format!(
                "{} of {}, {} writable in each, {} conventional",
                zoned.zone_count,
                Bytes(zoned.zone_sectors * 512),
                Bytes(zoned.zone_capacity_sectors * 512),
                zoned.conventional_count
            ),
        ));
        rows.push(("open at most", limit(zoned.open_max)));
        rows.push(("active at most", limit(zoned.active_max)));
        rows.push(("gate", zoned.gate.clone()));
        rows.push(("append", if zoned.append_emulated { "emulated" } else { "native" }.to_owned()));
    }
    rows.extend(device.hosts.iter().map(|host| ("host", host_text(device.nqn.as_deref(), host))));
    rows.extend(device.faults.iter().map(|fault| ("fault rule", fault_text(fault))));
    rows.extend(device.notes.iter().map(|note| ("note", note.clone())));
    for (name, value) in rows {
        writeln!(out, "{name:<16} {value}")?;
    }
    Ok(())
}

/// The description of a device, and what is wrong with it.
fn what(device: &DeviceView) -> String {
    let ublk = ublk_text(device).filter(|_| device.ublk_is_outdated);
    let latched = latched_text(device);
    let wrong = ublk.into_iter().chain(latched);
    wrong.fold(device.description.clone(), |text, wrong| format!("{text}; {wrong}"))
}

/// What a latched device does, and why.
fn latched_text(device: &DeviceView) -> Option<String> {
    let by = device.latched_by.as_ref()?;
    Some(format!("latched, because {by} has failed: writes and flushes fail"))
}

/// How a device accesses its file.
fn file_access_text(file: FileAccessView) -> String {
    let by = if file.is_uring { "io_uring" } else { "blocking calls" };
    let cache = if file.is_direct { "direct I/O" } else { "the page cache" };
    format!("{cache}, by {by}")
}

/// The block device of the kernel that a device is, and whether it works.
fn ublk_text(device: &DeviceView) -> Option<String> {
    let path = device.ublk.as_ref()?;
    Some(match device.ublk_is_outdated {
        true => format!("{path} is outdated: its requests fail, or it has another size"),
        false => path.clone(),
    })
}

/// A rule of a device's fault injector, and what it did.
fn fault_text(fault: &FaultRuleView) -> String {
    let FaultRuleView { id, rule, matched, applied } = fault;
    format!("{id}: {rule} ({matched} matched, {applied} applied)")
}

/// An NVMe host of a device. The subsystem of the host is named unless it is `own`.
pub(crate) fn host_text(own: Option<&str>, host: &HostView) -> String {
    let HostView { nqn, subsystem, peer, controller, queue_numbers, .. } = host;
    let by = if own == Some(subsystem) { String::new() } else { format!(" of {subsystem}") };
    let numbers: Vec<String> = queue_numbers.iter().map(u16::to_string).collect();
    let queues = match &numbers[..] {
        [] => "no queue".to_owned(),
        [number] => format!("queue {number}"),
        _ => format!("queues {}", numbers.join(" ")),
    };
    format!("{nqn} at {peer}, controller {controller}{by}, {queues}")
}

pub(crate) fn add(args: &AddArgs, out: &mut impl Write) -> Result<(), Failure> {
    let device = client(&args.talk).add(&args.device.to_string())?;
    if args.talk.json {
        return print_json(&device, out);
    }
    writeln!(out, "{}: {}", device.name, device.description)?;
    for note in &device.notes {
        writeln!(out, "  note: {note}")?;
    }
    Ok(())
}

pub(crate) fn rescan(args: &DeviceArgs, out: &mut impl Write) -> Result<(), Failure> {
    let device = client(&args.talk).rescan(&args.device)?;
    if args.talk.json {
        return print_json(&device, out);
    }
    Ok(writeln!(out, "{}: {}", device.name, device.description)?)
}

pub(crate) fn remove(args: &RemoveArgs, out: &mut impl Write) -> Result<(), Failure> {
    let device = client(&args.talk).remove(&args.device, args.force)?;
    if args.talk.json {
        return print_json(&device, out);
    }
    Ok(writeln!(out, "{}: removed", device.name)?)
}

pub(crate) fn connections(talk: &TalkArgs, out: &mut impl Write) -> Result<(), Failure> {
    let client = client(talk);
    let connections = client.connections()?;
    if talk.json {
        return print_json(&connections, out);
    }
    let memory = client.nbd_memory()?;
    let mut table = Table::new([
        "PEER", "DEVICE", "PROTOCOL", "HOST", "TLS", "REQUESTS", "READ", "WRITTEN", "ERRORS",
        "MEMORY",
    ]);
    for connection in connections {
        table.row([
            connection.peer,
            connection.device.or(connection.subsystem).unwrap_or_else(|| "-".to_owned()),
            match (connection.controller, connection.queue) {
                (Some(controller), Some(queue)) => {
                    format!("{} controller {controller} queue {queue}", connection.protocol)
                }
                _ => connection.protocol,
            },
            connection.host.unwrap_or_else(|| "-".to_owned()),
            if connection.tls { "yes" } else { "no" }.to_owned(),
            connection.requests.to_string(),
            connection.read_bytes.to_string(),
            connection.written_bytes.to_string(),
            connection.errors.to_string(),
            connection.memory_bytes.to_string(),
        ]);
    }
    print_table(table, &["DEVICE", "PROTOCOL", "HOST", "TLS"], out)?;
    let (used, limit) = (Bytes(memory.used_bytes), Bytes(memory.limit_bytes));
    let (waits, refused) = (memory.waits, memory.refused);
    Ok(writeln!(out, "NBD memory: {used} of {limit}, {waits} waits, {refused} refused")?)
}

#[cfg(test)]
mod tests {
    use blockyard_yard::devices::Devices;

    use super::*;

    #[test]
    fn show_has_a_line_for_each_nvme_host() {
        let devices = Devices::new();
        let entry = devices.add(blockyard_yard::uri::parse("null:///d?size=1M").unwrap()).unwrap();
        let mut device = DeviceView::new(&entry, &devices);
        let own = "nqn.2026-11.io.blockyard:d";
        let host = |subsystem: &str, queue_numbers: Vec<u16>| HostView {
            nqn: "nqn.a".to_owned(),
            subsystem: subsystem.to_owned(),
            peer: "tcp:192.0.2.1:50000".to_owned(),
            controller: 7,
            queues: queue_numbers.len() as u64,
            queue_numbers,
        };
        device.nqn = Some(own.to_owned());
        device.hosts = vec![host(own, vec![3]), host("nqn.all", vec![1, 2])];
        let mut out = Vec::new();
        print_device(&device, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let hosts: Vec<_> = text.lines().filter(|line| line.starts_with("host ")).collect();
        let wanted = [
            "host             nqn.a at tcp:192.0.2.1:50000, controller 7, queue 3",
            "host             nqn.a at tcp:192.0.2.1:50000, controller 7 of nqn.all, queues 1 2",
        ];
        assert_eq!(hosts, wanted);
    }
}
