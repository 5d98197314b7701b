//! A pool, wherever it is open.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_store::remote::{RemoteParameters, is_remote};
use blockyard_store::{LockOwner, PoolBacking, PoolPaths, StoreError, is_pool, no_pool};
use blockyard_volume::{Options, ReadOnlyPool, Running, VolumeError};
use blockyard_volume_admin::space::list_read_only;
use blockyard_yard::client::{Client, ClientError};
use blockyard_yard::paths;
use blockyard_yard::volumes::{self, CopyView, PoolView, VolumeDone, VolumeRequest, VolumeView};

use super::{refused, unopened};
use crate::args::{TalkArgs, VolumePoolArgs};
use crate::devices::{client, client_of};
use crate::failure::{Code, Failure};
use crate::serve::raise_files;

/// What becomes of a pool that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Make {
    /// It is said.
    Never,
    /// It is made; with consent also on a disk that has something else. In an object store it gets
    /// this capacity in bytes.
    IfMissing { consent: bool, capacity: u64 },
}

/// A pool.
pub(crate) enum PoolAccess {
    /// It is open here.
    Here(Arc<Running>),
    /// A yard has it open: who can be asked, and the pool's directory there.
    There(Client, PathBuf),
}

impl PoolAccess {
    /// The pool that is named.
    pub(crate) fn find(args: &VolumePoolArgs, make: Make) -> Result<PoolAccess, Failure> {
        let path = &args.pool;
        match named_yard(args)? {
            Some((client, path)) => Ok(PoolAccess::There(client, path)),
            None => open(args, path.clone(), make),
        }
    }

    /// The volumes and snapshots, without their space.
    pub(super) fn list(&self) -> Result<Vec<VolumeView>, Failure> {
        match self {
            PoolAccess::Here(running) => Ok(VolumeView::list_detailed(running)),
            PoolAccess::There(client, path) => Ok(client.volume_details(path)?),
        }
    }

    /// The state of the pool.
    pub(crate) fn view(&self) -> Result<PoolView, Failure> {
        match self {
            PoolAccess::Here(running) => PoolView::new(running).map_err(refused),
            PoolAccess::There(client, path) => view_there(client, path),
        }
    }

    /// Carries a verb out.
    pub(crate) fn work(&self, verb: &str, request: VolumeRequest) -> Result<VolumeDone, Failure> {
        match self {
            PoolAccess::Here(running) => {
                Ok(volumes::work(running, verb, &request).map_err(refused)?)
            }
            PoolAccess::There(client, path) => {
                let request = VolumeRequest { pool: Some(text(path)?), ..request };
                Ok(client.volume(verb, &request)?)
            }
        }
    }
}

/// A pool that is only shown. Nothing of it is changed.
pub(crate) enum ReadOnlyAccess {
    /// No process has it open.
    Here(Box<ReadOnlyPool<PoolBacking>>),
    /// A yard has it open.
    There(Client, PathBuf),
}

impl ReadOnlyAccess {
    /// The pool that is named.
    pub(crate) fn find(args: &VolumePoolArgs) -> Result<ReadOnlyAccess, Failure> {
        if let Some((client, path)) = named_yard(args)? {
            return Ok(ReadOnlyAccess::There(client, path));
        }
        raise_files();
        match blockyard_volume_admin::check::open_read_only(&args.pool) {
            Ok(pool) => Ok(ReadOnlyAccess::Here(Box::new(pool))),
            Err(VolumeError::Store(StoreError::InUse { path, lock_owner })) => {
                let (client, path) = held(&args.talk, path, lock_owner)?;
                Ok(ReadOnlyAccess::There(client, path))
            }
            Err(error) => Err(unopened(&args.pool, error)),
        }
    }

    /// The copies of a pool that no process has open.
    pub(super) fn copies(&self) -> Vec<CopyView> {
        match self {
            ReadOnlyAccess::Here(pool) => pool.copies().into_iter().map(CopyView::from).collect(),
            ReadOnlyAccess::There(..) => Vec::new(),
        }
    }

    /// The pool itself.
    pub(crate) fn view(&self) -> Result<PoolView, Failure> {
        match self {
            ReadOnlyAccess::Here(pool) => {
                Ok(PoolView::of_status(&pool.path(), pool.status().map_err(refused)?))
            }
            ReadOnlyAccess::There(client, path) => view_there(client, path),
        }
    }

