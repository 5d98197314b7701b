//! Parses TOML text to [`Config`], with the position of every error.

use std::num::NonZeroUsize;
use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;
use std::time::Duration;

use blockyard_nbd::{Endpoint, LIMIT_BYTES_MIN, UnixPlace};
use blockyard_nvme::auth_message::{AuthHash, DhGroup};
use blockyard_nvme::check_subsystem_nqn;
use blockyard_volume_admin::prune::{Period, Retention};
use blockyard_volume_format::catalogue::is_volume_name;
use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

use super::{
    BACKUP_NAME_MAX, BACKUP_TIMEOUT, BACKUPS_MAX, BackupSettings, Config, ConfigError, DEVICES_MAX,
    DevicePlaces, LEN_MAX, NO_SOCKET, NVME_CONNECTIONS, NVME_THREADS, NvmePlaces, TlsMode,
    TlsPlaces,
};
use crate::param::{
    DeviceKind, Param, ParamError, SWITCH_WORDS, ValueForm, expand_home, shown, switch,
};
use crate::spec::DeviceSpec;
use crate::suggestion::nearest;
use crate::ublk::UblkPlace;
use crate::uri::{self, find_kind};
use crate::vhost::VhostPlace;

/// The most errors that are reported.
const ERRORS_MAX: usize = 20;

pub(super) const SECTIONS: [&str; 7] =
    ["serve", "tls", "nvme", "vhost", "ublk", "device", "backup"];
pub(super) const BACKUP_KEYS: [&str; 8] =
    ["name", "pool", "volumes", "snapshots", "keep", "target", "timeout", "raw"];
pub(super) const SERVE_KEYS: [&str; 13] = [
    "nbd",
    "nvme",
    "nvme_discovery",
    "vhost_poll",
    "control",
    "api_directories",
    "nbd_memory",
    "metrics",
    "web",
    "web_token_file",
    "fuse",
    "fuse_allow_other",
    "standby",
];
pub(super) const TLS_KEYS: [&str; 4] = ["mode", "certificates", "verify_peer", "allow"];
pub(super) const NVME_KEYS: [&str; 7] =
    ["allow", "secrets", "hashes", "dh_groups", "subsystem", "threads", "connections"];

type TomlValue<'a> = Spanned<DeValue<'a>>;

/// Parses a configuration.
///
/// # Errors
/// All errors, in the order of the text; at most 20.
pub fn parse(text: &str) -> Result<Config, Vec<ConfigError>> {
    if text.len() > LEN_MAX {
        let message = format!("a configuration of {} bytes is too long", text.len());
        let help = format!("at most {LEN_MAX} bytes are read");
        return Err(vec![ConfigError::at(text, 0..0, message, Some(help))]);
    }
    let mut reader = ConfigReader { text, errors: Vec::new() };
    let mut config = Config::default();
    match DeTable::parse(text) {
        Ok(document) => reader.document(document.get_ref(), &mut config),
        Err(error) => {
            let span = error.span().unwrap_or(0..0);
            reader.error(span, error.message().trim_end(), None);
        }
    }
    let ConfigReader { mut errors, .. } = reader;
    errors.sort_by_key(|error| error.span.start);
    errors.truncate(ERRORS_MAX);
    if errors.is_empty() { Ok(config) } else { Err(errors) }
}

struct ConfigReader<'t> {
    text: &'t str,
    errors: Vec<ConfigError>,
}

