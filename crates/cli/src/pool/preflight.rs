//! `pool preflight`: whether an object store excludes a second writer.

use std::io::Write;

use blockyard_object::preflight::{PreflightReport, preflight_of};
use blockyard_object::{Access, ObjectError, ObjectUri};
use serde_json::json;

use crate::args::PoolPreflightArgs;
use crate::devices::print_json;
use crate::failure::{Code, Failure};

pub(super) fn run(args: &PoolPreflightArgs, out: &mut impl Write) -> Result<(), Failure> {
    let failed = |error: ObjectError| {
        let code = match &error {
            ObjectError::Invalid { .. } => Code::Usage,
            ObjectError::Refused { .. } => Code::Refused,
            _ => Code::Failed,
        };
        Failure::new(code, error)
    };
    let uri = ObjectUri::parse(&args.uri).map_err(failed)?;
    let access = Access::from_env().map_err(failed)?;
    let report = preflight_of(&uri, &access).map_err(failed)?;
    match args.json {
        true => print_json(&as_json(&report), out)?,
        false => print(&report, out)?,
    }
    match report.failure() {
        None => Ok(()),
        Some(why) => {
            let text = format!("{} is not fit for a pool: {why}", report.store);
            Err(Failure::new(Code::Refused, text))
        }
    }
}

fn as_json(report: &PreflightReport) -> serde_json::Value {
    json!({
        "store": report.store,
        "passed": report.failure().is_none(),
        "checks": report.checks,
        "requests": report.requests,
    })
}

fn print(report: &PreflightReport, out: &mut impl Write) -> Result<(), Failure> {
    writeln!(out, "{}", report.store)?;
    for check in &report.checks {
        let outcome = if check.failure.is_none() { "passed" } else { "FAILED" };
        writeln!(out, "  {:<18} {outcome}  {:>6} ms", check.name, check.took_ms)?;
        if let Some(why) = &check.failure {
            writeln!(out, "    {why}")?;
        }
    }
    writeln!(out, "{} requests", report.requests.total())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_object::Requests;
    use blockyard_object::preflight::Check;

    #[test]
    fn a_report_has_a_line_for_each_check_and_says_what_failed() {
        let check = |name, failure: Option<&str>| Check {
            name,
            failure: failure.map(str::to_owned),
            took_ms: 12,
        };
        let checks = vec![check("create only", None), check("race to create", Some("both won"))];
        let store = "s3://vol/pool at http://127.0.0.1:9000".to_owned();
        let report = PreflightReport { store, checks, requests: Requests::default() };
        let mut out = Vec::new();
        print(&report, &mut out).unwrap();
        let expected = "s3://vol/pool at http://127.0.0.1:9000\n  \
                        create only        passed      12 ms\n  \
                        race to create     FAILED      12 ms\n    \
                        both won\n\
                        0 requests\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        let json = as_json(&report);
        assert_eq!(
            (&json["passed"], &json["checks"][1]["failure"]),
            (&false.into(), &"both won".into())
        );
    }
}
