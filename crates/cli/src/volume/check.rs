//! `volume check`: verifies a pool that is not in use, and changes nothing; `volume scrub`: the
//! blocks of a pool that may be in use.

use std::io::{BufRead, BufReader, Write};

use blockyard_store::StoreError;
use blockyard_volume::VolumeError;
use blockyard_volume_admin::check::check;
use blockyard_yard::volumes::{ScrubLine, ScrubView, VolumeRequest};

use super::pool::{Make, PoolAccess, text};
use super::progress::ProgressLine;
use super::{refused, unopened};
use crate::args::{VolumePoolArgs, VolumeScrubArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};
use crate::human::rounded;
use crate::pool::copies;
use crate::serve::raise_files;

pub(super) fn run(args: &VolumePoolArgs, out: &mut impl Write) -> Result<(), Failure> {
    let mut progress = ProgressLine::new("verified");
    raise_files();
    let report = check(&args.pool, &mut |bytes| progress.tell(bytes, None));
    drop(progress);
    let report = report.map_err(|error| match error {
        VolumeError::Store(StoreError::InUse { path, lock_owner }) => {
            let path = path.display();
            let text = format!(
                "invalid path `{path}`: it is in use by {lock_owner}; expected a pool that is not \
                 open; `blockyard volume scrub {path}` verifies the blocks of an open pool"
            );
            Failure::new(Code::Refused, text)
        }
        other => unopened(&args.pool, other),
    })?;
    print(args, &report.into(), out)
}

pub(super) fn scrub(args: &VolumeScrubArgs, out: &mut impl Write) -> Result<(), Failure> {
    if args.pause || args.resume {
        return pause_or_resume(args, out);
    }
    let pool = PoolAccess::find(&args.pool, Make::Never)?;
    if let PoolAccess::Here(_) = &pool {
        // Only good copies are verified.
        copies::wait(&pool)?;
    }
    let mut progress = ProgressLine::new("verified");
    let report = match pool {
        PoolAccess::Here(running) => {
            let scrubbed = blockyard_volume_admin::scrub::scrub(
                &running,
                args.rate.unwrap_or(0),
                &mut |done, total| {
                    progress.tell(done, Some(total));
                    true
                },
            );
            scrubbed.map_err(refused)?.into()
        }
        PoolAccess::There(client, path) => {
            let pool = Some(text(&path)?);
            let request = VolumeRequest { pool, rate_bytes: args.rate, ..VolumeRequest::default() };
            follow(client.scrub(&request)?, &mut progress)?
        }
    };
    drop(progress);
    print(&args.pool, &report, out)
}

fn pause_or_resume(args: &VolumeScrubArgs, out: &mut impl Write) -> Result<(), Failure> {
    let PoolAccess::There(client, path) = PoolAccess::find(&args.pool, Make::Never)? else {
        let text = format!(
            "invalid POOL `{}`: no yard has it open; expected one of a yard, which scrubs it",
            args.pool.pool.display()
        );
        return Err(Failure::new(Code::Refused, text));
    };
    let request = VolumeRequest { pool: Some(text(&path)?), ..VolumeRequest::default() };
    let verb = if args.pause { "pause-scrub" } else { "resume-scrub" };
    let done = client.volume(verb, &request)?;
    if args.pool.talk.json {
        return print_json(&done, out);
    }
    Ok(writeln!(out, "{}: {}", done.name, done.done)?)
}

/// Reads what a yard tells of a scrub, to its end.
fn follow(answer: impl std::io::Read, progress: &mut ProgressLine) -> Result<ScrubView, Failure> {
    let failed = |error: String| Failure::new(Code::Failed, format!("scrub: {error}"));
    for line in BufReader::new(answer).lines() {
        let line = line.map_err(|error| failed(error.to_string()))?;
        let line: ScrubLine =
            serde_json::from_str(&line).map_err(|error| failed(error.to_string()))?;
        progress.tell(line.verified_bytes, Some(line.total_bytes));
        if let Some(report) = line.report {
            return Ok(report);
        }
    }
    let text = "it was paused or stopped; `blockyard pool status` shows how far it came, and the \
                log of the yard why";
    Err(failed(text.to_owned()))
}

fn print(args: &VolumePoolArgs, report: &ScrubView, out: &mut impl Write) -> Result<(), Failure> {
    if args.talk.json {
        print_json(report, out)?;
    } else {
        for copy in &report.copies {
            writeln!(out, "{}", super::shown(copy))?;
        }
        for damage in &report.damage {
            let (volume, block, address) = (&damage.volume, damage.block, damage.address);
            writeln!(out, "{volume}: block {block}, at {address} of the pool: {}", damage.what)?;
        }
        if report.unused_groups > 0 {
            writeln!(
                out,
                "{}: the log ends before {} intact groups: the power was cut while they were \
                 written, or the group before them is damaged; the next open does not use them",
                args.pool.display(),
                report.unused_groups
            )?;
        }
        if report.in_one_copy > 0 {
            writeln!(
                out,
                "{}: {} blocks of the last writes are in one copy only; they are not damaged, and \
                 the next open writes them to the other copy",
                args.pool.display(),
                report.in_one_copy
            )?;
        }
        writeln!(
            out,
            "{}: {} volumes and snapshots, {} blocks with {} verified, {} damaged, {} repaired",
            args.pool.display(),
            report.volumes,
            report.blocks,
            rounded(report.stored_bytes),
            report.damaged,
            report.mended
        )?;
    }
    let is_degraded = report.copies.iter().any(|copy| !copy.good);
    if report.damaged > 0 || is_degraded { Err(Failure::Silent(Code::Damaged)) } else { Ok(()) }
}
