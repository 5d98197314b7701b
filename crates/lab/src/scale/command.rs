//! `blockyard-lab scale`: the model's predictions, with their errors.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use blockyard_yard::table::Table;
use clap::Args;

use crate::command::CommandError;
use crate::error::LabError;
use crate::experiments::{limits, ram_locks, zone_locks};
use crate::limits::values::LimitValues;
use crate::results::{Index, Note, Prediction, Results};
use crate::scale::machine::{Machine, ns};
use crate::scale::predict::{Gain, Known, MEASURED_HERE};
use crate::scale::{calibrate, predict};
use crate::stop::Stop;

/// The number of measurements of each limit, and the duration of each.
const LIMIT_ROUNDS: u32 = 9;
const LIMIT_MEASURE: Duration = Duration::from_millis(60);
/// The number of measured openings of each variant, and the duration of each, alone and by two.
const OPENINGS: u32 = 25;
const OPENING_MEASURE: Duration = Duration::from_millis(20);
/// The aim for the model's error with two cores.
const ERROR_MAX: f64 = 0.15;

/// `lab scale`.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct ScaleArgs {
    /// The experiment; `zone-locks` and `ram-locks` are modelled
    pub name: String,
    /// Cores of the machine
    #[arg(long, value_name = "N", default_value_t = 96)]
    pub cores: usize,
    /// Sockets of the machine; a number that divides the cores
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub sockets: usize,
    /// Threads that share a core
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads_per_core: usize,
    /// What a cache line takes to another socket [default: 2.4 times what it takes here]
    #[arg(long, value_name = "NANOSECONDS", value_parser = nanoseconds)]
    pub cross_socket: Option<f64>,
    /// The seed of the simulation
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Results of `lab run`: their limits are used, and the predictions are put in
    #[arg(long, value_name = "DIR", default_value = "lab-results")]
    pub out: PathBuf,
    /// Print JSON: results of the lab with predictions only
    #[arg(long)]
    pub json: bool,
}

const HELP: &str = "\
A prediction is no measurement: it comes from a model of the shared accesses, with service times
measured here by one thread and the time that a cache line takes from one core to another. What is
known (two cores here, the published rows) is printed beside it with the error. docs/scale-model.md
describes the model.

Examples:
  blockyard-lab scale zone-locks --cores 96 --sockets 2
  blockyard-lab scale zone-locks --cores 8 --json
  blockyard-lab scale ram-locks --cores 4
";

fn nanoseconds(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (1.0..=100_000.0).contains(value));
    value.ok_or_else(|| "expected nanoseconds from 1 to 100000, e.g. 150".to_owned())
}

/// Predictions, and notes on them.
type Predicted = (Vec<Prediction>, Vec<String>);

