//! The machine that a run was made on, and how busy it was.

use std::collections::BTreeSet;
use std::fs;

use serde::{Deserialize, Serialize};

/// What the figures of a run depend on. What cannot be read is left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's name.
    pub cpu: String,
    /// Processors that this process may use.
    pub processors: usize,
    /// Sockets, as far as the system shows them.
    pub sockets: Option<usize>,
    /// Whether it is a virtual machine, which shares its processors with others.
    pub is_virtual: bool,
    /// The kernel's release.
    pub kernel: String,
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
    /// The frequency governor of the first processor.
    pub governor: Option<String>,
}

impl Machine {
    /// This machine.
    pub fn here() -> Machine {
        let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
        let sockets: BTreeSet<&str> = fields(&cpuinfo, "physical id").collect();
        let meminfo = read("/proc/meminfo").unwrap_or_default();
        let kib = fields(&meminfo, "MemTotal").next();
        let kib = kib.and_then(|text| text.trim_end_matches(" kB").parse::<u64>().ok());
        let name = ["model name", "Model", "Hardware"];
        let cpu = name.into_iter().find_map(|key| fields(&cpuinfo, key).next());
        let flags = fields(&cpuinfo, "flags").next().unwrap_or_default();
        Machine {
            cpu: cpu.unwrap_or(std::env::consts::ARCH).to_owned(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            sockets: (!sockets.is_empty()).then_some(sockets.len()),
            is_virtual: flags.split(' ').any(|flag| flag == "hypervisor"),
            kernel: read("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            memory_bytes: kib.map(|kib| kib << 10),
            governor: read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
                .map(|governor| governor.trim().to_owned()),
        }
    }
}

/// The load average of the last minute; `None` where the system does not say.
pub fn load() -> Option<f64> {
    let text = read("/proc/loadavg")?;
    text.split(' ').next()?.parse().ok()
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// The values of a key in text of the form `key : value`.
fn fields<'a>(text: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter_map(move |line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then_some(value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "model\t\t: 6\nmodel name\t: A CPU: fast\nmodel name\t: B\n";
        assert_eq!(fields(text, "model name").collect::<Vec<_>>(), ["A CPU: fast", "B"]);
        assert_eq!(fields(text, "name").next(), None);
    }

    #[test]
    fn this_machine_has_a_processor_and_a_name() {
        let machine = Machine::here();
        assert!(machine.processors >= 1);
        assert!(!machine.cpu.is_empty());
    }
}
