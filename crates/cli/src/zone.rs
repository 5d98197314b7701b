//! `zone`: the report and the verbs of blkzone, over the control API, and `zone check`.

use std::io::{Read, Write};

use blockyard_core::SECTOR_BYTES;
use blockyard_yard::client::{Client, ClientError};
use blockyard_yard::error::{YardError, counted};
use blockyard_yard::size::Bytes;
use blockyard_yard::stack;
use blockyard_yard::view::{ZoneRequest, ZoneView};
use blockyard_yard::zone_check::{VerdictView, of_disk, of_served};
use blockyard_yard::zone_image::{self, ZoneImageDone};
use serde_json::json;

use crate::args::{
    Amount, Distance, Subject, TalkArgs, ZoneArgs, ZoneChangeArgs, ZoneCheckArgs, ZoneCommand,
    ZoneImageArgs, ZoneResetAllArgs,
};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::output_file::{OutputFile, Replace, file_failed};

/// Zones asked for at once.
const PAGE: usize = 4096;

/// Most bytes that are passed on at once.
const PART_BYTES: usize = 256 << 10;

pub(crate) fn run(command: &ZoneCommand, out: &mut impl Write) -> Result<(), Failure> {
    match command {
        ZoneCommand::Report(args) => report(args, out),
        ZoneCommand::Open(args) => manage("open", args, out),
        ZoneCommand::Close(args) => manage("close", args, out),
        ZoneCommand::Finish(args) => manage("finish", args, out),
        ZoneCommand::Reset(args) => manage("reset", args, out),
        ZoneCommand::ResetAll(ZoneResetAllArgs { device, force, talk }) => {
            let request = ZoneRequest { force: *force, ..ZoneRequest::default() };
            let done = client(talk).manage(device, "reset-all", &request)?;
            print_done(talk, device, "reset-all", done.zones, out)
        }
        ZoneCommand::Check(args) => check(args, out),
        ZoneCommand::Save(args) => save(args, out),
        ZoneCommand::Load(args) => load(args, out),
    }
}

/// Writes an image to a file, with the rights of the user of the command.
fn save(args: &ZoneImageArgs, out: &mut impl Write) -> Result<(), Failure> {
    let replace = Replace { force: args.force, magic: zone_image::MAGIC };
    let output = OutputFile::create(&args.file, replace)?;
    let mut answer = client(&args.talk).zone_image(&args.device)?;
    let (mut part, mut bytes) = (vec![0; PART_BYTES], 0);
    loop {
        let failed = |error| Failure::new(Code::Refused, format!("stream: {error}"));
        let len = answer.read(&mut part).map_err(failed)?;
        if len == 0 {
            break;
        }
        let written = output.file().write_all(&part[..len]);
        written.map_err(|error| file_failed(&args.file, &error))?;
        bytes += len as u64;
    }
    output.finish()?;
    let device = &args.device;
    if args.talk.json {
        return print_json(&json!({ "device": device, "verb": "save", "bytes": bytes }), out);
    }
    Ok(writeln!(out, "{device}: saved {} to {}", counted(bytes, "byte"), args.file.display())?)
}

/// Sends an image to a device.
fn load(args: &ZoneImageArgs, out: &mut impl Write) -> Result<(), Failure> {
    let file = std::fs::File::open(&args.file);
    let mut file = file.map_err(|error| {
        Failure::new(Code::Failed, format!("cannot read `{}`: {error}", args.file.display()))
    })?;
    let ZoneImageDone { zones, bytes } =
        client(&args.talk).load_zone_image(&args.device, args.force, &mut file)?;
    let device = &args.device;
    if args.talk.json {
        let done = json!({ "device": device, "verb": "load", "zones": zones, "bytes": bytes });
        return print_json(&done, out);
    }
    let (zones, bytes) = (counted(zones, "zone"), counted(bytes, "byte"));
    Ok(writeln!(out, "{device}: loaded {zones}, {bytes}")?)
}

