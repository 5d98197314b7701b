//! The clients that may use each export: lists of the subjects of their TLS certificates.

use std::collections::BTreeMap;

/// The name that stands for every export without a list of its own.
pub const EVERY_EXPORT: &str = "*";

/// Allow lists. Without any list, every client may use every export; otherwise no client may use an
/// export without a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowLists(BTreeMap<String, Vec<String>>);

impl AllowLists {
    /// Allows a subject to use an export, or [`EVERY_EXPORT`]. A subject is written as
    /// `C=DE,O=Example,CN=alice`, in the order of the certificate; a comma, plus sign or backslash
    /// in a value is escaped by a backslash.
    ///
    /// # Errors
    /// The reason for which the subject is invalid.
    pub fn allow(&mut self, export: &str, subject: &str) -> Result<(), &'static str> {
        let subject = normalized(subject)?;
        self.0.entry(export.to_owned()).or_default().push(subject);
        Ok(())
    }

    /// Whether there is no list.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a client with this subject may use an export.
    pub fn permits(&self, export: &str, subject: Option<&str>) -> bool {
        if self.0.is_empty() {
            return true;
        }
        let list = self.0.get(export).or_else(|| self.0.get(EVERY_EXPORT));
        list.is_some_and(|list| list.iter().any(|allowed| Some(allowed.as_str()) == subject))
    }
}

/// A subject without spaces around its attributes.
fn normalized(subject: &str) -> Result<String, &'static str> {
    const WANTED: &str = "expected a subject such as CN=alice or O=Example,CN=alice";
    let mut parts = Vec::new();
    let (mut part, mut escaped) = (String::new(), false);
    for letter in subject.chars() {
        match letter {
            ',' if !escaped => parts.push(std::mem::take(&mut part)),
            _ => part.push(letter),
        }
        escaped = letter == '\\' && !escaped;
    }
    parts.push(part);
    let trimmed = parts.iter().map(|part| {
        let (name, value) = part.split_once('=').ok_or(WANTED)?;
        let (name, value) = (name.trim(), value.trim());
        match name.is_empty() || value.is_empty() {
            true => Err(WANTED),
            false => Ok(format!("{name}={value}")),
        }
    });
    Ok(trimmed.collect::<Result<Vec<_>, _>>()?.join(","))
}

/// The escaped value of an attribute in a subject.
#[cfg(feature = "tls")]
pub(crate) fn escaped(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for letter in value.trim().chars() {
        if matches!(letter, ',' | '+' | '\\') {
            text.push('\\');
        }
        text.push(letter);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_is_for_the_subjects_in_its_list() {
        let mut lists = AllowLists::default();
        assert!(lists.permits("a", None), "no list, no check");
        lists.allow("a", "CN=alice").unwrap();
        lists.allow("a", "O = Example , CN = bob").unwrap();
        assert!(
            lists.permits("a", Some("CN=alice")) && lists.permits("a", Some("O=Example,CN=bob"))
        );
        for other in [None, Some("CN=bob"), Some("CN=alice,O=x"), Some("O=x,CN=alice"), Some("")] {
            assert!(!lists.permits("a", other), "{other:?}");
        }
        assert!(!lists.permits("b", Some("CN=alice")), "an export without a list is for no client");
        lists.allow(EVERY_EXPORT, r"CN=a\,b").unwrap();
        assert!(lists.permits("b", Some(r"CN=a\,b")) && !lists.permits("a", Some(r"CN=a\,b")));
        for wrong in ["", "alice", "CN=", "=alice", "CN=a,,CN=b"] {
            assert!(lists.allow("a", wrong).is_err(), "{wrong}");
        }
    }
}
