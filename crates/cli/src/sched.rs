//! `sched`: a device's scheduler, shown and changed over the control API.

use std::io::Write;

use blockyard_core::sched::deadline::Tunable;
use blockyard_yard::scheduler::{Given, SchedulerRequest, SchedulerView};
use blockyard_yard::table::Table;
use clap::{Args, Subcommand};

use crate::args::{DeviceArgs, TalkArgs, name};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};

/// `sched`.
#[derive(Debug, Subcommand)]
pub(crate) enum SchedCommand {
    /// Show the scheduler of a device, its tunables and what it has done
    Show(DeviceArgs),
    /// Give a device another scheduler or other tunables, while it is used
    Set(SetArgs),
}

const SET_HELP: &str = "\
Parameters, with Linux's names, units and ranges:
  scheduler=none|mq-deadline   the scheduler; `deadline` is mq-deadline too
  read_expire=MS               when a read is overdue: milliseconds, or 500ms, 5s
  write_expire=MS              when any other request is overdue
  writes_starved=N             how often reads go before waiting writes
  front_merges=0|1             merge what ends where a waiting request begins
  async_depth=N                most writes that wait or run at once; 0: as many as there is room for
  fifo_batch=N                 requests in order of sectors before the overdue are looked at
  prio_aging_expire=MS         when a lower class is served in spite of a higher

Tunables are those of mq-deadline. They may be set under `none`, and stay what they are until the
device is removed. Several are set together: if one is invalid, none is set.

Examples:
  blockyard sched set mem0 scheduler=mq-deadline
  blockyard sched set mem0 read_expire=100ms fifo_batch=8
";

/// `sched set`.
#[derive(Args, Debug)]
#[command(after_help = SET_HELP)]
pub(crate) struct SetArgs {
    /// The device's name
    #[arg(value_parser = name)]
    device: String,
    /// What to set
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = pair)]
    pairs: Vec<(String, String)>,
    #[command(flatten)]
    talk: TalkArgs,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = pair.ok_or("expected KEY=VALUE, e.g. scheduler=mq-deadline")?;
    Ok((key.to_owned(), value.to_owned()))
}

pub(crate) fn run(command: &SchedCommand, out: &mut impl Write) -> Result<(), Failure> {
    let (talk, view) = match command {
        SchedCommand::Show(args) => (&args.talk, client(&args.talk).scheduler(&args.device)?),
        SchedCommand::Set(args) => {
            let request = request(&args.pairs)?;
            (&args.talk, client(&args.talk).set_scheduler(&args.device, &request)?)
        }
    };
    if talk.json { print_json(&view, out) } else { print(&view, out) }
}

fn request(pairs: &[(String, String)]) -> Result<SchedulerRequest, Failure> {
    let mut request = SchedulerRequest::new();
    for (key, value) in pairs {
        if request.insert(key.clone(), Given::Text(value.clone())).is_some() {
            let message = format!("{key} is given twice; give it once");
            return Err(Failure::new(Code::Usage, message));
        }
    }
    Ok(request)
}

fn print(view: &SchedulerView, out: &mut impl Write) -> Result<(), Failure> {
    writeln!(out, "{}: {}\n", view.device, view.line())?;
    let mut table = Table::new(["TUNABLE", "VALUE", "UNIT"]);
    for tunable in Tunable::ALL {
        let value = view.tunables.get(tunable.name());
        let value = value.map_or_else(|| "-".to_owned(), i64::to_string);
        table.row([tunable.name().to_owned(), value, tunable.unit().to_owned()]);
    }
    table.print(1, out)?;
    writeln!(out)?;
    let mut table = Table::new([
        "CLASS",
        "DIRECTION",
        "INSERTED",
        "MERGED",
        "DISPATCHED",
        "COMPLETED",
        "EXPIRED",
        "QUEUED",
    ]);
    for counts in &view.counts {
        let numbers = [
            counts.inserted,
            counts.merged,
            counts.dispatched,
            counts.completed,
            counts.expired,
            counts.queued,
        ];
        let names = [counts.class.clone(), counts.direction.clone()];
        table.row(names.into_iter().chain(numbers.map(|number| number.to_string())));
    }
    Ok(table.print(2, out)?)
}