fn check(args: &ZoneCheckArgs, out: &mut impl Write) -> Result<(), Failure> {
    let verdicts = verdicts(args)?;
    if args.talk.json {
        print_json(&verdicts, out)?;
    } else {
        for verdict in &verdicts {
            print_verdict(verdict, out)?;
        }
    }
    match verdicts.iter().all(|verdict| verdict.accepted) {
        true => Ok(()),
        false => Err(Failure::Silent(Code::Refused)),
    }
}

fn verdicts(args: &ZoneCheckArgs) -> Result<Vec<VerdictView>, Failure> {
    let made = match &args.subject {
        Subject::Served(_) => None,
        Subject::Made(spec) => {
            let made = stack::open(spec).map_err(|error| Failure::new(Code::Usage, error))?;
            Some(made.disk)
        }
    };
    let name = match &args.subject {
        Subject::Served(name) => name,
        Subject::Made(spec) => spec.name(),
    };
    let verdict = |&target| {
        let verdict = match &made {
            Some(disk) => of_disk(target, &**disk),
            None => of_served(target, &client(&args.talk), name)?,
        };
        let verdict = verdict.ok_or_else(|| not_zoned(name))?;
        Ok(VerdictView::new(name, target, verdict))
    };
    args.targets.iter().map(verdict).collect()
}

fn print_verdict(verdict: &VerdictView, out: &mut impl Write) -> Result<(), Failure> {
    let VerdictView { device, target, accepted, refusals, notes } = verdict;
    writeln!(out, "{device}: {target}: {}", if *accepted { "accepted" } else { "refused" })?;
    for refusal in refusals {
        let error = refusal.error.as_ref().map(|error| format!(" ({error})")).unwrap_or_default();
        writeln!(out, "  {}{error}: {}", refusal.by, refusal.message)?;
        writeln!(out, "    {}", refusal.about)?;
    }
    for note in notes {
        writeln!(out, "  note: {note}")?;
    }
    Ok(())
}

fn report(args: &ZoneArgs, out: &mut impl Write) -> Result<(), Failure> {
    let client = client(&args.talk);
    let range = ZoneRange::of(&client, args)?;
    let mut from = range.offset.unwrap_or(0);
    let end = range.length.and_then(|length| from.checked_add(length));
    let mut left = args.count.unwrap_or(u64::MAX);
    let mut all: Vec<ZoneView> = Vec::new();
    while left > 0 {
        let count = PAGE.min(left.try_into().unwrap_or(PAGE));
        let page = client.zones(&args.device, from, count);
        let page = page.map_err(|error| in_options(args, error))?;
        for zone in page.zones {
            if left == 0 || end.is_some_and(|end| zone.start >= end) {
                left = 0;
                break;
            }
            left -= 1;
            match args.talk.json {
                true => all.push(zone),
                false => writeln!(out, "{}", zone.line())?,
            }
        }
        match page.next {
            // An answer that leads nowhere ends the report rather than never.
            Some(next) if next > from => from = next,
            _ => break,
        }
    }
    if args.talk.json { print_json(&all, out) } else { Ok(()) }
}

fn manage(verb: &str, args: &ZoneChangeArgs, out: &mut impl Write) -> Result<(), Failure> {
    let ZoneChangeArgs { zones: args, force } = args;
    let client = client(&args.talk);
    let range = ZoneRange::of(&client, args)?;
    let (from, count) = (range.offset, range.zone_count(args)?);
    let mut request = ZoneRequest { from, count, force: *force };
    let mut zones = 0;
    loop {
        let done = client.manage(&args.device, verb, &request);
        let done = done.map_err(|error| in_options(args, error))?;
        zones += done.zones;
        // An answer may have passed over all of its zones; one that leads back ends the loop.
        let goes_on = |next: &u64| request.from.is_none_or(|from| *next > from);
        let Some(next) = done.next.filter(goes_on) else { break };
        request.from = Some(next);
        request.count = request.count.map(|count| count - done.zones);
    }
    print_done(&args.talk, &args.device, verb, zones, out)
}

