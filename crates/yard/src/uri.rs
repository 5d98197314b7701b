//! Device URIs: `null:///n0?size=10G&zoned=1`. Parses text to a [`DeviceSpec`], and does nothing
//! else.

use std::fmt::Write;

use crate::param::{DeviceKind, KINDS, ParamError, shown};
use crate::spec::{DeviceSpec, NameError};
use crate::suggestion::suggestion;

/// The longest URI, in bytes.
pub const LEN_MAX: usize = 8192;

/// The reason for which a text is no device URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UriError {
    /// The text is too long.
    #[error("a URI of {len} bytes is too long; {LEN_MAX} is the most")]
    TooLong {
        /// The text's length, in bytes.
        len: usize,
    },
    /// The text does not have the form `KIND:///NAME?KEY=VALUE&...`.
    #[error(
        "`{uri}` is not a device URI: {what}; expected KIND:///NAME?KEY=VALUE&KEY=VALUE, e.g. \
             null:///n0?size=10G"
    )]
    Form {
        /// The URI, shortened.
        uri: String,
        /// The error.
        what: String,
    },
    /// The kind of device is unknown.
    #[error("`{kind}` is not a kind of device (known: {known}){advice}")]
    UnknownKind {
        /// The given kind, shortened.
        kind: String,
        /// The known kinds.
        known: String,
        /// A suggestion: begins with a semicolon, or is empty.
        advice: String,
    },
    /// The name is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A parameter is invalid.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// A parameter is given twice.
    #[error("{key} is given twice; give it once")]
    Twice {
        /// The parameter.
        key: String,
    },
}

/// Parses a device URI.
///
/// # Errors
/// If it has another form, names an unknown kind or parameter, gives one twice, or gives an invalid
/// value.
pub fn parse(uri: &str) -> Result<DeviceSpec, UriError> {
    if uri.len() > LEN_MAX {
        return Err(UriError::TooLong { len: uri.len() });
    }
    let form = |what: &str| UriError::Form { uri: shown(uri), what: what.to_owned() };
    let (scheme, rest) =
        uri.split_once("://").ok_or_else(|| form("there is no `://` after the kind"))?;
    let kind = find_kind(scheme)?;
    if rest.contains('#') {
        return Err(form("a `#` must be written as %23"));
    }
    let (path, query) = match rest.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (rest, None),
    };
    let (host, name) = path.split_once('/').unwrap_or((path, ""));
    if !host.is_empty() {
        return Err(form("there is no host; three slashes stand before the name"));
    }
    if name.is_empty() {
        return Err(form("the name is missing"));
    }
    let name = decode(name).map_err(|what| form(&what))?;
    let mut spec = DeviceSpec::new(kind, &name)?;
    for pair in query.into_iter().flat_map(|query| query.split('&')) {
        let Some((key, value)) = pair.split_once('=') else {
            return Err(form(&match pair {
                "" => "an `&` or `?` is not followed by a parameter".to_owned(),
                key => format!("`{}` has no value; write {0}=VALUE", shown(key)),
            }));
        };
        let key = decode(key).map_err(|what| form(&what))?;
        let value = decode(value).map_err(|what| form(&what))?;
        if !spec.set_text(&key, &value)? {
            return Err(UriError::Twice { key });
        }
    }
    Ok(spec)
}

/// The kind with this name.
///
/// # Errors
/// If there is none; the error names all kinds.
pub fn find_kind(name: &str) -> Result<&'static DeviceKind, UriError> {
    DeviceKind::find(name).ok_or_else(|| {
        let known: Vec<_> = KINDS.iter().map(|kind| kind.name).collect();
        let advice = suggestion(name, known.iter().copied());
        UriError::UnknownKind { kind: shown(name), known: known.join(", "), advice }
    })
}

/// Percent-encodes the characters that have a meaning in a query.
pub fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || b"-._~/,:+@!*".contains(&byte);
        if plain {
            out.push(char::from(byte));
        } else {
            write!(out, "%{byte:02X}").expect("writing to a string cannot fail");
        }
    }
    out
}

