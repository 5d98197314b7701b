//! `init`, `check` and `schema`, and how a configuration's errors are shown.

use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use blockyard_core::owner_only;
use blockyard_yard::config::{Config, ConfigError, LEN_MAX, TEMPLATE, parse, schema};
use blockyard_yard::stack;
use miette::{
    Diagnostic, GraphicalReportHandler, GraphicalTheme, LabeledSpan, NamedSource, SourceCode,
};
use serde_json::json;

use crate::args::{CheckArgs, InitArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};

pub(crate) fn init(args: &InitArgs, out: &mut impl Write) -> Result<(), Failure> {
    if args.file.as_os_str() == "-" {
        return Ok(write!(out, "{TEMPLATE}")?);
    }
    let file = args.file.display();
    let mut options = std::fs::OpenOptions::new();
    options.write(true).mode(owner_only::FILE_MODE);
    match args.force {
        true => options.create(true).truncate(true),
        false => options.create_new(true),
    };
    let written = options.open(&args.file).and_then(|mut f| f.write_all(TEMPLATE.as_bytes()));
    match written {
        Ok(()) => Ok(writeln!(out, "{file}: written; serve it with `blockyard serve -c {file}`")?),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let message = format!("{file} is there already; --force overwrites it");
            Err(Failure::new(Code::Failed, message))
        }
        Err(error) => Err(Failure::new(Code::Failed, format!("{file}: {error}"))),
    }
}

pub(crate) fn print_schema(out: &mut impl Write) -> Result<(), Failure> {
    print_json(&schema(), out)
}

pub(crate) fn check(args: &CheckArgs, out: &mut impl Write) -> Result<(), Failure> {
    let text = read(&args.file)?;
    let (config, errors) = match parse(&text) {
        Ok(config) => {
            let mut errors = check_devices(&text, &config);
            errors.extend(config.check_tls(&text));
            errors.sort_by_key(|error| error.span.start);
            (Some(config), errors)
        }
        Err(errors) => (None, errors),
    };
    if args.json {
        let errors: Vec<_> = errors.iter().map(as_json).collect();
        print_json(&json!({ "ok": errors.is_empty(), "errors": errors }), out)?;
    } else if let Some(config) = config.filter(|_| errors.is_empty()) {
        let plural = if config.devices.len() == 1 { "device" } else { "devices" };
        writeln!(out, "{}: good: {} {plural}", args.file.display(), config.devices.len())?;
        for spec in &config.devices {
            // Checked above, so it comes without an error; its notes are worth showing.
            for note in stack::check(spec).unwrap_or_default() {
                writeln!(out, "{}: {note}", spec.name())?;
            }
        }
    } else {
        show(&args.file, &text, &errors);
    }
    if errors.is_empty() { Ok(()) } else { Err(Failure::Silent(Code::Config)) }
}

/// Reads a configuration that is to be served; what is wrong with it is shown. What it says of TLS
/// is left to be checked together with what the command line adds, if it does.
pub(crate) fn load(file: &Path, adds_tls: bool) -> Result<Config, Failure> {
    let text = read(file)?;
    let errors = match parse(&text) {
        Ok(config) => {
            let mut errors = check_devices(&text, &config);
            errors.extend(config.check_tls(&text).filter(|_| !adds_tls));
            errors.sort_by_key(|error| error.span.start);
            if errors.is_empty() {
                return Ok(config);
            }
            errors
        }
        Err(errors) => errors,
    };
    show(file, &text, &errors);
    Err(Failure::Silent(Code::Config))
}

/// What shows only when devices are made: whether their parameters go together.
fn check_devices(text: &str, config: &Config) -> Vec<ConfigError> {
    let devices = config.devices.iter().zip(&config.places);
    let checked = devices.filter_map(|(spec, places)| {
        let error = stack::check(spec).err()?;
        Some(ConfigError::at(text, places.of(error.field()), error.to_string(), None))
    });
    checked.collect()
}

fn read(file: &Path) -> Result<String, Failure> {
    let mut text = Vec::new();
    let limit = LEN_MAX as u64 + 1;
    let result = if file.as_os_str() == "-" {
        io::stdin().take(limit).read_to_end(&mut text)
    } else {
        std::fs::File::open(file).and_then(|file| file.take(limit).read_to_end(&mut text))
    };
    let failed = |what: String| Failure::new(Code::Config, format!("{}: {what}", file.display()));
    result.map_err(|error| failed(error.to_string()))?;
    String::from_utf8(text).map_err(|error| {
        let good = error.utf8_error().valid_up_to();
        let line = error.as_bytes()[..good].iter().filter(|byte| **byte == b'\n').count() + 1;
        failed(format!("line {line}: the file must be UTF-8 text"))
    })
}

fn as_json(error: &ConfigError) -> serde_json::Value {
    json!({
        "line": error.line,
        "column": error.column,
        "message": error.message,
        "help": error.help,
    })
}

/// Prints errors with the lines they are in: drawn on a terminal, one line each elsewhere.
fn show(file: &Path, text: &str, errors: &[ConfigError]) {
    let terminal = io::stderr().is_terminal();
    for error in errors {
        if !terminal {
            let ConfigError { line, column, message, help, .. } = error;
            let help = help.as_ref().map(|help| format!("; {help}")).unwrap_or_default();
            eprintln!("{}:{line}:{column}: {message}{help}", file.display());
            continue;
        }
        let shown =
            Shown { error, source: NamedSource::new(file.display().to_string(), text.to_owned()) };
        let plain = std::env::var_os("NO_COLOR").is_some();
        let theme =
            if plain { GraphicalTheme::unicode_nocolor() } else { GraphicalTheme::unicode() };
        let mut drawn = String::new();
        match GraphicalReportHandler::new_themed(theme).render_report(&mut drawn, &shown) {
            Ok(()) => eprintln!("{drawn}"),
            Err(_) => eprintln!("{}: {error}", file.display()),
        }
    }
}

/// An error with its text, as miette draws it.
#[derive(Debug)]
struct Shown<'a> {
    error: &'a ConfigError,
    source: NamedSource<String>,
}

impl std::fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.error.message)
    }
}

impl std::error::Error for Shown<'_> {}

impl Diagnostic for Shown<'_> {
    fn help<'a>(&'a self) -> Option<Box<dyn std::fmt::Display + 'a>> {
        let help = self.error.help.as_ref()?;
        Some(Box::new(help))
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        Some(&self.source)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let label = LabeledSpan::new_with_span(Some("here".to_owned()), self.error.span.clone());
        Some(Box::new(std::iter::once(label)))
    }
}