    /// The volumes and snapshots, or one of them, with their space.
    pub(super) fn volumes(&self, name: Option<&str>) -> Result<Vec<VolumeView>, Failure> {
        match self {
            ReadOnlyAccess::Here(pool) => {
                let list = list_read_only(pool, name).map_err(refused)?;
                Ok(list.iter().map(VolumeView::of_listed).collect())
            }
            ReadOnlyAccess::There(client, path) => Ok(client.space(path, name)?),
        }
    }
}

/// The state of a pool that a yard has open.
fn view_there(client: &Client, path: &Path) -> Result<PoolView, Failure> {
    let gone = || {
        let text = format!("{} is not open there any more", path.display());
        Failure::new(Code::Failed, text)
    };
    client.pools()?.into_iter().find(|pool| pool.is_at(path)).ok_or_else(gone)
}

/// A path for the control API.
pub(crate) fn text(path: &Path) -> Result<String, Failure> {
    let wrong = || Failure::new(Code::Usage, format!("{}: expected UTF-8", path.display()));
    path.to_str().map(str::to_owned).ok_or_else(wrong)
}

/// The yard that `--control` names, if it has the pool open. The pool may be open nowhere.
fn named_yard(args: &VolumePoolArgs) -> Result<Option<(Client, PathBuf)>, Failure> {
    if args.talk.control.as_ref().is_none_or(|path| path.as_os_str().is_empty()) {
        return Ok(None);
    }
    let path = args.pool.canonicalize().unwrap_or_else(|_| args.pool.clone());
    match has(&client(&args.talk), &path) {
        Ok(true) => Ok(Some((client(&args.talk), path))),
        Ok(false) | Err(Failure::Said(Code::Unreachable, _)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a yard has a pool open.
fn has(client: &Client, path: &Path) -> Result<bool, Failure> {
    match client.volumes(Some(path)) {
        Ok(_) => Ok(true),
        Err(error) => match error.code() {
            Some("no_such_pool") => Ok(false),
            _ => Err(error.into()),
        },
    }
}

/// Opens the pool of a directory, or finds the yard that has it open.
fn open(args: &VolumePoolArgs, path: PathBuf, make: Make) -> Result<PoolAccess, Failure> {
    if make == Make::Never && !is_pool(&path).map_err(refused)? {
        return Err(refused(no_pool(&path)));
    }
    // Each segment of a pool is an open file.
    raise_files();
    let (consent, capacity_bytes) = match make {
        Make::Never => (false, 0),
        Make::IfMissing { consent, capacity } => (consent, capacity),
    };
    let remote = RemoteParameters {
        capacity_bytes,
        take_over: args.take_over,
        ..RemoteParameters::default()
    };
    let places = PoolPaths { degraded: args.degraded, remote, ..PoolPaths::of(&path) };
    match Running::open_places(&places, Options { consent, ..Options::default() }) {
        Ok(running) => {
            // If the command fails, it leaves no new pool.
            running.erase_if_empty();
            Ok(PoolAccess::Here(running))
        }
        Err(VolumeError::Store(StoreError::InUse { path, lock_owner })) => {
            let (client, path) = held(&args.talk, path, lock_owner)?;
            Ok(PoolAccess::There(client, path))
        }
        Err(error) => Err(unopened(&args.pool, with_option(error))),
    }
}

/// Names the option in place of the parameter of a URI.
fn with_option(error: VolumeError) -> VolumeError {
    match error {
        VolumeError::Store(StoreError::Invalid { field: "pool_size", value, wanted }) => {
            VolumeError::Store(StoreError::Invalid { field: "--pool-size", value, wanted })
        }
        error => error,
    }
}

/// The yard that has a pool open: the one that its lock names, or the usual one.
fn held(
    talk: &TalkArgs,
    path: PathBuf,
    lock_owner: LockOwner,
) -> Result<(Client, PathBuf), Failure> {
    let path = path.canonicalize().unwrap_or(path);
    // The usual yard may have another pool of the same URI open, in another object store. The owner
    // of the lock has this one.
    let usual = Some(paths::control_socket()).filter(|_| !is_remote(&path));
    let mut why = String::new();
    for control in lock_owner.control.iter().chain(&usual) {
        let client = client_of(control, talk);
        match client.volumes(Some(&path)) {
            Ok(_) => return Ok((client, path)),
            Err(error @ ClientError::TimedOut { .. }) => return Err(error.into()),
            Err(error @ ClientError::Socket { .. }) => why += &format!(" ({error})"),
            Err(_) => {}
        }
    }
    let text = format!(
        "invalid path `{}`: it is in use by {lock_owner}, which does not answer for it{why}; if it \
         is a yard, name its control socket with --control PATH, else stop it",
        path.display()
    );
    Err(Failure::new(Code::Refused, text))
}
