//! `volume diff`: the ranges in which a volume differs from a snapshot.

use std::io::{BufRead, BufReader, Read, Write};

use blockyard_volume_admin::diff::diff_read_only;
use blockyard_yard::size::Bytes;
use blockyard_yard::volume_diff::{DiffLine, DiffRangeView, DiffTotals, each_line};
use blockyard_yard::volumes::VolumeRequest;
use serde_json::json;

use super::pool::{ReadOnlyAccess, text};
use super::refused;
use crate::args::VolumeDiffArgs;
use crate::failure::{Code, Failure};

/// The columns of offsets and lengths, in characters: bytes of the largest volume, 1P, fit.
const WIDTH: usize = 16;

impl From<blockyard_volume::VolumeError> for Failure {
    fn from(error: blockyard_volume::VolumeError) -> Failure {
        refused(error)
    }
}

pub(super) fn run(args: &VolumeDiffArgs, out: &mut impl Write) -> Result<(), Failure> {
    let to = args.to();
    let mut print = DiffPrinter { args, to: &to, count: 0, out };
    match ReadOnlyAccess::find(&args.pool)? {
        ReadOnlyAccess::Here(pool) => {
            let diff = diff_read_only(&pool, &args.from, &to)?;
            each_line(diff, &mut |line| print.line(line))
        }
        ReadOnlyAccess::There(client, path) => {
            let (pool, from) = (Some(text(&path)?), Some(args.from.clone()));
            let request = VolumeRequest { pool, name: to.clone(), from, ..Default::default() };
            follow(client.diff(&request)?, &mut print)
        }
    }
}

/// Reads the lines of a yard to the totals.
fn follow<W: Write>(answer: impl Read, print: &mut DiffPrinter<'_, W>) -> Result<(), Failure> {
    let failed = |error: String| Failure::new(Code::Failed, format!("diff: {error}"));
    for line in BufReader::new(answer).lines() {
        let line = line.map_err(|error| failed(error.to_string()))?;
        let line: DiffLine =
            serde_json::from_str(&line).map_err(|error| failed(error.to_string()))?;
        print.line(&line)?;
        if let DiffLine::Totals(_) = line {
            return Ok(());
        }
    }
    Err(failed("the yard has stopped it; its log says why".to_owned()))
}

/// Prints ranges as they are found: there may be more than memory has space for.
struct DiffPrinter<'a, W: Write> {
    args: &'a VolumeDiffArgs,
    to: &'a str,
    /// Ranges that were printed.
    count: u64,
    out: &'a mut W,
}

impl<W: Write> DiffPrinter<'_, W> {
    fn line(&mut self, line: &DiffLine) -> Result<(), Failure> {
        let is_first = self.count == 0;
        self.count += 1;
        match (line, self.args.pool.talk.json) {
            (DiffLine::Range(range), true) => self.range_as_json(range, is_first),
            (DiffLine::Range(range), false) => self.range(range, is_first),
            (DiffLine::Totals(totals), true) => self.totals_as_json(totals, is_first),
            (DiffLine::Totals(totals), false) => self.totals(totals),
        }
    }

    fn range_as_json(&mut self, range: &DiffRangeView, is_first: bool) -> Result<(), Failure> {
        let before = if is_first { "{\"ranges\":[\n" } else { ",\n" };
        let range = serde_json::to_string(range).expect("a range is plain data");
        Ok(write!(self.out, "{before}{range}")?)
    }

    fn totals_as_json(&mut self, totals: &DiffTotals, is_first: bool) -> Result<(), Failure> {
        let before = if is_first { "{\"ranges\":[" } else { "\n" };
        let (from, to) = (&self.args.from, self.to);
        let (from, to) = (json!(from), json!(to));
        let totals = serde_json::to_string(totals).expect("totals are plain data");
        Ok(writeln!(self.out, "{before}],\"from\":{from},\"to\":{to},\"totals\":{totals}}}")?)
    }

    fn bytes(&self, bytes: u64) -> String {
        if self.args.script.parsable { bytes.to_string() } else { Bytes(bytes).to_string() }
    }

    fn range(&mut self, range: &DiffRangeView, is_first: bool) -> Result<(), Failure> {
        if is_first && !self.args.script.scripted {
            writeln!(self.out, "{:>WIDTH$}  {:>WIDTH$}  CHANGE", "OFFSET", "LENGTH")?;
        }
        let (offset, length) = (self.bytes(range.offset_bytes), self.bytes(range.length_bytes));
        let change = range.change.name();
        match self.args.script.scripted {
            true => writeln!(self.out, "{offset}\t{length}\t{change}")?,
            false => writeln!(self.out, "{offset:>WIDTH$}  {length:>WIDTH$}  {change}")?,
        }
        Ok(())
    }

    fn totals(&mut self, totals: &DiffTotals) -> Result<(), Failure> {
        if self.args.script.scripted {
            return Ok(());
        }
        let DiffTotals { ranges, written_bytes, discarded_bytes, .. } = *totals;
        let (written, discarded) = (self.bytes(written_bytes), self.bytes(discarded_bytes));
        let ranges = if ranges == 1 { "1 range".to_owned() } else { format!("{ranges} ranges") };
        writeln!(self.out, "{ranges}: {written} written, {discarded} discarded")?;
        let (from, to) = (totals.from_size_bytes, totals.to_size_bytes);
        if from != to {
            writeln!(self.out, "size: {} before, {} now", self.bytes(from), self.bytes(to))?;
        }
        Ok(())
    }
}
