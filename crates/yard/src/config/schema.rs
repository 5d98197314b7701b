//! The configuration's JSON schema, for editors: made from the table of parameters.

use blockyard_nvme::CONNECTIONS_MAX;
use blockyard_nvme::auth_message::{AuthHash, DhGroup};
use serde_json::{Map, Value, json};

use super::{NO_SOCKET, NVME_CONNECTIONS, NVME_THREADS, TlsMode};
use crate::param::{DeviceKind, KINDS, Param, ValueForm};
use crate::spec::NAME_LEN_MAX;
use crate::ublk::{ANY_ID, ID_MAX};

/// The JSON schema (draft 2020-12) of a configuration.
pub fn schema() -> Value {
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of a Blockyard",
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "serve": serve(),
            "tls": tls(),
            "nvme": nvme(),
            "vhost": {
                "description":
                    "Sockets at which hypervisors find devices: `DEVICE = \"unix:PATH\"`",
                "type": "object",
                "additionalProperties": { "type": "string", "pattern": "^unix:.+$" },
            },
            "ublk": {
                "description":
                    "Devices that are block devices of the kernel: `DEVICE = N` for /dev/ublkbN, \
                     or `DEVICE = \"any\"`",
                "type": "object",
                "additionalProperties": {
                    "oneOf": [
                        { "type": "integer", "minimum": 0, "maximum": ID_MAX },
                        { "const": ANY_ID },
                    ],
                },
            },
            "backup": {
                "description": "Backup policies, which the yard runs",
                "type": "array",
                "items": backup(),
            },
            "device": {
                "description": "The devices of the yard",
                "type": "array",
                "items": {
                    "oneOf":
                        KINDS.iter().map(device).chain([device_by_uri()]).collect::<Vec<_>>(),
                },
            },
        },
    })
}

fn nvme_places(description: &str) -> Value {
    let listen = "^tcp:.+:[0-9]+$";
    json!({
        "description": description,
        "oneOf": [
            { "type": "string", "pattern": listen },
            { "type": "array", "items": { "type": "string", "pattern": listen } },
        ],
    })
}

/// The form of a place to listen at.
const PLACE: &str = "^(unix:.+|tcp:.+:[0-9]+)$";

fn listener(description: &str) -> Value {
    json!({ "description": description, "type": "string", "pattern": PLACE })
}

fn serve() -> Value {
    json!({
        "description": "Where the yard is served",
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "nbd": {
                "description": "Where NBD clients connect; `none` for nowhere",
                "oneOf": [
                    { "const": NO_SOCKET },
                    { "type": "string", "pattern": PLACE },
                    { "type": "array", "items": { "type": "string", "pattern": PLACE } },
                ],
            },
            "nvme": nvme_places("Where NVMe hosts connect; nowhere without it"),
            "nvme_discovery":
                nvme_places("Where NVMe hosts discover devices only; nowhere without it"),
            "control": {
                "description":
                    "Path of the control socket, with ?owner=, group= and mode= if needed; `none` \
                     for none",
                "type": "string",
            },
            "api_directories": {
                "description":
                    "Directories below which requests of the control API may name files; none \
                     without it",
                "type": "array",
                "items": { "type": "string", "pattern": "^/" },
            },
            "vhost_poll": {
                "description":
                    "Percentage of the time in which the thread of each ring of a virtual machine \
                     may poll it, instead of sleeping",
                "type": "integer",
                "minimum": 0,
                "maximum": 100,
                "default": 0,
            },
            "nbd_memory": {
                "description":
                    "Most memory for the buffers of all NBD connections, e.g. 256M; without it a \
                     quarter of what the process may use, 256M at most",
                "type": "string",
            },
            "metrics":
                listener("Address of a listener for metrics; the control socket has them too"),
            "web": listener("Address of a listener for the dashboard; none without it"),
            "web_token_file": {
                "description":
                    "File of mode 0600 with the token that clients of the dashboard have to show; \
                     needed where other machines reach it",
                "type": "string",
            },
            "fuse": {
                "description": "Empty directory where the devices are mounted as files",
                "type": "string",
            },
            "fuse_allow_other": {
                "description": "Whether other users see those files",
                "oneOf": switch(),
                "default": false,
            },
            "standby": {
                "description": "Whether the daemon waits for a promotion or the end of a lease",
                "oneOf": switch(), "default": false,
            },
        },
    })
}