fn decode(text: &str) -> Result<String, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(|byte| char::from(byte).to_digit(16));
        match (digit(), digit()) {
            (Some(high), Some(low)) => out.push((high << 4 | low) as u8),
            _ => return Err("two hexadecimal digits must follow a `%`".to_owned()),
        }
    }
    String::from_utf8(out).map_err(|_| "percent-encoded bytes must be UTF-8".to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::param::ValueForm;

    #[test]
    fn a_whole_uri_is_read() {
        let uri = "null:///n0?size=10G&zoned=1&zone_size=256M&memory_backed=1";
        let spec = parse(uri).unwrap();
        assert_eq!(spec.kind().name, "null");
        assert_eq!(spec.name(), "n0");
        assert_eq!(spec.number("size"), 10 << 30);
        assert!(spec.switch("zoned"));
        assert_eq!(spec.number("zone_size"), 256 << 20);
        assert_eq!(spec.small("zone_nr_conv"), 0);
        assert_eq!(parse(&spec.to_string()), Ok(spec));
    }

    #[test]
    fn escapes_are_decoded_once() {
        let spec = parse("null:///n%30?trace=%2Ftmp%2Fa%20b%2541").unwrap();
        assert_eq!(spec.name(), "n0");
        assert_eq!(spec.text("trace").as_deref(), Some("/tmp/a b%41"));
    }

    #[test]
    fn errors_name_the_value_and_what_would_do() {
        let cases = [
            ("n0", "there is no `://`"),
            ("", "there is no `://`"),
            ("null:n0", "there is no `://`"),
            ("null://n0", "three slashes"),
            ("null://host/n0", "three slashes"),
            ("null:///", "the name is missing"),
            ("null:///?size=1G", "the name is missing"),
            ("nul:///n0", "did you mean `null`?"),
            ("zvol:///n0", "`zvol` is not a kind of device (known: null, smr, ram, volume, file)"),
            ("null:///a/b", "invalid name `a/b`"),
            ("null:///n0?", "is not followed by a parameter"),
            ("null:///n0?size=1G&&bs=512", "is not followed by a parameter"),
            ("null:///n0?zoned", "`zoned` has no value; write zoned=VALUE"),
            ("null:///n0?zonesize=1M", "did you mean `zone_size`?"),
            ("null:///n0?size=1G&size=2G", "size is given twice"),
            ("null:///n0?size=1.5G", "invalid size `1.5G`"),
            ("null:///n0?size=99999999999999999999", "invalid size `99999999999999999999`"),
            ("null:///n0?size=", "invalid size ``"),
            ("null:///n0?trace=%zz", "two hexadecimal digits"),
            ("null:///n0?trace=%4", "two hexadecimal digits"),
            ("null:///n0?trace=%ff", "must be UTF-8"),
            ("null:///n0#x", "written as %23"),
            ("null:///%00", "invalid name"),
        ];
        for (uri, want) in cases {
            let error = parse(uri).unwrap_err().to_string();
            assert!(error.contains(want), "{uri}: {error}");
        }
        let long = format!("null:///n0?trace={}", "x".repeat(LEN_MAX));
        assert!(matches!(parse(&long), Err(UriError::TooLong { .. })));
    }

    /// A valid value of the form.
    fn fitting(form: ValueForm) -> BoxedStrategy<String> {
        match form {
            ValueForm::Size { min, max } => {
                (min..=max).prop_map(|n| crate::size::Bytes(n).to_string()).boxed()
            }
            ValueForm::Sizes(sizes) => {
                proptest::sample::select(sizes).prop_map(|n| n.to_string()).boxed()
            }
            ValueForm::Count { min, max } | ValueForm::Millis { min, max } => {
                (min..=max).prop_map(|n| n.to_string()).boxed()
            }
            ValueForm::Int { min, max } => (min..=max).prop_map(|n| n.to_string()).boxed(),
            ValueForm::Switch => prop_oneof![Just("0".to_owned()), Just("1".to_owned())].boxed(),
            ValueForm::Choice(words) => (0..words.len()).prop_map(|i| words[i].to_owned()).boxed(),
            ValueForm::Text { len_max } | ValueForm::Path { len_max } => {
                "[^~\\p{C}]{0,20}".prop_filter("bounded", move |text| text.len() <= len_max).boxed()
            }
        }
    }

    proptest! {
        #[test]
        fn printing_and_parsing_round_trip(
            name in "[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
            picks in proptest::collection::vec(any::<proptest::sample::Index>(), 0..8),
            seed in any::<u64>(),
        ) {
            let kind = &KINDS[0];
            let params: Vec<_> = kind.params().collect();
            let mut spec = DeviceSpec::new(kind, &name).unwrap();
            let mut runner = proptest::test_runner::TestRunner::new_with_rng(
                Default::default(),
                proptest::test_runner::TestRng::from_seed(
                    proptest::test_runner::RngAlgorithm::ChaCha,
                    &seed.to_le_bytes().repeat(4),
                ),
            );
            for pick in picks {
                let param = pick.get(&params);
                let value = fitting(param.form).new_tree(&mut runner).unwrap().current();
                spec.set_text(param.name, &value).unwrap();
            }
            prop_assert_eq!(parse(&spec.to_string()).unwrap(), spec);
        }

        #[test]
        fn no_text_makes_it_panic(text in "(null:///)?\\PC{0,80}") {
            let _ = parse(&text);
        }

        #[test]
        fn every_text_survives_encoding(text in "\\PC*") {
            prop_assert_eq!(decode(&encode(&text)), Ok(text));
        }
    }
}
