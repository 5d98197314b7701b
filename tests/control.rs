//! The control API and the commands that use it, while the yard serves.

use crate::place::Place;
use crate::run::{nbdsh, ok};
use crate::yard::{Yard, blockyard};

const MEM0: &str = "null:///mem0?size=64M&memory_backed=1&discard=1";

#[test]
fn devices_come_and_go_while_others_serve() {
    let yard = Yard::serve(&[MEM0]);
    let names = || -> Vec<String> {
        let list = yard.command(&["list", "--json"]).ok().json();
        let list = list.as_array().or_else(|| list["devices"].as_array()).cloned().unwrap();
        list.iter().map(|device| device["name"].as_str().unwrap().to_string()).collect()
    };
    assert_eq!(names(), ["mem0"]);
    yard.command(&["add", "null:///late?size=1G"]).ok();
    assert_eq!(names(), ["mem0", "late"]);
    yard.serves("late");
    // A name that exists, and one that does not.
    yard.command(&["add", "null:///late?size=2G"]).fails().says(&["late"]);
    for command in ["remove", "show"] {
        let run = yard.command(&[command, "never"]).fails().says(&["never"]);
        assert_eq!(run.code, Some(5), "{run}");
    }
    yard.command(&["remove", "late"]).ok();
    assert_eq!(names(), ["mem0"]);
    yard.serves("mem0");
}

#[test]
fn a_device_is_shown_and_counted() {
    let yard = Yard::serve(&[MEM0]);
    nbdsh(&yard.uri("mem0"), "h.pwrite(bytes(8192), 0); h.pread(4096, 0); h.flush()");
    let show = yard.command(&["show", "mem0", "--json"]).ok().json();
    assert_eq!(show["name"], "mem0", "{show}");
    assert_eq!(show["size_bytes"], 64 << 20, "{show}");
    assert_eq!(show["logical_block_bytes"], 512, "{show}");
    yard.command(&["show", "mem0"]).ok();
    let stats = yard.command(&["stats", "--json"]).ok().json().to_string();
    assert!(stats.contains("mem0") && stats.contains("8192"), "{stats}");
    yard.command(&["stats"]).ok();
}

#[test]
fn where_no_yard_answers_it_is_said() {
    let place = Place::new();
    let control = place.file("control");
    let run = blockyard(&["list", "--control", &control]).fails().says(&[&control]);
    assert_eq!(run.code, Some(4), "{run}");
}

#[test]
fn metrics_are_in_the_format_that_the_client_accepts() {
    let yard = Yard::serve(&[MEM0]);
    nbdsh(&yard.uri("mem0"), "h.pwrite(bytes(8192), 0)");
    let control = yard.place.file("control");
    let get = |path: &str| {
        let uri = format!("http://localhost{path}");
        ok(&["curl", "--silent", "--fail", "--unix-socket", &control, &uri])
    };
    let open = "Accept: application/openmetrics-text";
    let uri = "http://localhost/metrics";
    let open =
        ok(&["curl", "--silent", "--fail", "--header", open, "--unix-socket", &control, uri]);
    assert!(open.ends_with("# EOF\n"), "{open}");
    let metrics = get("/metrics");
    assert!(!metrics.contains("# EOF"), "{metrics}");
    let counts =
        |line: &str| line.starts_with("blockyard_device_ops_total{") && line.contains("mem0");
    assert!(metrics.lines().any(counts), "{metrics}");
    let devices: serde_json::Value = serde_json::from_str(&get("/v1/devices")).unwrap();
    assert!(devices.to_string().contains("mem0"), "{devices}");
}

#[test]
fn an_injected_fault_strikes_and_ends() {
    let yard = Yard::serve(&[MEM0]);
    yard.command(&["inject", "mem0", "add,op=READ,status=MEDIUM,times=1"]).ok();
    let script = "
try:
    h.pread(512, 0)
except nbd.Error as error:
    assert error.errno == 'EIO', error
else:
    raise SystemExit('the fault did not strike')
h.pread(512, 0)
";
    nbdsh(&yard.uri("mem0"), script);
}

#[test]
fn a_file_makes_a_yard() {
    let place = Place::new();
    let file = place.file("yard.toml");
    blockyard(&["init", &file]).ok();
    blockyard(&["check", &file]).ok();
    let schema = blockyard(&["schema"]).ok().json();
    assert!(schema["$schema"].is_string(), "{schema}");
    let yard = Yard::serve_in(place, &["-c", &file]);
    let list = yard.command(&["list"]).ok();
    assert!(list.out.contains("zoned0"), "{list}");
}
