//! `pool attach`, `pool detach`, `pool replace` and `pool resync`: the copies of a pool that may be
//! in use.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockyard_yard::volumes::{CopyView, PoolView, VolumeDone, VolumeRequest};

use crate::args::{
    AttachArgs, PoolAttachArgs, PoolDetachArgs, PoolReplaceArgs, PoolResyncArgs, ResyncOptions,
    VolumePoolArgs,
};
use crate::devices::print_json;
use crate::failure::{Code, Failure};
use crate::volume::pool::{Make, PoolAccess, text};
use crate::volume::progress::ProgressLine;

/// How often a resync is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

pub(super) fn attach(args: &PoolAttachArgs, out: &mut impl Write) -> Result<(), Failure> {
    let AttachArgs { pool, new, options } = &args.attach;
    print(pool, &join(pool, "attach", new_copy(options), args.wait, new)?, out)
}

pub(super) fn replace(args: &PoolReplaceArgs, out: &mut impl Write) -> Result<(), Failure> {
    let copy = Some(text(&absolute(&args.old)?)?);
    let request = VolumeRequest { copy, ..new_copy(&args.options) };
    print(&args.pool, &join(&args.pool, "replace", request, args.wait, &args.new)?, out)
}

pub(super) fn detach(args: &PoolDetachArgs, out: &mut impl Write) -> Result<(), Failure> {
    let copy = Some(text(&absolute(&args.copy)?)?);
    let request = VolumeRequest { copy, ..VolumeRequest::default() };
    let done = PoolAccess::find(&args.pool, Make::Never)?.work("detach", request)?;
    print(&args.pool, &done, out)
}

pub(super) fn resync(args: &PoolResyncArgs, out: &mut impl Write) -> Result<(), Failure> {
    let pool = PoolAccess::find(&args.pool, Make::Never)?;
    let verb = match (args.pause, args.resume) {
        (true, _) => "pause-resync",
        (_, true) => "resume-resync",
        _ => "resync",
    };
    if args.rate.is_some() || args.pause || args.resume {
        let PoolAccess::There(..) = &pool else {
            let path = args.pool.pool.display();
            let text = format!(
                "invalid POOL `{path}`: no yard has it open; expected one of a yard, which resyncs \
                 it"
            );
            return Err(Failure::new(Code::Refused, text));
        };
    }
    if args.pause || args.resume {
        let done = pool.work(verb, VolumeRequest::default())?;
        return print(&args.pool, &done, out);
    }
    if let Some(rate) = args.rate {
        let request = VolumeRequest { rate_bytes: Some(rate), ..VolumeRequest::default() };
        let done = pool.work(verb, request)?;
        return print(&args.pool, &done, out);
    }
    wait(&pool)?;
    let copies = pool.view()?.copies;
    if let Some(CopyView { path, state, why, .. }) = copies.iter().find(|copy| !copy.good) {
        let why = why.as_ref().map_or(String::new(), |why| format!(": {why}"));
        return Err(Failure::new(Code::Failed, format!("the copy at {path} is {state}{why}")));
    }
    let done = VolumeDone { done: "no resync is to be done".to_owned(), ..VolumeDone::default() };
    print(&args.pool, &done, out)
}

/// The request for a new copy.
pub(crate) fn new_copy(options: &ResyncOptions) -> VolumeRequest {
    let (force, rate_bytes) = (options.force, options.rate);
    VolumeRequest { force, rate_bytes, ..VolumeRequest::default() }
}

/// A path that a yard understands, which was started in another directory.
fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    let failed = |error| Failure::new(Code::Failed, format!("{}: {error}", path.display()));
    match path.canonicalize() {
        Ok(path) => Ok(path),
        // The disk may be gone.
        Err(_) => std::path::absolute(path).map_err(failed),
    }
}

/// Adds a copy to a pool. Waits until it is good, if that is to be or this process has the pool
/// open.
pub(crate) fn join(
    args: &VolumePoolArgs,
    verb: &str,
    request: VolumeRequest,
    waits: bool,
    new: &Path,
) -> Result<VolumeDone, Failure> {
    let pool = PoolAccess::find(args, Make::Never)?;
    let new = absolute(new)?;
    let mut done = VolumeDone::default();
    match &pool {
        // An interrupted command is repeated. The opening has let the resync continue.
        PoolAccess::Here(running) if is_begun(&pool, &new, request.copy.as_deref())? => {
            if let Some(rate) = request.rate_bytes {
                running.set_resync_rate(rate);
            }
        }
        _ => {
            let request = VolumeRequest { new: Some(text(&new)?), ..request };
            done = pool.work(verb, request)?;
            if matches!(pool, PoolAccess::There(..)) && !waits {
                return Ok(done);
            }
        }
    }
    wait(&pool)?;
    let view = pool.view()?;
    let why = match view.copies.iter().find(|copy| Path::new(&copy.path) == new) {
        Some(CopyView { good: true, .. }) => None,
        Some(CopyView { why, state, .. }) => Some(why.as_ref().unwrap_or(state).clone()),
        // A pool with one copy lists none.
        None if Path::new(&view.path) == new => None,
        None => Some("it was detached".to_owned()),
    };
    if let Some(why) = why {
        let text = format!("the resync of {} has failed: {why}", new.display());
        return Err(Failure::new(Code::Failed, text));
    }
    Ok(VolumeDone { done: format!("{} is a good copy", new.display()), ..done })
}

/// Whether a pool resyncs the copy at `new`, and that copy will replace the one at `old`. Without
/// `old`, it is to replace none.
fn is_begun(pool: &PoolAccess, new: &Path, old: Option<&str>) -> Result<bool, Failure> {
    let PoolView { resync, copies, .. } = pool.view()?;
    let Some(resync) = resync.filter(|resync| Path::new(&resync.path) == new) else {
        return Ok(false);
    };
    Ok(match (old, resync.replaces) {
        // A copy that had failed left the pool when the new one joined.
        (Some(old), None) => copies.iter().all(|copy| copy.path != old),
        (old, replaces) => old == replaces.as_deref(),
    })
}

/// Waits until no copy is resyncing, and shows the progress.
///
/// # Errors
/// If the resync cannot continue, because no good copy can be used.
pub(crate) fn wait(pool: &PoolAccess) -> Result<(), Failure> {
    let mut progress = ProgressLine::new("equal");
    let mut verifying = ProgressLine::new("verified");
    while let Some(resync) = pool.view()?.resync {
        if let Some(error) = resync.error {
            let again = match pool {
                PoolAccess::Here(_) => "the next opening of the pool tries again",
                PoolAccess::There(..) => "the yard tries again each minute",
            };
            return Err(Failure::new(Code::Failed, format!("{error}; {again}")));
        }
        match resync.verified_bytes {
            Some(verified) => verifying.tell(verified, resync.to_verify_bytes),
            None => progress.tell(resync.done_bytes, Some(resync.total_bytes)),
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    Ok(())
}

fn print(args: &VolumePoolArgs, done: &VolumeDone, out: &mut impl Write) -> Result<(), Failure> {
    if args.talk.json {
        return print_json(done, out);
    }
    Ok(writeln!(out, "{}", done.done)?)
}
