//! The memory that this process may use.

use std::path::Path;

/// The bytes of memory that this process may use: those of the machine, or fewer if its control
/// group, or one above that, has a limit. `u64::MAX` if the system does not report it.
pub fn available_bytes() -> u64 {
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let groups = read(Path::new("/proc/self/cgroup"));
    let limits = limit_files(&groups).into_iter().filter_map(|file| bytes_in(&read(&file)));
    let machine = machine_bytes(&read(Path::new("/proc/meminfo")));
    limits.chain(machine).min().unwrap_or(u64::MAX)
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

fn machine_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
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
        assert_eq!(machine_bytes("MemFree: 1 kB\nMemTotal:       2048 kB\n"), Some(2 << 20));
        assert!(available_bytes() > 1 << 20);
    }
}
