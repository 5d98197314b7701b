//! `sched`: a device's scheduler, shown and changed over the control API.

use std::io::Write;

use blockyard_core::sched::deadline::Tunable;
use blockyard_yard::scheduler::{Given, SchedulerRequest, SchedulerView};
use blockyard_yard::table::Table;

use crate::args::SchedCommand;
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::human::print_table;

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
    print_table(table, &["UNIT"], out)?;
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
    Ok(print_table(table, &["DIRECTION"], out)?)
}