/// A refusal in the words of the command line rather than of the control API.
fn in_options(args: &ZoneArgs, error: ClientError) -> Failure {
    let ClientError::Refused(mut refusal) = error else { return error.into() };
    let typed = |distance: &Option<Distance>| distance.as_ref().map(|it| it.text.clone());
    let (offset, length) = (typed(&args.offset), typed(&args.length));
    let option = match refusal.field.as_deref() {
        Some("from") => offset.map(|text| ("--offset", text)),
        Some("count") => {
            let count = args.count.map(|count| ("--count", count.to_string()));
            count.or_else(|| length.map(|text| ("--length", text)))
        }
        _ => None,
    };
    if let Some((option, text)) = option
        && let Some((_, wanted)) = refusal.message.split_once(": expected ")
    {
        refusal.message = format!("invalid {option} `{text}`: expected {wanted}");
    }
    ClientError::Refused(refusal).into()
}

/// A range of zones, in sectors.
struct ZoneRange {
    offset: Option<u64>,
    length: Option<u64>,
    /// The length of a zone and of the device; 0 where nothing needs them.
    zone_sectors: u64,
    device_sectors: u64,
}

impl ZoneRange {
    /// The range that the options name; what is given in zones, and a length, needs the device's.
    fn of(client: &Client, args: &ZoneArgs) -> Result<ZoneRange, Failure> {
        let in_zones = matches!(args.offset, Some(Distance { amount: Amount::Zones(_), .. }));
        let (zone_sectors, device_sectors) = match in_zones || args.length.is_some() {
            true => {
                let device = client.device(&args.device)?;
                let zoned = device.zoned.ok_or_else(|| not_zoned(&args.device))?;
                (zoned.zone_sectors, device.size_bytes / SECTOR_BYTES)
            }
            false => (0, 0),
        };
        let sectors = |option: &str, distance: &Option<Distance>| match distance {
            None => Ok(None),
            Some(Distance { amount: Amount::Sectors(sectors), .. }) => Ok(Some(*sectors)),
            Some(Distance { text, amount: Amount::Zones(zones) }) => {
                let sectors = zones.checked_mul(zone_sectors).map(Some);
                let text = format!("invalid {option} `{text}`: expected a zone of the device");
                sectors.ok_or_else(|| Failure::new(Code::Usage, text))
            }
        };
        let (offset, length) =
            (sectors("--offset", &args.offset)?, sectors("--length", &args.length)?);
        Ok(ZoneRange { offset, length, zone_sectors, device_sectors })
    }

    /// The number of zones, if there is a length. As for blkzone, it must be whole zones; the last
    /// zone of a device may be shorter.
    fn zone_count(&self, args: &ZoneArgs) -> Result<Option<u64>, Failure> {
        let (Some(length), Some(typed)) = (self.length, &args.length) else {
            return Ok(args.count);
        };
        let end = self.offset.unwrap_or(0).checked_add(length);
        if length > 0
            && (length.is_multiple_of(self.zone_sectors) || end == Some(self.device_sectors))
        {
            return Ok(Some(length.div_ceil(self.zone_sectors)));
        }
        let (text, sectors) = (&typed.text, self.zone_sectors);
        let size = Bytes(sectors * SECTOR_BYTES);
        let text = format!(
            "invalid --length `{text}`: expected whole zones, a multiple of {sectors} sectors \
             ({size}); for one zone `--length 1z` or `--count 1`"
        );
        Err(Failure::new(Code::Usage, text))
    }
}

fn not_zoned(name: &str) -> Failure {
    Failure::new(Code::Refused, YardError::NotZoned { name: name.to_owned() })
}

fn print_done(
    talk: &TalkArgs,
    device: &str,
    verb: &str,
    zones: u64,
    out: &mut impl Write,
) -> Result<(), Failure> {
    if talk.json {
        return print_json(&json!({ "device": device, "verb": verb, "zones": zones }), out);
    }
    Ok(writeln!(out, "{device}: {verb}: {}", counted(zones, "zone"))?)
}
