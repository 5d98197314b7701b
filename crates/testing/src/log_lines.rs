//! The lines of the log, for tests of what a program says.
#![allow(clippy::disallowed_types)] // A list of a test.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The lines of all threads that have at least a level and contain a text.
#[derive(Clone, Debug)]
pub struct LogLines {
    level: Level,
    text: String,
    lines: Arc<Mutex<Vec<String>>>,
}

impl LogLines {
    /// Collects the warnings and errors with this text from now on. A process can do so once.
    ///
    /// # Panics
    /// If the process has a log already.
    pub fn with(text: &str) -> LogLines {
        LogLines::at_level(Level::WARN, text)
    }

    /// Collects the lines of this level or a more important one with this text, as
    /// [`LogLines::with`].
    ///
    /// # Panics
    /// If the process has a log already.
    pub fn at_level(level: Level, text: &str) -> LogLines {
        let lines = LogLines { level, text: text.to_owned(), lines: Arc::default() };
        tracing::subscriber::set_global_default(lines.clone()).expect("one test has the log");
        lines
    }

    /// The lines so far: the fields of each, and its message.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0 += &format!("{field}={value:?} ");
    }
}

impl Subscriber for LogLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields(String::new());
        event.record(&mut fields);
        if fields.0.contains(&self.text) {
            self.lines.lock().unwrap_or_else(PoisonError::into_inner).push(fields.0);
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
