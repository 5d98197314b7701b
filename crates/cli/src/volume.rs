//! `volume`: pools of durable volumes. A command opens a pool that is not in use by itself;
//! one that a yard has open is worked on through that yard's control API.

mod check;
mod diff;
mod image;
mod import;
mod list;
mod move_volume;
pub(crate) mod pool;
pub(crate) mod progress;
mod properties;
mod secret;
mod stream;

use std::io::Write;
use std::path::Path;

use blockyard_store::is_pool;
use blockyard_volume::admin::check_new;
use blockyard_yard::error::YardError;
use blockyard_yard::volume_secret::SecretFields;
use blockyard_yard::volumes::{CopyView, KeptView, PoolView, VolumeDone, VolumeRequest};
use serde_json::json;

use crate::args::{
    AttachArgs, VolumeAt, VolumeCommand, VolumeDestroyArgs, VolumeHoldArgs, VolumePoolArgs,
    VolumePruneArgs, VolumeShowArgs,
};
use crate::devices::print_json;
use crate::failure::{Code, Failure};
use crate::human::{date, exact, rounded};
use crate::pool::copies;
use crate::pool::cost::{cost, forecast};

use pool::{Make, PoolAccess, ReadOnlyAccess};

pub(crate) fn run(command: &VolumeCommand, out: &mut impl Write) -> Result<(), Failure> {
    let nothing = VolumeRequest::default;
    match command {
        VolumeCommand::Create(args) => {
            let block_bytes = u32::try_from(args.volblocksize).unwrap_or(u32::MAX);
            let (size_bytes, volblocksize_bytes) = (Some(args.size), Some(block_bytes));
            let reservation_bytes = args.reservation;
            let secret = secret::of_new(&args.secret, args.encrypt, &args.at.name)?;
            let SecretFields { passphrase, key } =
                secret.as_ref().map(SecretFields::from).unwrap_or_default();
            let sizes = VolumeRequest { size_bytes, volblocksize_bytes, ..nothing() };
            let request = VolumeRequest { reservation_bytes, passphrase, key, ..sizes };
            // Everything is checked before a pool is made, or a disk is overwritten by one.
            if !is_pool(&args.at.pool.pool).map_err(refused)? {
                let reserved = reservation_bytes.unwrap_or(0);
                check_new(&args.at.name, args.size, block_bytes, reserved).map_err(refused)?;
            }
            let make = Make::IfMissing { consent: args.force, capacity: args.capacity };
            let pool = PoolAccess::find(&args.at.pool, make)?;
            work_in(pool, &args.at.pool, &args.at.name, "create", request, out)
        }
        VolumeCommand::List(args) => list::list(args, out),
        VolumeCommand::Show(args) => show(args, out),
        VolumeCommand::Snapshot(args) => {
            args.check().map_err(|wanted| wrong_name(&args.name, &wanted))?;
            let request = VolumeRequest { recursive: args.recursive, ..nothing() };
            let pool = PoolAccess::find(&args.pool, Make::Never)?;
            work_in(pool, &args.pool, &args.name, "snapshot", request, out)
        }
        VolumeCommand::Clone(args) => {
            let request = VolumeRequest { new: Some(args.new.clone()), ..nothing() };
            work(&args.at, "clone", request, out)
        }
        VolumeCommand::Rollback(args) => work(&args.at, "rollback", nothing(), out),
        VolumeCommand::Resize(args) => {
            let (size_bytes, reservation_bytes) = (args.size, args.reservation);
            let force = args.force;
            let request = VolumeRequest { size_bytes, reservation_bytes, force, ..nothing() };
            work(&args.at, "resize", request, out)
        }
        VolumeCommand::Set(args) => properties::set(args, out),
        VolumeCommand::Get(args) => properties::get(args, out),
        VolumeCommand::Unlock(args) => secret::unlock(args, out),
        VolumeCommand::Lock(args) => secret::lock(args, out),
        VolumeCommand::ChangeKey(args) => secret::change_key(args, out),
        VolumeCommand::Rename(args) => {
            let request = VolumeRequest { new: Some(args.new.clone()), ..nothing() };
            work(&args.at, "rename", request, out)
        }
        VolumeCommand::Promote(args) => work(&args.at, "promote", nothing(), out),
        VolumeCommand::Hold(args) => hold(args, "hold", out),
        VolumeCommand::Release(args) => hold(args, "release", out),
        VolumeCommand::Holds(args) => list::holds(args, out),
        VolumeCommand::Destroy(args) => destroy(args, out),
        VolumeCommand::Diff(args) => diff::run(args, out),
        VolumeCommand::Prune(args) => prune(args, out),
        VolumeCommand::Move(args) => move_volume::run(args, out),
        VolumeCommand::Send(args) => stream::send(args, out),
        VolumeCommand::Receive(args) => stream::receive(args, out),
        VolumeCommand::VerifyStream(args) => stream::verify(args, out),
        VolumeCommand::Export(args) => image::export(args, out),
        VolumeCommand::Import(args) => import::import(args, out),
        VolumeCommand::Scrub(args) => check::scrub(args, out),
        VolumeCommand::Check(args) => check::run(args, out),
        VolumeCommand::Attach(args) => attach(args, out),
    }
}

