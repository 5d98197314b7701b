//! The physical memory of another process.

use std::fs;
use std::io;

/// Bytes in a unit of the kernel's reports.
const KIB: u64 = 1024;

/// The anonymous memory of a process in bytes, exactly: its heap, stacks and mapped buffers. Its
/// program and the files and memory that it shares with others are not part of it, nor is what the
/// kernel holds for it: page tables, sockets, rings of io_uring.
pub(crate) fn anonymous_bytes(pid: u32) -> io::Result<u64> {
    field(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?, "Anonymous:")
}

/// The greatest physical memory of a process until now in bytes, with its program.
pub(crate) fn peak_bytes(pid: u32) -> io::Result<u64> {
    field(&fs::read_to_string(format!("/proc/{pid}/status"))?, "VmHWM:")
}

fn field(text: &str, name: &str) -> io::Result<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib * KIB).ok_or_else(|| io::Error::other(format!("no `{name}` in kB")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "Rss:      12 kB\nLazyAnonymous: 1 kB\nAnonymous:     34 kB\nVmHWM: 5 MB\n";
        assert_eq!(field(text, "Anonymous:").unwrap(), 34 * KIB);
        assert!(field(text, "VmHWM:").is_err() && field(text, "Pss:").is_err());
    }

    #[test]
    fn memory_counts_from_its_first_use() {
        let pid = std::process::id();
        let (len, before) = (64 << 20, anonymous_bytes(pid).unwrap());
        let mut memory = Vec::<u8>::with_capacity(len);
        let reserved = anonymous_bytes(pid).unwrap();
        memory.resize(len, 1);
        let used = anonymous_bytes(pid).unwrap();
        assert!(std::hint::black_box(&memory).len() == len);
        // Other tests run in this process too.
        assert!(reserved < before + len as u64 / 2, "{before} {reserved}");
        assert!(used > reserved + len as u64 / 2, "{reserved} {used}");
        assert!(peak_bytes(pid).unwrap() >= used);
    }
}
