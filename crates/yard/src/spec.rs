//! The specification of a device: kind, name and parameters, each checked on its own.
//!
//! Conflicts between parameters (a capacity above the zone size, say) are found when the device is
//! opened; see [`crate::stack`].

use std::collections::BTreeMap;
use std::fmt;

use crate::param::{DeviceKind, Param, ParamError, Value, shown};
use crate::uri;

/// Longest name of a device, in bytes.
pub const NAME_LEN_MAX: usize = 64;

/// The rule for the name of a device.
pub const NAME_WANTED: &str =
    "1 to 64 letters, digits, `.`, `_` or `-`, the first a letter or a digit";

/// The name of a device is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid name `{name}`: expected {NAME_WANTED}")]
pub struct NameError {
    /// The name, shortened.
    pub name: String,
}

/// Checks the name of a device.
///
/// # Errors
/// If it is empty or too long, or has other characters than [`NAME_WANTED`] allows.
pub fn check_name(name: &str) -> Result<(), NameError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let good = (1..=NAME_LEN_MAX).contains(&name.len())
        && name.bytes().all(plain)
        && name.as_bytes()[0].is_ascii_alphanumeric();
    if good { Ok(()) } else { Err(NameError { name: shown(name) }) }
}

/// The specification of a device.
#[derive(Clone)]
pub struct DeviceSpec {
    kind: &'static DeviceKind,
    name: String,
    values: BTreeMap<&'static str, Value>,
}

impl DeviceSpec {
    /// A device of this kind with every parameter at its default.
    ///
    /// # Errors
    /// If the name is invalid.
    pub fn new(kind: &'static DeviceKind, name: &str) -> Result<DeviceSpec, NameError> {
        check_name(name)?;
        Ok(DeviceSpec { kind, name: name.to_owned(), values: BTreeMap::new() })
    }

    /// The kind of device.
    pub fn kind(&self) -> &'static DeviceKind {
        self.kind
    }

    /// The device's name, unique in a yard.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets a parameter from its text form, and returns whether it was set for the first time.
    ///
    /// # Errors
    /// If there is no such parameter, or the value is invalid.
    pub fn set_text(&mut self, key: &str, text: &str) -> Result<bool, ParamError> {
        let param = self.kind.param(key)?;
        let value = param.parse(text)?;
        Ok(self.values.insert(param.name, value).is_none())
    }

    /// Sets a parameter.
    ///
    /// # Errors
    /// If the value is invalid for the parameter.
    pub fn set(&mut self, param: &'static Param, value: Value) -> Result<(), ParamError> {
        if !param.fits(&value) {
            return Err(param.refuse(&param.print(&value)));
        }
        self.values.insert(param.name, value);
        Ok(())
    }

    /// Removes a parameter, which has its default then.
    pub(crate) fn unset(&mut self, key: &str) {
        self.values.remove(key);
    }

    /// Whether the specification sets a parameter.
    pub fn is_set(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// The value of a size, a number, or a time in milliseconds.
    ///
    /// # Panics
    /// If the kind has no such parameter, or one of another form; both are bugs.
    pub fn number(&self, key: &str) -> u64 {
        match self.value(key) {
            Value::Size(number) | Value::Count(number) => number,
            other => unreachable!("{key} is no number but {other:?}"),
        }
    }

    /// The value of a number below 2^32.
    ///
    /// # Panics
    /// As [`DeviceSpec::number`], and if the table allows larger numbers.
    pub fn small(&self, key: &str) -> u32 {
        u32::try_from(self.number(key)).expect("the table bounds the parameter below 2^32")
    }

    /// The value of a switch.
    ///
    /// # Panics
    /// If the kind has no such parameter, or one of another form; both are bugs.
    pub fn switch(&self, key: &str) -> bool {
        match self.value(key) {
            Value::Switch(on) => on,
            other => unreachable!("{key} is no switch but {other:?}"),
        }
    }

    /// The index of a choice in its list.
    ///
    /// # Panics
    /// If the kind has no such parameter, or one of another form; both are bugs.
    pub fn choice(&self, key: &str) -> usize {
        match self.value(key) {
            Value::Choice(index) => index,
            other => unreachable!("{key} is no choice but {other:?}"),
        }
    }

    /// The value of a text, `None` if it is empty.
    ///
    /// # Panics
    /// If the kind has no such parameter, or one of another form; both are bugs.
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

    /// The parameters that the specification sets, in the order of the table.
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
    fn a_missing_parameter_has_its_default() {
        let spec = DeviceSpec::new(DeviceKind::find("null").unwrap(), "n0").unwrap();
        assert_eq!(spec.number("size"), 250 << 30);
        assert!(!spec.switch("zoned"));
        assert_eq!(spec.choice("irqmode"), 0);
        assert_eq!(spec.text("trace"), None);
        assert_eq!(spec.small("hw_queue_depth"), 64);
        assert_eq!(spec.to_string(), "null:///n0");
    }
}
