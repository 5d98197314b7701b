//! Traces of devices for requests: recorded, and replayed.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::middleware::Recording;
use blockyard_trace::replay::QUEUE_DEPTH_MAX;
use blockyard_trace::{
    Operations, RecordLimits, ReplayError, ReplayOptions, ReplayStop, ReplayView, SOURCE, Select,
    Speed, TraceScope, replay,
};
use serde::{Deserialize, Serialize};

use crate::devices::Devices;
use crate::entry::DeviceEntry;
use crate::error::YardError;
use crate::stack::trace_title;

/// The shortest size limit of a trace, in bytes.
pub const TRACE_BYTES_MIN: u64 = 64 << 10;

/// The longest duration of a trace, in ms: 30 days.
pub const TRACE_MS_MAX: u64 = 30 * 86_400_000;

/// The slowest and the fastest speed of a replay, as factors.
pub const SPEEDS: std::ops::RangeInclusive<f64> = 0.001..=1000.0;

/// The longest expected duration of a replay whose request names none, in ms: a day.
pub const REPLAY_MS: u64 = 86_400_000;

/// The longest expected duration that a request may name, in ms: 30 days.
pub const REPLAY_MS_MAX: u64 = 30 * 86_400_000;

/// The queue depth of a replay that asks for none.
pub const QUEUE_DEPTH: u16 = 128;

/// `POST /v1/devices/{name}/trace`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct TraceRequest {
    /// How long the trace lasts at most, in ms.
    pub duration_ms: Option<u64>,
    /// How long it is at most, in bytes.
    pub bytes_max: Option<u64>,
}

impl TraceRequest {
    /// The limits.
    ///
    /// # Errors
    /// If one is out of range.
    pub fn limits(&self) -> Result<RecordLimits, YardError> {
        let invalid = |field, value: u64, wanted: String| {
            Err(YardError::Argument { field, value: value.to_string(), wanted })
        };
        match (self.duration_ms, self.bytes_max) {
            (Some(ms), _) if ms == 0 || ms > TRACE_MS_MAX => {
                invalid("duration_ms", ms, format!("1 to {TRACE_MS_MAX}"))
            }
            (_, Some(bytes)) if bytes < TRACE_BYTES_MIN => {
                invalid("bytes_max", bytes, format!("{TRACE_BYTES_MIN} at least"))
            }
            (ms, bytes_max) => {
                Ok(RecordLimits { duration: ms.map(Duration::from_millis), bytes_max })
            }
        }
    }
}

/// The response to `DELETE /v1/devices/{name}/trace`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct TraceStopped {
    /// The device.
    pub device: String,
}

/// The query of `POST /v1/devices/{name}/replay`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReplayQuery {
    /// A factor, or `max`; by default 1.
    pub speed: Option<String>,
    /// Operations in flight on each channel, at most.
    pub queue_depth: Option<u64>,
    /// The longest expected duration, in ms. A trace that lasts longer at this speed is refused.
    pub duration_max_ms: Option<u64>,
    /// A number by which a request may stop this replay and no other.
    pub id: Option<u64>,
    /// Whether operations that change the device are replayed.
    pub write: bool,
    /// Whether they are although clients use the device.
    pub force: bool,
}

impl ReplayQuery {
    /// The options.
    ///
    /// # Errors
    /// If one is out of range.
    pub fn options(&self) -> Result<ReplayOptions, YardError> {
        let speed = self.speed.as_deref().map_or(Ok(Speed::Factor(1.0)), parse_speed);
        let speed = speed.map_err(|wanted| {
            let value = self.speed.clone().unwrap_or_default();
            YardError::Argument { field: "speed", value, wanted }
        })?;
        let depth = self.queue_depth.unwrap_or(QUEUE_DEPTH.into());
        let depths = 1..=QUEUE_DEPTH_MAX;
        let Some(queue_depth) = u16::try_from(depth).ok().filter(|it| depths.contains(it)) else {
            let (value, wanted) = (depth.to_string(), format!("1 to {QUEUE_DEPTH_MAX}"));
            return Err(YardError::Argument { field: "queue_depth", value, wanted });
        };
        Ok(ReplayOptions { speed, queue_depth, write: self.write })
    }

    /// What is checked while the trace is read: that the replay does not last too long.
    ///
    /// # Errors
    /// If the longest duration is out of range.
    pub fn scope(&self, speed: Speed) -> Result<TraceScope, YardError> {
        let ms = self.duration_max_ms.unwrap_or(REPLAY_MS);
        if ms == 0 || ms > REPLAY_MS_MAX {
            let (value, wanted) = (ms.to_string(), format!("1 to {REPLAY_MS_MAX}"));
            return Err(YardError::Argument { field: "duration_max_ms", value, wanted });
        }
        Ok(TraceScope::new(match speed {
            Speed::Max => None,
            Speed::Factor(factor) => Some((ms as f64 * 1e6 * factor) as u64),
        }))
    }
}