fn tls() -> Value {
    json!({
        "description": "TLS for NBD",
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "mode": {
                "description": "Whether TLS is offered or demanded",
                "enum": TlsMode::WORDS,
                "default": "off",
            },
            "certificates": {
                "description":
                    "Directory with server-cert.pem, server-key.pem and, to verify, ca-cert.pem",
                "type": "string",
            },
            "allow": {
                "description":
                    "Which clients may use which export, `*` for every other one: subjects of \
                     certificates, e.g. CN=alice",
                "type": "object",
                "additionalProperties": strings(),
            },
            "verify_peer": {
                "description": "Whether clients must show a certificate that ca-cert.pem signed",
                "oneOf": switch(),
                "default": false,
            },
        },
    })
}

fn nvme() -> Value {
    json!({
        "description": "Access of NVMe hosts, and resources for their connections",
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "allow": {
                "description":
                    "Which hosts may use which device, `*` for every other one: NQNs, as in \
                     /etc/nvme/hostnqn of the host",
                "type": "object",
                "additionalProperties": strings(),
            },
            "secrets": {
                "description":
                    "File with the secrets of hosts, by which they have to authenticate",
                "type": "string",
            },
            "hashes": {
                "description":
                    "Hash functions for that, the preferred one first; all without it",
                "oneOf": words(&AuthHash::ALL.map(AuthHash::word)),
            },
            "dh_groups": {
                "description":
                    "Diffie-Hellman groups for that, the preferred one first; all without it",
                "oneOf": words(&DhGroup::ALL.map(DhGroup::word)),
            },
            "subsystem": {
                "description":
                    "NQN of a subsystem with all devices as namespaces; none without it",
                "type": "string",
            },
            "threads": {
                "description":
                    "Most threads that serve the connections of all NVMe listeners; the number of \
                     processors without it",
                "type": "integer",
                "minimum": NVME_THREADS.start(),
                "maximum": NVME_THREADS.end(),
            },
            "connections": {
                "description": "Most connections of each NVMe listener",
                "type": "integer",
                "minimum": NVME_CONNECTIONS.start(),
                "maximum": NVME_CONNECTIONS.end(),
                "default": CONNECTIONS_MAX,
            },
        },
    })
}

fn backup() -> Value {
    json!({
        "description": "A backup policy",
        "type": "object",
        "required": ["name", "pool", "snapshots"],
        "additionalProperties": false,
        "properties": {
            "name": {
                "description": "Name of the policy, with which its snapshots begin",
                "type": "string",
            },
            "pool": {
                "description": "Directory or disk of the pool, of which a volume is a device",
                "type": "string",
            },
            "volumes": {
                "description": "The volumes; all of the pool without it",
                "type": "array",
                "minItems": 1,
                "items": { "type": "string" },
            },
            "snapshots": {
                "description": "How often a snapshot is made",
                "enum": ["hourly", "daily", "weekly", "monthly", "yearly"],
            },
            "keep": {
                "description": "Which of its snapshots are kept, e.g. 24h,7d,4w; all without it",
                "type": "string",
                "pattern": "^[0-9]+[hdwmy](,[0-9]+[hdwmy])*$",
            },
            "target": {
                "description":
                    "Program that reads the stream of each volume, and its arguments; {volume} is \
                     the name of the volume",
                "type": "array",
                "minItems": 1,
                "items": { "type": "string" },
            },
            "timeout": {
                "description": "How long the program may take for one stream",
                "type": "string",
                "pattern": "^[0-9]+[smh]$",
                "default": "6h",
            },
            "raw": {
                "description":
                    "Whether encrypted volumes are sent as they are stored, without their keys",
                "type": "boolean",
                "default": true,
            },
        },
    })
}

/// A word, or an array of words.
fn words(words: &[&str]) -> Value {
    json!([
        { "enum": words },
        { "type": "array", "minItems": 1, "items": { "enum": words } },
    ])
}

/// A string or an array of strings.
fn strings() -> Value {
    json!({
        "oneOf": [
            { "type": "string" },
            { "type": "array", "items": { "type": "string" } },
        ],
    })
}

/// A switch, in every accepted form.
fn switch() -> Value {
    json!([
        { "type": "boolean" },
        { "enum": [0, 1] },
        { "enum": ["1", "0", "true", "false", "yes", "no", "y", "n", "on", "off"] },
    ])
}

