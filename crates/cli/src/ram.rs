//! `ram`: work on compressed RAM disks, over the control API.

mod list;

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use blockyard_yard::client::Answer;
use blockyard_yard::ram::{BLOCKS_MAX, RamDone, RamRequest, SAMPLES, snapshot};
use blockyard_yard::size;

use crate::args::{
    DeviceArgs, RamBlocksArgs, RamCommand, RamFileArgs, RamSelectArgs, RamSetArgs, TalkArgs,
};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::human::bar;
use crate::output_file::{OutputFile, Replace, file_failed};

/// Most bytes that are passed on at once.
const PART_BYTES: usize = 256 << 10;

/// What a zstd dictionary begins with.
const DICTIONARY_MAGIC: [u8; 4] = 0xec30_a437_u32.to_le_bytes();

pub(crate) fn run(command: &RamCommand, out: &mut impl Write) -> Result<(), Failure> {
    let nothing = RamRequest::default;
    match command {
        RamCommand::List(args) => list::list(args, out),
        RamCommand::Compact(args) => work(&args.talk, &args.device, "compact", &nothing(), out),
        RamCommand::Idle(args) => work(&args.talk, &args.device, "idle", &nothing(), out),
        RamCommand::Recompress(args) => {
            let request = RamRequest { priority: args.priority, ..selected(&args.select) };
            work(&args.select.talk, &args.select.device, "recompress", &request, out)
        }
        RamCommand::Writeback(args) => {
            let request = RamRequest { limit_bytes: args.limit, ..selected(&args.select) };
            work(&args.select.talk, &args.select.device, "writeback", &request, out)
        }
        RamCommand::Save(args) => save(args, out),
        RamCommand::Train(args) => train(args, out),
        RamCommand::Blocks(args) => blocks(args, out),
        RamCommand::Histograms(args) => histograms(args, out),
        RamCommand::Set(args) => work(&args.talk, &args.device, "set", &settings(args)?, out),
    }
}

/// What is to be set; the yard checks what the numbers mean.
fn settings(args: &RamSetArgs) -> Result<RamRequest, Failure> {
    let mut request = RamRequest::default();
    for (key, value) in &args.pairs {
        let refused = |wanted: &str| {
            let text = format!("invalid {key} `{value}`: expected {wanted}");
            Failure::new(Code::Usage, text)
        };
        let bytes = || size::parse(value).map_err(|_| refused("a size, e.g. 512M"));
        let twice = match key.as_str() {
            "mem_limit" => request.mem_limit.replace(bytes()?).is_some(),
            "mem_used_max" => request.mem_used_max.replace(bytes()?).is_some(),
            "compact" => {
                let percent = value.parse().map_err(|_| refused("1 to 100 percent, or 0"))?;
                request.compact.replace(percent).is_some()
            }
            _ => {
                let text = format!(
                    "`{key}` cannot be set while the device is used; mem_limit, mem_used_max and \
                     compact can"
                );
                return Err(Failure::new(Code::Usage, text));
            }
        };
        if twice {
            return Err(Failure::new(Code::Usage, format!("{key} is given twice; give it once")));
        }
    }
    Ok(request)
}

fn selected(args: &RamSelectArgs) -> RamRequest {
    RamRequest {
        which: args.which.clone(),
        age: args.age,
        threshold_bytes: args.threshold,
        blocks_max: args.max,
        ..RamRequest::default()
    }
}

/// Writes what a RAM disk holds to a file, with the rights of the user of the command.
fn save(args: &RamFileArgs, out: &mut impl Write) -> Result<(), Failure> {
    let replace = Replace { force: args.force, magic: &snapshot::MAGIC };
    let output = OutputFile::create(&args.file, replace)?;
    let mut answer = client(&args.talk).ram_content(&args.device, "snapshot")?;
    let (mut end, mut bytes) = (Vec::new(), 0);
    copy(&mut answer, output.file(), &args.file, |part| {
        bytes += part.len() as u64;
        end.extend_from_slice(part);
        end.drain(..end.len().saturating_sub(snapshot::END_BYTES));
    })?;
    output.finish()?;
    let blocks = end.first_chunk::<{ snapshot::END_BYTES }>().map_or(0, snapshot::blocks_of);
    tell("save", args, [("blocks", blocks), ("bytes", bytes)], out)
}

