//! The scheduler of a served device: shown, tuned and switched while fio writes and verifies over
//! NBD.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::Value;

use crate::run::{Run, nbdsh, ok, run};
use crate::yard::{Yard, blockyard};

const MEM0: &str = "null:///mem0?size=64M&memory_backed=1&discard=1&scheduler=mq-deadline";

/// The counts of a class and direction.
fn counts(view: &Value, class: &str, direction: &str) -> Value {
    let rows = view["counts"].as_array().unwrap();
    let row = rows.iter().find(|row| row["class"] == class && row["direction"] == direction);
    row.unwrap_or_else(|| panic!("{view}")).clone()
}

fn show(yard: &Yard) -> Value {
    yard.command(&["sched", "show", "mem0", "--json"]).ok().json()
}

#[test]
fn it_is_shown_tuned_and_switched() {
    let yard = Yard::serve(&[&format!("{MEM0}&read_expire=250")]);
    let view = show(&yard);
    assert_eq!(view["scheduler"], "mq-deadline", "{view}");
    assert_eq!(view["tunables"]["read_expire"], 250, "{view}");
    assert_eq!(view["tunables"]["fifo_batch"], 16, "{view}");
    let line = ["sched", "set", "mem0", "scheduler=none", "fifo_batch=4", "--json"];
    let view = yard.command(&line).ok().json();
    assert_eq!((&view["scheduler"], &view["tunables"]["fifo_batch"]), (&"none".into(), &4.into()));
    assert_eq!(view["tunables"]["read_expire"], 250, "{view}");
    yard.command(&["sched", "set", "mem0", "scheduler=deadline"]).ok();
    let run = yard.command(&["sched", "show", "mem0"]).ok();
    assert!(run.out.starts_with("mem0: none [mq-deadline]\n"), "{run}");
    assert!(yard.command(&["list"]).ok().out.contains("mq-deadline"));
    let device = yard.command(&["show", "mem0", "--json"]).ok().json();
    assert_eq!(device["scheduler"], "mq-deadline", "{device}");
}

#[test]
fn an_invalid_tunable_is_named_with_its_range_and_changes_nothing() {
    let yard = Yard::serve(&[MEM0]);
    let before = show(&yard);
    for (pair, words) in [
        ("scheduler=bfq", ["invalid scheduler `bfq`", "none, mq-deadline"]),
        ("read_expire=-1", ["invalid read_expire `-1`", "from 0 to 2147483647"]),
        ("fifo_batch=9999999999", ["invalid fifo_batch `9999999999`", "from 0 to 2147483647"]),
        ("writes_starved=x", ["invalid writes_starved `x`", "from -2147483648 to 2147483647"]),
        ("front_merges=2", ["invalid front_merges `2`", "1 or 0"]),
        ("fifo_bach=1", ["`fifo_bach` is no parameter", "did you mean `fifo_batch`?"]),
        ("size=1G", ["`size` is no parameter of a scheduler", "prio_aging_expire"]),
    ] {
        let run = yard.command(&["sched", "set", "mem0", "write_expire=1", pair]);
        assert_eq!(run.fails().says(&words).code, Some(2), "{pair}");
        assert_eq!(show(&yard), before);
    }
    let run = yard.command(&["sched", "set", "never", "fifo_batch=1"]).fails().says(&["never"]);
    assert_eq!(run.code, Some(5), "{run}");
    for line in [&["mem0"][..], &["mem0", "fifo_batch"], &["mem0", "fifo_batch=1", "fifo_batch=2"]]
    {
        let run = yard.command(&[&["sched", "set"], line].concat()).fails();
        assert_eq!(run.code, Some(2), "{run}");
    }
    blockyard(&["serve", "null:///n?read_expire=soon"])
        .fails()
        .says(&["invalid read_expire `soon`"]);
}

#[test]
fn the_requests_of_clients_are_counted() {
    let yard = Yard::serve(&[MEM0]);
    nbdsh(&yard.uri("mem0"), "h.pwrite(bytes(8192), 0); h.pread(4096, 0); h.trim(4096, 8192)");
    let view = show(&yard);
    let (reads, writes) = (counts(&view, "be", "read"), counts(&view, "be", "write"));
    assert_eq!((&reads["inserted"], &reads["completed"]), (&1.into(), &1.into()), "{view}");
    assert_eq!((&writes["inserted"], &writes["completed"]), (&2.into(), &2.into()), "{view}");
    assert_eq!((&reads["queued"], &writes["queued"]), (&0.into(), &0.into()), "{view}");
    let control = yard.place.file("control");
    let uri = "http://yard/metrics";
    let metrics = ok(&["curl", "--silent", "--fail", "--unix-socket", &control, uri]);
    for line in [
        "blockyard_device_scheduler{device=\"mem0\",scheduler=\"mq-deadline\"} 1",
        "blockyard_scheduler_completed_total{device=\"mem0\",class=\"be\",direction=\"write\"} 2",
    ] {
        assert!(metrics.lines().any(|have| have == line), "no {line}:\n{metrics}");
    }
}

/// fio writes at random from four connections and verifies every block.
fn verify(yard: &Yard) -> Run {
    let uri = format!("--uri={}", yard.uri("mem0"));
    let mut line = vec!["fio", "--name=verify", "--ioengine=nbd", &uri, "--numjobs=4"];
    line.extend(["--iodepth=16", "--size=12M", "--offset_increment=16M", "--randrepeat=0"]);
    line.extend(["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"]);
    line.extend(["--group_reporting", "--rw=randrw", "--bsrange=512-64k", "--bs_unaligned=0"]);
    run(&line)
}

#[test]
fn four_connections_verify_through_one_scheduler() {
    let device = "&irqmode=timer&completion_nsec=20000&hw_queue_depth=4";
    let yard = Yard::serve(&[&format!("{MEM0}{device}")]);
    verify(&yard).ok();
    let view = show(&yard);
    assert!(counts(&view, "be", "read")["dispatched"].as_u64() > Some(0), "{view}");
    assert!(counts(&view, "be", "write")["dispatched"].as_u64() > Some(0), "{view}");
}

#[test]
fn it_is_switched_under_load_and_nothing_is_lost() {
    let yard = Yard::serve(&[MEM0]);
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut turn = 0;
            // Relaxed: it only ends the loop.
            while !ended.load(Ordering::Relaxed) || turn < 4 {
                let scheduler = ["scheduler=none", "scheduler=mq-deadline"][turn % 2];
                let batch = format!("fifo_batch={}", turn % 20);
                yard.command(&["sched", "set", "mem0", scheduler, &batch]).ok();
                turn += 1;
            }
        });
        let verified: Vec<Run> = (0..2).map(|_| verify(&yard)).collect();
        ended.store(true, Ordering::Relaxed);
        verified.into_iter().for_each(|run| drop(run.ok()));
    });
    let view = show(&yard);
    for row in view["counts"].as_array().unwrap() {
        assert_eq!(row["queued"], 0, "{view}");
    }
}