/// A device by its URI.
fn device_by_uri() -> Value {
    let kinds = KINDS.iter().map(|kind| kind.name).collect::<Vec<_>>().join("|");
    json!({
        "description": "A device by its URI",
        "type": "object",
        "required": ["uri"],
        "additionalProperties": false,
        "properties": {
            "uri": {
                "description": "KIND:///NAME?KEY=VALUE&KEY=VALUE",
                "type": "string",
                "pattern": format!("^({kinds}):///"),
            },
        },
    })
}

fn device(kind: &DeviceKind) -> Value {
    let mut properties = Map::new();
    properties.insert("kind".to_owned(), json!({ "const": kind.name }));
    properties.insert(
        "name".to_owned(),
        json!({
            "description": "Name of the device, unique in the yard",
            "type": "string",
            "pattern": format!("^[A-Za-z0-9][A-Za-z0-9._-]{{0,{}}}$", NAME_LEN_MAX - 1),
        }),
    );
    for param in kind.params() {
        properties.insert(param.name.to_owned(), parameter(param));
    }
    json!({
        "description": kind.doc,
        "type": "object",
        "required": ["kind", "name"],
        "additionalProperties": false,
        "properties": properties,
    })
}

fn parameter(param: &Param) -> Value {
    const SIZE: &str = "^[0-9]+([bBsS]|[kKmMgGtTpPeE]([iI]?[bB])?)?$";
    let mut schema = match param.form {
        ValueForm::Sizes(sizes) => json!({
            "oneOf": [{ "type": "string", "pattern": SIZE }, { "enum": sizes }],
            "default": param.default,
        }),
        ValueForm::Size { min, max } => json!({
            "oneOf": [
                { "type": "string", "pattern": SIZE },
                { "type": "integer", "minimum": min, "maximum": max },
            ],
            "default": param.default,
        }),
        ValueForm::Count { min, max } => json!({
            "type": "integer",
            "minimum": min,
            "maximum": max,
            "default": param.default.parse::<u64>().expect("a test parses every default"),
        }),
        ValueForm::Int { min, max } => json!({
            "type": "integer",
            "minimum": min,
            "maximum": max,
            "default": param.default.parse::<i32>().expect("a test parses every default"),
        }),
        ValueForm::Millis { min, max } => json!({
            "oneOf": [
                { "type": "string", "pattern": "^[0-9]+(ms|s)?$" },
                { "type": "integer", "minimum": min, "maximum": max },
            ],
            "default": param.default.parse::<u64>().expect("a test parses every default"),
        }),
        ValueForm::Switch => json!({
            "oneOf": switch(),
            "default": param.default == "1",
        }),
        ValueForm::Choice(words) => json!({
            "oneOf": [
                { "enum": words },
                { "type": "integer", "minimum": 0, "maximum": words.len() - 1 },
            ],
            "default": param.default,
        }),
        ValueForm::Text { len_max } | ValueForm::Path { len_max } => {
            json!({ "type": "string", "maxLength": len_max, "default": param.default })
        }
    };
    schema["description"] = param.doc.into();
    schema
}

#[cfg(test)]
mod tests {
    use super::super::read::{BACKUP_KEYS, NVME_KEYS, SECTIONS, SERVE_KEYS, TLS_KEYS};
    use super::*;

    fn keys(value: &Value) -> Vec<&str> {
        let mut keys: Vec<_> =
            value["properties"].as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        keys
    }

    fn sorted<const N: usize>(mut keys: [&'static str; N]) -> [&'static str; N] {
        keys.sort_unstable();
        keys
    }

    #[test]
    fn it_has_the_keys_that_are_read() {
        let schema = schema();
        assert_eq!(keys(&schema), sorted(SECTIONS));
        assert_eq!(keys(&schema["properties"]["serve"]), sorted(SERVE_KEYS));
        assert_eq!(keys(&schema["properties"]["tls"]), sorted(TLS_KEYS));
        assert_eq!(keys(&schema["properties"]["nvme"]), sorted(NVME_KEYS));
        assert_eq!(keys(&schema["properties"]["backup"]["items"]), sorted(BACKUP_KEYS));
        let null = &schema["properties"]["device"]["items"]["oneOf"][0];
        assert_eq!(keys(null).len(), KINDS[0].params().count() + 2);
        assert_eq!(null["properties"]["bs"]["default"], "512");
    }
}
