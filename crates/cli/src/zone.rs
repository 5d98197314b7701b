//! `zone`: the report and the verbs of blkzone, over the control API, and `zone check`.

use std::io::Write;

use blockyard_yard::client::{Client, ClientError};
use blockyard_yard::error::counted;
use blockyard_yard::stack;
use blockyard_yard::view::{ZoneRequest, ZoneView};
use blockyard_yard::zone_check::{VerdictView, of_disk, of_served};
use serde_json::json;

use crate::args::{
    Distance, Subject, TalkArgs, ZoneArgs, ZoneChangeArgs, ZoneCheckArgs, ZoneCommand,
    ZoneResetAllArgs,
};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};

/// Zones asked for at once.
const PAGE: usize = 4096;

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
    }
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
        let Some(verdict) = verdict else {
            return Err(Failure::new(Code::Refused, format!("`{name}` is not a zoned device")));
        };
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
        let page = client.zones(&args.device, from, count).map_err(in_options)?;
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
    let (from, count) = (range.offset, range.zone_count(args));
    let mut request = ZoneRequest { from, count, force: *force };
    let mut zones = 0;
    loop {
        let done = client.manage(&args.device, verb, &request).map_err(in_options)?;
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
fn in_options(error: ClientError) -> Failure {
    let ClientError::Refused(mut refusal) = error else { return error.into() };
    for (field, option) in
        [("invalid from ", "invalid --offset "), ("invalid count ", "invalid --count ")]
    {
        if let Some(rest) = refusal.message.strip_prefix(field) {
            refusal.message = format!("{option}{rest}");
        }
    }
    ClientError::Refused(refusal).into()
}

/// A range of zones, in sectors.
struct ZoneRange {
    offset: Option<u64>,
    length: Option<u64>,
    /// Length of a zone; 0 where nothing needs it.
    zone_sectors: u64,
}

impl ZoneRange {
    /// The range that the options name; what is given in zones, and a length, needs the device's.
    fn of(client: &Client, args: &ZoneArgs) -> Result<ZoneRange, Failure> {
        let in_zones = |distance: Option<Distance>| matches!(distance, Some(Distance::Zones(_)));
        let zone_sectors = match in_zones(args.offset) || args.length.is_some() {
            true => zone_sectors(client, &args.device)?,
            false => 0,
        };
        let sectors = |option: &str, distance: Option<Distance>| match distance {
            None => Ok(None),
            Some(Distance::Sectors(sectors)) => Ok(Some(sectors)),
            Some(Distance::Zones(zones)) => {
                let sectors = zones.checked_mul(zone_sectors).map(Some);
                let text = format!("invalid {option} `{zones}z`: expected a zone of the device");
                sectors.ok_or_else(|| Failure::new(Code::Usage, text))
            }
        };
        let (offset, length) =
            (sectors("--offset", args.offset)?, sectors("--length", args.length)?);
        Ok(ZoneRange { offset, length, zone_sectors })
    }

    /// The length in zones, if there is one. A shorter last zone counts as one, as for blkzone.
    fn zone_count(&self, args: &ZoneArgs) -> Option<u64> {
        args.count.or_else(|| self.length.map(|length| length.div_ceil(self.zone_sectors.max(1))))
    }
}

/// Length of a device's zones.
fn zone_sectors(client: &Client, name: &str) -> Result<u64, Failure> {
    let not_zoned = || Failure::new(Code::Refused, format!("`{name}` is not a zoned device"));
    Ok(client.device(name)?.zoned.ok_or_else(not_zoned)?.zone_sectors)
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
