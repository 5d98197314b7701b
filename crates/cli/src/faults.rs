//! `inject`: faults of devices, their rules, and scenarios.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;

use blockyard_yard::error::counted;
use blockyard_yard::scenario::{FAILED, LEN_MAX, Scenario, ScenarioLine};
use blockyard_yard::table::Table;
use blockyard_yard::view::DeviceView;
use serde_json::{Value, json};

use crate::args::{
    InjectArgs, InjectCommand, InjectListArgs, InjectRemoveArgs, InjectRunArgs, RemovedRules,
};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::human::print_table;
use crate::trace::Stopper;

pub(crate) fn run(args: &InjectArgs, out: &mut impl Write) -> Result<(), Failure> {
    match &args.command {
        None => inject(args, out),
        Some(InjectCommand::List(args)) => list(args, out),
        Some(InjectCommand::Remove(args)) => remove(args, out),
        Some(InjectCommand::Run(args)) => run_scenario(args, out),
    }
}

fn inject(args: &InjectArgs, out: &mut impl Write) -> Result<(), Failure> {
    let (device, fault) = args.device.as_deref().zip(args.fault.as_deref()).unwrap_or_default();
    let id = client(&args.talk).inject(device, fault)?;
    if args.talk.json {
        let done: Value = json!({ "device": device, "fault": fault, "id": id });
        return print_json(&done, out);
    }
    match id {
        Some(id) => Ok(writeln!(out, "{device}: rule {id}: {fault}")?),
        None => Ok(writeln!(out, "{device}: {fault}")?),
    }
}

fn list(args: &InjectListArgs, out: &mut impl Write) -> Result<(), Failure> {
    let client = client(&args.talk);
    let devices: Vec<DeviceView> = match &args.device {
        Some(name) => vec![client.device(name)?],
        None => client.devices()?,
    };
    if args.talk.json {
        let with_faults = devices.iter().filter(|device| !device.faults.is_empty());
        let listed: Vec<Value> = with_faults
            .map(|device| json!({ "device": device.name, "faults": device.faults }))
            .collect();
        return print_json(&listed, out);
    }
    let mut table = Table::new(["DEVICE", "ID", "MATCHED", "APPLIED", "RULE"]);
    for device in devices {
        for rule in device.faults {
            let numbers = [rule.id, rule.matched, rule.applied].map(|number| number.to_string());
            let [id, matched, applied] = numbers;
            table.row([device.name.clone(), id, matched, applied, rule.rule]);
        }
    }
    Ok(print_table(table, &["RULE"], out)?)
}

fn remove(args: &InjectRemoveArgs, out: &mut impl Write) -> Result<(), Failure> {
    let id = match args.rules {
        RemovedRules::All => None,
        RemovedRules::One(id) => Some(id),
    };
    let done = client(&args.talk).remove_faults(&args.device, id)?;
    if args.talk.json {
        return print_json(&done, out);
    }
    Ok(writeln!(out, "{}: removed {}", done.device, counted(done.removed, "rule"))?)
}

/// The text of a scenario, and how errors name the file.
fn read(path: &Path) -> Result<(String, String), Failure> {
    let (shown, input): (_, Box<dyn Read>) = match path == Path::new("-") {
        true => ("standard input".to_owned(), Box::new(io::stdin())),
        false => {
            let shown = path.display().to_string();
            let failed =
                |error| Failure::new(Code::Config, format!("cannot read `{shown}`: {error}"));
            (shown.clone(), Box::new(File::open(path).map_err(failed)?))
        }
    };
    let mut text = String::new();
    // One more than is allowed, so that a longer one is refused.
    let read = input.take(LEN_MAX as u64 + 1).read_to_string(&mut text);
    match read {
        Ok(_) => Ok((text, shown)),
        Err(error) => Err(Failure::new(Code::Config, format!("cannot read {shown}: {error}"))),
    }
}

fn run_scenario(args: &InjectRunArgs, out: &mut impl Write) -> Result<(), Failure> {
    let (text, shown) = read(&args.file)?;
    let device = args.device.as_deref();
    Scenario::parse(&text, device)
        .map_err(|error| Failure::new(Code::Config, format!("{shown}: {error}")))?;
    // The yard says nothing between two steps.
    let client = client(&args.talk).without_notice();
    // Any number, which no other command has.
    let id = RandomState::new().hash_one(std::process::id());
    let answer = client.run_scenario(&text, device, id)?;
    let stopped = client.clone();
    // The yard ends the answer when it has removed the rules.
    let stopper = Stopper::start(move || stopped.stop_scenario(id).is_ok())?;
    let last = print_lines(BufReader::new(answer), args.talk.json, out);
    stopper.stop();
    match last? {
        Some(line) if line.event == "done" => Ok(()),
        Some(line) if line.event == FAILED => {
            Err(Failure::new(Code::Refused, line.message.unwrap_or_default()))
        }
        Some(_) => {
            let text = "the scenario was stopped; its rules are removed";
            Err(Failure::new(Code::Failed, text))
        }
        None => {
            let text = "the yard broke off the scenario; the rules of a yard go with its process";
            Err(Failure::new(Code::Failed, text))
        }
    }
}

/// Prints the lines of a run while they arrive; returns the last one of a run that has ended.
fn print_lines(
    mut lines: impl BufRead,
    is_json: bool,
    out: &mut impl Write,
) -> Result<Option<ScenarioLine>, Failure> {
    let mut text = String::new();
    loop {
        text.clear();
        let read = lines.read_line(&mut text);
        let line: Option<ScenarioLine> = match read {
            Ok(0) | Err(_) => None,
            Ok(_) => serde_json::from_str(&text).ok(),
        };
        let Some(line) = line else { return Ok(None) };
        if is_json {
            write!(out, "{text}")?;
        } else if let Some(said) = said(&line) {
            writeln!(out, "{said}")?;
        }
        out.flush()?;
        if !matches!(line.event.as_str(), "begin" | "end") {
            return Ok(Some(line));
        }
    }
}

/// A line for people; `None` for one that the exit says.
fn said(line: &ScenarioLine) -> Option<String> {
    let at = line.at_ns as f64 / 1e9;
    let (Some(step), Some(device), Some(rule)) = (line.step, &line.device, &line.rule) else {
        return (line.event == "done").then(|| format!("{at:>9.3}s  the scenario has ended"));
    };
    match line.event.as_str() {
        "begin" => Some(format!("{at:>9.3}s  step {step} begins: {device} {rule}")),
        "end" => {
            let counts = match (line.matched, line.applied) {
                (Some(matched), Some(applied)) => {
                    let matched = counted(matched, "request");
                    format!("{matched} matched, {applied} failed or delayed")
                }
                _ => "another command removed the rule, or the device".to_owned(),
            };
            Some(format!("{at:>9.3}s  step {step} ends: {device}: {counts}"))
        }
        _ => None,
    }
}
