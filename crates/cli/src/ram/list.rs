//! `ram list`: RAM disks, as `zramctl` lists zram devices.

use std::io::Write;

use blockyard_os::mount_point;
use blockyard_yard::ram::RamView;
use blockyard_yard::uri;
use blockyard_yard::view::{DeviceView, StatsView};
use serde_json::{Value, json};

use crate::args::RamListArgs;
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::human::{Columns, rounded, terminal_width};

/// All columns, with the names of zramctl.
const COLUMNS: [&str; 13] = [
    "NAME",
    "DISKSIZE",
    "DATA",
    "COMPR",
    "ALGORITHM",
    "STREAMS",
    "ZERO-PAGES",
    "TOTAL",
    "MEM-LIMIT",
    "MEM-USED",
    "MIGRATED",
    "COMP-RATIO",
    "MOUNTPOINT",
];

/// The columns that are shown without `-o`, as of zramctl.
const USUAL: [&str; 8] =
    ["NAME", "ALGORITHM", "DISKSIZE", "DATA", "COMPR", "TOTAL", "STREAMS", "MOUNTPOINT"];

/// The usual columns that a terminal that is too narrow does not show, the first ones first.
const OPTIONAL: [&str; 3] = ["MOUNTPOINT", "STREAMS", "TOTAL"];

/// A RAM disk.
struct RamRow {
    device: DeviceView,
    ram: RamView,
}

impl RamRow {
    fn algorithm(&self) -> String {
        let spec = uri::parse(&self.device.uri).ok();
        let names = ["lz4", "lz4hc", "zstd"];
        spec.and_then(|spec| names.get(spec.choice("algo")).copied()).unwrap_or("-").to_owned()
    }

    /// Where the block device of the kernel that the disk is, is mounted.
    fn mount_point(&self) -> String {
        let source = self.device.ublk.as_deref();
        let point = source.and_then(|source| mount_point(source).ok().flatten());
        point.map_or_else(String::new, |point| point.display().to_string())
    }

    fn cell(&self, column: &str, in_bytes: bool) -> String {
        let size = |bytes: u64| if in_bytes { bytes.to_string() } else { rounded(bytes) };
        let mm = &self.ram.mm_stat;
        match column {
            "NAME" => self.device.name.clone(),
            "DISKSIZE" => size(self.device.size_bytes),
            "DATA" => size(mm.orig_data_size),
            "COMPR" => size(mm.compr_data_size),
            "ALGORITHM" => self.algorithm(),
            "STREAMS" => self.device.channels.to_string(),
            "ZERO-PAGES" => mm.same_pages.to_string(),
            "TOTAL" => size(mm.mem_used_total),
            "MEM-LIMIT" => size(mm.mem_limit),
            "MEM-USED" => size(mm.mem_used_max),
            "MIGRATED" => mm.pages_compacted.to_string(),
            "COMP-RATIO" => match mm.mem_used_total {
                0 => "-".to_owned(),
                total => format!("{:.4}", mm.orig_data_size as f64 / total as f64),
            },
            _ => self.mount_point(),
        }
    }

    fn json(&self) -> Value {
        json!({
            "name": self.device.name,
            "algorithm": self.algorithm(),
            "size_bytes": self.device.size_bytes,
            "streams": self.device.channels,
            "mm_stat": self.ram.mm_stat,
            "mount_point": Some(self.mount_point()).filter(|point| !point.is_empty()),
        })
    }
}

/// The columns that are to be shown.
fn columns(args: &RamListArgs) -> Result<Vec<&'static str>, Failure> {
    if args.output_all {
        return Ok(COLUMNS.to_vec());
    }
    if args.output.is_empty() {
        return Ok(USUAL.to_vec());
    }
    let column = |name: &String| {
        COLUMNS.into_iter().find(|column| column.eq_ignore_ascii_case(name)).ok_or_else(|| {
            let text = format!("invalid -o `{name}`: expected one of {}", COLUMNS.join(", "));
            Failure::new(Code::Usage, text)
        })
    };
    args.output.iter().map(column).collect()
}

pub(super) fn list(args: &RamListArgs, out: &mut impl Write) -> Result<(), Failure> {
    let headings = columns(args)?;
    let client = client(&args.talk);
    let (devices, stats) = (client.devices()?, client.stats()?);
    let rows = rows(devices, &stats, &args.devices)?;
    if args.talk.json {
        return print_json(&rows.iter().map(RamRow::json).collect::<Vec<_>>(), out);
    }
    let cells = |row: &RamRow| {
        headings.iter().map(|column| row.cell(column, args.bytes)).collect::<Vec<_>>()
    };
    let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    if args.raw {
        let headings = headings.iter().map(|it| (*it).to_owned()).collect();
        let lines = (!args.noheadings).then_some(headings).into_iter().chain(cells);
        return Ok(lines.into_iter().try_for_each(|line| writeln!(out, "{}", line.join(" ")))?);
    }
    let is_usual = args.output.is_empty() && !args.output_all;
    let table = Columns { headings, texts: &["ALGORITHM", "MOUNTPOINT"], rows: cells };
    let width = terminal_width().filter(|_| is_usual);
    match args.noheadings {
        false => Ok(table.print(&OPTIONAL, width, out)?),
        true => Ok(table.print_aligned(out)?),
    }
}

/// The RAM disks of these names, or all.
fn rows(
    devices: Vec<DeviceView>,
    stats: &[StatsView],
    names: &[String],
) -> Result<Vec<RamRow>, Failure> {
    let ram = |name: &str| stats.iter().find(|it| it.device == name).and_then(|it| it.ram);
    let row = |device: DeviceView| ram(&device.name).map(|ram| RamRow { device, ram });
    let all: Vec<RamRow> = devices.into_iter().filter_map(row).collect();
    if let Some(name) = names.iter().find(|name| all.iter().all(|row| row.device.name != **name)) {
        let text = format!("there is no RAM disk `{name}`");
        return Err(Failure::new(Code::NoSuchDevice, text));
    }
    let is_named = |row: &RamRow| names.is_empty() || names.contains(&row.device.name);
    Ok(all.into_iter().filter(is_named).collect())
}
