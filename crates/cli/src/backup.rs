//! `backup`: the backup policies of a yard.

use std::io::Write;

use blockyard_yard::backup::BackupView;

use crate::args::{BackupCommand, TalkArgs};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::human::{Columns, date, rounded, terminal_width};

pub(crate) fn run(command: &BackupCommand, out: &mut impl Write) -> Result<(), Failure> {
    match command {
        BackupCommand::List(talk) => list(talk, out),
    }
}

fn list(talk: &TalkArgs, out: &mut impl Write) -> Result<(), Failure> {
    let backups = client(talk).backups()?;
    if talk.json {
        print_json(&backups, out)?;
    } else {
        let headings = vec!["NAME", "POOL", "SNAPSHOTS", "LAST", "RESULT", "SENT", "NEXT"];
        let rows = backups.iter().map(row).collect();
        let texts = &["POOL", "LAST", "RESULT", "NEXT"];
        let table = Columns { headings, texts, rows };
        table.print(&["SNAPSHOTS", "SENT", "POOL"], terminal_width(), out)?;
        for BackupView { name, error, note, .. } in &backups {
            if let Some(error) = error {
                writeln!(out, "{name}: {error}")?;
            }
            if let Some(note) = note {
                writeln!(out, "{name}: the target has said: {note}")?;
            }
        }
    }
    match backups.iter().any(|backup| backup.error.is_some()) {
        true => Err(Failure::Silent(Code::Failed)),
        false => Ok(()),
    }
}

fn row(backup: &BackupView) -> Vec<String> {
    let time = |time: Option<u64>| time.map_or_else(|| "-".to_owned(), date);
    let result = match (backup.running, &backup.error, backup.last_run) {
        (true, _, _) => "running",
        (false, Some(_), _) => "failed",
        (false, None, Some(_)) => "done",
        (false, None, None) => "-",
    };
    vec![
        backup.name.clone(),
        backup.pool.clone(),
        backup.snapshots.clone(),
        time(backup.last_run),
        result.to_owned(),
        rounded(backup.sent_bytes),
        time(backup.next_run),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_how_the_last_run_ended() {
        let view = BackupView { name: "offsite".to_owned(), ..BackupView::default() };
        let result = |view: &BackupView| row(view)[4].clone();
        assert_eq!(result(&view), "-");
        let done = BackupView { last_run: Some(1_700_000_000), ..view };
        assert_eq!((row(&done)[3].as_str(), result(&done).as_str()), ("2023-11-14 22:13", "done"));
        let failed = BackupView { error: Some("no route".to_owned()), ..done };
        assert_eq!(result(&failed), "failed");
        assert_eq!(result(&BackupView { running: true, ..failed }), "running");
    }
}
