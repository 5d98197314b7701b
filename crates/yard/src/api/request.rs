//! Bodies and queries of requests, parsed so that an error names the field, the value and what is
//! expected, and never a Rust type.

use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, Visitor,
};
use serde_json::Value;

use crate::param::shown;

/// The reason for which a request is invalid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RequestError {
    /// The invalid field, if the error is about one.
    pub(super) field: Option<String>,
    /// The value, shortened.
    pub(super) value: Option<String>,
    what: String,
    /// Whether `what` names the field already.
    is_whole: bool,
}

impl RequestError {
    /// An error whose sentence names the field.
    fn about(field: &str, what: String) -> RequestError {
        RequestError { field: Some(field.to_owned()), value: None, what, is_whole: true }
    }

    fn in_field(mut self, name: &str) -> RequestError {
        self.field = Some(match self.field.take() {
            Some(inner) => format!("{}.{inner}", shown(name)),
            None => shown(name),
        });
        self
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.field, &self.value) {
            (Some(field), Some(value)) => write!(f, "invalid {field} `{value}`: {}", self.what),
            (Some(field), None) if !self.is_whole => write!(f, "invalid {field}: {}", self.what),
            (None, Some(value)) => write!(f, "invalid request `{value}`: {}", self.what),
            _ => f.write_str(&self.what),
        }
    }
}

impl std::error::Error for RequestError {}

/// The expected value, in words for people.
fn plain(expected: &dyn Expected) -> String {
    let text = expected.to_string();
    match text.as_str() {
        "u8" => format!("expected a whole number from 0 to {}", u8::MAX),
        "u16" => format!("expected a whole number from 0 to {}", u16::MAX),
        "u32" => format!("expected a whole number from 0 to {}", u32::MAX),
        "u64" | "usize" => format!("expected a whole number from 0 to {}", u64::MAX),
        "i32" => format!("expected a whole number from {} to {}", i32::MIN, i32::MAX),
        "i64" => "expected a whole number".to_owned(),
        "a string" => "expected text".to_owned(),
        "a boolean" => "expected true or false".to_owned(),
        text if text.starts_with("struct ") || text == "a map" => {
            "expected an object with the fields of this request".to_owned()
        }
        text => format!("expected {text}"),
    }
}

fn value_of(unexpected: Unexpected<'_>) -> String {
    match unexpected {
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Unsigned(value) => value.to_string(),
        Unexpected::Signed(value) => value.to_string(),
        Unexpected::Float(value) => value.to_string(),
        Unexpected::Str(text) => shown(text),
        Unexpected::Unit | Unexpected::Option => "null".to_owned(),
        Unexpected::Seq => "[...]".to_owned(),
        Unexpected::Map => "{...}".to_owned(),
        other => shown(&other.to_string()),
    }
}

impl de::Error for RequestError {
    fn custom<T: fmt::Display>(message: T) -> RequestError {
        RequestError { what: message.to_string(), ..RequestError::default() }
    }

    fn invalid_type(unexpected: Unexpected<'_>, expected: &dyn Expected) -> RequestError {
        let (value, what) = (Some(value_of(unexpected)), plain(expected));
        RequestError { value, what, ..RequestError::default() }
    }

    fn invalid_value(unexpected: Unexpected<'_>, expected: &dyn Expected) -> RequestError {
        RequestError::invalid_type(unexpected, expected)
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> RequestError {
        let what = match known {
            [] => "expected no field".to_owned(),
            known => format!("expected one of {}", known.join(", ")),
        };
        let (field, value) = (Some("field".to_owned()), Some(shown(field)));
        RequestError { field, value, what, is_whole: false }
    }

    fn missing_field(field: &'static str) -> RequestError {
        RequestError::about(field, format!("missing field `{field}`"))
    }

    fn duplicate_field(field: &'static str) -> RequestError {
        RequestError::about(field, format!("{field} is given twice; give it once"))
    }
}

/// Parses a JSON body; an empty one is an object without fields.
pub(super) fn read_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, RequestError> {
    let body: &[u8] = if body.is_empty() { b"{}" } else { body };
    let value: Value = serde_json::from_slice(body).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        let what = format!("the body is not valid JSON at line {line}, column {column}");
        RequestError { what, ..RequestError::default() }
    })?;
    if !value.is_object() {
        let what = "expected an object with the fields of this request".to_owned();
        let value = Some(shown(&value.to_string()));
        return Err(RequestError { value, what, ..RequestError::default() });
    }
    T::deserialize(Json(&value))
}

