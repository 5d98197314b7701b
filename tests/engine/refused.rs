//! Invalid requests: one clear line, and an exit code.

use std::fs;

use super::{done, engine, fio, fio_in};
use crate::place::Place;
use crate::run::{Run, ok};

/// The engine's own lines; fio's start differently.
fn lines(run: &Run) -> Vec<&str> {
    run.err.lines().filter(|line| line.starts_with("fio: blockyard: ")).collect()
}

/// fio must end with one line of the engine, which has these words, and no other line.
#[track_caller]
fn one_line(run: Run, words: &[&str]) {
    let run = run.fails().says(words);
    assert_eq!(lines(&run).len(), 1, "{run}");
    assert_eq!(run.err.lines().filter(|line| !line.is_empty()).count(), 1, "{run}");
}

#[test]
fn processes_in_place_of_threads_are_refused() {
    let Some(engine) = engine() else { return };
    let place = Place::new();
    let run = fio_in(&place, &engine, &["--dev=null:///n", "--name=t", "--filename=n"]);
    one_line(run, &["thread=0", "add thread=1 (--thread)"]);
}

#[test]
fn devices_that_cannot_be_are_named() {
    let Some(engine) = engine() else { return };
    for (dev, words) in [
        (None, ["dev: is missing", "null:///n0?size=10G"]),
        (Some("--dev=nul:///n"), ["dev: `nul` is not a kind of device", "`null`?"]),
        (Some("--dev=null:/n"), ["dev: `null:/n` cannot be read", "device URI"]),
        (Some("--dev=null:///n?sise=1G"), ["dev: ", "`size`?"]),
        (Some("--dev=null:///n?zoned=1&zone_size=3M"), ["invalid zone_size `3M`", "expected"]),
        (Some("--dev=yard.toml"), ["dev: `yard.toml` cannot be read", "No such file"]),
    ] {
        let mut line = vec!["--name=t", "--filename=n"];
        line.extend(dev);
        one_line(fio(&engine, &line), &words);
    }
}

#[test]
fn baselines_and_schedulers_that_are_not_there_are_named() {
    let Some(engine) = engine() else { return };
    let line = ["--dev=null:///n?zoned=1", "--before=one-lok", "--name=t", "--filename=n"];
    one_line(fio(&engine, &line), &["before: ", "`one-lok`"]);
    let line = ["--dev=null:///n", "--ioscheduler=bfq", "--name=t", "--filename=n"];
    one_line(fio(&engine, &line), &["invalid ioscheduler `bfq`", "none"]);
}

#[test]
fn one_filename_is_one_device() {
    let Some(engine) = engine() else { return };
    let mut line = vec!["--filename=n", "--rw=read", "--size=1M", "--name=a", "--dev=null:///a"];
    line.extend(["--name=b", "--dev=null:///b"]);
    fio(&engine, &line).fails().says(&["filename `n` is device `null:///a`", "`null:///b`"]);
    let mut line = vec!["--filename=n", "--name=a", "--dev=null:///a?size=1M", "--name=b"];
    line.extend(["--dev=null:///a?size=2M"]);
    fio(&engine, &line).fails().says(&["dev: `a` is `null:///a?size=1M`", "another name"]);
}

#[test]
fn options_follow_the_engine_and_are_known() {
    let Some(engine) = engine() else { return };
    fio(&engine, &["--dve=null:///n", "--name=t"]).fails().says(&["unrecognized option"]);
    let external = format!("--ioengine=external:{engine}");
    let line = ["fio", "--thread", "--dev=null:///n", &external, "--name=t", "--filename=n"];
    one_line(crate::run::run(&line), &["dev: is missing", "after --ioengine"]);
}

#[test]
fn submission_by_other_threads_is_refused() {
    let Some(engine) = engine() else { return };
    let line = ["--dev=null:///n", "--name=t", "--filename=n", "--io_submit_mode=offload"];
    fio(&engine, &line).fails().says(&["can't be used with offloaded submit"]);
}

#[test]
fn an_engine_for_another_fio_is_refused() {
    let Some(engine) = engine() else { return };
    let place = Place::new();
    let other = place.file("other.so");
    let mut bytes = fs::read(&engine).unwrap();
    let at = version_at(&engine);
    let version = i32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    bytes[at..at + 4].copy_from_slice(&(version + 1).to_le_bytes());
    fs::write(&other, bytes).unwrap();
    let run = fio(&other, &["--dev=null:///n", "--name=t", "--filename=n"]);
    let want = format!("bad ioops version {} (want {version})", version + 1);
    run.fails().says(&[&want]);
    done(fio(&engine, &["--dev=null:///n?size=1M", "--name=t", "--filename=n", "--rw=read"]));
}

/// The offset in the file of the version in the engine's table of hooks: after a list head of two
/// pointers and the pointer to the name.
fn version_at(engine: &str) -> usize {
    let number = |text: &str| usize::from_str_radix(text, 16).unwrap();
    let symbols = ok(&["nm", engine]);
    let table = symbols.lines().find(|line| line.ends_with(" blockyard_fio_table")).unwrap();
    let address = number(table.split_whitespace().next().unwrap()) + 3 * size_of::<usize>();
    // Columns: number, name, size, address, address in memory, offset in the file, alignment.
    let sections = ok(&["objdump", "--section-headers", "--wide", engine]);
    for line in sections.lines() {
        let cells: Vec<&str> = line.split_whitespace().collect();
        if cells.len() < 7 || cells[0].parse::<u32>().is_err() || cells[1] == ".bss" {
            continue;
        }
        let [size, start, offset] = [cells[2], cells[3], cells[5]].map(number);
        if (start..start + size).contains(&address) {
            return offset + address - start;
        }
    }
    panic!("no section holds {address:#x}:\n{sections}");
}