fn attach(args: &AttachArgs, out: &mut impl Write) -> Result<(), Failure> {
    let AttachArgs { pool, new, options } = args;
    copies::join(pool, "attach", copies::new_copy(options), true, new)?;
    let (path, new) = (pool.pool.display().to_string(), new.display().to_string());
    if pool.talk.json {
        return print_json(&json!({ "pool": path, "copy": new }), out);
    }
    Ok(writeln!(out, "attached {new} to {path} as its second copy")?)
}

/// What a pool that this process opens has refused.
pub(crate) fn refused(error: impl Into<YardError>) -> Failure {
    let error = error.into();
    let code = match &error {
        YardError::Argument { .. } => Code::Usage,
        YardError::Volume(error) => Code::of_pool(error),
        _ => Code::Failed,
    };
    Failure::new(code, error)
}

/// The refusal of a pool that cannot be opened. Damage is described by file or segment alone, so
/// the pool is named too.
fn unopened(path: &Path, error: impl Into<YardError>) -> Failure {
    match refused(error) {
        Failure::Said(Code::Damaged, text) => {
            let path = path.display();
            Failure::new(Code::Damaged, format!("cannot open the pool `{path}`: {text}"))
        }
        other => other,
    }
}

fn work(
    at: &VolumeAt,
    verb: &str,
    request: VolumeRequest,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let pool = PoolAccess::find(&at.pool, Make::Never)?;
    work_in(pool, &at.pool, &at.name, verb, request, out)
}

fn work_in(
    pool: PoolAccess,
    args: &VolumePoolArgs,
    name: &str,
    verb: &str,
    request: VolumeRequest,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let request = VolumeRequest { name: name.to_owned(), ..request };
    let done = pool.work(verb, request)?;
    if args.talk.json {
        return print_json(&done, out);
    }
    let VolumeDone { done, .. } = done;
    Ok(writeln!(out, "{done}")?)
}

fn hold(args: &VolumeHoldArgs, verb: &str, out: &mut impl Write) -> Result<(), Failure> {
    let request = VolumeRequest { tag: Some(args.tag.clone()), ..VolumeRequest::default() };
    let pool = PoolAccess::find(&args.pool, Make::Never)?;
    work_in(pool, &args.pool, &args.name, verb, request, out)
}

fn wrong_name(name: &str, wanted: &str) -> Failure {
    Failure::new(Code::Usage, format!("invalid NAME `{name}`: {wanted}"))
}

fn destroy(args: &VolumeDestroyArgs, out: &mut impl Write) -> Result<(), Failure> {
    args.check().map_err(|wanted| wrong_name(&args.name, &wanted))?;
    let request = VolumeRequest {
        name: args.name.clone(),
        recursive: args.recursive,
        dry_run: args.dry_run,
        count_freed: args.verbose || args.dry_run,
        ..VolumeRequest::default()
    };
    let done = PoolAccess::find(&args.pool, Make::Never)?.work("destroy", request)?;
    if args.pool.talk.json {
        return print_json(&done, out);
    }
    if !(args.verbose || args.dry_run) {
        return Ok(writeln!(out, "{}", done.done)?);
    }
    print_destroyed(&done, args.dry_run, out)
}

/// Prints what was destroyed, or would be, and how much that frees.
fn print_destroyed(
    done: &VolumeDone,
    is_dry_run: bool,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let would = if is_dry_run { "would " } else { "" };
    let (destroy, reclaim) = match is_dry_run {
        true => ("destroy", "reclaim"),
        false => ("destroyed", "reclaimed"),
    };
    for name in &done.names {
        writeln!(out, "{would}{destroy} {name}")?;
    }
    Ok(writeln!(out, "{would}{reclaim} {}", rounded(done.freed_bytes.unwrap_or(0)))?)
}

fn prune(args: &VolumePruneArgs, out: &mut impl Write) -> Result<(), Failure> {
    let is_long = args.verbose || args.dry_run;
    let request = VolumeRequest {
        name: args.name.clone().unwrap_or_default(),
        keep: Some(args.keep.to_string()),
        prefix: args.prefix.clone(),
        dry_run: args.dry_run,
        count_freed: is_long,
        ..VolumeRequest::default()
    };
    let done = PoolAccess::find(&args.pool, Make::Never)?.work("prune", request)?;
    if args.pool.talk.json {
        return print_json(&done, out);
    }
    if is_long {
        for KeptView { name, why } in &done.kept {
            writeln!(out, "{} {name}: {why}", if args.dry_run { "would keep" } else { "kept" })?;
        }
        print_destroyed(&done, args.dry_run, out)?;
    }
    Ok(writeln!(out, "{}", done.done)?)
}

