//! The devices of this process: jobs that name one device share it.
#![allow(clippy::disallowed_types)] // Jobs ask for their devices at setup: control plane.

use std::sync::{Arc, Mutex, PoisonError};

use blockyard_core::Disk;
use blockyard_yard::spec::DeviceSpec;
use blockyard_yard::stack;

use crate::error::EngineError;
use crate::{scheduler, source};

/// A job's options for one of its files.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted<'a> {
    /// The option `dev=`.
    pub dev: Option<&'a str>,
    /// The option `before=`.
    pub before: Option<&'a str>,
    /// The option `ioscheduler=`.
    pub scheduler: Option<&'a str>,
    /// The file's name.
    pub file: Option<&'a str>,
    /// Whether fio keeps write pointers of its own (`zonemode=zbd`).
    pub zbd: bool,
}

/// An open device of the process.
struct Entered {
    spec: DeviceSpec,
    before: Option<String>,
    disk: Arc<dyn Disk>,
    /// The filenames under which jobs use the device.
    files: Vec<String>,
    /// The filename under which jobs with `zonemode=zbd` use the device.
    zbd_file: Option<String>,
}

impl Entered {
    fn shown(&self) -> String {
        shown(&self.spec, self.before.as_deref())
    }
}

fn shown(spec: &DeviceSpec, before: Option<&str>) -> String {
    before.map_or_else(|| spec.to_string(), |before| format!("{spec} before={before}"))
}

/// The open devices by name.
#[derive(Default)]
pub struct Devices(Mutex<Vec<Entered>>);

/// The devices of this process.
static DEVICES: Devices = Devices(Mutex::new(Vec::new()));

impl Devices {
    /// The table of this process.
    pub fn of_process() -> &'static Devices {
        &DEVICES
    }

    /// Returns the device of a job's options: one that another job opened, or a new one. `say`
    /// receives warnings for the user.
    ///
    /// # Errors
    /// If the options name no device, or conflict with those of other jobs.
    pub fn enter(
        &self,
        wanted: &Wanted<'_>,
        say: &mut dyn FnMut(&str),
    ) -> Result<Arc<dyn Disk>, EngineError> {
        let spec = source::spec(wanted.dev.unwrap_or(""), wanted.file)?;
        // `Job::open` applies the scheduler; an unknown name fails here, at setup.
        wanted.scheduler.map(scheduler::find).transpose()?;
        // A panic of another holder leaves a consistent table: pushing an entry is the last step.
        let mut devices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        check_file(&devices, &spec, wanted)?;
        let at = match devices.iter().position(|entered| entered.spec.name() == spec.name()) {
            Some(at) => at,
            None => {
                devices.push(make(spec.clone(), wanted.before, say)?);
                devices.len() - 1
            }
        };
        let entered = &mut devices[at];
        if !same(&entered.spec, &spec) || entered.before.as_deref() != wanted.before {
            return Err(EngineError::Other {
                name: spec.name().to_owned(),
                here: entered.shown(),
                wanted: shown(&spec, wanted.before),
            });
        }
        if let Some(file) = wanted.file {
            bind(entered, file, wanted.zbd)?;
        }
        Ok(Arc::clone(&entered.disk))
    }

    /// Forgets every device. A device that no job holds is dropped now, which writes out its trace.
    pub fn clear(&self) {
        let devices = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        drop(devices);
    }
}

/// Fails if a filename would stand for two devices.
fn check_file(
    devices: &[Entered],
    spec: &DeviceSpec,
    wanted: &Wanted<'_>,
) -> Result<(), EngineError> {
    let Some(file) = wanted.file else { return Ok(()) };
    let other = devices.iter().find(|entered| {
        entered.spec.name() != spec.name() && entered.files.iter().any(|name| name == file)
    });
    match other {
        None => Ok(()),
        Some(other) => Err(EngineError::File {
            file: file.to_owned(),
            here: other.shown(),
            wanted: shown(spec, wanted.before),
        }),
    }
}

fn make(
    spec: DeviceSpec,
    before: Option<&str>,
    say: &mut dyn FnMut(&str),
) -> Result<Entered, EngineError> {
    let disk = match before {
        Some(before) => blockyard_baselines::open(before, &spec)?,
        None => {
            let made = stack::open(&spec)?;
            for note in &made.notes {
                say(&format!("{}: {note}", spec.name()));
            }
            made.disk
        }
    };
    let before = before.map(str::to_owned);
    Ok(Entered { spec, before, disk, files: Vec::new(), zbd_file: None })
}

/// Whether two specs describe equal devices, defaults included.
fn same(a: &DeviceSpec, b: &DeviceSpec) -> bool {
    let value = |spec: &DeviceSpec, name: &str| {
        spec.given().find(|(param, _)| param.name == name).map(|(_, value)| value.clone())
    };
    a.kind().name == b.kind().name
        && a.kind().params().all(|param| {
            let (a, b) = (value(a, param.name), value(b, param.name));
            a == b
                || a.unwrap_or_else(|| param.default_value())
                    == b.unwrap_or_else(|| param.default_value())
        })
}

