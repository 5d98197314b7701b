//! `ram`: work on compressed RAM disks, over the control API.

use std::io::Write;
use std::path::Path;

use blockyard_yard::ram::{BLOCKS_MAX, RamRequest};
use blockyard_yard::size;

use crate::args::{
    DeviceArgs, RamBlocksArgs, RamCommand, RamFileArgs, RamSelectArgs, RamSetArgs, TalkArgs,
};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};

pub(crate) fn run(command: &RamCommand, out: &mut impl Write) -> Result<(), Failure> {
    let nothing = RamRequest::default;
    match command {
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
        RamCommand::Save(args) => file("save", args, out),
        RamCommand::Train(args) => file("train", args, out),
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
            let text = format!("{key}: `{value}` will not do: wanted {wanted}");
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

fn file(verb: &str, args: &RamFileArgs, out: &mut impl Write) -> Result<(), Failure> {
    // The daemon may stand in another directory.
    let path = std::path::absolute(&args.file)
        .map_err(|error| Failure::new(Code::Usage, format!("{}: {error}", args.file.display())))?;
    let file = text(&path)?;
    let request = RamRequest { file: Some(file), ..RamRequest::default() };
    work(&args.talk, &args.device, verb, &request, out)
}

fn text(path: &Path) -> Result<String, Failure> {
    let wrong = || Failure::new(Code::Usage, format!("{}: wanted UTF-8", path.display()));
    path.to_str().map(str::to_owned).ok_or_else(wrong)
}

fn work(
    talk: &TalkArgs,
    device: &str,
    verb: &str,
    request: &RamRequest,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let done = client(talk).ram(device, verb, request)?;
    if talk.json {
        return print_json(&done, out);
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
    writeln!(out, "{:>8} {:>12}", "bytes", "objects")?;
    for size in &found.sizes {
        writeln!(out, "{:8} {:12}", size.bytes, size.objects)?;
    }
    writeln!(out, "\n{:>8} {:>12}", "age", "blocks")?;
    for (age, blocks) in found.ages.iter().enumerate() {
        writeln!(out, "{age:8} {blocks:12}")?;
    }
    Ok(())
}
