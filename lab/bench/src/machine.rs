//! The machine of a run, and how busy it was.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Ticks of `/proc/stat` in a second: `USER_HZ`, the same on every architecture that we run on.
const TICKS_PER_SECOND: f64 = 100.0;

/// The facts about the machine that affect the figures of a run. A fact that cannot be read is left
/// out.
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

/// The load of the machine by other processes, in processors on average.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Others {
    /// The processors that other processes kept busy.
    pub busy: f64,
    /// The processors that the host gave to other virtual machines.
    pub stolen: f64,
}

/// The machine's clocks at one moment, in ticks since it was started.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clocks {
    /// The time of all processors.
    total: f64,
    /// User space and the kernel, interrupts included.
    busy: f64,
    /// The time that the host gave to other virtual machines.
    stolen: f64,
    /// The time of this process, and of children that were waited for.
    own: f64,
    /// The number of processors of the machine.
    processors: f64,
}

impl Clocks {
    /// The clocks now; `None` where the system does not say.
    pub fn now() -> Option<Clocks> {
        Clocks::parse(&read("/proc/stat")?, &read("/proc/self/stat")?)
    }

    fn parse(machine: &str, own: &str) -> Option<Clocks> {
        let all = machine.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let ticks: Vec<f64> = all.split_whitespace().map_while(|word| word.parse().ok()).collect();
        // user nice system idle iowait irq softirq steal; guest times are in user's.
        let [user, nice, system, idle, waiting, irq, softirq, stolen] = *ticks.first_chunk()?;
        let busy = user + nice + system + irq + softirq;
        let is_processor = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
        let processors = machine.lines().filter(is_processor).count();
        // The name, in brackets, may contain anything; the times are the 12th to 15th field after
        // it.
        let (_, own) = own.rsplit_once(')')?;
        let own = own.split_whitespace().skip(11).take(4).map(str::parse::<f64>);
        let own: Vec<f64> =
            own.collect::<Result<_, _>>().ok().filter(|own: &Vec<f64>| own.len() == 4)?;
        Some(Clocks {
            total: busy + idle + waiting + stolen,
            busy,
            stolen,
            own: own.iter().sum(),
            processors: processors.max(1) as f64,
        })
    }

    /// The busy time of all processors together since an earlier moment, by any process.
    pub fn busy_since(&self, before: &Clocks) -> Duration {
        Duration::from_secs_f64((self.busy - before.busy).max(0.0) / TICKS_PER_SECOND)
    }

    /// The load by other processes since an earlier moment. A child of ours that still runs counts
    /// as another process.
    pub fn since(&self, before: &Clocks) -> Others {
        let total = (self.total - before.total).max(1.0);
        let of = |ticks: f64| (ticks / total).clamp(0.0, 1.0) * self.processors;
        let ours = self.own - before.own;
        let others = self.busy - before.busy - ours;
        Others { busy: of(others), stolen: of(self.stolen - before.stolen) }
    }
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
    fn others_are_what_is_left_of_the_busy_time() {
        let machine = |user, idle, stolen| {
            format!("cpu  {user} 10 20 {idle} 5 1 2 {stolen} 0 0\ncpu0 1 2\ncpu1 3 4\nintr 9\n")
        };
        let own = |user, children| {
            format!("77 (a) b) R 1 1 1 0 -1 0 0 0 0 0 {user} 5 {children} 2 20 0 1\n")
        };
        let at = |m: &str, o: &str| Clocks::parse(m, o).unwrap();
        let before = at(&machine(100, 1000, 7), &own(50, 10));
        let after = at(&machine(200, 1080, 27), &own(100, 20));
        // Of 200 ticks of two processors, 100 were busy, 60 of them with this process, and 20 were
        // stolen.
        assert_eq!(after.since(&before), Others { busy: 0.4, stolen: 0.2 });
        assert_eq!(after.busy_since(&before), Duration::from_secs(1));
        assert_eq!(Clocks::parse("cpu  1 2 3", &own(1, 1)), None);
        assert_eq!(Clocks::parse(&machine(1, 2, 3), "77 (a) R 1"), None);
        assert!(Clocks::now().is_some());
    }

    #[test]
    fn this_machine_has_a_processor_and_a_name() {
        let machine = Machine::here();
        assert!(machine.processors >= 1);
        assert!(!machine.cpu.is_empty());
    }
}
