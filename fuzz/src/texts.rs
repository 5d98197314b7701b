//! Texts from users: device URIs, configurations, faults. The result is a value that prints to the
//! same text, or errors that are not empty and point into the text.

use std::net::{IpAddr, SocketAddr};

use blockyard_core::Geometry;
use blockyard_yard::config::{self, ConfigError};
use blockyard_yard::param::KINDS;
use blockyard_yard::scenario::{LENGTH_NS_MAX, Scenario};
use blockyard_yard::web_access::WebAccess;
use blockyard_yard::{inject, size, stack, uri};

use crate::input::Input;

/// Values of parameters: valid for some, invalid for others.
const VALUES: &[&str] = &[
    "1",
    "0",
    "true",
    "off",
    "10G",
    "64M",
    "1T",
    "8P",
    "256M",
    "192M",
    "1M",
    "64k",
    "4k",
    "512",
    "4096",
    "513",
    "3M",
    "14",
    "2",
    "timer",
    "softirq",
    "none",
    "+0-7",
    "1,100,0,3",
    "-1",
    "99999999999999999999",
    "18446744073709551615",
    "4294967296",
    "1e9",
    "inf",
    "",
    " ",
    "%41",
    "%",
    "é",
    "\u{202e}",
    "\"",
    "\\",
];

/// The token of the dashboard.
const TOKEN: &str = "0123456789abcdef";
/// `:TOKEN` in base 64, as the password of a user without a name.
const TOKEN_IN_BASE_64: &str = "OjAxMjM0NTY3ODlhYmNkZWY=";

/// Pieces of a header `Host`.
const HOST_PIECES: &[&str] = &[
    "127.0.0.1",
    "localhost",
    "[::1]",
    "[",
    "]",
    ":",
    "9465",
    "evil.example",
    ".",
    "::1",
    " ",
    "/",
    "@",
    "%",
    "é",
    "0",
];

/// Pieces of a header `Authorization`.
const AUTHORIZATION_PIECES: &[&str] =
    &["Bearer ", "basic ", "Basic ", " ", TOKEN, TOKEN_IN_BASE_64, "OjAx", "=", ":", "%", "é"];

/// Words that are no parameter, or not a valid one here.
const WORDS: &[&str] = &["sise", "name", "kind", "#", "&", "=", "é", "", "SIZE", "max_open", "["];

/// Pieces of a configuration other than devices.
const TOML_PIECES: &[&str] = &[
    "[[device]]\n",
    "[device]\n",
    "[serve]\n",
    "[tls]\n",
    "[nvme]\n",
    "secrets = \"/s\"\n",
    "hashes = [\"sha256\"]\n",
    "allow = { a = \"nqn.a\" }\n",
    "[control]\n",
    "\n",
    "# c\n",
    "mode = \"off\"\n",
    "mode = \"require\"\n",
    "nbd = [\"unix:/tmp/x\"]\n",
    "metrics = \"tcp:127.0.0.1:1\"\n",
    "uri = \"null:///a\"\n",
    "certificates = \"/x\"\n",
    "verify_peer = true\n",
    "path = \"/c\"\n",
    "a = { b = 1 }\n",
    "x = [",
    "]",
    "'",
    "\"\"\"",
    "é",
    "\u{0}",
    "\t",
    ".",
];

/// Pieces of a scenario.
const SCENARIO_PIECES: &[&str] = &[
    "[[step]]\nat = \"1s\"\nfor = \"2s\"\n",
    "[[step]]\n",
    "device = \"z\"\n",
    "seed = 7\n",
    "at = \"24h\"\n",
    "for = \"9999999h\"\n",
    "at = 0\n",
    "status = \"IOERR\"\n",
    "latency = \"1ms..2ms\"\n",
    "latency = \"1us/2us/3us\"\n",
    "chance = \"1%\"\n",
    "zones = \"3-7\"\n",
    "start = 8\n",
    "op = \"READ\"\n",
    "x = [",
    "\"",
    "\u{0}",
    "\u{e9}",
    "\n",
];

