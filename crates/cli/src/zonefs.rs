//! `mkzonefs` and `zonefs`: on a device of a running yard by the control API, or on one that this
//! process makes from a URI.

use std::io::Write;
use std::path::{Path, PathBuf};

use blockyard_yard::control::Event;
use blockyard_yard::daemon::{Daemon, DaemonOptions};
use blockyard_yard::error::{YardError, counted};
use blockyard_yard::spec::DeviceSpec;
use blockyard_yard::table::Table;
use blockyard_yard::view::{FormatRequest, FormatView, MountRequest, MountView};
use blockyard_yard::{uri, zonefs};

use crate::args::{MkzonefsArgs, TalkArgs, ZonefsCommand, ZonefsMountArgs, ZonefsUnmountArgs};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::human::print_table;

/// A device as the command line names it.
enum Named {
    /// One of a running yard.
    Served(String),
    /// One that this process makes.
    Own(Box<DeviceSpec>),
}

fn named(text: &str) -> Result<Named, Failure> {
    if !text.contains("://") {
        return Ok(Named::Served(text.to_owned()));
    }
    match uri::parse(text) {
        Ok(spec) => Ok(Named::Own(Box::new(spec))),
        Err(error) => Err(Failure::new(Code::Usage, error)),
    }
}

/// A refusal of a device that this process made.
fn refused(error: YardError) -> Failure {
    match error {
        YardError::Argument { field: "options", value, wanted } => {
            Failure::new(Code::Usage, format!("invalid -o `{value}`: expected {wanted}"))
        }
        YardError::Argument { .. } => Failure::new(Code::Usage, error),
        _ => Failure::new(Code::Refused, error),
    }
}

pub(crate) fn format(args: &MkzonefsArgs, out: &mut impl Write) -> Result<(), Failure> {
    let request = FormatRequest {
        force: args.force,
        label: args.label.clone().unwrap_or_default(),
        uuid: args.uuid.clone(),
        options: args.options.join(","),
    };
    // Invalid arguments are refused before a yard is asked.
    zonefs::read_format(&request).map_err(refused)?;
    let made = match named(&args.device)? {
        Named::Served(name) => client(&args.talk).format_zonefs(&name, &request)?,
        Named::Own(spec) => {
            let daemon = own(&spec)?;
            daemon.devices().format_zonefs(spec.name(), &request).map_err(refused)?
        }
    };
    if args.talk.json {
        return print_json(&made, out);
    }
    print_made(&made, args.verbose, out)
}

fn print_made(made: &FormatView, verbose: bool, out: &mut impl Write) -> Result<(), Failure> {
    let conventional = counted(made.conventional_files.into(), "conventional file");
    let sequential = counted(made.sequential_files.into(), "sequential file");
    writeln!(out, "{}: zonefs with {conventional} and {sequential}", made.device)?;
    if verbose {
        writeln!(out, "  UUID   {}", made.uuid)?;
        if !made.label.is_empty() {
            writeln!(out, "  label  {}", made.label)?;
        }
        let zone_0 = if made.zone_0_finished { "sequential, finished" } else { "conventional" };
        writeln!(out, "  zone 0 holds the superblock: {zone_0}")?;
    }
    Ok(())
}

pub(crate) fn run(command: &ZonefsCommand, out: &mut impl Write) -> Result<(), Failure> {
    match command {
        ZonefsCommand::Mount(args) => mount(args, out),
        ZonefsCommand::Unmount(args) => unmount(args, out),
        ZonefsCommand::List(talk) => list(talk, out),
    }
}

fn mount(args: &ZonefsMountArgs, out: &mut impl Write) -> Result<(), Failure> {
    let options = args.options.join(",");
    let checked = zonefs::read_mount_options(&options).map_err(refused)?;
    let dir = absolute(&args.dir)?;
    match named(&args.device)? {
        Named::Served(name) => {
            // The daemon's directory is not this process's.
            let request =
                MountRequest { dir: dir.display().to_string(), options, force: args.force };
            let view = client(&args.talk).mount_zonefs(&name, &request)?;
            print_mounted(args, &view, out)
        }
        Named::Own(spec) => {
            crate::serve::start_log(None, "warn")?;
            let daemon = own(&spec)?;
            let events = daemon.sender();
            let ended = move || {
                // A daemon that no longer listens is ending already.
                let _ = events.send(Event::Unmounted);
            };
            let view = daemon.devices().mount_zonefs(spec.name(), &dir, checked, args.force, ended);
            print_mounted(args, &view.map_err(refused)?, out)?;
            out.flush()?;
            daemon.next_event();
            daemon.shutdown();
            Ok(())
        }
    }
}

fn print_mounted(
    args: &ZonefsMountArgs,
    view: &MountView,
    out: &mut impl Write,
) -> Result<(), Failure> {
    if args.talk.json {
        return print_json(view, out);
    }
    Ok(writeln!(out, "mounted {} at {} ({})", view.device, view.dir, view.options)?)
}

fn unmount(args: &ZonefsUnmountArgs, out: &mut impl Write) -> Result<(), Failure> {
    let view = client(&args.talk).unmount_zonefs(&args.device)?;
    if args.talk.json {
        return print_json(&view, out);
    }
    Ok(writeln!(out, "unmounted {} from {}", view.device, view.dir)?)
}

fn list(talk: &TalkArgs, out: &mut impl Write) -> Result<(), Failure> {
    let mounts = client(talk).zonefs_mounts()?;
    if talk.json {
        return print_json(&mounts, out);
    }
    let of = |count: u32, max: u32| match max {
        0 => count.to_string(),
        max => format!("{count}/{max}"),
    };
    let mut table = Table::new(["DEVICE", "DIR", "OPTIONS", "WRITE-OPEN", "ACTIVE"]);
    for view in mounts {
        let writes = of(view.write_open, view.write_open_max);
        let active = of(view.active, view.active_max);
        let since =
            if view.read_only && !view.options.starts_with("ro") { " (ro now)" } else { "" };
        table.row([view.device, view.dir, view.options + since, writes, active]);
    }
    Ok(print_table(table, &["DIR", "OPTIONS"], out)?)
}

/// A yard of one device, for as long as this process lives.
fn own(spec: &DeviceSpec) -> Result<Daemon, Failure> {
    let options = DaemonOptions { devices: vec![spec.clone()], ..DaemonOptions::default() };
    Daemon::start(&options).map_err(|error| Failure::new(Code::Usage, error))
}

/// The directory from the root on.
fn absolute(dir: &Path) -> Result<PathBuf, Failure> {
    let absolute = std::path::absolute(dir);
    absolute.map_err(|error| Failure::new(Code::Failed, format!("{}: {error}", dir.display())))
}
