//! The memory that this process may use.

use std::path::Path;

/// The bytes of memory that this process may use: those of the machine, or fewer if its control
/// group, or one above that, has a limit. `u64::MAX` if the system does not report it.
pub fn available_bytes() -> u64 {
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let groups = read(Path::new("/proc/self/cgroup"));
    let limits = limit_files(&groups).into_iter().filter_map(|file| bytes_in(&read(&file)));
    let machine = meminfo_bytes(&read(Path::new("/proc/meminfo")), "MemTotal:");
    limits.chain(machine).min().unwrap_or(u64::MAX)
}

/// The bytes of memory that this process can still take: those that the machine has available, or
/// fewer if its control group, or one above that, has less left. `u64::MAX` if the system does not
/// report it.
pub(crate) fn free_bytes() -> u64 {
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let groups = read(Path::new("/proc/self/cgroup"));
    let left = limit_files(&groups).into_iter().filter_map(|file| left_bytes(&file, &read));
    let machine = meminfo_bytes(&read(Path::new("/proc/meminfo")), "MemAvailable:");
    left.chain(machine).min().unwrap_or(u64::MAX)
}

/// What a control group has left, from the files in its directory. Its page cache
/// that was not used lately can be freed. The limit above which a group is slowed down counts too.
fn left_bytes(limit: &Path, read: &dyn Fn(&Path) -> String) -> Option<u64> {
    let sibling = |name: &str| read(&limit.with_file_name(name));
    let (usage, cache, slows) = match limit.ends_with("memory.max") {
        true => ("memory.current", "inactive_file ", "memory.high"),
        false => ("memory.usage_in_bytes", "total_inactive_file ", ""),
    };
    let slows = (!slows.is_empty()).then(|| bytes_in(&sibling(slows))).flatten();
    let limit = bytes_in(&read(limit)).into_iter().chain(slows).min()?;
    let stat = sibling("memory.stat");
    let cache = stat.lines().find_map(|line| bytes_in(line.strip_prefix(cache)?)).unwrap_or(0);
    let used = bytes_in(&sibling(usage))?.saturating_sub(cache);
    Some(limit.saturating_sub(used))
}

/// The files that may contain a limit for the groups of a process: its own and those above it.
fn limit_files(groups: &str) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for line in groups.lines() {
        // cgroups(7): number, controllers, path.
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|one| one == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        for group in Path::new(path).ancestors() {
            let below = group.strip_prefix("/").unwrap_or(group);
            files.push(Path::new(root).join(below).join(file));
        }
    }
    files
}

/// The number in such a file; `None` for `max`.
fn bytes_in(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

fn meminfo_bytes(meminfo: &str, field: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_group_and_of_those_above_it_are_found() {
        let files = |text| {
            let files = limit_files(text).into_iter();
            files.map(|file| file.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(
            files("0::/a/b\n"),
            [
                "/sys/fs/cgroup/a/b/memory.max",
                "/sys/fs/cgroup/a/memory.max",
                "/sys/fs/cgroup/memory.max"
            ]
        );
        assert_eq!(
            files("5:cpu,memory:/x\n3:cpu:/x\nnonsense\n"),
            [
                "/sys/fs/cgroup/memory/x/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes"
            ]
        );
        assert_eq!((bytes_in("167772160\n"), bytes_in("max\n")), (Some(160 << 20), None));
        let meminfo = "MemFree: 1 kB\nMemTotal:       2048 kB\n";
        assert_eq!(meminfo_bytes(meminfo, "MemTotal:"), Some(2 << 20));
        assert!(available_bytes() > 1 << 20);
    }

    #[test]
    fn what_a_group_has_left_is_its_limit_without_what_it_needs() {
        let left = |files: &[(&str, &str)]| {
            let read = |path: &Path| {
                let found = files.iter().find(|(name, _)| path.ends_with(name));
                found.map_or_else(String::new, |(_, text)| (*text).to_owned())
            };
            left_bytes(&Path::new("/g").join(files[0].0), &read)
        };
        let (max, current) = (("memory.max", "1000\n"), ("memory.current", "700\n"));
        assert_eq!(left(&[max, current]), Some(300));
        let stat = ("memory.stat", "active_file 7\ninactive_file 100\n");
        assert_eq!(left(&[max, current, stat]), Some(400));
        assert_eq!(left(&[max, current, stat, ("memory.high", "800\n")]), Some(200));
        assert_eq!(left(&[("memory.max", "max\n"), current]), None);
        assert_eq!(left(&[("memory.max", "max\n"), current, ("memory.high", "600\n")]), Some(0));
        let old = [("memory.limit_in_bytes", "1000\n"), ("memory.usage_in_bytes", "1000\n")];
        let stat = ("memory.stat", "inactive_file 1\ntotal_inactive_file 50\n");
        assert_eq!(left(&[old[0], old[1], stat]), Some(50));
        assert!(free_bytes() > 1 << 20);
    }
}
