//! nbdcopy as a client: one connection that reads a whole device sequentially and discards the
//! data.

use std::time::Duration;

use crate::error::LabError;
use crate::sample::Round;
use crate::tools::child::{ChildResult, CommandLine};

/// The length of a request, in bytes.
pub const REQUEST_BYTES: u64 = 1 << 20;
/// The time limit; nbdcopy normally ends long before.
const LIMIT: Duration = Duration::from_secs(60);

/// The command. nbdcopy also reads ranges that the server knows to be empty (`--no-extents`), and
/// discards the data.
pub fn line(uri: &str) -> CommandLine {
    let mut line = CommandLine::new("libnbd-bin", "nbdcopy --connections=1 --no-extents");
    line.words.push(format!("--request-size={REQUEST_BYTES}"));
    line.words.extend(["--", uri, "null:"].map(String::from));
    line
}

/// Runs nbdcopy to its end.
///
/// # Errors
/// If nbdcopy is missing, fails or does not end.
pub fn run(uri: &str, round: &Round<'_>) -> Result<ChildResult, LabError> {
    line(uri).start(None)?.finish(LIMIT, round.stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_reads_everything_by_large_requests() {
        let text = line("nbd+unix:///a?socket=s").text();
        let want = "nbdcopy --connections=1 --no-extents --request-size=1048576 -- \
                    nbd+unix:///a?socket=s null:";
        assert_eq!(text, want);
    }
}