/// Pieces of a fault.
const FAULT_PIECES: &[&str] = &[
    "add,",
    "add",
    "removeall",
    "op=",
    "WRITE",
    "read",
    "start=",
    "nr_sectors=",
    "status=",
    "MEDIUM",
    "BLK_STS_IOERR",
    "OK",
    "chance=",
    "times=",
    "latency=",
    "zones=",
    "seed=",
    "5ms",
    "..",
    "/",
    "0.5%",
    "%",
    "300s",
    "7-",
    "1",
    "0",
    "18446744073709551615",
    ",",
    "=",
    "badblocks=",
    "+0-7",
    "zone_readonly=",
    "\n",
    "é",
    " ",
];

/// Interprets the bytes as a device URI.
///
/// # Panics
/// If an accepted URI does not print to itself.
pub fn uri(bytes: &[u8]) {
    let text = uri_text(bytes);
    let _ = size::parse(&text);
    match uri::parse(&text) {
        Ok(spec) => {
            let printed = spec.to_string();
            assert_eq!(uri::parse(&printed).as_ref(), Ok(&spec), "{printed}");
            // The parameters may still conflict; then an error says so. A file that a parameter
            // names is not touched, and memory is only reserved.
            if let Err(error) = stack::check(&spec) {
                assert_says_something(&error.to_string());
            }
        }
        Err(error) => assert_says_something(&error.to_string()),
    }
}

/// Interprets the bytes as a configuration.
///
/// # Panics
/// If an error does not point into the text.
pub fn config(bytes: &[u8]) {
    let text = toml_text(bytes);
    let errors = match config::parse(&text) {
        Ok(config) => {
            assert_eq!(config.devices.len(), config.places.len());
            config.check_tls(&text).into_iter().chain(config.check_nvme(&text)).collect()
        }
        Err(errors) => {
            assert!(!errors.is_empty(), "refused without an error");
            errors
        }
    };
    for ConfigError { line, column, span, message, .. } in errors {
        assert!(line >= 1 && line <= text.matches('\n').count() + 1, "line {line}");
        assert!(column >= 1 && column <= text.chars().count() + 1, "column {column}");
        assert!(text.get(span.clone()).is_some(), "{span:?} is no part of the text");
        assert_says_something(&message);
    }
}

/// Interprets the bytes as a fault.
///
/// # Panics
/// If an error is empty.
pub fn fault(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let text = raw(&mut input).unwrap_or_else(|| pieces(&mut input, FAULT_PIECES, 24));
    match inject::parse(&text) {
        Ok(inject::Fault::Rule(rule)) => {
            let geometry = Geometry {
                sectors: 1 << 20,
                logical_block_bytes: 512,
                physical_block_bytes: 512,
                zones: None,
            };
            if let Ok(rule) = rule.resolve(&geometry) {
                let printed = inject::print(&rule);
                let Ok(inject::Fault::Rule(again)) = inject::parse(&printed) else {
                    panic!("{printed}")
                };
                assert_eq!(again.resolve(&geometry), Ok(rule), "{printed}");
            }
        }
        Ok(_) => {}
        Err(error) => assert_says_something(&error.to_string()),
    }
}

/// Interprets the bytes as a scenario of faults.
///
/// # Panics
/// If an error is empty or names no line of the text.
pub fn scenario(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let text = raw(&mut input).unwrap_or_else(|| pieces(&mut input, SCENARIO_PIECES, 24));
    match Scenario::parse(&text, None) {
        Ok(scenario) => assert!(scenario.length_ns() <= LENGTH_NS_MAX),
        Err(error) => {
            assert!(error.line >= 1 && error.line <= text.matches('\n').count() + 1);
            assert_says_something(&error.message);
        }
    }
}

