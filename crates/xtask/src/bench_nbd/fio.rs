//! The client: one fio line, and what of its report we use.

use std::error::Error;
use std::process::Command;

use serde_json::Value;

/// How hard fio pulls.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// Jobs, each with a connection of its own.
    pub(super) connections: usize,
    /// Requests that each keeps in flight.
    pub(super) depth: usize,
}

/// What fio saw.
#[derive(Debug, PartialEq)]
pub(super) struct Report {
    pub(super) iops: f64,
    pub(super) ios: u64,
    /// Wall time.
    pub(super) seconds: f64,
    /// Processors that all jobs together kept busy.
    pub(super) cpus: f64,
}

/// The command, the same for every server but for the URI.
pub(super) fn line(load: Load, uri: &str, seconds: u32) -> Vec<String> {
    let line = format!(
        "fio --name=read --ioengine=nbd --uri={uri} --rw=randread --bs=4k --size=10G \
         --numjobs={} --iodepth={} --time_based --runtime={seconds} --norandommap --randrepeat=0 \
         --group_reporting --output-format=json",
        load.connections, load.depth,
    );
    line.split(' ').map(String::from).collect()
}

/// Runs the line to its end.
pub(super) fn run(load: Load, uri: &str, seconds: u32) -> Result<Report, Box<dyn Error>> {
    let line = line(load, uri, seconds);
    let output = Command::new(&line[0]).args(&line[1..]).output();
    let output = output.map_err(|error| format!("fio: {error}; `make deps` installs it"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {}\n{errors}{text}", line.join(" "), output.status).into());
    }
    report(load, &text)
}

fn report(load: Load, text: &str) -> Result<Report, Box<dyn Error>> {
    // fio may print notes before the report.
    let json: Value = serde_json::from_str(&text[text.find('{').unwrap_or(0)..])?;
    let job = &json["jobs"][0];
    let number = |value: &Value, name: &str| {
        value.as_f64().ok_or(format!("fio's report has no number for {name}: {text}"))
    };
    let error = number(&job["error"], "error")?;
    if error != 0.0 {
        return Err(format!("fio: error {error}: {text}").into());
    }
    let read = &job["read"];
    if read["total_ios"] == 0 {
        return Err(format!("fio read nothing: {text}").into());
    }
    // The shares are per cent of one job's time, over all jobs.
    let share = number(&job["usr_cpu"], "usr_cpu")? + number(&job["sys_cpu"], "sys_cpu")?;
    Ok(Report {
        iops: number(&read["iops"], "iops")?,
        ios: number(&read["total_ios"], "total_ios")? as u64,
        seconds: number(&read["runtime"], "runtime")? / 1e3,
        cpus: share / 100.0 * load.connections as f64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Load = Load { connections: 4, depth: 32 };

    #[test]
    fn the_line_names_the_load_and_the_server() {
        let line = line(LOAD, "nbd://a", 3).join(" ");
        for part in ["--uri=nbd://a ", "--numjobs=4 ", "--iodepth=32 ", "--runtime=3 "] {
            assert!(line.contains(part), "{line}");
        }
    }

    #[test]
    fn a_report_is_read_behind_notes() {
        let text = r#"fio: a note
            {"jobs": [{"error": 0, "usr_cpu": 20.0, "sys_cpu": 30.0,
             "read": {"iops": 1000.5, "total_ios": 4002, "runtime": 4000}}]}"#;
        let want = Report { iops: 1000.5, ios: 4002, seconds: 4.0, cpus: 2.0 };
        assert_eq!(report(LOAD, text).unwrap(), want);
    }

    #[test]
    fn a_report_of_an_error_is_an_error() {
        assert!(report(LOAD, r#"{"jobs": [{"error": 5}]}"#).is_err());
        assert!(report(LOAD, r#"{"jobs": [{"error": 0, "read": {"total_ios": 0}}]}"#).is_err());
        assert!(report(LOAD, r#"{"jobs": []}"#).is_err());
        assert!(report(LOAD, "nothing").is_err());
    }
}
