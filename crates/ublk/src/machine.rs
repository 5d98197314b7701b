//! The ublk devices of the machine, ours and those of other programs: listed, found, removed.

use std::fs;
use std::path::Path;

use crate::abi::{ControlCommand, DevInfo, DeviceState, block_path};
use crate::control::Control;
use crate::error::UblkError;
use crate::name_file;

/// The directory with an entry `ublkcN` for each device.
const CLASS: &str = "/sys/class/ublk-char";

/// The mount table of this process.
const MOUNTS: &str = "/proc/self/mountinfo";

/// A ublk device of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MachineDevice {
    /// The number N of `/dev/ublkbN`.
    pub id: u32,
    /// The state: `live`, `quiesced` (requests wait for a server), `failing`, `dead` (no block
    /// device) or `unknown`.
    pub state: &'static str,
    /// The process of the server, if it is running.
    pub pid: Option<i32>,
    /// Whether a yard has made it, and no other program.
    pub is_ours: bool,
    /// The name of the device in the yard that serves or has served it, if it is known.
    pub device: Option<String>,
    /// The number of queues.
    pub queues: u16,
    /// The requests of a queue.
    pub depth: u16,
}

/// The ublk devices of the machine, by their numbers.
///
/// # Errors
/// If the kernel has no ublk driver, or refuses it to this process.
pub fn list() -> Result<Vec<MachineDevice>, UblkError> {
    let mut control = Control::open()?;
    let mut devices = Vec::new();
    for id in ids()? {
        // It may have been deleted just now.
        let Some(info) = control.info(id)? else { continue };
        devices.push(MachineDevice {
            id,
            state: info.state.name(),
            pid: Some(info.pid).filter(|pid| is_alive(*pid)),
            is_ours: name_file::is_ours(info.identity),
            device: name_file::read(id, info.identity),
            queues: info.queues,
            depth: info.depth,
        });
    }
    Ok(devices)
}

/// Removes a ublk device that has no server; with `force` also one that is mounted, or that another
/// program has made. Requests that wait for a server fail.
///
/// # Errors
/// If there is none of this number, a process serves it, it is mounted, another program has made
/// it, or the kernel refuses.
pub fn remove(id: u32, force: bool) -> Result<(), UblkError> {
    let mut control = Control::open()?;
    let info = control.info(id)?.ok_or(UblkError::Unknown { id })?;
    if info.state == DeviceState::Live && is_alive(info.pid) {
        return Err(UblkError::InUse { id, pid: info.pid });
    }
    if !force && !name_file::is_ours(info.identity) {
        return Err(UblkError::NotOurs { id, state: info.state.name() });
    }
    // Not by opening it: that may wait for the server that is missing.
    if !force && has_mount(&fs::read_to_string(MOUNTS)?, &numbers(id), &block_path(id)) {
        return Err(UblkError::Mounted { id });
    }
    control.command(ControlCommand::StopDev, id, 0)?;
    delete(&mut control, id)?;
    name_file::remove(id);
    Ok(())
}

/// The device numbers `major:minor` of a block device and of its partitions.
fn numbers(id: u32) -> Vec<String> {
    let dir = format!("/sys/block/ublkb{id}");
    let number = |dir: &Path| fs::read_to_string(dir.join("dev")).ok();
    // A device that is stopped has no such directory; what else is in it has no `dev`.
    let parts = fs::read_dir(&dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let dirs = std::iter::once(dir.into()).chain(parts);
    dirs.filter_map(|dir| number(&dir)).map(|number| number.trim().to_owned()).collect()
}

/// Whether a mount table has a block device of these numbers, or of this path or a partition of it:
/// btrfs mounts under numbers of its own.
///
/// proc(5): `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`.
fn has_mount(table: &str, numbers: &[String], path: &str) -> bool {
    let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    let is_source = |source: &str| {
        let rest = source.strip_prefix(path);
        rest.is_some_and(|rest| rest.is_empty() || rest.strip_prefix('p').is_some_and(is_digits))
    };
    table.lines().any(|line| {
        let mut words = line.split(' ');
        let number = words.nth(2).unwrap_or_default();
        let source = words.skip_while(|word| *word != "-").nth(2);
        numbers.iter().any(|it| it == number) || source.is_some_and(is_source)
    })
}

/// The first device that fits.
pub(crate) fn find(
    control: &mut Control,
    fits: impl Fn(&DevInfo) -> bool,
) -> Result<Option<DevInfo>, UblkError> {
    for id in ids()? {
        if let Some(info) = control.info(id)?.filter(|info| fits(info)) {
            return Ok(Some(info));
        }
    }
    Ok(None)
}

/// Deletes a device that is stopped or was never started. Does not wait for programs that have its
/// block device open.
pub(crate) fn delete(control: &mut Control, id: u32) -> Result<(), UblkError> {
    match control.command(ControlCommand::DelDevAsync, id, 0) {
        Err(UblkError::Command { source, .. })
            if source.raw_os_error() == Some(libc::EOPNOTSUPP) =>
        {
            // Linux before 6.7.
            control.command(ControlCommand::DelDev, id, 0)
        }
        Err(UblkError::Command { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => {
            Ok(())
        }
        result => result,
    }
}

/// Whether a process exists and has not ended.
pub(crate) fn is_alive(pid: i32) -> bool {
    if pid <= 0 {
        return false;
    }
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // proc(5): the state follows the name, which is in parentheses and may have any character.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

/// The numbers of all devices, in order.
fn ids() -> Result<Vec<u32>, UblkError> {
    let entries = match fs::read_dir(CLASS) {
        Ok(entries) => entries,
        // Without a device there may be no directory.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let number = |name: &str| name.strip_prefix("ublkc").and_then(|number| number.parse().ok());
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut ids: Vec<u32> = names.filter_map(|name| number(&name)).collect();
    ids.sort_unstable();
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mounted_device_is_found_by_number_or_source() {
        let (number, source) = (["259:3".to_owned()], "/dev/ublkb1");
        for (line, is_mounted) in [
            ("36 35 259:3 / /mnt rw,noatime master:1 shared:2 - ext4 /dev/root rw", true),
            ("36 35 0:44 /sub /mnt rw - btrfs /dev/ublkb1 rw,subvol=/", true),
            ("36 35 259:4 / /mnt rw - ext4 /dev/ublkb1p2 rw", true),
            ("36 35 259:4 / /mnt rw - ext4 /dev/ublkb10 rw", false),
            ("36 35 259:4 / /mnt rw - ext4 /dev/ublkb1px rw", false),
            ("36 35 259:30 / /dev/ublkb1 rw - ext4 /dev/sda rw", false),
            ("259:3", false),
            ("", false),
        ] {
            let table = format!("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n{line}\n");
            assert_eq!(has_mount(&table, &number, source), is_mounted, "{line}");
        }
        // The root of this process, which has a table.
        let table = fs::read_to_string(MOUNTS).unwrap();
        let root = table.lines().next().unwrap().split(' ').nth(2).unwrap().to_owned();
        assert!(has_mount(&table, &[root], source) && !has_mount(&table, &[], source));
        assert!(numbers(u32::MAX).is_empty());
    }

    #[test]
    fn this_process_is_alive_and_no_process_is_not() {
        assert!(is_alive(std::process::id() as i32));
        assert!(!is_alive(0) && !is_alive(-1) && !is_alive(i32::MAX));
    }
}
