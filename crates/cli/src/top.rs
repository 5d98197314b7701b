//! `top`: what a yard does, page by page on a terminal, or as text or JSON.

#![allow(clippy::disallowed_types)] // Control plane: no I/O passes here.

mod keys;
mod pages;
mod screen;

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use blockyard_yard::activity::{Activity, Sample};
use blockyard_yard::client::{Client, ClientError, Notice};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::args::TopArgs;
use crate::devices::client;
use crate::failure::{Code, Failure};
use keys::Keyboard;
use pages::{TopPage, summary};
use screen::Screen;

pub(crate) use pages::{short, short_bytes};

/// The interval of the first screen.
const FIRST_INTERVAL: Duration = Duration::from_millis(100);

/// How long the screen waits for a key before it looks for a signal and a sample.
const LOOK: Duration = Duration::from_millis(50);

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
    let before = take_sample(&client, false)?;
    std::thread::sleep(FIRST_INTERVAL);
    let now = take_sample(&client, false)?;
    let screen = Screen::new(Activity::new(&before, &now), args.delay);
    let is_ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP, SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&is_ended))?;
    }
    let shown = ratatui::try_init().and_then(|mut terminal| {
        let sampler = Sampler::start(client.without_notice())?;
        show(args.count, screen, now, &sampler, &mut terminal, &is_ended)
    });
    // Also if the terminal could be changed in part only.
    ratatui::restore();
    Ok(shown?)
}

/// Asks a yard; for zones only if they are wanted, since a device may have to count them.
///
/// # Errors
/// If the yard does not answer.
fn take_sample(client: &Client, with_zones: bool) -> Result<Sample, ClientError> {
    Ok(Sample {
        process: client.process()?,
        stats: client.stats()?,
        zones: if with_zones { client.zone_counts()? } else { Vec::new() },
        pools: client.pools()?,
        connections: client.connections()?,
    })
}

/// A thread that takes samples, so that the screen answers keys while the yard does not answer.
struct Sampler {
    /// Asks for a sample, with or without zones.
    asks: Sender<bool>,
    answers: Receiver<Result<Sample, ClientError>>,
}

impl Sampler {
    /// Starts the thread. It ends when the sampler is dropped and the yard has answered.
    fn start(client: Client) -> std::io::Result<Sampler> {
        let ((asks, asked), (answer, answers)) = (mpsc::channel(), mpsc::channel());
        let work = move || {
            while let Ok(with_zones) = asked.recv() {
                if answer.send(take_sample(&client, with_zones)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("sampler".to_owned()).spawn(work)?;
        Ok(Sampler { asks, answers })
    }
}

/// Prints an activity after each interval.
fn print(args: &TopArgs, client: &Client, out: &mut impl Write) -> Result<(), Failure> {
    let mut before = take_sample(client, true)?;
    let mut left = args.count;
    while left != Some(0) {
        std::thread::sleep(args.delay);
        let now = take_sample(client, true)?;
        let activity = Activity::new(&before, &now);
        if args.talk.json {
            // A line each time, so that a reader knows where one ends.
            writeln!(out, "{}", activity.to_json())?;
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
            let texts = &page.headings()[..page.text_columns()];
            page.table(activity).print(texts, out)?;
        }
    }
    writeln!(out)?;
    Ok(())
}

/// Shows samples on the terminal until the user or a signal ends it, or the terminal hangs up.
fn show(
    count: Option<u64>,
    mut screen: Screen,
    mut before: Sample,
    sampler: &Sampler,
    terminal: &mut ratatui::DefaultTerminal,
    is_ended: &AtomicBool,
) -> std::io::Result<()> {
    let mut keyboard = Keyboard::open()?;
    let mut left = count;
    let mut due = Instant::now() + screen.delay;
    // Since when the yard owes a sample.
    let mut asked: Option<Instant> = None;
    // Relaxed: nothing else is read because of the flag.
    while left != Some(0) && !is_ended.load(Ordering::Relaxed) {
        terminal.draw(|frame| screen.draw(frame))?;
        let is_waiting = asked.is_some() || keyboard.is_in_key();
        let wait = due.saturating_duration_since(Instant::now()).min(LOOK);
        let keys = keyboard.await_keys(if is_waiting { LOOK } else { wait })?;
        let Some(keys) = keys else { return Ok(()) };
        let delay = screen.delay;
        for key in &keys {
            if !screen.press(*key) {
                return Ok(());
            }
        }
        if screen.delay != delay {
            due = Instant::now() + screen.delay;
        }
        if !keys.is_empty() && screen.lacks_zones() {
            due = Instant::now();
        }
        if let Some(since) = asked {
            match sampler.answers.try_recv() {
                Ok(Ok(now)) => {
                    screen.update(Activity::new(&before, &now));
                    (before, asked) = (now, None);
                    left = left.map(|left| left - 1);
                }
                Ok(Err(error)) => (screen.error, asked) = (Some(error.to_string()), None),
                Err(_) if since.elapsed() >= Notice::AFTER => {
                    let seconds = since.elapsed().as_secs();
                    screen.error = Some(format!("the yard has not answered for {seconds} s"));
                }
                Err(_) => {}
            }
        } else if Instant::now() >= due {
            due = Instant::now() + screen.delay;
            if !screen.is_paused {
                sampler.asks.send(screen.shows_zones()).map_err(std::io::Error::other)?;
                asked = Some(Instant::now());
            }
        }
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
#[path = "../../yard/src/activity/fixture.rs"]
pub(crate) mod fixture;

#[cfg(test)]
mod picture_tests;

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
