//! Stock fio as a client: a command line as data, and the parts of its report that we use.
//!
//! Every line uses threads for jobs (`--thread`), so that fio is one process that can be killed as
//! a whole, and reports all its jobs as one group.

mod report;

use std::fmt::Display;
use std::time::Duration;

pub use report::FioReport;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::stop::Stop;
use crate::tools::child::CommandLine;
use crate::tools::engine;

/// The time that fio may take beyond its run time to start its jobs and to end.
const GRACE: Duration = Duration::from_secs(30);
/// The options of every line.
const COMMON: &str =
    "fio --name=lab --thread --time_based --group_reporting --eta=never --output-format=json";

/// A fio line without its times.
#[derive(Clone, Debug)]
pub struct Fio {
    words: Vec<String>,
}

impl Fio {
    /// A line with these options, separated by blanks as in a shell.
    pub fn new(options: &str) -> Fio {
        Fio { words: options.split_whitespace().map(String::from).collect() }
    }

    /// A line whose jobs use our engine with the device of the URI `dev`, under the baseline
    /// `before` or as the product.
    ///
    /// # Errors
    /// If the engine is missing.
    pub fn on_engine(
        settings: &Settings,
        dev: &str,
        before: Option<&str>,
        options: &str,
    ) -> Result<Fio, LabError> {
        let path = settings.engine.as_ref();
        let path = path.ok_or_else(|| LabError::missing(engine::NAME, "run `make fio`"))?;
        let fio = Fio::new("").option("ioengine", format!("external:{}", path.display()));
        let mut fio = fio.option("dev", dev);
        if let Some(before) = before {
            fio = fio.option("before", before);
        }
        fio.words.extend(options.split_whitespace().map(String::from));
        Ok(fio)
    }

    /// Adds an option, whose value may contain anything. Options of an engine must come after
    /// `ioengine`.
    pub fn option(mut self, name: &str, value: impl Display) -> Fio {
        self.words.push(format!("--{name}={value}"));
        self
    }

    /// The command: `warm_up` before the measured time, then `runtime`.
    pub fn line(&self, warm_up: Duration, runtime: Duration) -> CommandLine {
        let mut line = CommandLine::new("fio", COMMON);
        line.words.extend_from_slice(&self.words);
        line.words.push(format!("--runtime={}ms", runtime.as_millis().max(1)));
        if warm_up.as_millis() > 0 {
            line.words.push(format!("--ramp_time={}ms", warm_up.as_millis()));
        }
        line
    }

    /// Runs the line to its end.
    ///
    /// # Errors
    /// If fio is missing, fails, reports an error, does nothing or does not end.
    pub fn run(
        &self,
        warm_up: Duration,
        runtime: Duration,
        stop: &Stop,
    ) -> Result<FioReport, LabError> {
        let line = self.line(warm_up, runtime);
        let ended = line.start(None)?.finish(warm_up + runtime + GRACE, stop)?;
        let report = FioReport::parse(&ended.out, &ended.err);
        report.map_err(|why| {
            LabError::failed("fio", format!("{why}; the line was `{}`", line.text()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Sample;

    #[test]
    fn the_line_is_made_of_data() {
        let fio = Fio::new("--ioengine=nbd  --rw=randread --bs=4k").option("uri", "nbd://a b");
        let line = fio.line(Duration::from_millis(250), Duration::from_secs(2));
        assert_eq!(line.words[0], "fio");
        let own = &line.words[COMMON.split(' ').count()..];
        let want = [
            "--ioengine=nbd",
            "--rw=randread",
            "--bs=4k",
            "--uri=nbd://a b",
            "--runtime=2000ms",
            "--ramp_time=250ms",
        ];
        assert_eq!(own, want);
        let line = fio.line(Duration::ZERO, Duration::ZERO).text();
        assert!(line.ends_with("--runtime=1ms"), "{line}");
    }

    #[test]
    fn our_engine_is_named_before_its_options() {
        let settings = Settings {
            quick: true,
            engine: None,
            program: "by".into(),
            lab: "blockyard-lab".into(),
            scratch: "/tmp".into(),
            processors: 2,
            peers: Default::default(),
        };
        let on = |settings: &Settings| {
            Fio::on_engine(settings, "null:///z?zoned=1", Some("one-lock"), "--rw=read --bs=4k")
        };
        let error = on(&settings).unwrap_err().to_string();
        assert_eq!(error, "libblockyard_fio-*.so is missing; run `make fio`");
        let settings = Settings { engine: Some("/l/e.so".into()), ..settings };
        let want = [
            "--ioengine=external:/l/e.so",
            "--dev=null:///z?zoned=1",
            "--before=one-lock",
            "--rw=read",
            "--bs=4k",
        ];
        assert_eq!(on(&settings).unwrap().words, want);
    }

    /// fio's own null engine needs nothing but fio.
    const NULL: &str = "--ioengine=null --rw=randread --bs=4k --size=1G --norandommap";

    #[test]
    fn a_real_fio_is_run_and_understood() {
        let fio = Fio::new(NULL).option("numjobs", 2).option("iodepth", 4);
        let run = fio.run(Duration::from_millis(20), Duration::from_millis(100), &Stop::new());
        let report = run.unwrap();
        assert!(report.ios > 0 && report.iops > 0.0 && report.bandwidth > 0.0, "{report:?}");
        assert!(!report.cpu.is_zero() && !report.runtime.is_zero(), "{report:?}");
        let Sample { latency, .. } = report.sample(usize::MAX);
        let points = latency.unwrap().0;
        assert!(points.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{points:?}");
    }

    #[test]
    fn a_real_fio_that_refuses_is_quoted() {
        let fio = Fio::new(NULL).option("no-such-option", 1);
        let error = fio.run(Duration::ZERO, Duration::from_millis(10), &Stop::new()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("fio: unrecognized option '--no-such-option=1'"), "{error}");
    }

    #[test]
    fn a_real_fio_that_finds_no_server_is_an_error() {
        let uri = "nbd+unix:///a?socket=/no/such/socket";
        let fio = Fio::new("--ioengine=nbd --rw=read --size=1M").option("uri", uri);
        let error = fio.run(Duration::ZERO, Duration::from_millis(10), &Stop::new()).unwrap_err();
        assert!(error.to_string().contains("fio: "), "{error}");
    }
}
