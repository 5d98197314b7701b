//! The progress of a run: a bar on a terminal, a line per round elsewhere; on standard error.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::error::LabError;
use crate::experiment::Cell;

/// Shows the progress of a run.
#[derive(Debug)]
pub struct Progress {
    shown: Shown,
    /// The expected time of the experiments after the current one.
    later: Duration,
    /// The remaining time when the bar was empty, and the round for which the last line was
    /// printed.
    total: Option<Duration>,
    said: Option<(String, u32)>,
}

#[derive(Debug)]
enum Shown {
    Bar(ProgressBar),
    Lines,
    Silent,
}

impl Progress {
    /// A bar if standard error is a terminal, lines otherwise.
    pub fn on_stderr() -> Progress {
        if !std::io::stderr().is_terminal() {
            return Progress::new(Shown::Lines);
        }
        let bar = ProgressBar::with_draw_target(Some(1000), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("[{bar:24}] {prefix} left  {wide_msg}")
            .expect("the template is ours")
            .progress_chars("=> ");
        bar.set_style(style);
        Progress::new(Shown::Bar(bar))
    }

    /// Shows no progress.
    pub fn silent() -> Progress {
        Progress::new(Shown::Silent)
    }

    fn new(shown: Shown) -> Progress {
        Progress { shown, later: Duration::ZERO, total: None, said: None }
    }

    /// Sets the expected time of the experiments after the next one.
    pub fn later(&mut self, later: Duration) {
        self.later = later;
    }

    /// A cell is about to be measured; `left` is the remaining time of its experiment.
    pub(crate) fn step(
        &mut self,
        experiment: &str,
        cell: &Cell,
        round: u32,
        rounds: u32,
        left: Duration,
    ) {
        let left = left + self.later;
        let total = *self.total.get_or_insert(left);
        match &self.shown {
            Shown::Bar(bar) => {
                let done = 1.0 - left.as_secs_f64() / total.as_secs_f64().max(1e-9);
                bar.set_position((done.clamp(0.0, 1.0) * 1000.0) as u64);
                bar.set_prefix(words(left));
                bar.set_message(format!("{experiment} round {} of {rounds}: {cell:?}", round + 1));
            }
            Shown::Lines => {
                let now = (experiment.to_owned(), round);
                if self.said.as_ref() != Some(&now) {
                    let (round, left) = (round + 1, words(left));
                    eprintln!("{experiment}: round {round} of {rounds}, about {left} left");
                    self.said = Some(now);
                }
            }
            Shown::Silent => {}
        }
    }

    /// A cell failed and will not be measured again.
    pub(crate) fn failed(&self, experiment: &str, cell: &Cell, error: &LabError) {
        self.say(&format!("{experiment}: {cell:?} is not measured: {error}"));
    }

    /// Prints a line without disturbing the bar.
    pub fn say(&self, line: &str) {
        match &self.shown {
            Shown::Bar(bar) => bar.suspend(|| eprintln!("{line}")),
            Shown::Lines => eprintln!("{line}"),
            Shown::Silent => {}
        }
    }

    /// Removes the bar, so that results can be printed.
    pub fn pause(&self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

/// A remaining time, in words.
pub(crate) fn words(left: Duration) -> String {
    match left.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds => format!("{} min {:02} s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_said_in_minutes_and_seconds() {
        assert_eq!(words(Duration::from_millis(1900)), "1 s");
        assert_eq!(words(Duration::from_secs(125)), "2 min 05 s");
    }
}
