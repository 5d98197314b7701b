//! The parts of fio's JSON report (`--output-format=json`) that we use.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;

use crate::metric::Metric;
use crate::sample::{LatencyPercentiles, Sample};
use crate::tools::child::complaint;

/// fio counts CPU time in milliseconds; less than one is not visible.
const CPU_MIN: Duration = Duration::from_millis(1);
/// The factor by which the busy processors may exceed those of the machine, because fio rounds to
/// milliseconds.
const ROUNDING: f64 = 1.05;
/// The reason for a missing rate.
const IN_TURNS: &str = "Where fio's jobs took turns on the processors, each counted its own time \
                        only, and the sum of their rates is more than there ever was at a time: \
                        such rounds give CPU time and no throughput.";

/// The results of fio: all its jobs, and reads, writes and trims together.
#[derive(Clone, Debug, PartialEq)]
pub struct FioReport {
    /// I/Os that completed.
    pub ios: u64,
    /// I/Os per second of wall time.
    pub iops: f64,
    /// Bytes per second of wall time.
    pub bandwidth: f64,
    /// The measured wall time.
    pub runtime: Duration,
    /// The CPU time of all jobs in it.
    pub cpu: Duration,
    /// Completion latencies of the direction with the most I/Os, unless the line turned them off.
    pub latency: Option<LatencyPercentiles>,
}

#[derive(Deserialize)]
struct Document {
    jobs: Vec<JobReport>,
}

#[derive(Deserialize)]
struct JobReport {
    jobname: String,
    error: i64,
    read: Direction,
    write: Direction,
    trim: Direction,
    /// The sum of all jobs of the group, in milliseconds.
    job_runtime: u64,
    /// Per cent of `job_runtime`.
    usr_cpu: f64,
    sys_cpu: f64,
}

#[derive(Deserialize)]
struct Direction {
    total_ios: u64,
    iops: f64,
    bw_bytes: f64,
    /// Milliseconds.
    runtime: u64,
    #[serde(default)]
    clat_ns: FioLatency,
}

#[derive(Default, Deserialize)]
struct FioLatency {
    min: f64,
    max: f64,
    #[serde(default)]
    percentile: BTreeMap<String, f64>,
}

impl FioReport {
    /// Parses the report in fio's standard output `printed`; `complaints` is its standard error.
    ///
    /// # Errors
    /// If there is no report, or it contains an error or no I/O: fio's own words.
    pub fn parse(printed: &str, complaints: &str) -> Result<FioReport, String> {
        // fio may print notes before the report, and after it.
        let from = printed.find("{\n").ok_or_else(|| {
            format!("it printed no report in JSON: {}", complaint(&[complaints, printed].concat()))
        })?;
        let mut documents = serde_json::Deserializer::from_str(&printed[from..]).into_iter();
        let document: Document = match documents.next() {
            Some(Ok(document)) => document,
            Some(Err(error)) => return Err(format!("its report cannot be read: {error}")),
            None => return Err("its report is empty".into()),
        };
        if let Some(job) = document.jobs.iter().find(|job| job.error != 0) {
            let JobReport { jobname, error, .. } = job;
            return Err(format!("job {jobname}: error {error}: {}", complaint(complaints)));
        }
        let directions = || document.jobs.iter().flat_map(|job| [&job.read, &job.write, &job.trim]);
        let most = directions().max_by_key(|direction| direction.total_ios);
        let most = most.filter(|direction| direction.total_ios > 0);
        let most = most.ok_or_else(|| format!("it did nothing: {}", complaint(complaints)))?;
        Ok(FioReport {
            ios: directions().map(|direction| direction.total_ios).sum(),
            iops: directions().map(|direction| direction.iops).sum(),
            bandwidth: directions().map(|direction| direction.bw_bytes).sum(),
            runtime: Duration::from_millis(most.runtime.max(1)),
            cpu: document
                .jobs
                .iter()
                .map(JobReport::cpu)
                .sum::<Result<Duration, _>>()?
                .max(CPU_MIN),
            latency: most.clat_ns.percentiles()?,
        })
    }

    /// The number of processors that the jobs kept busy.
    pub fn cpus(&self) -> f64 {
        self.cpu.as_secs_f64() / self.runtime.as_secs_f64()
    }

    /// The sample of a run whose device lives in fio's own process: the CPU time is that of both.
    ///
    /// fio sums the rates of its jobs, each from its own start to its own end. Where jobs ran one
    /// after another, the sum exceeds any rate that ever was, and the jobs seem to have kept more
    /// processors busy than there are. Such rates are left out, and a note gives the reason.
    pub fn sample(&self, processors: usize) -> Sample {
        let ios = self.ios as f64;
        let together = self.cpus() <= processors as f64 * ROUNDING;
        let mut sample = Sample::default();
        if together {
            sample = sample.with(Metric::IOPS, self.iops);
        }
        sample = sample
            .with(Metric::CPU_PER_IO, self.cpu.as_nanos() as f64 / ios)
            .with(Metric::IOS_PER_CPU_SECOND, ios / self.cpu.as_secs_f64());
        if together {
            sample = sample.with(Metric::BANDWIDTH, self.bandwidth).with(Metric::CPUS, self.cpus());
        } else {
            sample.notes.push(IN_TURNS.to_owned());
        }
        self.latencies(sample)
    }

