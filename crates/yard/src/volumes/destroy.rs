//! Destroying and pruning volumes and snapshots of an open pool.

use blockyard_volume::admin::now;
use blockyard_volume::{Running, VolumeError};
use blockyard_volume_admin::prune::{self, PrunePlan};
use blockyard_volume_admin::receive::has_changed;
use blockyard_volume_admin::space;
use blockyard_volume_format::catalogue::VolumeMeta;
use serde::{Deserialize, Serialize};

use super::{VolumeDone, VolumeRequest, argument, counted, guid_text, key_slot_text};
use crate::error::YardError;
use crate::volume_properties::{PropertySource, PropertyView, RESERVATION, views};

/// A snapshot that `prune` keeps.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct KeptView {
    /// The name of the snapshot.
    pub name: String,
    /// Why it is kept, for people.
    pub why: String,
}

/// Destroys volumes and snapshots, or says what would be destroyed.
pub(super) fn destroy(running: &Running, request: &VolumeRequest) -> Result<VolumeDone, YardError> {
    let name = request.name.clone();
    if !request.copied.is_empty() && (!request.recursive || name.contains('@')) {
        let wanted = "none, unless `recursive` destroys a volume";
        return Err(argument("copied", request.copied.join(", "), wanted));
    }
    let of_copy =
        [("properties", !request.properties.is_empty()), ("key_slot", request.key_slot.is_some())];
    if let Some((field, _)) = of_copy.iter().find(|(_, given)| *given && request.copied.is_empty())
    {
        return Err(argument(field, field, "none of this name without `copied`"));
    }
    let doomed = running.doomed(&name, request.recursive)?;
    let (names, freed_bytes) = destroy_all(running, request, doomed)?;
    let verb = if request.dry_run { "would destroy" } else { "destroyed" };
    let done = match &names[..] {
        all if name.contains(['%']) || name.starts_with('@') => {
            format!("{verb} {}", counted(all.len(), "snapshot"))
        }
        [one] => format!("{verb} {one}"),
        all => format!("{verb} {name} and {}", counted(all.len() - 1, "snapshot")),
    };
    Ok(VolumeDone { name, done, names, freed_bytes, ..VolumeDone::default() })
}

/// Destroys volumes and snapshots, unless the request is for a dry run. Returns their names, and
/// the bytes that this frees if the request wants to know.
fn destroy_all(
    running: &Running,
    request: &VolumeRequest,
    doomed: Vec<VolumeMeta>,
) -> Result<(Vec<String>, Option<u64>), YardError> {
    let ids = doomed.iter().map(|meta| meta.id).collect();
    let freed_bytes = match request.count_freed {
        true => Some(space::freed_bytes(running.pool(), &ids)?),
        false => None,
    };
    let check = || check_copied(running, &doomed, request);
    match request.dry_run {
        true => check()?,
        false => running.destroy_all_if(&doomed, check)?,
    }
    Ok((doomed.into_iter().map(|meta| meta.name).collect(), freed_bytes))
}

/// Refuses to destroy a volume that another pool does not have completely: a snapshot is not among
/// those that were copied, the volume has changed since the newest one, or it has another key slot
/// or a property that the copy lacks.
fn check_copied(
    running: &Running,
    doomed: &[VolumeMeta],
    request: &VolumeRequest,
) -> Result<(), VolumeError> {
    let copied = &request.copied;
    // The volume is the last one.
    let Some((volume, snapshots)) = doomed.split_last().filter(|_| !copied.is_empty()) else {
        return Ok(());
    };
    let lacks = |meta: &VolumeMeta, why: String| {
        Err(VolumeError::NotCopied { name: meta.name.clone(), why })
    };
    if let Some(it) = snapshots.iter().find(|it| !copied.contains(&guid_text(it.guid))) {
        return lacks(it, "a snapshot that was not copied".to_owned());
    }
    let Some(newest) = snapshots.last() else {
        return lacks(volume, "without a snapshot that was copied".to_owned());
    };
    if has_changed(running.pool(), &volume.name, &newest.name)? {
        return lacks(volume, format!("no longer as it was copied, at `{}`", newest.name));
    }
    let present = running.pool().find(&volume.name)?.listed();
    let properties = running.pool().volumes().properties_of(present.id);
    let is_lacking = |it: &PropertyView| {
        let of_copy = request.properties.get(&it.name);
        match it.source {
            PropertySource::Pool => of_copy != Some(&it.value),
            // It may have been removed, and the copy still has one.
            _ => it.name == RESERVATION && of_copy.is_some_and(|value| *value != it.value),
        }
    };
    if let Some(it) = views(&present, &properties, None).into_iter().find(is_lacking) {
        let why = format!("no longer as it was copied: `{}` was set to `{}`", it.name, it.value);
        return Err(VolumeError::Busy { name: present.name, why });
    }
    match key_slot_text(running, &present) {
        Some(slot) if request.key_slot.as_ref() != Some(&slot) => {
            Err(VolumeError::KeyChanged { name: present.name })
        }
        _ => Ok(()),
    }
}

/// Destroys the snapshots that a retention does not keep, or says which it would destroy.
pub(super) fn prune(running: &Running, request: &VolumeRequest) -> Result<VolumeDone, YardError> {
    let (name, retention) = (request.name.clone(), request.retention()?);
    let volume = Some(name.as_str()).filter(|name| !name.is_empty());
    let prefix = request.prefix.as_deref().unwrap_or_default();
    let PrunePlan { doomed, kept } = prune::plan(running, volume, prefix, &retention, now())?;
    let (names, freed_bytes) = destroy_all(running, request, doomed)?;
    let verb = if request.dry_run { "would destroy" } else { "destroyed" };
    let stay = if request.dry_run { "keep" } else { "kept" };
    let done = format!("{verb} {}, {stay} {}", counted(names.len(), "snapshot"), kept.len());
    let kept = kept.into_iter().map(|(name, why)| KeptView { name, why }).collect();
    Ok(VolumeDone { name, done, names, freed_bytes, kept, ..VolumeDone::default() })
}