/// A modelled experiment.
struct Model {
    name: &'static str,
    /// Coarsest first.
    variants: [&'static str; 3],
    workloads: [&'static str; 2],
    /// Measures the model's inputs, and predicts.
    predict: fn(&Machine, u64, &Stop) -> Result<Predicted, LabError>,
}

const MODELS: [Model; 2] = [
    Model {
        name: zone_locks::NAME,
        variants: [
            crate::scale::zone_locks::VARIANTS[0].0,
            crate::scale::zone_locks::VARIANTS[1].0,
            crate::scale::zone_locks::VARIANTS[2].0,
        ],
        workloads: [
            crate::scale::zone_locks::WORKLOADS[0].name,
            crate::scale::zone_locks::WORKLOADS[1].name,
        ],
        predict: predict_zone_locks,
    },
    Model {
        name: ram_locks::NAME,
        variants: crate::scale::ram_locks::VARIANTS,
        workloads: [
            crate::scale::ram_locks::WORKLOADS[0].0,
            crate::scale::ram_locks::WORKLOADS[1].0,
        ],
        predict: predict_ram_locks,
    },
];

/// The result that is printed and stored.
struct Answer {
    model: &'static Model,
    machine: Machine,
    predictions: Vec<Prediction>,
    notes: Vec<String>,
}

/// Runs the command.
///
/// # Errors
/// See [`CommandError`].
pub fn run(args: &ScaleArgs, out: &mut impl Write) -> Result<(), CommandError> {
    let Some(model) = MODELS.iter().find(|model| model.name == args.name) else {
        let names = MODELS.map(|model| format!("`{}`", model.name)).join(" and ");
        let message = format!("`{}` has no scale model; {names} have one", args.name);
        return Err(CommandError::Usage(message));
    };
    shape(args, Machine::default()).check().map_err(CommandError::Usage)?;
    let stop = Stop::by_signal().map_err(LabError::io("catching Ctrl-C"))?;
    let answer = answer(args, model, &stop).map_err(|error| match error {
        LabError::Interrupted => CommandError::Interrupted("interrupted".into()),
        other => CommandError::Lab(other),
    })?;
    let kept = keep(args, &answer)?;
    if args.json {
        let mut results = Results::new(command_line(), false);
        put(&mut results, &answer);
        let text = serde_json::to_string_pretty(&results).map_err(io::Error::from)?;
        writeln!(out, "{text}")?;
    } else {
        print(&answer, out)?;
        if let Some(path) = kept {
            writeln!(out, "\nthe predictions are in {}; `blockyard-lab report`", path.display())?;
        }
    }
    Ok(out.flush()?)
}

fn command_line() -> String {
    let words: Vec<String> = std::env::args().skip(1).collect();
    format!("blockyard {}", words.join(" "))
}

/// The requested machine, with the times of `machine`.
fn shape(args: &ScaleArgs, machine: Machine) -> Machine {
    let far = args.cross_socket.map_or(machine.transfer_far, ns);
    Machine {
        cores: args.cores,
        sockets: args.sockets,
        threads_per_core: args.threads_per_core,
        transfer_far: far,
        ..machine
    }
}

fn why(why: String) -> LabError {
    LabError::failed("scale model", why)
}

/// The lock over all zones, a lock per zone, the product.
fn predict_zone_locks(machine: &Machine, seed: u64, stop: &Stop) -> Result<Predicted, LabError> {
    let known = predict::measure(OPENINGS, OPENING_MEASURE, stop)?;
    let mut predictions = predict::predict(machine, &known, seed).map_err(why)?;
    predictions.extend(predict::published(seed).map_err(why)?);
    let mut notes = vec![
        "The published rows of lock-per-zone are fitted (what an I/O costs on the kernel's way is \
         not known); those of one-lock are predicted. Its machine is an assumption but for its 48 \
         cores."
            .to_owned(),
    ];
    notes.extend(spread(&known));
    Ok((predictions, notes))
}

/// The lock over a RAM disk's table, a bit per entry, the product.
fn predict_ram_locks(machine: &Machine, seed: u64, stop: &Stop) -> Result<Predicted, LabError> {
    use crate::scale::ram_locks;
    let known = ram_locks::measure(stop)?;
    let predictions = ram_locks::predict(machine, &known, seed).map_err(why)?;
    Ok((predictions, ram_locks::notes()))
}

fn answer(args: &ScaleArgs, model: &'static Model, stop: &Stop) -> Result<Answer, LabError> {
    let (limits, source) = limit_values(args, stop)?;
    let machine = shape(args, calibrate::machine(&limits, args.cores, args.sockets)?);
    let (predictions, said) = (model.predict)(&machine, args.seed, stop)?;
    let mut notes = vec![
        format!(
            "A cache line takes {} from core to core{}, from {source}.",
            nanos(machine.transfer_near),
            match args.sockets {
                1 => String::new(),
                _ => format!(" and {} to another socket", nanos(machine.transfer_far)),
            },
        ),
        two_cores(&predictions),
    ];
    notes.extend(said);
    Ok(Answer { model, machine, predictions, notes })
}

/// The limits of the latest results if complete; otherwise measured now.
fn limit_values(args: &ScaleArgs, stop: &Stop) -> Result<(LimitValues, String), LabError> {
    let index = Index::read(&args.out)?;
    if let Some(file) = index.latest.get(limits::NAME) {
        let path = args.out.join(file);
        let values = LimitValues::of(&Results::read(&path)?);
        if calibrate::machine(&values, 2, 1).is_ok() {
            return Ok((values, path.display().to_string()));
        }
    }
    Ok((
        LimitValues::measure(calibrate::NEEDED, LIMIT_ROUNDS, LIMIT_MEASURE, stop)?,
        "limits measured now".to_owned(),
    ))
}

/// The throughput of two threads relative to one: on one device, by opening, and on a device each.
fn spread(known: &[Known]) -> Option<String> {
    let gains = known.iter().filter_map(|known| Some((known, known.gain?)));
    let texts: Vec<String> = gains
        .map(|(known, gain)| {
            let Known { variant, workload, .. } = known;
            let apart = known.apart.map(|apart| format!(", apart {:.2}", apart.mean));
            let Gain { mean, min, max } = gain;
            let apart = apart.unwrap_or_default();
            format!("{variant} {} {mean:.2} ({min:.2} to {max:.2}){apart}", workload.name)
        })
        .collect();
    let what = "Two threads did so many times as much as one on one device (least to greatest of \
                its openings), and apart on a device each, which is what the model takes";
    (!texts.is_empty()).then(|| format!("{what}: {}.", texts.join("; ")))
}

fn nanos(picoseconds: u64) -> String {
    format!("{:.0} ns", picoseconds as f64 / 1000.0)
}

/// The model's error for two cores.
fn two_cores(predictions: &[Prediction]) -> String {
    let measured =
        |p: &&Prediction| p.cores == 2 && p.known_source.as_deref() == Some(MEASURED_HERE);
    let errors = predictions.iter().filter(measured).filter_map(|p| p.error.map(|e| (p, e)));
    let worst = errors.max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()));
    match worst {
        None => {
            "Two cores were not measured here, or were threads of one core all the time: the error \
                 is not known."
                .to_owned()
        }
        Some((p, error)) => format!(
            "For two cores the model is off by at most {:.0}% ({}, {}), which is {} {:.0}%.",
            error.abs() * 100.0,
            p.variant,
            p.workload,
            if error.abs() <= ERROR_MAX { "within the limit" } else { "ABOVE the limit" },
            ERROR_MAX * 100.0,
        ),
    }
}