/// Writes a dictionary that is trained on a RAM disk to a file.
fn train(args: &RamFileArgs, out: &mut impl Write) -> Result<(), Failure> {
    let replace = Replace { force: args.force, magic: &DICTIONARY_MAGIC };
    let output = OutputFile::create(&args.file, replace)?;
    let mut answer = client(&args.talk).ram_content(&args.device, "dictionary")?;
    let samples = answer.header(SAMPLES).and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut bytes = 0;
    copy(&mut answer, output.file(), &args.file, |part| bytes += part.len() as u64)?;
    output.finish()?;
    tell("train", args, [("bytes", bytes), ("samples", samples)], out)
}

fn copy(
    answer: &mut Answer,
    mut file: &File,
    path: &Path,
    mut each: impl FnMut(&[u8]),
) -> Result<(), Failure> {
    let mut part = vec![0; PART_BYTES];
    loop {
        let failed = |error| Failure::new(Code::Refused, format!("stream: {error}"));
        match answer.read(&mut part).map_err(failed)? {
            0 => return Ok(()),
            len => {
                file.write_all(&part[..len]).map_err(|error| file_failed(path, &error))?;
                each(&part[..len]);
            }
        }
    }
}

fn tell(
    verb: &str,
    args: &RamFileArgs,
    done: [(&str, u64); 2],
    out: &mut impl Write,
) -> Result<(), Failure> {
    let done = done.into_iter().map(|(name, number)| (name.to_owned(), number)).collect();
    show(&args.talk, &args.device, verb, &RamDone { done }, out)
}

fn work(
    talk: &TalkArgs,
    device: &str,
    verb: &str,
    request: &RamRequest,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let done = client(talk).ram(device, verb, request)?;
    show(talk, device, verb, &done, out)
}

fn show(
    talk: &TalkArgs,
    device: &str,
    verb: &str,
    done: &RamDone,
    out: &mut impl Write,
) -> Result<(), Failure> {
    if talk.json {
        return print_json(done, out);
    }
    write!(out, "{device}: {verb}:")?;
    if done.done.is_empty() {
        write!(out, " done")?;
    }
    for (name, value) in &done.done {
        write!(out, " {name} {value}")?;
    }
    Ok(writeln!(out)?)
}

/// The columns of zram's `block_state`, with ages in place of times, and stored bytes.
fn blocks(args: &RamBlocksArgs, out: &mut impl Write) -> Result<(), Failure> {
    let (client, mut from) = (client(&args.talk), Some(args.from));
    let mut left = args.count.unwrap_or(u64::MAX);
    let mut all = Vec::new();
    while let Some(first) = from.filter(|_| left > 0) {
        let count = left.min(BLOCKS_MAX as u64);
        let page = client.blocks(&args.device, first, count as usize)?;
        left -= page.blocks.len() as u64;
        from = page.next;
        if args.talk.json {
            all.extend(page.blocks);
            continue;
        }
        for block in page.blocks {
            let (number, age, bytes) = (block.block, block.age, block.stored_bytes);
            writeln!(out, "{number:12} {age:3} {bytes:6} {}", block.flags)?;
        }
    }
    if args.talk.json { print_json(&all, out) } else { Ok(()) }
}

fn histograms(args: &DeviceArgs, out: &mut impl Write) -> Result<(), Failure> {
    let found = client(&args.talk).histograms(&args.device)?;
    if args.talk.json {
        return print_json(&found, out);
    }
    let sizes = found.sizes.iter().map(|size| (size.bytes, size.objects));
    print_histogram(["bytes", "objects"], &sizes.collect::<Vec<_>>(), out)?;
    writeln!(out)?;
    let ages: Vec<(u64, u64)> = (0..).zip(found.ages).collect();
    print_histogram(["age", "blocks"], &ages, out)
}

/// Prints counts by value, each with a bar.
fn print_histogram(
    headings: [&str; 2],
    counts: &[(u64, u64)],
    out: &mut impl Write,
) -> Result<(), Failure> {
    let most = counts.iter().map(|(_, count)| *count).max().unwrap_or(0);
    writeln!(out, "{:>8} {:>12}", headings[0], headings[1])?;
    for (value, count) in counts {
        let line = format!("{value:8} {count:12}  {}", bar(*count, most));
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}
