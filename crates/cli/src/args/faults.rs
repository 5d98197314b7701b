//! The arguments of `inject`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{TalkArgs, name};

const INJECT_HELP: &str = "\
FAULT is one of:
  add,op=OP,start=SECTOR,nr_sectors=N,zones=N-N,status=STATUS,latency=LATENCY,chance=CHANCE,times=N,
  seed=N
      a rule: requests that match fail with STATUS before they reach the device, or complete LATENCY
      later than the device completes them, or both. All keys but one of status and latency may be
      left out. OP is READ, WRITE, FLUSH, DISCARD, WRITE_ZEROES, ZONE_APPEND, ZONE_RESET, ...;
      zones=3-7 is the range of these zones; STATUS is a name of Linux: IOERR, MEDIUM, TIMEOUT,
      NOSPC, ...; chance=10 is one request in ten, chance=1% one in a hundred; times=3 applies the
      rule to three requests at most; equal seeds decide equally. LATENCY is 5ms, or 1ms..20ms
      (every time between these with the same probability), or 200us/5ms/50ms (the percentiles 50,
      99 and 99.9). The newest rule that fails a request and the newest that delays it win.
  removeall
      removes all rules
  NAME=VALUE
      a fault of the device's own. null devices have badblocks=+START-END and -START-END (sectors,
      END inclusive), badblocks_once=1, badblocks_partial_io=1, zone_readonly=SECTOR and
      zone_offline=SECTOR for the zone of that sector, -SECTOR to repair it (the zone is empty then;
      giving the fault again changes nothing), timeout= and
      requeue=INTERVAL,PROBABILITY,SPACE,TIMES, power_cut=1. smr devices have the zone faults.
      timeout= holds a request for the device's request_timeout_ms, 5 seconds unless its URI says
      otherwise, and then it fails with TIMEOUT. ram devices have nospc=N (one in N writes finds no
      memory; 0: none) and flip=SECTOR (a bit of what is stored there changes), those with a backing
      file backing_eio=N, backing_late_eio=N and backing_enospc=N (N reads and writes of it fail, N
      syncs, N writes that find no space)

Examples:
  blockyard inject mem0 add,op=WRITE,start=0,nr_sectors=8,status=MEDIUM
  blockyard inject mem0 add,op=READ,latency=200us/5ms/50ms
  blockyard inject zoned0 zone_offline=2097152
  blockyard inject list
  blockyard inject remove mem0 2
";

/// `inject`.
#[derive(Args, Debug)]
#[command(
    after_help = INJECT_HELP,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub(crate) struct InjectArgs {
    #[command(subcommand)]
    pub(crate) command: Option<InjectCommand>,
    /// The device's name
    #[arg(required = true, value_parser = name)]
    pub(crate) device: Option<String>,
    /// The fault
    #[arg(required = true, value_name = "FAULT", value_parser = fault)]
    pub(crate) fault: Option<String>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// The other commands of `inject`.
#[derive(Debug, Subcommand)]
pub(crate) enum InjectCommand {
    /// List the rules of one device or of all, and what they did
    List(InjectListArgs),
    /// Remove one rule of a device, or all
    Remove(InjectRemoveArgs),
    /// Run a scenario: rules that come and go at their times
    Run(InjectRunArgs),
}

/// `inject list`.
#[derive(Args, Debug)]
pub(crate) struct InjectListArgs {
    /// Only this device
    #[arg(value_parser = name)]
    pub(crate) device: Option<String>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `inject remove`.
#[derive(Args, Debug)]
pub(crate) struct InjectRemoveArgs {
    /// The device's name
    #[arg(value_parser = name)]
    pub(crate) device: String,
    /// The number of the rule, as `inject list` prints it, or `all`
    #[arg(value_name = "ID|all", value_parser = removed_rules)]
    pub(crate) rules: RemovedRules,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// Which rules are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemovedRules {
    /// All rules.
    All,
    /// The rule of this number.
    One(u64),
}

const RUN_HELP: &str = "\
FILE is TOML. Each step is a rule, with the keys of `inject DEVICE add,...`, that the device has
from `at` on, counted from the start, for as long as `for` says:

  seed = 42                 # equal seeds decide equally; 0 without it
  device = \"zoned0\"         # for all steps; a step may have its own `device`

  [[step]]
  at = \"10s\"
  for = \"5s\"
  op = \"WRITE\"
  zones = \"3-7\"
  status = \"IOERR\"
  chance = \"1%\"

  [[step]]
  at = \"20s\"
  for = \"30s\"
  op = \"READ\"
  latency = \"200us/5ms/50ms\"

The whole file is checked before the first step. Each step is printed when it begins and when it
ends, with the number of requests that matched and those that failed or were delayed. The yard
removes the rules at the end of the scenario, on Ctrl-C, and when the connection is lost.

Exit codes: 0 the scenario has ended; 1 it was stopped; 3 the file is invalid; 6 the yard refused,
or a device was removed meanwhile.
";

/// `inject run`.
#[derive(Args, Debug)]
#[command(after_help = RUN_HELP)]
pub(crate) struct InjectRunArgs {
    /// The scenario; `-` for standard input
    pub(crate) file: PathBuf,
    /// The device of all steps that name none, instead of the file's
    #[arg(value_parser = name)]
    pub(crate) device: Option<String>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

fn fault(text: &str) -> Result<String, String> {
    let checked = blockyard_yard::inject::parse(text);
    checked.map(|_| text.to_owned()).map_err(|error| error.to_string())
}

fn removed_rules(text: &str) -> Result<RemovedRules, String> {
    if text == "all" {
        return Ok(RemovedRules::All);
    }
    let id = text.parse().map_err(|_| "expected the number of a rule, or all".to_owned());
    id.map(RemovedRules::One)
}
