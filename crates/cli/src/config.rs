//! `init`, `check` and `schema`, and how a configuration's errors are shown.

use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use blockyard_core::owner_only;
use blockyard_yard::config::{Config, ConfigError, LEN_MAX, TEMPLATE, parse, schema};
use blockyard_yard::error::counted;
use blockyard_yard::stack;
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
            errors.extend(config.check_nvme(&text));
            errors.sort_by_key(|error| error.span.start);
            (Some(config), errors)
        }
        Err(errors) => (None, errors),
    };
    if args.json {
        let errors: Vec<_> = errors.iter().map(as_json).collect();
        print_json(&json!({ "ok": errors.is_empty(), "errors": errors }), out)?;
    } else if let Some(config) = config.filter(|_| errors.is_empty()) {
        let file = args.file.display();
        let devices = counted(config.devices.len() as u64, "device");
        match config.backups.len() as u64 {
            0 => writeln!(out, "{file}: good: {devices}")?,
            count => writeln!(out, "{file}: good: {devices}, {}", counted(count, "backup"))?,
        }
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
/// and of the access of NVMe hosts is left to be checked together with what the command line adds,
/// if it does.
pub(crate) fn load(file: &Path, adds_tls: bool, adds_nvme_access: bool) -> Result<Config, Failure> {
    let text = read(file)?;
    let errors = match parse(&text) {
        Ok(config) => {
            let mut errors = check_devices(&text, &config);
            errors.extend(config.check_tls(&text).filter(|_| !adds_tls));
            errors.extend(config.check_nvme(&text).filter(|_| !adds_nvme_access));
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
    let failed = |what: String| {
        Failure::new(
            Code::Config,
            format!("cannot read the configuration `{}`: {what}", file.display()),
        )
    };
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
    let is_plain = std::env::var_os("NO_COLOR").is_some();
    let renderer = if is_plain { Renderer::plain() } else { Renderer::styled() };
    for error in errors {
        if !terminal {
            let ConfigError { line, column, message, help, .. } = error;
            let help = help.as_ref().map(|help| format!("; {help}")).unwrap_or_default();
            eprintln!("{}:{line}:{column}: {message}{help}", file.display());
            continue;
        }
        eprintln!("{}", drawn(file, text, error, &renderer));
    }
}

/// An error with the line that it is in.
fn drawn(file: &Path, text: &str, error: &ConfigError, renderer: &Renderer) -> String {
    let path = file.display().to_string();
    let place = AnnotationKind::Primary.span(error.span.clone()).label("here");
    let snippet = Snippet::source(text).path(path).annotation(place);
    let mut report = Level::ERROR.primary_title(&error.message).element(snippet);
    if let Some(help) = &error.help {
        report = report.element(Level::HELP.message(help));
    }
    renderer.render(&[report])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_drawn_below_its_line() {
        let text = "[[device]]\nname = \"a\"\nkind = \"null\"\nsizee = 5\n";
        let errors = parse(text).unwrap_err();
        let drawn = drawn(Path::new("yard.toml"), text, &errors[0], &Renderer::plain());
        let lines: Vec<&str> = drawn.lines().collect();
        assert!(lines[0].starts_with("error: "), "{drawn}");
        assert!(lines[1].contains("yard.toml:4:1"), "{drawn}");
        let at = lines.iter().position(|line| line.contains("sizee = 5")).expect("shows the line");
        assert!(lines[at + 1].contains("^^^^^ here"), "{drawn}");
        assert!(drawn.contains("size"), "{drawn}");
    }
}
