//! `top`: what a yard does, page by page on a terminal, or as text or JSON.

mod pages;
mod sample;
mod screen;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use blockyard_yard::client::Client;
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use crate::args::TopArgs;
use crate::devices::client;
use crate::failure::{Code, Failure};
use pages::{TopPage, summary, to_json};
use sample::{Activity, Sample};
use screen::Screen;

pub(crate) use pages::{device_json, short, short_bytes};

pub(crate) fn run(args: &TopArgs, out: &mut impl Write) -> Result<(), Failure> {
    let client = client(&args.talk);
    if args.batch || args.talk.json {
        return print(args, &client, out);
    }
    if !std::io::stdout().is_terminal() {
        let message = "standard output is not a terminal: use --batch for text, or --json";
        return Err(Failure::new(Code::Usage, message));
    }
    // Before the terminal is changed, so that the error of an absent yard is readable.
    let first = Sample::take(&client)?;
    let mut terminal = ratatui::try_init()?;
    let ended = show(args, &client, first, &mut terminal);
    ratatui::restore();
    Ok(ended?)
}

/// Prints an activity after each interval.
fn print(args: &TopArgs, client: &Client, out: &mut impl Write) -> Result<(), Failure> {
    let mut before = Sample::take(client)?;
    let mut left = args.count;
    while left != Some(0) {
        std::thread::sleep(args.delay);
        let now = Sample::take(client)?;
        let activity = Activity::new(&before, &now);
        if args.talk.json {
            // A line each time, so that a reader knows where one ends.
            writeln!(out, "{}", to_json(&activity))?;
        } else {
            print_pages(&activity, out)?;
        }
        out.flush()?;
        before = now;
        left = left.map(|left| left - 1);
    }
    Ok(())
}

/// Prints the pages that have a row.
fn print_pages(activity: &Activity, out: &mut impl Write) -> Result<(), Failure> {
    writeln!(out, "{}", summary(activity))?;
    for page in TopPage::ALL {
        if page == TopPage::Devices || !page.rows(activity).is_empty() {
            writeln!(out)?;
            page.table(activity).print(page.text_columns(), out)?;
        }
    }
    writeln!(out)?;
    Ok(())
}

/// Shows samples on the terminal until the user ends it.
fn show(
    args: &TopArgs,
    client: &Client,
    first: Sample,
    terminal: &mut ratatui::DefaultTerminal,
) -> std::io::Result<()> {
    let mut screen = Screen::new(Activity::new(&Sample::default(), &first), args.delay);
    let (mut before, mut left) = (first, args.count);
    let mut due = Instant::now() + screen.delay;
    while left != Some(0) {
        terminal.draw(|frame| screen.draw(frame))?;
        if event::poll(due.saturating_duration_since(Instant::now()))? {
            let delay = screen.delay;
            if let Event::Key(key) = event::read()?
                && key.kind == KeyEventKind::Press
                && !screen.press(key)
            {
                return Ok(());
            }
            if screen.delay != delay {
                due = Instant::now() + screen.delay;
            }
            continue;
        }
        due = Instant::now() + screen.delay;
        if screen.is_paused {
            continue;
        }
        match Sample::take(client) {
            Ok(now) => {
                screen.update(Activity::new(&before, &now));
                before = now;
            }
            Err(error) => screen.error = Some(error.to_string()),
        }
        left = left.map(|left| left - 1);
    }
    Ok(())
}

/// The shortest and the longest time between two samples.
pub(crate) const DELAYS: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(86_400);

/// The time of a number of seconds.
///
/// # Errors
/// If it is no number, or outside [`DELAYS`].
pub(crate) fn delay(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| seconds.is_finite());
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|delay| DELAYS.contains(delay))
        .ok_or_else(|| "expected seconds from 0.1 to 86400".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_are_bounded() {
        assert_eq!(delay("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "0.09", "-1", "nan", "inf", "1e9", "x", ""] {
            assert!(delay(text).is_err(), "{text}");
        }
    }
}