/// Records that the device is used under this filename.
fn bind(entered: &mut Entered, file: &str, zbd: bool) -> Result<(), EngineError> {
    if zbd && entered.disk.geometry().zones.is_some() {
        match &entered.zbd_file {
            Some(here) if here != file => {
                return Err(EngineError::TwoFiles {
                    name: entered.spec.name().to_owned(),
                    here: here.clone(),
                    file: file.to_owned(),
                });
            }
            _ => entered.zbd_file = Some(file.to_owned()),
        }
    }
    if !entered.files.iter().any(|name| name == file) {
        entered.files.push(file.to_owned());
    }
    Ok(())
}

impl std::fmt::Debug for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Devices").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted<'a>(dev: &'a str, file: &'a str) -> Wanted<'a> {
        Wanted { dev: Some(dev), file: Some(file), ..Wanted::default() }
    }

    fn refused(devices: &Devices, wanted: &Wanted<'_>) -> String {
        match devices.enter(wanted, &mut |_| {}) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{wanted:?} was entered"),
        }
    }

    #[test]
    fn before_is_a_baseline_of_the_lab() {
        let devices = Devices::default();
        let zoned = wanted("null:///z?size=1G&zoned=1&zone_size=16M", "f");
        for before in blockyard_baselines::names_of("null") {
            let devices = Devices::default();
            let before = Wanted { before: Some(before), ..zoned };
            assert!(devices.enter(&before, &mut |_| {}).is_ok(), "{before:?}");
        }
        let unknown = refused(&devices, &Wanted { before: Some("one-lok"), ..zoned });
        assert!(unknown.starts_with("before: there is no baseline `one-lok`"), "{unknown}");
        let plain = wanted("null:///n?size=1G", "f");
        let plain = refused(&devices, &Wanted { before: Some("one-lock"), ..plain });
        assert!(plain.contains("zoned=1"), "{plain}");
    }

    #[test]
    fn jobs_that_name_the_same_device_share_it() {
        let devices = Devices::default();
        let mut lines = Vec::new();
        let mut say = |line: &str| lines.push(line.to_owned());
        let a = devices.enter(&wanted("null:///n?size=1M", "f"), &mut say).unwrap();
        let spelled = wanted("null:///n?size=1024k&zoned=0", "g");
        let b = devices.enter(&spelled, &mut say).unwrap();
        let none = Wanted { scheduler: Some("none"), ..spelled };
        let c = devices.enter(&none, &mut say).unwrap();
        assert!(Arc::ptr_eq(&a, &b) && Arc::ptr_eq(&b, &c));
        assert_eq!(lines, Vec::<String>::new());
        devices.clear();
        drop((b, c));
        assert_eq!(Arc::strong_count(&a), 1);
    }

    #[test]
    fn one_name_is_one_device_and_one_file_too() {
        let devices = Devices::default();
        devices.enter(&wanted("null:///n?size=1M", "f"), &mut |_| {}).unwrap();
        let error = refused(&devices, &wanted("null:///n?size=2M", "g"));
        assert!(error.starts_with("dev: `n` is `null:///n?size=1M`"), "{error}");
        let error = refused(&devices, &wanted("null:///m?size=1M", "f"));
        assert!(error.starts_with("dev: filename `f` is device `null:///n?size=1M`"), "{error}");
    }

    #[test]
    fn with_zonemode_zbd_a_device_has_one_filename() {
        let devices = Devices::default();
        let zbd = |file| Wanted { zbd: true, ..wanted("null:///z?size=1G&zoned=1", file) };
        devices.enter(&zbd("/dev/a"), &mut |_| {}).unwrap();
        devices.enter(&zbd("/dev/a"), &mut |_| {}).unwrap();
        let error = refused(&devices, &zbd("/dev/b"));
        assert!(error.starts_with("filename: zoned device `z` is `/dev/a`"), "{error}");
    }

    #[test]
    fn jobs_with_other_schedulers_share_a_device_all_the_same() {
        // fio switches the scheduler of the device when a job starts.
        let devices = Devices::default();
        let plain = wanted("null:///n?size=1M", "f");
        let first = devices.enter(&plain, &mut |_| {}).unwrap();
        for scheduler in ["mq-deadline", "deadline", "none"] {
            let wanted = Wanted { scheduler: Some(scheduler), ..plain };
            assert!(Arc::ptr_eq(&first, &devices.enter(&wanted, &mut |_| {}).unwrap()));
        }
        let error = refused(&devices, &Wanted { scheduler: Some("bfq"), ..plain });
        assert!(error.starts_with("invalid ioscheduler `bfq`: expected one of"), "{error}");
    }
}