/// Parses the pairs of a query.
pub(super) fn read_query<T: DeserializeOwned>(
    pairs: &[(String, String)],
) -> Result<T, RequestError> {
    T::deserialize(Pairs(pairs))
}

/// A value in a JSON body.
struct Json<'a>(&'a Value);

impl<'de> Deserializer<'de> for Json<'_> {
    type Error = RequestError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RequestError> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
                (Some(value), ..) => visitor.visit_u64(value),
                (_, Some(value), _) => visitor.visit_i64(value),
                (_, _, value) => visitor.visit_f64(value.unwrap_or(f64::NAN)),
            },
            Value::String(text) => visitor.visit_str(text),
            Value::Array(items) => visitor.visit_seq(Items(items.iter())),
            Value::Object(fields) => visitor
                .visit_map(Fields { fields: fields.iter().map(|it| (&**it.0, it.1)), last: None }),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RequestError> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, RequestError> {
        visitor.visit_newtype_struct(self)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

struct Items<'a>(std::slice::Iter<'a, Value>);

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = RequestError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, RequestError> {
        self.0.next().map(|value| seed.deserialize(Json(value))).transpose()
    }
}

/// The name of a field.
fn key(name: &str) -> StrDeserializer<'_, RequestError> {
    name.into_deserializer()
}

/// The remaining fields, and the one whose value is next.
struct Fields<I, S> {
    fields: I,
    last: Option<S>,
}

impl<'a, 'de, I: Iterator<Item = (&'a str, &'a Value)>> MapAccess<'de>
    for Fields<I, (&'a str, &'a Value)>
{
    type Error = RequestError;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, RequestError> {
        self.last = self.fields.next();
        self.last.map(|(name, _)| seed.deserialize(key(name))).transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(
        &mut self,
        seed: V,
    ) -> Result<V::Value, RequestError> {
        let (name, value) = self.last.take().expect("a value follows its key");
        seed.deserialize(Json(value)).map_err(|error| error.in_field(name))
    }
}

/// The pairs of a query.
struct Pairs<'a>(&'a [(String, String)]);

impl<'de> Deserializer<'de> for Pairs<'_> {
    type Error = RequestError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RequestError> {
        let fields = self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        visitor.visit_map(Fields { fields, last: None })
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier
        ignored_any
    }
}

impl<'a, 'de, I: Iterator<Item = (&'a str, &'a str)>> MapAccess<'de>
    for Fields<I, (&'a str, &'a str)>
{
    type Error = RequestError;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, RequestError> {
        self.last = self.fields.next();
        self.last.map(|(name, _)| seed.deserialize(key(name))).transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(
        &mut self,
        seed: V,
    ) -> Result<V::Value, RequestError> {
        let (name, value) = self.last.take().expect("a value follows its key");
        seed.deserialize(Text(value)).map_err(|error| error.in_field(name))
    }
}

/// A value in a query: a text that may stand for a number or a switch.
struct Text<'a>(&'a str);

impl Text<'_> {
    fn is_whole(&self) -> bool {
        !self.0.is_empty() && self.0.bytes().all(|byte| byte.is_ascii_digit())
    }
}