/// The speed of a replay: a factor, or `max`.
///
/// # Errors
/// What is expected.
pub fn parse_speed(text: &str) -> Result<Speed, String> {
    if text == "max" {
        return Ok(Speed::Max);
    }
    let factor = text.parse::<f64>().ok().filter(|factor| SPEEDS.contains(factor));
    let wanted = || format!("a factor from {} to {}, or max", SPEEDS.start(), SPEEDS.end());
    factor.map(Speed::Factor).ok_or_else(wanted)
}

/// Starts to record a device.
pub(crate) fn begin(entry: &DeviceEntry) -> Result<(Recording, String), YardError> {
    let name = entry.spec.name();
    let point = entry.disk.trace_point();
    let recording = point.and_then(|point| point.record(SOURCE));
    let recording = recording.ok_or_else(|| YardError::Traced { name: name.to_owned() })?;
    Ok((recording, trace_title(name, entry.disk.as_ref())))
}

/// Ends the trace of a device.
pub(crate) fn stop(entry: &DeviceEntry) -> Result<TraceStopped, YardError> {
    let device = entry.spec.name().to_owned();
    match entry.disk.trace_point().is_some_and(|point| point.stop()) {
        true => Ok(TraceStopped { device }),
        false => Err(YardError::NotTraced { name: device }),
    }
}

/// The query of `DELETE /v1/devices/{name}/replay`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReplayStopQuery {
    /// The number of the replay; without it all replays on the device are stopped.
    pub id: Option<u64>,
}

/// The response to `DELETE /v1/devices/{name}/replay`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ReplayStopped {
    /// The device.
    pub device: String,
    /// The number of replays that were stopped.
    pub replays: u64,
}

/// Replays a trace on a device of a daemon until `stop` stops it.
pub(crate) fn replay_on(
    devices: &Devices,
    entry: DeviceEntry,
    query: &ReplayQuery,
    input: impl Read,
    stop: &ReplayStop,
) -> Result<ReplayView, YardError> {
    let options = query.options()?;
    let scope = query.scope(options.speed)?;
    let name = entry.spec.name();
    // No client that could write comes meanwhile.
    let _claim = if query.write {
        let claim = entry.shared.claim.claim().ok_or_else(|| devices.claimed(name))?;
        devices.may_replay(name, query.force)?;
        Some(claim)
    } else {
        None
    };
    let entered = devices.replays().enter(name, query.id, query.write, stop)?;
    // A request may have removed or replaced the device just before.
    let is_same = |now: DeviceEntry| Arc::ptr_eq(&now.disk, &entry.disk);
    if !devices.find(name).is_ok_and(is_same) {
        return Err(YardError::Device(blockyard_core::DeviceError::Gone));
    }
    let operations = Operations::new(input, Select::Queue).within(scope);
    let replayed = replay(entry.disk.as_ref(), operations, &options, stop);
    // First: a request that removes the device waits for the end of the replay.
    drop(entry);
    drop(entered);
    replayed.map_err(|error| match error {
        ReplayError::Channel(error) => error.into(),
        error => YardError::Replay(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_has_a_longest_duration_at_its_speed() {
        let query = ReplayQuery { duration_max_ms: Some(1000), ..ReplayQuery::default() };
        let span = |speed| query.scope(speed).unwrap().span_max_ns;
        assert_eq!(span(Speed::Factor(2.0)), Some(2_000_000_000));
        assert_eq!(span(Speed::Max), None);
        let day = ReplayQuery::default().scope(Speed::Factor(1.0)).unwrap();
        assert_eq!(day.span_max_ns, Some(86_400_000_000_000));
        for ms in [0, REPLAY_MS_MAX + 1] {
            let query = ReplayQuery { duration_max_ms: Some(ms), ..ReplayQuery::default() };
            assert!(query.scope(Speed::Max).is_err());
        }
    }

    #[test]
    fn limits_and_speeds_have_ranges() {
        for (duration_ms, bytes_max) in [(Some(0), None), (None, Some(1))] {
            assert!(TraceRequest { duration_ms, bytes_max }.limits().is_err());
        }
        let limits = TraceRequest { duration_ms: Some(1500), bytes_max: Some(1 << 20) };
        assert_eq!(limits.limits().unwrap().duration, Some(Duration::from_millis(1500)));
        assert_eq!(parse_speed("max"), Ok(Speed::Max));
        assert_eq!(parse_speed("2.5"), Ok(Speed::Factor(2.5)));
        for text in ["", "0", "-1", "nan", "inf", "1e9", "fast"] {
            assert!(parse_speed(text).is_err(), "{text}");
        }
    }
}
