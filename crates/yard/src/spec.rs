//! A device as somebody asked for it: kind, name and parameters, each checked on its own.
//!
//! Whether the parameters go together (a capacity above the zone size, say) is for the device to
//! judge when it is made; see [`crate::stack`].

use std::collections::BTreeMap;
use std::fmt;

use crate::param::{Kind, Param, ParamError, Value, shown};
use crate::uri;

/// Longest name of a device, in bytes.
pub const NAME_LEN_MAX: usize = 64;

/// What the name of a device has to be.
pub const NAME_WANTED: &str =
    "1 to 64 letters, digits, `.`, `_` or `-`, the first a letter or a digit";

/// Why a name will not do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("name: `{name}` will not do: wanted {NAME_WANTED}")]
pub struct NameError {
    /// What was given, shortened.
    pub name: String,
}

/// Checks the name of a device.
///
/// # Errors
/// If it is empty, too long, or has other characters than names have.
pub fn check_name(name: &str) -> Result<(), NameError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let good = (1..=NAME_LEN_MAX).contains(&name.len())
        && name.bytes().all(plain)
        && name.as_bytes()[0].is_ascii_alphanumeric();
    if good { Ok(()) } else { Err(NameError { name: shown(name) }) }
}

/// A device as somebody asked for it.
#[derive(Clone)]
pub struct DeviceSpec {
    kind: &'static Kind,
    name: String,
    values: BTreeMap<&'static str, Value>,
}

impl DeviceSpec {
    /// A device of this kind with every parameter at its default.
    ///
    /// # Errors
    /// If the name will not do.
    pub fn new(kind: &'static Kind, name: &str) -> Result<DeviceSpec, NameError> {
        check_name(name)?;
        Ok(DeviceSpec { kind, name: name.to_owned(), values: BTreeMap::new() })
    }

    /// Its kind.
    pub fn kind(&self) -> &'static Kind {
        self.kind
    }

    /// Its name, unique in a yard.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets a parameter from its text form, and says whether it was set for the first time.
    ///
    /// # Errors
    /// If there is no such parameter, or the value does not fit it.
    pub fn set_text(&mut self, key: &str, text: &str) -> Result<bool, ParamError> {
        let param = self.kind.param(key)?;
        let value = param.parse(text)?;
        Ok(self.values.insert(param.name, value).is_none())
    }

    /// Sets a parameter.
    ///
    /// # Errors
    /// If the value does not fit the parameter.
    pub fn set(&mut self, param: &'static Param, value: Value) -> Result<(), ParamError> {
        if !param.fits(&value) {
            return Err(param.refuse(&param.print(&value)));
        }
        self.values.insert(param.name, value);
        Ok(())
    }

    /// Whether a parameter was given.
    pub fn is_set(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// A size, a number, or a time in milliseconds.
    ///
    /// # Panics
    /// If the kind has no such parameter, or one of another form: our own mistake.
    pub fn number(&self, key: &str) -> u64 {
        match self.value(key) {
            Value::Size(number) | Value::Count(number) => number,
            other => unreachable!("{key} is no number but {other:?}"),
        }
    }

    /// A number below 2^32.
    ///
    /// # Panics
    /// As [`DeviceSpec::number`], and if the table lets larger numbers through.
    pub fn small(&self, key: &str) -> u32 {
        u32::try_from(self.number(key)).expect("the table bounds the parameter below 2^32")
    }

    /// A switch.
    ///
    /// # Panics
    /// If the kind has no such parameter, or one of another form: our own mistake.
    pub fn switch(&self, key: &str) -> bool {
        match self.value(key) {
            Value::Switch(on) => on,
            other => unreachable!("{key} is no switch but {other:?}"),
        }
    }

    /// The position of a choice in its list.
    ///
    /// # Panics
    /// If the kind has no such parameter, or one of another form: our own mistake.
    pub fn choice(&self, key: &str) -> usize {
        match self.value(key) {
            Value::Choice(index) => index,
            other => unreachable!("{key} is no choice but {other:?}"),
        }
    }

    /// A text, `None` if it is empty.
    ///
    /// # Panics
    /// If the kind has no such parameter, or one of another form: our own mistake.
    pub fn text(&self, key: &str) -> Option<String> {
        match self.value(key) {
            Value::Text(text) => Some(text).filter(|text| !text.is_empty()),
            other => unreachable!("{key} is no text but {other:?}"),
        }
    }

    fn value(&self, key: &str) -> Value {
        self.values.get(key).cloned().unwrap_or_else(|| {
            self.kind.param(key).expect("callers name parameters of the table").default_value()
        })
    }

    /// The parameters that were given, in the order of the table.
    pub fn given(&self) -> impl Iterator<Item = (&'static Param, &Value)> {
        self.kind.params().filter_map(|param| Some((param, self.values.get(param.name)?)))
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:///{}", self.kind.name, self.name)?;
        for (index, (param, value)) in self.given().enumerate() {
            let mark = if index == 0 { '?' } else { '&' };
            write!(f, "{mark}{}={}", param.name, uri::encode(&param.print(value)))?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceSpec({self})")
    }
}

impl PartialEq for DeviceSpec {
    fn eq(&self, other: &DeviceSpec) -> bool {
        self.kind.name == other.kind.name && self.name == other.name && self.values == other.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded() {
        for name in ["n", "null0", "a.b-c_d", "0", &"x".repeat(64)] {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
        assert!(NAME_WANTED.starts_with(&format!("1 to {NAME_LEN_MAX} letters")));
        for name in ["", ".", "-x", "..", "a/b", "a b", "\u{e9}", "a\0", &"x".repeat(65)] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn what_is_not_given_has_its_default() {
        let spec = DeviceSpec::new(Kind::find("null").unwrap(), "n0").unwrap();
        assert_eq!(spec.number("size"), 250 << 30);
        assert!(!spec.switch("zoned"));
        assert_eq!(spec.choice("irqmode"), 0);
        assert_eq!(spec.text("trace"), None);
        assert_eq!(spec.small("hw_queue_depth"), 64);
        assert_eq!(spec.to_string(), "null:///n0");
    }
}