/// Stores the predictions in the experiment's latest results, if there are any.
fn keep(args: &ScaleArgs, answer: &Answer) -> Result<Option<PathBuf>, LabError> {
    let Some(file) = Index::read(&args.out)?.latest.get(&args.name).cloned() else {
        return Ok(None);
    };
    let path = args.out.join(file);
    let mut results = Results::read(&path)?;
    put(&mut results, answer);
    results.rewrite(&path)?;
    Ok(Some(path))
}

fn put(results: &mut Results, answer: &Answer) {
    let name = answer.model.name;
    let ours = |experiment: &String| experiment == name;
    results.predictions.retain(|prediction| !ours(&prediction.experiment));
    results.predictions.extend(answer.predictions.iter().cloned());
    let marked = |text: &String| format!("Prediction: {text}");
    results.notes.retain(|note| !(ours(&note.experiment) && note.text.starts_with("Prediction: ")));
    results.notes.extend(
        answer.notes.iter().map(|text| Note { experiment: name.to_owned(), text: marked(text) }),
    );
}

fn print(answer: &Answer, out: &mut impl Write) -> io::Result<()> {
    let is_published =
        |p: &&Prediction| p.known_source.as_deref().is_some_and(|s| s.starts_with("published"));
    let Machine { cores, sockets, threads_per_core, .. } = &answer.machine;
    writeln!(
        out,
        "{}: PREDICTIONS of a model, not measurements\n\
         {cores} cores, {sockets} socket(s), {threads_per_core} thread(s) per core; million I/Os \
         per second",
        answer.model.name
    )?;
    for workload in answer.model.workloads {
        writeln!(out, "\n{workload}, prediction")?;
        let names = answer.model.variants;
        let last = format!("{}:{}", names[2], names[0]);
        let ratio = format!("{}:{}", names[1], names[0]);
        let mut table = Table::new(["CORES", names[0], names[1], names[2], &ratio, &last]);
        for count in predict::core_counts(*cores) {
            let value = |variant: &str| {
                let mut all = answer.predictions.iter().filter(|p| !is_published(p));
                let found = all.find(|p| {
                    (p.variant.as_str(), p.workload.as_str()) == (variant, workload)
                        && p.cores == count as u32
                });
                found.map_or(f64::NAN, |p| p.value)
            };
            let values = names.map(value);
            let millions = values.map(|value| format!("{:.2}", value / 1e6));
            let times = |value: f64| format!("{:.2}x", value / values[0]);
            let [first, second, third] = millions;
            table.row([
                &count.to_string(),
                &first,
                &second,
                &third,
                &times(values[1]),
                &times(values[2]),
            ]);
        }
        table.print(3, out)?;
    }
    writeln!(out, "\nwhat is known, and the model's error")?;
    let mut table =
        Table::new(["VARIANT", "WORKLOAD", "CORES", "PREDICTED", "KNOWN", "ERROR", "FROM"]);
    for p in answer.predictions.iter().filter(|p| p.known.is_some()) {
        table.row([
            p.variant.as_str(),
            &p.workload,
            &p.cores.to_string(),
            &format!("{:.2}", p.value / 1e6),
            &format!("{:.2}", p.known.unwrap_or(f64::NAN) / 1e6),
            &format!("{:+.0}%", p.error.unwrap_or(f64::NAN) * 100.0),
            p.known_source.as_deref().unwrap_or(""),
        ]);
    }
    table.print(3, out)?;
    writeln!(out)?;
    answer.notes.iter().try_for_each(|note| writeln!(out, "{note}"))
}