    /// Adds the latencies to a sample.
    pub fn latencies(&self, mut sample: Sample) -> Sample {
        let points = self.latency.iter().flat_map(|latency| &latency.0);
        for (percentile, ns) in points {
            match percentile {
                50.0 => sample = sample.with(Metric::P50, *ns),
                99.0 => sample = sample.with(Metric::P99, *ns),
                99.9 => sample = sample.with(Metric::P999, *ns),
                _ => {}
            }
        }
        sample.latency = self.latency.clone();
        sample
    }
}

impl JobReport {
    fn cpu(&self) -> Result<Duration, String> {
        let seconds = (self.usr_cpu + self.sys_cpu) / 100.0 * self.job_runtime as f64 / 1e3;
        Duration::try_from_secs_f64(seconds).map_err(|error| format!("CPU time {seconds}: {error}"))
    }
}

impl FioLatency {
    /// `None` if latencies were not measured.
    fn percentiles(&self) -> Result<Option<LatencyPercentiles>, String> {
        if self.percentile.is_empty() || self.max <= 0.0 {
            return Ok(None);
        }
        let mut points = vec![(0.0, self.min), (100.0, self.max)];
        for (percentile, ns) in &self.percentile {
            let number = percentile.parse::<f64>();
            let number = number.ok().filter(|number| *number > 0.0 && *number < 100.0);
            // Minimum and maximum are exact; for a percentile fio prints the upper end of a bucket.
            let percentile = number.ok_or_else(|| format!("percentile {percentile}"))?;
            points.push((percentile, ns.clamp(self.min, self.max)));
        }
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(Some(LatencyPercentiles(points)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `fio --name=x --thread --ioengine=null --rw=randrw --bs=4k --size=1G --numjobs=2
    /// --time_based --runtime=200ms --group_reporting --output-format=json` of fio 3.33, without
    /// its histograms.
    const RECORDED: &str = include_str!("recorded.json");

    #[test]
    fn a_recorded_report_is_read() {
        let report = FioReport::parse(RECORDED, "").unwrap();
        assert_eq!(report.ios, 378_861 + 379_358);
        assert_eq!(report.iops, 1_884_880.597_015 + 1_887_353.233_831);
        assert_eq!(report.bandwidth, 7_720_470_925.0 + 7_730_598_845.0);
        assert_eq!(report.runtime, Duration::from_millis(201));
        // 37.5 per cent of 400 ms, the run times of both jobs.
        assert_eq!(report.cpu, Duration::from_millis(150));
        let sample = report.sample(2);
        let value = |wanted: Metric| sample.values.iter().find(|(metric, _)| *metric == wanted);
        assert_eq!(value(Metric::P50), Some(&(Metric::P50, 23.0)));
        assert_eq!(value(Metric::P99), Some(&(Metric::P99, 26.0)));
        assert_eq!(value(Metric::CPU_PER_IO).unwrap().1, 150e6 / 758_219.0);
        let points = sample.latency.unwrap().0;
        assert_eq!((points[0], points[18]), ((0.0, 20.0), (100.0, 5_217_713.0)));
    }

    #[test]
    fn jobs_that_took_turns_give_no_throughput() {
        let report = FioReport::parse(RECORDED, "").unwrap();
        let turns = FioReport { cpu: Duration::from_millis(500), ..report.clone() }.sample(2);
        let together = FioReport { cpu: Duration::from_millis(400), ..report }.sample(2);
        let has_rate =
            |sample: &Sample| sample.values.iter().any(|(metric, _)| *metric == Metric::IOPS);
        assert!(has_rate(&together) && together.notes.is_empty());
        assert!(!has_rate(&turns) && turns.notes == [IN_TURNS]);
        let has_cpu = |(metric, _): &(Metric, f64)| *metric == Metric::CPU_PER_IO;
        assert!(turns.values.iter().any(has_cpu));
    }

    #[test]
    fn notes_around_the_report_do_no_harm() {
        let noted = format!("fio: a note {{x}}\n{RECORDED}\nfio: another\n");
        assert_eq!(FioReport::parse(&noted, ""), FioReport::parse(RECORDED, ""));
    }

    #[test]
    fn errors_are_quoted() {
        let failed = RECORDED.replacen("\"error\" : 0", "\"error\" : 5", 1);
        let said = "a note\nfio: io_u error on file x: Input/output error\n";
        let error = FioReport::parse(&failed, said).unwrap_err();
        assert_eq!(error, "job x: error 5: fio: io_u error on file x: Input/output error");
        let error = FioReport::parse("fio: pid=1, err=2", "").unwrap_err();
        assert_eq!(error, "it printed no report in JSON: fio: pid=1, err=2");
        let error = FioReport::parse("{\n\"jobs\": 5}", "").unwrap_err();
        assert!(error.starts_with("its report cannot be read: "), "{error}");
        let error = FioReport::parse("{\n\"jobs\": []}", "fio: connect: refused").unwrap_err();
        assert_eq!(error, "it did nothing: fio: connect: refused");
    }

    #[test]
    fn without_latencies_there_are_none() {
        let latency = FioLatency { min: 0.0, max: 0.0, percentile: BTreeMap::new() };
        assert_eq!(latency.percentiles(), Ok(None));
        let odd = BTreeMap::from([("x".to_owned(), 1.0)]);
        assert!(FioLatency { min: 0.0, max: 1.0, percentile: odd }.percentiles().is_err());
    }
}
