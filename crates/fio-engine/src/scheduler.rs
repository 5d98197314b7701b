//! What `--ioscheduler=` means. fio itself would only try to write it into sysfs.

use blockyard_yard::nearest::suggestion;
use blockyard_yard::param::shown;
use blockyard_yard::spec::DeviceSpec;

use crate::error::EngineError;

/// Linux's names, and ours (`sched=`); `None` where we do not have it yet.
const SCHEDULERS: &[(&str, Option<&str>)] =
    &[("none", Some("none")), ("mq-deadline", None), ("deadline", None)];

/// Puts the device under the scheduler of this name. Where it is one that there is not yet, the
/// device keeps `none`, and the answer is a line that says so.
///
/// # Errors
/// If there is no scheduler of this name, or the device does not take it.
pub fn apply(name: &str, spec: &mut DeviceSpec) -> Result<Option<String>, EngineError> {
    let Some((linux, ours)) = SCHEDULERS.iter().find(|(linux, _)| *linux == name) else {
        let names = || SCHEDULERS.iter().map(|(linux, _)| *linux);
        let known = names().collect::<Vec<_>>().join(", ");
        return Err(EngineError::Scheduler {
            name: shown(name),
            known,
            advice: suggestion(name, names()),
        });
    };
    spec.set_text("sched", ours.unwrap_or("none"))?;
    Ok(ours.is_none().then(|| {
        format!(
            "WARNING: ioscheduler={linux}: Blockyard has no {linux} yet; device `{}` runs with \
             `none`, and these figures are those of `none`",
            spec.name()
        )
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_yard::uri;

    #[test]
    fn each_row_is_a_scheduler_that_the_device_takes() {
        for (linux, ours) in SCHEDULERS {
            let mut spec = uri::parse("null:///n0").unwrap();
            let warning = apply(linux, &mut spec).unwrap();
            assert_eq!(warning.is_some(), ours.is_none());
            assert!(spec.is_set("sched"));
        }
    }

    #[test]
    fn an_unknown_one_is_refused() {
        let mut spec = uri::parse("null:///n0").unwrap();
        let error = apply("mq-deadlin", &mut spec).unwrap_err().to_string();
        assert_eq!(
            error,
            "ioscheduler: `mq-deadlin` is not a scheduler here; none, mq-deadline, deadline would \
             do; did you mean `mq-deadline`?"
        );
    }
}
