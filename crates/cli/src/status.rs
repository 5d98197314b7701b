//! `status`: the warnings of a yard, with an exit code for monitoring.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use blockyard_yard::error::counted;
use blockyard_yard::warnings::{BackupStatusView, CRITICAL, StatusView};

use crate::args::{PromoteArgs, TalkArgs};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::human::date;

/// Exit codes, which are those of plugins for Nagios, Icinga and similar programs.
const OK: u8 = 0;
const WARNING: u8 = 1;
const CRITICAL_CODE: u8 = 2;
pub(crate) const UNKNOWN: u8 = 3;

/// Prints the status; returns the exit code.
pub(crate) fn run(talk: &TalkArgs, out: &mut impl Write) -> Result<ExitCode, Failure> {
    let status = match client(talk).status() {
        Ok(status) => status,
        Err(error) => {
            // Monitoring reads standard output.
            writeln!(out, "UNKNOWN: {error}")?;
            return Ok(ExitCode::from(UNKNOWN));
        }
    };
    if talk.json {
        print_json(&status, out)?;
    } else {
        print(&status, out)?;
    }
    Ok(ExitCode::from(code(&status)))
}

/// How often the status is asked for while a standby opens its pools.
const PAUSE: Duration = Duration::from_millis(200);

/// Promotes a standby, and waits until it serves.
pub(crate) fn promote(args: &PromoteArgs, out: &mut impl Write) -> Result<(), Failure> {
    let client = client(&args.talk);
    let mut status = client.promote()?;
    while status.promoting && !args.no_wait {
        std::thread::sleep(PAUSE);
        // A daemon that cannot open its pools ends.
        status = client.status().map_err(|error| {
            let ended = format!(
                "cannot take the pools over: the yard has ended, and its log says \
                                 why ({error})"
            );
            Failure::new(Code::Failed, ended)
        })?;
    }
    if status.standby {
        let failed = "cannot take the pools over: the yard has started again as a standby, and its \
                      log says why";
        return Err(Failure::new(Code::Failed, failed.to_owned()));
    }
    if args.talk.json {
        return print_json(&status, out);
    }
    let done = if status.promoting { "the yard takes its pools over" } else { "the yard serves" };
    Ok(writeln!(out, "promoted: {done}")?)
}

fn code(status: &StatusView) -> u8 {
    match status.state.as_str() {
        "ok" => OK,
        "warning" => WARNING,
        _ => CRITICAL_CODE,
    }
}

fn print(status: &StatusView, out: &mut impl Write) -> Result<(), Failure> {
    let (devices, pools) = (counted(status.devices, "device"), counted(status.pools, "pool"));
    let critical = status.warnings.iter().filter(|it| it.severity == CRITICAL).count() as u64;
    let others = status.warnings.len() as u64 - critical;
    let found = match (critical, others) {
        (0, 0) => "no warnings".to_owned(),
        (0, others) => counted(others, "warning"),
        (critical, others) => format!("{critical} critical, {}", counted(others, "warning")),
    };
    let standby = match (status.standby, status.promoting) {
        (true, _) => "standby, ",
        (_, true) => "promoting, ",
        _ => "",
    };
    writeln!(out, "{}: {standby}{devices}, {pools}, {found}", status.state.to_uppercase())?;
    for warning in &status.warnings {
        writeln!(
            out,
            "{}: {} {}: {} (since {} UTC)",
            warning.severity,
            warning.kind,
            warning.subject,
            warning.message,
            date(warning.since)
        )?;
    }
    for backup in &status.backups {
        writeln!(out, "backup {}", backup_result(backup))?;
    }
    Ok(())
}

/// The last result of a backup policy. A warning has why a run failed.
fn backup_result(backup: &BackupStatusView) -> String {
    let BackupStatusView { name, last_success, error } = backup;
    let success = last_success.map(|it| format!("last success {} UTC", date(it)));
    let success = success.unwrap_or_else(|| "no run has succeeded".to_owned());
    match error {
        Some(_) => format!("{name}: the last run failed, {success}"),
        None => format!("{name}: {success}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_yard::warnings::WarningView;

    #[test]
    fn the_first_line_has_the_state_and_the_exit_code_is_that_of_plugins() {
        let warning = |severity: &str| WarningView {
            kind: "pool_fill".to_owned(),
            severity: severity.to_owned(),
            subject: "/srv/pool".to_owned(),
            message: "82% full: 8.20G of 10G".to_owned(),
            since: 1_796_055_600,
        };
        let line = "pool_fill /srv/pool: 82% full: 8.20G of 10G (since 2026-11-30 16:20 UTC)\n";
        for (severities, wanted, exit) in [
            (&[][..], "OK: 2 devices, 1 pool, no warnings\n".to_owned(), 0),
            (&["warning"], format!("WARNING: 2 devices, 1 pool, 1 warning\nwarning: {line}"), 1),
            (
                &["warning", "critical"],
                format!(
                    "CRITICAL: 2 devices, 1 pool, 1 critical, 1 warning\ncritical: {line}\
                     warning: {line}"
                ),
                2,
            ),
        ] {
            let warnings = severities.iter().map(|severity| warning(severity)).collect();
            let status = StatusView::new(2, 1, warnings);
            let mut out = Vec::new();
            print(&status, &mut out).unwrap();
            assert_eq!((String::from_utf8(out).unwrap(), code(&status)), (wanted, exit));
        }
    }

    #[test]
    fn each_backup_policy_has_a_line_with_its_last_result() {
        let backup = |name: &str, last_success, error: Option<&str>| BackupStatusView {
            name: name.to_owned(),
            last_success,
            error: error.map(str::to_owned),
        };
        let mut status = StatusView::new(1, 1, Vec::new());
        status.backups = vec![
            backup("offsite", Some(1_700_000_000), None),
            backup("second", Some(1_700_000_000), Some("no route")),
            backup("third", None, None),
            backup("fourth", None, Some("no route")),
        ];
        let mut out = Vec::new();
        print(&status, &mut out).unwrap();
        let wanted = "OK: 1 device, 1 pool, no warnings\n\
                      backup offsite: last success 2023-11-14 22:13 UTC\n\
                      backup second: the last run failed, last success 2023-11-14 22:13 UTC\n\
                      backup third: no run has succeeded\n\
                      backup fourth: the last run failed, no run has succeeded\n";
        assert_eq!(String::from_utf8(out).unwrap(), wanted);
    }
}