/// Interprets the bytes as the headers `Host` and `Authorization` of a request to the dashboard.
///
/// # Panics
/// If a host comes in that is neither an address nor `localhost`, or a client without the token.
pub fn web_access(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let access = WebAccess::with_token(TOKEN).ok().flatten().expect("it is a token");
    let host = raw(&mut input).unwrap_or_else(|| pieces(&mut input, HOST_PIECES, 8));
    if access.is_own_host(&host) {
        let name = host.trim_start_matches('[');
        let is_address = name.split(']').next().is_some_and(|it| it.parse::<IpAddr>().is_ok())
            || host.parse::<SocketAddr>().is_ok()
            || host.split(':').next().is_some_and(|it| it.parse::<IpAddr>().is_ok());
        let is_local = host.to_ascii_lowercase().split(':').next() == Some("localhost");
        assert!(is_address || is_local, "{host}");
    }
    let shown = raw(&mut input).unwrap_or_else(|| pieces(&mut input, AUTHORIZATION_PIECES, 6));
    if access.admits(Some(&shown)) {
        assert!(shown.contains(TOKEN) || shown.contains(TOKEN_IN_BASE_64), "{shown}");
    }
}

/// A quarter of all inputs are used without change.
fn raw(input: &mut Input<'_>) -> Option<String> {
    let raw = input.below(4) == 1;
    raw.then(|| String::from_utf8_lossy(input.take(usize::MAX)).into_owned())
}

/// Concatenates random pieces.
fn pieces(input: &mut Input<'_>, pieces: &[&str], count_max: u64) -> String {
    (0..input.below(count_max)).map(|_| input.choose(pieces)).collect()
}

/// The name of a parameter of any kind, or a word that is no parameter.
fn key<'a>(input: &mut Input<'_>) -> &'a str {
    if input.below(24) == 1 {
        return input.choose(WORDS);
    }
    let kind = &KINDS[input.below(KINDS.len() as u64) as usize];
    let count = kind.params().count() as u64;
    kind.params().nth(input.below(count) as usize).expect("below the count").name
}

fn uri_text(bytes: &[u8]) -> String {
    let mut input = Input::new(bytes);
    if let Some(text) = raw(&mut input) {
        return text;
    }
    let heads =
        ["null:///n0", "null:///a-b.c", "null:///%41", "mem:///m", "null://h/n", "null:", ""];
    // Mostly the valid head, because otherwise the parameters would not be parsed.
    let head = if input.below(8) == 1 { input.choose(&heads) } else { heads[0] };
    let mut text = head.to_owned();
    for index in 0..input.below(7) {
        text.push(if index == 0 { '?' } else { '&' });
        text.push_str(key(&mut input));
        text.push('=');
        text.push_str(input.choose(VALUES));
    }
    text
}

fn toml_text(bytes: &[u8]) -> String {
    let mut input = Input::new(bytes);
    if let Some(text) = raw(&mut input) {
        return text;
    }
    let mut text = pieces(&mut input, TOML_PIECES, 4);
    for number in 0..input.below(4) {
        text.push_str(if input.below(8) == 1 { "[device.x]\n" } else { "[[device]]\n" });
        text.push_str(&format!("name = \"d{number}\"\nkind = \"null\"\n"));
        for _ in 0..input.below(6) {
            let (key, value) = (key(&mut input), input.choose(VALUES));
            text.push_str(&match input.below(3) {
                0 => format!("{key} = {value}\n"),
                _ => format!("{key} = \"{value}\"\n"),
            });
        }
    }
    text + &pieces(&mut input, TOML_PIECES, 6)
}

/// Asserts that a message is not empty, not too long, and has no control characters.
fn assert_says_something(message: &str) {
    assert!(!message.trim().is_empty(), "an empty message");
    assert!(message.len() < 16_384, "a message of {} bytes", message.len());
    let odd = message.chars().find(|letter| letter.is_control() && *letter != '\n');
    assert_eq!(odd, None, "a control character in `{}`", message.escape_debug());
}