impl ConfigReader<'_> {
    fn error(&mut self, span: Range<usize>, message: impl Into<String>, help: Option<String>) {
        // The number of collected errors is bounded too; the caller keeps the first by position.
        if self.errors.len() < ERRORS_MAX * 64 {
            self.errors.push(ConfigError::at(self.text, span, message, help));
        }
    }

    fn document(&mut self, document: &DeTable<'_>, config: &mut Config) {
        for (key, value) in document {
            match (key.get_ref().as_ref(), value.get_ref()) {
                ("serve", DeValue::Table(table)) => self.serve(table, config),
                ("tls", DeValue::Table(table)) => self.tls(table, config),
                ("nvme", DeValue::Table(table)) => self.nvme(table, config),
                ("vhost", DeValue::Table(table)) => self.vhost(table, config),
                ("ublk", DeValue::Table(table)) => self.ublk(table, config),
                ("device", DeValue::Array(devices)) => {
                    for device in devices.iter() {
                        self.device(device, config);
                    }
                }
                ("backup", DeValue::Array(backups)) => {
                    for backup in backups.iter() {
                        self.backup(backup, config);
                    }
                }
                ("serve" | "tls" | "nvme" | "vhost" | "ublk", other) => {
                    let help = format!("begin a table with a line [{}]", key.get_ref());
                    self.type_error(value.span(), key.get_ref(), other, "a table", Some(help));
                }
                (section @ ("device" | "backup"), other) => {
                    let help = Some(format!("begin each {section} with a line [[{section}]]"));
                    self.type_error(value.span(), section, other, "an array of tables", help);
                }
                (other, _) => self.unknown_key(key.span(), other, "the file", &SECTIONS),
            }
        }
        if config.devices.len() > DEVICES_MAX {
            let span = config.places[DEVICES_MAX].name.clone();
            let message = format!("{} devices are too many", config.devices.len());
            self.error(span, message, Some(format!("expected at most {DEVICES_MAX}")));
        }
    }

    fn serve(&mut self, table: &DeTable<'_>, config: &mut Config) {
        for (key, value) in table {
            match key.get_ref().as_ref() {
                "nbd" => {
                    let items: Vec<&TomlValue<'_>> = match value.get_ref() {
                        DeValue::Array(items) => items.iter().collect(),
                        DeValue::String(word) if word.as_ref() == NO_SOCKET => Vec::new(),
                        _ => vec![value],
                    };
                    let places = items.into_iter().filter_map(|item| self.place("nbd", item));
                    config.nbd = Some(places.collect());
                }
                "nvme" => config.nvme = self.nvme_places("nvme", value),
                "nvme_discovery" => {
                    config.nvme_discovery = self.nvme_places("nvme_discovery", value);
                }
                "control" => config.control = self.socket_place("control", value),
                "api_directories" => config.api_directories = self.paths("api_directories", value),
                "vhost_poll" => config.vhost_poll = self.percent("vhost_poll", value),
                "nbd_memory" => config.nbd_memory = self.nbd_memory(value),
                "metrics" => config.metrics = self.place("metrics", value),
                "web" => config.web = self.place("web", value),
                "web_token_file" => config.web_token_file = self.path("web_token_file", value),
                "fuse" => config.fuse = self.path("fuse", value),
                "fuse_allow_other" => {
                    if let Some(on) = self.switch("fuse_allow_other", value) {
                        config.fuse_allow_other = on;
                    }
                }
                "standby" => config.standby = self.switch("standby", value).unwrap_or(false),
                other => self.unknown_key(key.span(), other, "[serve]", &SERVE_KEYS),
            }
        }
    }

    fn tls(&mut self, table: &DeTable<'_>, config: &mut Config) {
        for (key, value) in table {
            match key.get_ref().as_ref() {
                "mode" => {
                    let Some(word) = self.string("mode", value) else { continue };
                    match TlsMode::from_word(word) {
                        Some(mode) => config.tls.mode = mode,
                        None => {
                            let help = format!("expected one of {}", TlsMode::WORDS.join(", "));
                            let message = format!("invalid mode `{}`", shown(word));
                            self.error(value.span(), message, Some(help));
                        }
                    }
                }
                "certificates" => {
                    config.tls.certificates = self.path("certificates", value);
                }
                "verify_peer" => {
                    if let Some(on) = self.switch("verify_peer", value) {
                        config.tls.verify_peer = on;
                    }
                }
                "allow" => {
                    let lists = &mut config.tls.allow;
                    self.allow("tls", value, |export, subject| lists.allow(export, subject));
                }
                other => self.unknown_key(key.span(), other, "[tls]", &TLS_KEYS),
            }
        }
        let place = |key| table.get(key).map(Spanned::span);
        config.tls_places = TlsPlaces {
            mode: place("mode"),
            certificates: place("certificates"),
            verify_peer: place("verify_peer"),
            allow: place("allow"),
        };
    }

    /// The sockets of devices, by their names. A device that does not exist is found when all
    /// devices are known.
    fn vhost(&mut self, table: &DeTable<'_>, config: &mut Config) {
        for (key, value) in table {
            let device = key.get_ref();
            let Some(place) = self.string("vhost", value) else { continue };
            match VhostPlace::of(device, place) {
                Ok(place) => config.vhost.push(place),
                Err(error) => {
                    self.error(value.span(), format!("vhost: `{device}`: {error}"), None);
                }
            }
        }
    }

    /// The numbers of devices' block devices, by their names.
    fn ublk(&mut self, table: &DeTable<'_>, config: &mut Config) {
        for (key, value) in table {
            let device = key.get_ref();
            let id = match value.get_ref() {
                DeValue::Integer(number) => whole(number),
                DeValue::String(text) => Some(text.to_string()),
                _ => None,
            };
            let Some(id) = id else {
                let wanted = "a number or `any`";
                self.type_error(value.span(), "ublk", value.get_ref(), wanted, None);
                continue;
            };
            match UblkPlace::of(device, &id) {
                Ok(place) => config.ublk.push(place),
                Err(error) => self.error(value.span(), format!("ublk: `{device}`: {error}"), None),
            }
        }
    }

    fn nvme(&mut self, table: &DeTable<'_>, config: &mut Config) {
        for (key, value) in table {
            match key.get_ref().as_ref() {
                "allow" => {
                    let hosts = &mut config.nvme_access.allow;
                    self.allow("nvme", value, |device, host| hosts.allow(device, host));
                }
                "secrets" => config.nvme_access.secrets = self.path("secrets", value),
                "hashes" => {
                    let words = AuthHash::ALL.map(|hash| (hash.word(), hash));
                    config.nvme_access.hashes = self.choices("hashes", value, &words);
                }
                "dh_groups" => {
                    let words = DhGroup::ALL.map(|group| (group.word(), group));
                    config.nvme_access.dh_groups = self.choices("dh_groups", value, &words);
                }
                "subsystem" => config.nvme_access.subsystem = self.subsystem(value),
                "threads" => {
                    config.nvme_access.threads = self.count("threads", value, &NVME_THREADS);
                }
                "connections" => {
                    let count = self.count("connections", value, &NVME_CONNECTIONS);
                    config.nvme_access.connections = count;
                }
                other => self.unknown_key(key.span(), other, "[nvme]", &NVME_KEYS),
            }
        }
        let place = |key| table.get(key).map(Spanned::span);
        config.nvme_places = NvmePlaces { hashes: place("hashes"), dh_groups: place("dh_groups") };
    }

    /// The NQN of a subsystem.
    fn subsystem(&mut self, value: &TomlValue<'_>) -> Option<String> {
        let nqn = self.string("subsystem", value)?;
        match check_subsystem_nqn(nqn) {
            Ok(()) => Some(nqn.to_owned()),
            Err(wanted) => {
                let message = format!("invalid subsystem `{}`: {wanted}", shown(nqn));
                self.error(value.span(), message, None);
                None
            }
        }
    }

    /// A word, or an array of words, one at least.
    fn choices<T: Copy>(
        &mut self,
        key: &str,
        value: &TomlValue<'_>,
        words: &[(&'static str, T)],
    ) -> Vec<T> {
        let items: Vec<&TomlValue<'_>> = match value.get_ref() {
            DeValue::Array(items) => items.iter().collect(),
            _ => vec![value],
        };
        let known: Vec<_> = words.iter().map(|(word, _)| *word).collect();
        let help = || Some(format!("expected one of {}", known.join(", ")));
        if items.is_empty() {
            self.error(value.span(), format!("invalid {key} `[]`"), help());
        }
        let mut chosen = Vec::new();
        for item in items {
            let Some(text) = self.string(key, item) else { continue };
            match words.iter().find(|(word, _)| *word == text) {
                Some((_, choice)) => chosen.push(*choice),
                None => self.error(item.span(), format!("invalid {key} `{}`", shown(text)), help()),
            }
        }
        chosen
    }

    /// The clients that may use each device. `section` contains the lists.
    fn allow(
        &mut self,
        section: &str,
        value: &TomlValue<'_>,
        mut allow: impl FnMut(&str, &str) -> Result<(), &'static str>,
    ) {
        let DeValue::Table(table) = value.get_ref() else {
            let help = Some(format!("begin it with a line [{section}.allow]"));
            return self.type_error(value.span(), "allow", value.get_ref(), "a table", help);
        };
        for (device, value) in table {
            let clients: Vec<&TomlValue<'_>> = match value.get_ref() {
                DeValue::Array(items) => items.iter().collect(),
                _ => vec![value],
            };
            if clients.is_empty() {
                // It would be no list at all, and a device without a list is for all.
                let help = "expected at least one client".to_owned();
                self.error(value.span(), "invalid allow `[]`".to_owned(), Some(help));
            }
            for item in clients {
                let Some(client) = self.string("allow", item) else { continue };
                if let Err(what) = allow(device.get_ref(), client) {
                    let message = format!("invalid allow `{}`", shown(client));
                    self.error(item.span(), message, Some(what.to_owned()));
                }
            }
        }
    }

    fn device(&mut self, device: &TomlValue<'_>, config: &mut Config) {
        let DeValue::Table(table) = device.get_ref() else {
            let help = Some("begin each device with a line [[device]]".to_owned());
            self.type_error(device.span(), "device", device.get_ref(), "a table", help);
            return;
        };
        if let Some(value) = table.get("uri") {
            return self.device_by_uri(table, value, config);
        }
        let kind = self.needed("device", device, table, "kind", "e.g. kind = \"null\"");
        let name = self.needed("device", device, table, "name", "e.g. name = \"n0\"");
        let kind = kind.and_then(|(kind, span)| match find_kind(kind) {
            Ok(kind) => Some(kind),
            Err(error) => {
                self.error(span, error.to_string(), None);
                None
            }
        });
        let (Some(kind), Some((name, name_span))) = (kind, name) else { return };
        let mut spec = match DeviceSpec::new(kind, name) {
            Ok(spec) => spec,
            Err(error) => return self.error(name_span, error.to_string(), None),
        };
        if self.is_taken(name, &name_span, config) {
            return;
        }
        let mut places = DevicePlaces { name: name_span, values: Vec::new() };
        for (key, value) in table {
            let text: &str = key.get_ref();
            if matches!(text, "kind" | "name") {
                continue;
            }
            match kind.param(text) {
                Ok(param) => {
                    places.values.push((param.name, value.span()));
                    self.parameter(param, value, &mut spec);
                }
                Err(error) => self.unknown_parameter(key.span(), kind, &error),
            }
        }
        config.devices.push(spec);
        config.places.push(places);
    }

    /// A backup policy.
    fn backup(&mut self, backup: &TomlValue<'_>, config: &mut Config) {
        let DeValue::Table(table) = backup.get_ref() else {
            let help = Some("begin each backup with a line [[backup]]".to_owned());
            return self.type_error(backup.span(), "backup", backup.get_ref(), "a table", help);
        };
        for key in table.keys().filter(|key| !BACKUP_KEYS.iter().any(|it| key.get_ref() == *it)) {
            self.unknown_key(key.span(), key.get_ref(), "[[backup]]", &BACKUP_KEYS);
        }
        let name = self.needed("backup", backup, table, "name", "e.g. name = \"offsite\"");
        let pool = self.needed("backup", backup, table, "pool", "e.g. pool = \"/srv/pool\"");
        let every =
            self.needed("backup", backup, table, "snapshots", "e.g. snapshots = \"hourly\"");
        let snapshots = every.and_then(|(word, span)| {
            let period = Period::of_adverb(word);
            if period.is_none() {
                let help = "expected hourly, daily, weekly, monthly or yearly".to_owned();
                self.error(span, format!("invalid snapshots `{}`", shown(word)), Some(help));
            }
            period
        });
        let name = name.filter(|(name, span)| {
            let is_tag = BackupSettings::is_name(name);
            let names = config.backups.iter().map(|other| other.name.as_str());
            let taken = names.into_iter().find(|other| are_confused(name, other));
            let help = match taken {
                _ if !is_tag => {
                    format!("expected 1 to {BACKUP_NAME_MAX} letters, digits, `-`, `_` and `.`")
                }
                Some(other) if other == *name => {
                    "expected a name that no other backup has".to_owned()
                }
                Some(other) => format!(
                    "expected a name that is not that of the backup `{other}` and `-` and more, or \
                     the reverse: each would prune the snapshots of the other"
                ),
                None => return true,
            };
            self.error(span.clone(), format!("invalid name `{}`", shown(name)), Some(help));
            false
        });
        let keep = table.get("keep").and_then(|value| self.retention(value));
        let strings = |reader: &mut Self, key: &str| {
            table.get(key).map_or_else(Vec::new, |value| reader.strings(key, value))
        };
        let (volumes, target) = (strings(self, "volumes"), strings(self, "target"));
        if let Some(value) = table.get("volumes")
            && let Some(volume) = volumes.iter().find(|volume| !is_volume_name(volume))
        {
            let help = "expected the name of a volume".to_owned();
            self.error(value.span(), format!("invalid volumes `{}`", shown(volume)), Some(help));
        }
        let timeout = table.get("timeout").map(|value| self.timeout(value));
        let timeout = timeout.unwrap_or(Some(BACKUP_TIMEOUT));
        let raw = table.get("raw").is_none_or(|value| self.boolean("raw", value));
        let (Some((name, _)), Some((pool, _)), Some(snapshots), Some(timeout)) =
            (name, pool, snapshots, timeout)
        else {
            return;
        };
        let (name, pool) = (name.to_owned(), PathBuf::from(pool));
        let settings =
            BackupSettings { name, pool, volumes, snapshots, keep, target, timeout, raw };
        self.add_backup(backup.span(), settings, config);
    }

    /// Adds a backup policy, if it can be run with the others.
    fn add_backup(&mut self, span: Range<usize>, settings: BackupSettings, config: &mut Config) {
        if config.backups.len() >= BACKUPS_MAX {
            let help = format!("expected at most {BACKUPS_MAX}");
            return self.error(span, "too many backups", Some(help));
        }
        if let Some(other) = config.backups.iter().find(|other| other.sends_same(&settings)) {
            let help = format!("expected another target than that of the backup `{}`", other.name);
            let message = "invalid target: two backups cannot send a volume to one target";
            return self.error(span, message, Some(help));
        }
        config.backups.push(settings);
    }

    /// Which snapshots are kept.
    fn retention(&mut self, value: &TomlValue<'_>) -> Option<Retention> {
        let text = self.string("keep", value)?;
        match text.parse() {
            Ok(retention) => Some(retention),
            Err(wanted) => {
                self.error(value.span(), format!("invalid keep `{}`", shown(text)), Some(wanted));
                None
            }
        }
    }

    /// An array of strings, one at least.
    fn strings(&mut self, key: &str, value: &TomlValue<'_>) -> Vec<String> {
        let DeValue::Array(items) = value.get_ref() else {
            self.type_error(value.span(), key, value.get_ref(), "an array of strings", None);
            return Vec::new();
        };
        if items.is_empty() {
            let help = Some("expected one string at least, or no such key".to_owned());
            self.error(value.span(), format!("invalid {key} `[]`"), help);
        }
        items.iter().filter_map(|item| self.string(key, item).map(str::to_owned)).collect()
    }

    /// A boolean; `true` after an error.
    fn boolean(&mut self, key: &str, value: &TomlValue<'_>) -> bool {
        if let DeValue::Boolean(on) = value.get_ref() {
            return *on;
        }
        self.type_error(value.span(), key, value.get_ref(), "true or false", None);
        true
    }

    /// How long the program of a backup may take.
    fn timeout(&mut self, value: &TomlValue<'_>) -> Option<Duration> {
        let text = self.string("timeout", value)?;
        let timeout = BackupSettings::parse_timeout(text);
        if timeout.is_none() {
            let help = "expected 1s to 720h, in s, m or h, such as 90m".to_owned();
            self.error(value.span(), format!("invalid timeout `{}`", shown(text)), Some(help));
        }
        timeout
    }

    /// Whether a device before this one has its name, which is an error.
    fn is_taken(&mut self, name: &str, span: &Range<usize>, config: &Config) -> bool {
        let is_taken = config.devices.iter().any(|other| other.name() == name);
        if is_taken {
            let help = "every device of a yard has a name of its own".to_owned();
            self.error(span.clone(), format!("name: `{name}` is taken already"), Some(help));
        }
        is_taken
    }

    /// A device that is given by a URI, which must be its only key.
    fn device_by_uri(&mut self, table: &DeTable<'_>, value: &TomlValue<'_>, config: &mut Config) {
        for key in table.keys().filter(|key| key.get_ref() != "uri") {
            let message = format!("invalid key `{}`: the table has a `uri`", shown(key.get_ref()));
            let help = "give the whole device by `uri`, or by `kind`, `name` and parameters";
            self.error(key.span(), message, Some(help.to_owned()));
        }
        let Some(text) = self.string("uri", value) else { return };
        let spec = match uri::parse(text) {
            Ok(spec) => spec,
            Err(error) => return self.error(value.span(), error.to_string(), None),
        };
        if !self.is_taken(spec.name(), &value.span(), config) {
            config.devices.push(spec);
            config.places.push(DevicePlaces { name: value.span(), values: Vec::new() });
        }
    }

    fn parameter(&mut self, param: &'static Param, value: &TomlValue<'_>, spec: &mut DeviceSpec) {
        let text = match (param.form, value.get_ref()) {
            (
                ValueForm::Size { .. }
                | ValueForm::Sizes(_)
                | ValueForm::Millis { .. }
                | ValueForm::Choice(_)
                | ValueForm::Text { .. }
                | ValueForm::Path { .. },
                DeValue::String(text),
            ) => Some(text.to_string()),
            (
                ValueForm::Size { .. }
                | ValueForm::Sizes(_)
                | ValueForm::Count { .. }
                | ValueForm::Int { .. }
                | ValueForm::Millis { .. }
                | ValueForm::Choice(_),
                DeValue::Integer(number),
            ) => whole(number),
            (ValueForm::Switch, other) => switch_text(other),
            _ => None,
        };
        let Some(text) = text else {
            let wanted = toml_form(param.form);
            // For a switch the message is complete without help.
            let help = (!matches!(param.form, ValueForm::Switch))
                .then(|| param.wanted().trim_start_matches("expected ").to_owned());
            return self.type_error(value.span(), param.name, value.get_ref(), wanted, help);
        };
        match spec.set_text(param.name, &text) {
            Err(ParamError::BadValue { key, value: text, wanted }) => {
                let message = format!("invalid {key} `{text}`");
                self.error(value.span(), message, Some(wanted));
            }
            // TOML finds a key that occurs twice; this parameter also has an older name.
            Ok(false) => {
                let message = format!("{} is given twice, once by its older name", param.name);
                self.error(value.span(), message, Some("give it once".to_owned()));
            }
            _ => {}
        }
    }

    /// A mandatory string of a device or backup, with its position.
    fn needed<'v>(
        &mut self,
        what: &str,
        item: &TomlValue<'_>,
        table: &'v DeTable<'_>,
        key: &str,
        example: &str,
    ) -> Option<(&'v str, Range<usize>)> {
        match table.get(key) {
            Some(value) => self.string(key, value).map(|text| (text, value.span())),
            None => {
                let message = format!("{key}: missing in this {what}");
                self.error(item.span(), message, Some(example.to_owned()));
                None
            }
        }
    }

    /// An endpoint. Standard input belongs to the process that starts the server, so only the
    /// command line can name it.
    fn place(&mut self, key: &str, value: &TomlValue<'_>) -> Option<Endpoint> {
        let text = self.string(key, value)?;
        match text.parse() {
            Ok(Endpoint::Stdio) => {
                let help = "expected unix:PATH or tcp:HOST:PORT; `--nbd stdio` is for the shell";
                let message = format!("invalid {key} `stdio`");
                self.error(value.span(), message, Some(help.to_owned()));
                None
            }
            Ok(endpoint) => Some(endpoint),
            Err(error) => {
                self.error(value.span(), format!("{key}: {error}"), None);
                None
            }
        }
    }

    /// The endpoints of NVMe, one or several.
    fn nvme_places(&mut self, key: &str, value: &TomlValue<'_>) -> Vec<Endpoint> {
        let items: Vec<&TomlValue<'_>> = match value.get_ref() {
            DeValue::Array(items) => items.iter().collect(),
            _ => vec![value],
        };
        items.into_iter().filter_map(|item| self.nvme_place(key, item)).collect()
    }

    /// An endpoint of NVMe.
    fn nvme_place(&mut self, key: &str, value: &TomlValue<'_>) -> Option<Endpoint> {
        let place = self.place(key, value)?;
        if let Endpoint::Tcp { .. } = place {
            return Some(place);
        }
        let message = format!("invalid {key} `{place}`");
        self.error(value.span(), message, Some("expected tcp:HOST:PORT".to_owned()));
        None
    }

    fn socket_place(&mut self, key: &str, value: &TomlValue<'_>) -> Option<UnixPlace> {
        match UnixPlace::read(&self.path_text(key, value)?) {
            Ok(place) => Some(place),
            Err(what) => {
                self.error(value.span(), format!("{key}: {what}"), None);
                None
            }
        }
    }

    /// A whole number from 0 to 100.
    fn percent(&mut self, key: &str, value: &TomlValue<'_>) -> Option<u32> {
        let DeValue::Integer(number) = value.get_ref() else {
            self.type_error(value.span(), key, value.get_ref(), "a number", None);
            return None;
        };
        let percent = number.to_string().parse().ok().filter(|percent| *percent <= 100);
        if percent.is_none() {
            let help = Some("expected a number from 0 to 100".to_owned());
            self.error(value.span(), format!("invalid {key} `{number}`"), help);
        }
        percent
    }

    /// A number within bounds, of which the lower one is above 0.
    fn count(
        &mut self,
        key: &str,
        value: &TomlValue<'_>,
        bounds: &RangeInclusive<usize>,
    ) -> Option<NonZeroUsize> {
        let DeValue::Integer(number) = value.get_ref() else {
            self.type_error(value.span(), key, value.get_ref(), "a number", None);
            return None;
        };
        let count = number.to_string().parse().ok().filter(|count| bounds.contains(count));
        if count.is_none() {
            let help = format!("expected a number from {} to {}", bounds.start(), bounds.end());
            self.error(value.span(), format!("invalid {key} `{number}`"), Some(help));
        }
        count.and_then(NonZeroUsize::new)
    }

    fn nbd_memory(&mut self, value: &TomlValue<'_>) -> Option<u64> {
        let text = self.string("nbd_memory", value)?;
        let bytes = crate::size::parse(text).ok().filter(|bytes| *bytes >= LIMIT_BYTES_MIN);
        if bytes.is_none() {
            let help = format!("expected a size of {}M at least", LIMIT_BYTES_MIN >> 20);
            self.error(value.span(), format!("invalid nbd_memory `{}`", shown(text)), Some(help));
        }
        bytes
    }

    /// An array of absolute paths.
    fn paths(&mut self, key: &str, value: &TomlValue<'_>) -> Vec<PathBuf> {
        let DeValue::Array(items) = value.get_ref() else {
            self.type_error(value.span(), key, value.get_ref(), "an array of strings", None);
            return Vec::new();
        };
        let mut paths = Vec::new();
        for item in items.iter() {
            let Some(text) = self.string(key, item) else { continue };
            if !text.starts_with('/') {
                let message = format!("invalid {key} `{}`", shown(text));
                let help = "expected a path that begins with `/`".to_owned();
                self.error(item.span(), message, Some(help));
                continue;
            }
            paths.push(PathBuf::from(text));
        }
        paths
    }

    fn path(&mut self, key: &str, value: &TomlValue<'_>) -> Option<PathBuf> {
        self.path_text(key, value).map(PathBuf::from)
    }

    /// The text of a path; a leading `~/` is the home directory.
    fn path_text(&mut self, key: &str, value: &TomlValue<'_>) -> Option<String> {
        let text = self.string(key, value)?;
        let path = expand_home(text);
        if path.is_none() {
            let message = format!("invalid {key} `{}`: expected a path", shown(text));
            let help = "`~/` at its beginning is $HOME; `~USER` is not supported".to_owned();
            self.error(value.span(), message, Some(help));
        }
        path
    }

    fn switch(&mut self, key: &str, value: &TomlValue<'_>) -> Option<bool> {
        let Some(text) = switch_text(value.get_ref()) else {
            self.type_error(value.span(), key, value.get_ref(), SWITCH_WORDS, None);
            return None;
        };
        let on = switch(&text);
        if on.is_none() {
            let message = format!("invalid {key} `{}`", shown(&text));
            self.error(value.span(), message, Some(format!("expected {SWITCH_WORDS}")));
        }
        on
    }

    fn string<'v>(&mut self, key: &str, value: &'v TomlValue<'_>) -> Option<&'v str> {
        match value.get_ref() {
            DeValue::String(text) => Some(text),
            other => {
                self.type_error(value.span(), key, other, "a string", None);
                None
            }
        }
    }

    fn type_error(
        &mut self,
        span: Range<usize>,
        key: &str,
        value: &DeValue<'_>,
        wanted: &str,
        help: Option<String>,
    ) {
        let message = format!("{key}: found {}, expected {wanted}", article(value.type_str()));
        self.error(span, message, help);
    }

    fn unknown_key(&mut self, span: Range<usize>, key: &str, place: &str, known: &[&str]) {
        let help = match nearest(key, known.iter().copied()) {
            Some(known) => format!("did you mean `{known}`?"),
            None => format!("known: {}", known.join(", ")),
        };
        self.error(span, format!("{place} has no key `{}`", shown(key)), Some(help));
    }

    fn unknown_parameter(&mut self, span: Range<usize>, kind: &DeviceKind, error: &ParamError) {
        let ParamError::UnknownKey { key, advice, .. } = error else { return };
        let advice = advice.trim_start_matches("; ");
        let help = match advice {
            "" => format!("`blockyard help-device {}` lists them", kind.name),
            advice => advice.to_owned(),
        };
        let message = format!("`{}` devices have no parameter `{key}`", kind.name);
        self.error(span, message, Some(help));
    }
}

