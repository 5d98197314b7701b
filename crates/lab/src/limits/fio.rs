//! What stock fio takes for an I/O that its own null engine does not do: the least that any figure
//! by fio can show.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::error::LabError;
use crate::limits::slices::Reading;
use crate::sample::Round;

/// Random 4 KiB reads of fio's null engine at this depth, in batches of up to 64.
///
/// # Errors
/// If fio is not installed, fails, or says what is not understood.
pub fn null_engine(round: &Round<'_>, depth: u32) -> Result<Reading, LabError> {
    let batch = depth.min(64);
    let seconds = round.duration.as_secs().max(1);
    let arguments = format!(
        "--name=limit --ioengine=null --thread --size=10g --rw=randread --bs=4k --iodepth={depth} \
         --iodepth_batch_submit={batch} --iodepth_batch_complete_max={batch} --gtod_reduce=1 \
         --norandommap --time_based --runtime={seconds} --ramp_time=0 --output-format=json"
    );
    let mut command = Command::new("fio");
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    let output = command.output().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => LabError::missing("fio", "install the package fio"),
        _ => LabError::io("starting fio")(error),
    })?;
    let what = format!("fio {arguments}");
    if !output.status.success() {
        return Err(LabError::failed(what, String::from_utf8_lossy(&output.stderr)));
    }
    let iops = iops_per_cpu(&output.stdout).map_err(|why| LabError::failed(what, why))?;
    Ok(Reading::of(1e9 / iops))
}

/// I/Os per second of the CPU time that fio's thread had.
fn iops_per_cpu(output: &[u8]) -> Result<f64, String> {
    // fio may say something before the document.
    let start = output.iter().position(|&byte| byte == b'{').ok_or("no JSON in its output")?;
    let value: Value = serde_json::from_slice(&output[start..]).map_err(|e| e.to_string())?;
    let job = &value["jobs"][0];
    let number = |value: &Value, name: &str| {
        value[name].as_f64().ok_or_else(|| format!("no number `{name}` in its output"))
    };
    let iops = number(&job["read"], "iops")?;
    let cpu = (number(job, "usr_cpu")? + number(job, "sys_cpu")?) / 100.0;
    if iops > 0.0 && cpu > 0.0 { Ok(iops / cpu) } else { Err(format!("{iops} IOPS, CPU {cpu}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_the_processor_is_divided_out() {
        let text = br#"note: a word before
            {"jobs": [{"read": {"iops": 5e6}, "usr_cpu": 40.0, "sys_cpu": 10.0}]}"#;
        assert_eq!(iops_per_cpu(text), Ok(1e7));
        assert!(iops_per_cpu(b"").is_err());
        assert!(iops_per_cpu(br#"{"jobs": []}"#).unwrap_err().contains("iops"));
    }
}