impl<'de> Deserializer<'de> for Text<'_> {
    type Error = RequestError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RequestError> {
        visitor.visit_str(self.0)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RequestError> {
        match self.0 {
            "true" => visitor.visit_bool(true),
            "false" => visitor.visit_bool(false),
            text => visitor.visit_str(text),
        }
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RequestError> {
        match self.0.parse().ok().filter(|_| self.is_whole()) {
            Some(number) => visitor.visit_u64(number),
            None => visitor.visit_str(self.0),
        }
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RequestError> {
        self.deserialize_u64(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RequestError> {
        visitor.visit_some(self)
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;
    use crate::scheduler::SchedulerRequest;
    use crate::view::{AddRequest, FormatRequest, ZoneRequest};
    use crate::volumes::VolumeRequest;

    fn error<T: DeserializeOwned + fmt::Debug>(body: &str) -> String {
        read_body::<T>(body.as_bytes()).unwrap_err().to_string()
    }

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields, default)]
    struct Query {
        from: u64,
        count: Option<usize>,
        force: bool,
        name: Option<String>,
    }

    fn pairs(query: &[(&str, &str)]) -> Result<Query, String> {
        let pairs: Vec<_> =
            query.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        read_query(&pairs).map_err(|error| error.to_string())
    }

    /// The bug: a client that sent `"size_bytes": "1G"` got `invalid type: string "1G", expected
    /// u64 at line 1 column 18`, which names a Rust type and not the field.
    #[test]
    fn errors_name_field_value_and_what_was_expected() {
        assert_eq!(
            error::<VolumeRequest>("{\"size_bytes\":\"1G\"}"),
            "invalid size_bytes `1G`: expected a whole number from 0 to 18446744073709551615"
        );
        assert_eq!(
            error::<VolumeRequest>("{\"volblocksize_bytes\":4294967296}"),
            "invalid volblocksize_bytes `4294967296`: expected a whole number from 0 to 4294967295"
        );
        assert_eq!(error::<AddRequest>("{\"uri\":5}"), "invalid uri `5`: expected text");
        assert_eq!(error::<AddRequest>("{\"uri\":null}"), "invalid uri `null`: expected text");
        assert_eq!(error::<AddRequest>("{}"), "missing field `uri`");
        assert_eq!(error::<AddRequest>(""), "missing field `uri`");
        assert_eq!(
            error::<AddRequest>("{\"url\":\"x\"}"),
            "invalid field `url`: expected one of uri"
        );
        let object = "expected an object with the fields of this request";
        assert_eq!(error::<AddRequest>("[1]"), format!("invalid request `[1]`: {object}"));
        assert_eq!(
            error::<AddRequest>("{\"uri\":"),
            "the body is not valid JSON at line 1, column 7"
        );
        let number = "expected a whole number from 0 to 18446744073709551615";
        assert_eq!(error::<ZoneRequest>("{\"from\":-1}"), format!("invalid from `-1`: {number}"));
        assert_eq!(error::<ZoneRequest>("{\"from\":1.5}"), format!("invalid from `1.5`: {number}"));
        assert_eq!(
            error::<FormatRequest>("{\"force\":\"yes\"}"),
            "invalid force `yes`: expected true or false"
        );
        let wrong = error::<SchedulerRequest>("{\"scheduler\":[1]}");
        assert_eq!(wrong, "invalid scheduler: expected text, a whole number, true or false");
    }

    #[test]
    fn a_query_is_read_by_the_type_of_each_field() {
        let all = pairs(&[("from", "5"), ("count", "7"), ("force", "true"), ("name", "1")]);
        let name = Some("1".to_owned());
        assert_eq!(all, Ok(Query { from: 5, count: Some(7), force: true, name }));
        assert_eq!(pairs(&[]), Ok(Query::default()));
        let number = "expected a whole number from 0 to 18446744073709551615";
        for value in ["-1", "+1", "x", "", "18446744073709551616"] {
            let want = format!("invalid from `{value}`: {number}");
            assert_eq!(pairs(&[("from", value)]), Err(want));
        }
        let want = "invalid force `1`: expected true or false".to_owned();
        assert_eq!(pairs(&[("force", "1")]), Err(want));
        let want = "invalid field `fro`: expected one of from, count, force, name".to_owned();
        assert_eq!(pairs(&[("fro", "1")]), Err(want));
        let twice = pairs(&[("from", "1"), ("from", "2")]).unwrap_err();
        assert_eq!(twice, "from is given twice; give it once");
    }

    proptest! {
        #[test]
        fn no_body_makes_it_panic(body in "\\{(\"(pool|name|size_bytes)\":)?\\PC{0,20}\\}?") {
            let _ = read_body::<VolumeRequest>(body.as_bytes());
        }
    }
}