/// The state of a copy of a pool.
pub(crate) fn shown(copy: &CopyView) -> String {
    let CopyView { path, state, good, why, mended } = copy;
    match why {
        _ if *good => format!("{path}: {state}, repaired {mended} times"),
        Some(why) => format!("{path}: {state}: {why}"),
        None => format!("{path}: {state}"),
    }
}

fn print_rows(rows: &[(&str, String)], out: &mut impl Write) -> Result<(), Failure> {
    for (name, value) in rows {
        writeln!(out, "{name:<16} {value}")?;
    }
    Ok(())
}

fn show(args: &VolumeShowArgs, out: &mut impl Write) -> Result<(), Failure> {
    let pool = ReadOnlyAccess::find(&args.pool)?;
    let Some(name) = &args.name else {
        let is_open = matches!(pool, ReadOnlyAccess::There(..));
        return show_pool(args, &pool.view()?, is_open, out);
    };
    let volume = pool.volumes(Some(name))?.into_iter().next();
    let volume = volume.ok_or_else(|| Failure::new(Code::Failed, "the yard named no volume"))?;
    if args.pool.talk.json {
        return print_json(&volume, out);
    }
    let encryption = match (volume.encrypted, volume.locked) {
        (false, _) => "none",
        (true, true) => "aes-256-gcm, locked",
        (true, false) => "aes-256-gcm, unlocked",
    };
    let unknown = || "unknown: a page of a map cannot be read".to_owned();
    let space = |bytes: Option<u64>| bytes.map_or_else(unknown, exact);
    let mut rows = vec![
        ("name", volume.name.clone()),
        ("type", if volume.snapshot { "snapshot" } else { "volume" }.to_owned()),
        ("size", exact(volume.size_bytes)),
        ("created", volume.created.map_or_else(|| "unknown".to_owned(), date)),
        ("volblocksize", list::block_size(&volume)),
        ("reservation", exact(volume.reservation_bytes)),
        ("encryption", encryption.to_owned()),
        ("device", if volume.in_use { "yes" } else { "no" }.to_owned()),
        ("used", space(volume.used_bytes)),
        ("refer", space(volume.stored_bytes)),
        ("lrefer", space(volume.referenced_bytes)),
    ];
    rows.extend(volume.origin.map(|origin| ("origin", origin)));
    print_rows(&rows, out)
}

fn show_pool(
    args: &VolumeShowArgs,
    pool: &PoolView,
    is_open: bool,
    out: &mut impl Write,
) -> Result<(), Failure> {
    if args.pool.talk.json {
        return print_json(pool, out);
    }
    let segments = |count: u64| exact(count * pool.segment_bytes);
    let capacity = pool.used_bytes.saturating_add(pool.available_bytes);
    let part = pool.used_bytes.saturating_mul(100) / capacity.max(1);
    let mut rows = vec![
        ("pool", pool.path.clone()),
        ("volumes", format!("{}, including snapshots", pool.volumes)),
        ("used", format!("{}, {part} % of the capacity", exact(pool.used_bytes))),
        ("available", exact(pool.available_bytes)),
        ("segments", segments(pool.segments)),
        ("free", segments(pool.segments_free)),
        ("reserved", segments(pool.segments_reserved)),
        ("can grow by", exact(pool.outside_free_bytes)),
    ];
    let state = match (is_open, pool.failed_read_only) {
        (false, _) => "not open",
        (true, false) => "good",
        (true, true) => "read-only since an error",
    };
    rows.push(("state", state.to_owned()));
    rows.push(("log", format!("last group {}", pool.log_group)));
    // A pool that is not open has no activity.
    if is_open {
        rows.extend(activity(pool));
        if let Some(upload) = &pool.upload {
            rows.push(("cost", cost(&upload.requests, pool.used_bytes)));
        }
        rows.extend(forecast(pool).map(|line| ("forecast", line)));
    }
    rows.extend(pool.copies.iter().map(|copy| ("copy", shown(copy))));
    print_rows(&rows, out)
}

/// What a pool has done since it was opened.
pub(crate) fn activity(pool: &PoolView) -> [(&'static str, String); 7] {
    let mean = pool.log_bytes.checked_div(pool.groups).unwrap_or(0);
    let groups = format!("{}, {} on average, {} syncs", pool.groups, rounded(mean), pool.syncs);
    let cleaned =
        format!("{} moved, {} segments freed", exact(pool.moved_bytes), pool.segments_cleaned);
    let checkpoints = format!("{}, {} of map pages", pool.checkpoints, exact(pool.page_bytes));
    let waits =
        format!("{} for cleaning, {} searches for space", pool.cleaning_waits, pool.space_searches);
    [
        ("groups", groups),
        ("written", exact(pool.data_bytes)),
        ("stored as", exact(pool.stored_bytes)),
        ("to the log", exact(pool.log_bytes)),
        ("cleaning", cleaned),
        ("checkpoints", checkpoints),
        ("waits", waits),
    ]
}