fn article(kind: &str) -> String {
    let vowel = kind.starts_with(['a', 'e', 'i', 'o', 'u']);
    format!("{} {kind}", if vowel { "an" } else { "a" })
}

/// The TOML type of a parameter.
fn toml_form(form: ValueForm) -> &'static str {
    match form {
        ValueForm::Size { .. } | ValueForm::Sizes(_) => "a string or a number of bytes",
        ValueForm::Count { .. } | ValueForm::Int { .. } => "a number without quotes",
        ValueForm::Millis { .. } => "a string or a number of milliseconds",
        ValueForm::Switch => SWITCH_WORDS,
        ValueForm::Choice(_) | ValueForm::Text { .. } | ValueForm::Path { .. } => "a string",
    }
}

/// A whole number as text.
fn whole(number: &DeInteger<'_>) -> Option<String> {
    let number = i128::from_str_radix(number.as_str(), number.radix()).ok()?;
    Some(number.to_string())
}

/// A switch in the form of a URI, from a boolean, a number or a word.
fn switch_text(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::Boolean(on) => Some(u8::from(*on).to_string()),
        DeValue::Integer(number) => whole(number),
        DeValue::String(text) => Some(text.to_string()),
        _ => None,
    }
}

/// Whether the names of the snapshots of one backup could be those of the other: they begin with
/// the name of the backup and `-`.
fn are_confused(one: &str, other: &str) -> bool {
    let begins = |one: &str, other: &str| format!("{one}-").starts_with(&format!("{other}-"));
    begins(one, other) || begins(other, one)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::TEMPLATE;
    use super::*;

    /// The bug: the error for `zoned = "yes"` was `found a string, wanted true or false; wanted 1
    /// or 0 (true or false, yes or no, on or off)`, which names two rules, the second with `yes`.
    #[test]
    fn a_switch_is_alike_in_a_uri_and_in_a_table() {
        let table = |rest: &str| format!("[[device]]\nname = \"a\"\nkind = \"null\"\n{rest}\n");
        for (value, word, on) in [
            ("true", "true", true),
            ("1", "1", true),
            ("\"yes\"", "yes", true),
            ("\"On\"", "On", true),
            ("false", "false", false),
            ("0", "0", false),
            ("\"no\"", "no", false),
            ("\"off\"", "off", false),
        ] {
            let spec = &parse(&table(&format!("zoned = {value}"))).unwrap().devices[0];
            assert_eq!(spec.switch("zoned"), on, "{value}");
            let uri = format!("null:///a?zoned={word}");
            assert_eq!(spec.switch("zoned"), uri::parse(&uri).unwrap().switch("zoned"));
            let serve = parse(&format!("[serve]\nfuse_allow_other = {value}\n")).unwrap();
            assert_eq!(serve.fuse_allow_other, on, "{value}");
        }
        let words = "1 or 0 (true or false, yes or no, on or off)";
        for (value, problem) in [
            ("\"maybe\"", format!("invalid zoned `maybe`: expected {words}")),
            ("2", format!("invalid zoned `2`: expected {words}")),
            ("[]", format!("zoned: found an array, expected {words}")),
        ] {
            let errors = parse(&table(&format!("zoned = {value}"))).unwrap_err();
            assert_eq!(errors[0].to_string(), format!("line 4, column 9: {problem}"));
            let text = format!("[serve]\nfuse_allow_other = {value}\n");
            let error = parse(&text).unwrap_err()[0].to_string();
            let problem = problem.replace("zoned", "fuse_allow_other");
            assert_eq!(error, format!("line 2, column 20: {problem}"));
        }
    }

    #[test]
    fn backups_are_read_and_their_errors_have_a_place() {
        let whole = "[[backup]]\nname = \"off\"\npool = \"/p\"\nsnapshots = \"hourly\"\n";
        let text = format!(
            "{whole}keep = \"24h,7d\"\nvolumes = [\"v0\"]\ntarget = [\"ssh\", \"there\"]\n\
             timeout = \"3h\"\nraw = false\n"
        );
        let wanted = BackupSettings {
            name: "off".to_owned(),
            pool: PathBuf::from("/p"),
            volumes: vec!["v0".to_owned()],
            snapshots: Period::Hour,
            keep: Some("24h,7d".parse().unwrap()),
            target: vec!["ssh".to_owned(), "there".to_owned()],
            timeout: Duration::from_secs(10_800),
            raw: false,
        };
        assert_eq!(parse(&text).unwrap().backups, [wanted]);
        assert!(parse(whole).unwrap().backups[0].raw, "encrypted volumes stay encrypted");
        let other = |name: &str| format!("{whole}{}", whole.replace("off", name));
        for name in ["daily", "offsite", "of", "off_site"] {
            assert_eq!(parse(&other(name)).unwrap().backups.len(), 2, "{name}");
        }
        let twice = |from: &str, to: &str| {
            format!("{text}{}", text.replace("\"off\"", "\"b\"").replace(from, to))
        };
        for (from, to) in [("v0", "v1"), ("there", "here"), ("/p", "/q")] {
            assert_eq!(parse(&twice(from, to)).unwrap().backups.len(), 2, "{from}");
        }
        for (text, line, problem, help) in [
            // Each would build on the snapshot that it has sent, and the target has a newer one.
            (twice("24h", "12h"), 10, "invalid target", "than that of the backup `off`"),
            (twice("volumes = [\"v0\"]", ""), 10, "invalid target", "backup `off`"),
            (other("off"), 6, "invalid name `off`", "no other backup has"),
            // Regression: `off` pruned the snapshots `v0@off-site-...` of the other one.
            (other("off-site"), 6, "invalid name `off-site`", "each would prune the snapshots"),
            (other("off").replacen("off", "off-a", 1), 6, "invalid name `off`", "each would prune"),
            (other("-x"), 6, "invalid name `-x`", "expected 1 to 48 letters"),
            (whole.replace("hourly", "often"), 4, "invalid snapshots `often`", "hourly, daily"),
            (format!("{whole}keep = \"24\"\n"), 5, "invalid keep `24`", "counts with units"),
            (format!("{whole}timeout = \"1d\"\n"), 5, "invalid timeout `1d`", ""),
            (format!("{whole}volumes = [\"v@a\"]\n"), 5, "invalid volumes `v@a`", "a volume"),
            (format!("{whole}raw = 1\n"), 5, "raw: found an integer, expected true or false", ""),
            (format!("{whole}kepe = \"24h\"\n"), 5, "kepe", "keep"),
            (whole.replace("pool = \"/p\"\n", ""), 1, "pool", ""),
        ] {
            let errors = parse(&text).unwrap_err();
            let found = errors[0].help.clone().unwrap_or_default();
            assert_eq!((errors.len(), errors[0].line), (1, line), "{text}: {}", errors[0]);
            let said = errors[0].to_string();
            assert!(said.contains(problem) && found.contains(help), "{said}; {found}");
        }
    }

    #[test]
    fn a_device_may_be_given_by_its_uri() {
        let text = "[[device]]\nuri = \"null:///a?size=1G&zoned=1\"\n\n\
                    [[device]]\nname = \"b\"\nkind = \"null\"\n";
        let config = parse(text).unwrap();
        assert_eq!(config.devices[0], uri::parse("null:///a?size=1G&zoned=1").unwrap());
        assert_eq!(config.devices[1].name(), "b");
        let place = config.places[0].of("size");
        assert_eq!(&text[place], "\"null:///a?size=1G&zoned=1\"");
        for (text, want) in [
            (
                "uri = \"null:///a\"\nsize = 1\n",
                "line 3, column 1: invalid key `size`: the table has a `uri`",
            ),
            ("uri = 5\n", "line 2, column 7: uri: found an integer, expected a string"),
            ("uri = \"nul:///a\"\n", "line 2, column 7: `nul` is not a kind of device"),
            ("uri = \"null:///a?siz=1\"\n", "did you mean `size`?"),
            (
                "uri = \"null:///a\"\n[[device]]\nuri = \"null:///a\"\n",
                "line 4, column 7: name: `a` is taken already",
            ),
        ] {
            let errors = parse(&format!("[[device]]\n{text}")).unwrap_err();
            assert!(errors[0].to_string().contains(want), "{}", errors[0]);
        }
    }

    #[test]
    fn a_path_may_begin_at_the_home_directory() {
        let text = "[serve]\ncontrol = \"~nobody/control.sock\"\nfuse = \"~nobody\"\n";
        let errors = parse(text).unwrap_err();
        assert_eq!(errors.len(), 2);
        assert_eq!(
            errors[1].to_string(),
            "line 3, column 8: invalid fuse `~nobody`: expected a path; `~/` at its beginning is \
             $HOME; `~USER` is not supported"
        );
    }

    #[test]
    fn the_template_is_the_default_yard() {
        let config = parse(TEMPLATE).unwrap();
        let names: Vec<_> = config.devices.iter().map(DeviceSpec::name).collect();
        assert_eq!(names, ["zoned0", "null0", "mem0", "smr0", "ram0", "vol0"]);
        assert_eq!(config.nbd, None);
        assert_eq!(config.devices[0].number("zone_capacity"), 192 << 20);
        let place = config.places[0].of("zone_capacity");
        assert_eq!(&TEMPLATE[place], "\"192M\"");
    }

    #[test]
    fn the_examples_in_comments_of_the_template_are_valid() {
        let keys = [
            "nbd",
            "nvme",
            "control",
            "api_directories",
            "nbd_memory",
            "vhost_poll",
            "metrics",
            "web",
            "web_token_file",
            "fuse",
            "[tls]",
            "[nvme]",
            "mode",
            "certificates",
            "verify_peer",
            "allow",
            "secrets",
            "hashes",
            "dh_groups",
            "subsystem",
            "threads",
            "connections",
        ];
        let text: String = TEMPLATE
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(rest) if keys.iter().any(|key| rest.starts_with(key)) => rest.to_owned(),
                _ => line.to_owned(),
            } + "\n")
            .collect();
        let config = parse(&text).unwrap();
        assert_eq!(config.nbd.unwrap().len(), 2);
        assert_eq!((config.nvme.len(), config.nvme_discovery.len()), (1, 1));
        assert!(config.control.is_some() && config.metrics.is_some());
        assert!(config.web.is_some() && config.web_token_file.is_some());
        assert_eq!(config.vhost_poll, Some(50));
        assert_eq!(config.api_directories, [PathBuf::from("/srv/blockyard")]);
        assert!(config.fuse.is_some() && config.fuse_allow_other);
        assert_eq!(config.tls.mode, TlsMode::Require);
        assert!(config.tls.allow.permits("vol0", Some("O=Example,CN=alice")));
        assert!(config.tls.allow.permits("ram0", Some("CN=backup")));
        let host = "nqn.2014-08.org.nvmexpress:uuid:4dd5a6b1-51c4-4a24-9a6d-1e1c9f7e0a01";
        let access = &config.nvme_access;
        assert!(access.allow.permits("vol0", host) && !access.allow.permits("ram0", host));
        assert_eq!(access.secrets, Some(PathBuf::from("/etc/blockyard/nvme-secrets")));
        assert_eq!((access.hashes.len(), access.dh_groups.len()), (3, 6));
        assert_eq!(access.subsystem.as_deref(), Some("nqn.2026-11.io.blockyard:all"));
        assert_eq!(
            (access.threads, access.connections),
            (NonZeroUsize::new(2), NonZeroUsize::new(1024))
        );
        assert_eq!(access.check(), Ok(()));
    }

    #[test]
    fn block_devices_have_a_number_or_any() {
        let ublk = parse("[ublk]\nvm = 3\nram = \"any\"\n").unwrap().ublk;
        let place = |device: &str, id| UblkPlace { device: device.to_owned(), id };
        assert_eq!(ublk, [place("ram", None), place("vm", Some(3))]);
        let error = |text| parse(text).map(drop).unwrap_err()[0].to_string();
        assert_eq!(
            error("[ublk]\nvm = 1048576\n"),
            "line 2, column 6: ublk: `vm`: invalid id `1048576`: expected the N of /dev/ublkbN, 0 \
             to 1048575, or any"
        );
        let wanted = "line 2, column 6: ublk: found a boolean, expected a number or `any`";
        assert_eq!(error("[ublk]\nvm = true\n"), wanted);
    }

    #[test]
    fn nvme_hosts_discover_at_tcp_ports() {
        let text = "[serve]\nnvme_discovery = [\"tcp:[::1]:8009\", \"unix:/a\"]\n";
        let error = parse(text).map(drop).unwrap_err()[0].to_string();
        let wanted = "line 2, column 37: invalid nvme_discovery `unix:/a`: expected tcp:HOST:PORT";
        assert_eq!(error, wanted);
    }

    #[test]
    fn errors_point_at_the_line_and_say_what_would_do() {
        let cases = [
            ("[serv]\n", "line 1, column 2: the file has no key `serv`; did you mean `serve`?"),
            (
                "x = 1\n",
                "line 1, column 1: the file has no key `x`; known: serve, tls, nvme, \
              vhost, ublk, device, backup",
            ),
            ("[vhost]\nvm = \"tcp:a:1\"\n", "line 2, column 6: vhost: `vm`: expected unix:PATH"),
            (
                "[serve]\nndb = []\n",
                "line 2, column 1: [serve] has no key `ndb`; did you mean `nbd`?",
            ),
            (
                "[serve]\nnbd = [\"unix:/a\", 5]\n",
                "line 2, column 19: nbd: found an integer, expected a string",
            ),
            (
                "[serve]\nnvme = \"unix:/a\"\n",
                "line 2, column 8: invalid nvme `unix:/a`: expected tcp:HOST:PORT",
            ),
            (
                "[serve]\nnbd = \"udp:1\"\n",
                "line 2, column 7: nbd: `udp:1` is no place to listen at: it begins with none of \
                 them; expected unix:PATH, tcp:HOST:PORT or stdio",
            ),
            (
                "[tls]\nmode = \"maybe\"\n",
                "line 2, column 8: invalid mode `maybe`: expected one of off, on, require",
            ),
            (
                "[[device]]\nkind = \"null\"\n",
                "line 1, column 1: name: missing in this device; e.g. name = \"n0\"",
            ),
            (
                "[[device]]\nname = \"a\"\nkind = \"nul\"\n",
                "line 3, column 8: `nul` is not a kind of device (known: null, smr, ram, volume, \
                 file); did you mean `null`?",
            ),
            (
                "[device]\nname = \"a\"\nkind = \"null\"\n",
                "line 1, column 1: device: found a table, expected an array of tables; begin each \
                 device with a line [[device]]",
            ),
            (
                "[[device]]\nname = \"a\"\nkind = \"null\"\nzonesize = \"1M\"\n",
                "line 4, column 1: `null` devices have no parameter `zonesize`; did you mean \
                 `zone_size`?",
            ),
            (
                "[[device]]\nname = \"a\"\nkind = \"null\"\nzone_nr_conv = \"4\"\n",
                "line 4, column 16: zone_nr_conv: found a string, expected a number without \
                 quotes; a number from 0 to 4294967295",
            ),
            (
                "[[device]]\nname = \"a\"\nkind = \"null\"\nzone_nr_conv = -4\n",
                "line 4, column 16: invalid zone_nr_conv `-4`: expected a number from 0 to \
                 4294967295",
            ),
            (
                "[[device]]\nname = \"\u{e9}\"\nkind = \"null\"\n",
                "line 2, column 8: invalid name `\u{e9}`: expected 1 to 64 letters, digits, \
                 `.`, `_` or `-`, the first a letter or a digit",
            ),
        ];
        for (text, want) in cases {
            let errors = parse(text).unwrap_err();
            assert_eq!(errors[0].to_string(), want, "{text}");
        }
    }

    #[test]
    fn invalid_settings_of_nvme_are_refused() {
        let cases = [
            (
                "[nvme]\nallow = [\"nqn.a\"]\n",
                "line 2, column 9: allow: found an array, expected a table; begin it with a line \
                 [nvme.allow]",
            ),
            (
                "[nvme]\nsubsystem = \"all\"\n",
                "line 2, column 13: invalid subsystem `all`: expected an NQN, which begins with \
                 `nqn.`, has no spaces and at most 223 bytes, and not that of discovery",
            ),
            (
                "[nvme]\nthreads = 0\n",
                "line 2, column 11: invalid threads `0`: expected a number from 1 to 4096",
            ),
            (
                "[nvme]\nconnections = 16385\n",
                "line 2, column 15: invalid connections `16385`: expected a number from 2 to 16384",
            ),
            (
                "[nvme]\nconnections = \"all\"\n",
                "line 2, column 15: connections: found a string, expected a number",
            ),
            (
                "[nvme.allow]\nn0 = [\"nqn.a\", \"alice\"]\n",
                "line 2, column 16: invalid allow `alice`: expected the NQN of a host, which \
                 begins with `nqn.`, has no spaces and at most 223 bytes",
            ),
            (
                "[nvme.allow]\nn0 = []\n",
                "line 2, column 6: invalid allow `[]`: expected at least one client",
            ),
            (
                "[nvme]\nsecrets = \"/s\"\nhashes = [\"sha1\"]\n",
                "line 3, column 11: invalid hashes `sha1`: expected one of sha256, sha384, sha512",
            ),
            (
                "[nvme]\nsecrets = \"/s\"\ndh_groups = []\n",
                "line 3, column 13: invalid dh_groups `[]`: expected one of ffdhe2048, ffdhe3072, \
                 ffdhe4096, ffdhe6144, ffdhe8192, null",
            ),
        ];
        for (text, want) in cases {
            assert_eq!(parse(text).unwrap_err()[0].to_string(), want, "{text}");
        }
    }

    #[test]
    fn settings_of_an_authentication_without_secrets_are_refused() {
        for (text, want) in [
            (
                "[nvme]\nhashes = \"sha256\"\n",
                "line 2, column 10: hashes: no host authenticates without secrets; add secrets = \
                 \"FILE\"",
            ),
            (
                "[nvme]\ndh_groups = [\"null\"]\n",
                "line 2, column 13: dh_groups: no host authenticates without secrets; add secrets \
                 = \"FILE\"",
            ),
        ] {
            let error = parse(text).unwrap().check_nvme(text).unwrap();
            assert_eq!(error.to_string(), want, "{text}");
        }
    }

    #[test]
    fn tls_settings_that_protect_no_client_are_refused() {
        let cases = [
            (
                "[tls]\nmode = \"on\"\n",
                "line 2, column 8: certificates: missing, and TLS is on; name the directory that \
                 holds server-cert.pem and server-key.pem",
            ),
            (
                "[tls]\ncertificates = \"/c\"\n",
                "line 2, column 16: tls: certificates are given but TLS is off; add mode = \
                 \"require\" (or \"on\")",
            ),
            (
                "[tls]\nmode = \"on\"\ncertificates = \"/c\"\nverify_peer = true\n",
                "line 4, column 15: verify_peer: with mode = \"on\" a client without TLS is let in \
                 and shows no certificate; use mode = \"require\"",
            ),
        ];
        for (text, want) in cases {
            let error = parse(text).unwrap().check_tls(text).unwrap();
            assert_eq!(error.to_string(), want, "{text}");
        }
    }

    #[test]
    fn a_name_stands_once() {
        let one = "[[device]]\nname = \"a\"\nkind = \"null\"\n";
        let errors = parse(&format!("{one}{one}")).unwrap_err();
        assert_eq!(errors.len(), 1);
        assert_eq!((errors[0].line, errors[0].column), (5, 8));
    }

    #[test]
    fn several_errors_come_in_the_order_of_the_text() {
        let text = "[[device]]\nname = \"a\"\nkind = \"null\"\nsize = true\nbs = 100\nx = 1\n";
        let lines: Vec<_> = parse(text).unwrap_err().iter().map(|error| error.line).collect();
        assert_eq!(lines, [4, 5, 6]);
    }

    #[test]
    fn broken_syntax_has_a_place_too() {
        let errors = parse("[serve]\nnbd = [\n").unwrap_err();
        assert!(errors[0].line >= 2, "{errors:?}");
        assert_eq!(parse("a = 1\na = 2\n").unwrap_err()[0].line, 2);
    }

    #[test]
    fn the_length_is_bounded() {
        let errors = parse(&"#".repeat(LEN_MAX + 1)).unwrap_err();
        assert!(errors[0].to_string().contains("too long"));
    }

    proptest! {
        #[test]
        fn a_uri_and_a_table_mean_the_same(size in 512_u64..1 << 50, zoned: bool, conv: u32) {
            let uri = format!("null:///n?size={size}&zoned={}&zone_nr_conv={conv}", zoned as u8);
            let toml = format!(
                "[[device]]\nname='n'\nkind='null'\nsize={size}\nzoned={zoned}\nzone_nr_conv={conv}"
            );
            prop_assert_eq!(
                &parse(&toml).unwrap().devices[0],
                &crate::uri::parse(&uri).unwrap()
            );
        }

        #[test]
        fn no_text_makes_it_panic(text in "(\\[\\[device\\]\\]\n)?\\PC{0,60}") {
            let _ = parse(&text);
        }
    }
}
