//! Stock fio with our engine in its own process: the published command lines, shortened, and fio's
//! reaction to errors.
//!
//! `make test` builds the engine and names it in `BLOCKYARD_FIO_ENGINE`. Without it these tests
//! fail, or are skipped by request: a build of the engine needs fio's source.

use blockyard_testing::capability::Capability;

use crate::place::Place;
use crate::run::{Run, bounded, finish, ok};

mod refused;
mod zoned;

/// The engine. Without one the test fails, or is skipped by request.
fn engine() -> Option<String> {
    let engine = std::env::var("BLOCKYARD_FIO_ENGINE").ok().filter(|path| !path.is_empty());
    if engine.is_none() {
        Capability::Fio.is_missing("BLOCKYARD_FIO_ENGINE names no engine; `make test` builds one");
    }
    engine
}

/// Runs fio in a place of its own, with our engine and with threads.
fn fio(engine: &str, args: &[&str]) -> Run {
    fio_in(&Place::new(), engine, &[&["--thread"], args].concat())
}

/// Runs fio with our engine and these arguments. The engine's option comes first, because fio
/// accepts the engine's own options only after it.
fn fio_in(place: &Place, engine: &str, args: &[&str]) -> Run {
    let engine = format!("--ioengine=external:{engine}");
    let mut line = vec!["fio", "--output-format=json", "--verify_state_save=0", &engine];
    line.extend(args);
    finish(&line, bounded(&line).current_dir(place.path()))
}

/// The numbers of reads, writes and trims that all jobs of a run executed, none of them with an
/// error.
#[track_caller]
fn done(run: Run) -> [u64; 3] {
    let run = run.ok();
    let report = &run.out[run.out.find('{').unwrap_or(0)..];
    let report: serde_json::Value =
        serde_json::from_str(report).unwrap_or_else(|_| panic!("{run}"));
    let mut sums = [0; 3];
    for job in report["jobs"].as_array().unwrap() {
        assert_eq!(job["error"], 0, "{run}");
        for (sum, kind) in sums.iter_mut().zip(["read", "write", "trim"]) {
            *sum += job[kind]["total_ios"].as_u64().unwrap();
        }
    }
    assert!(!run.err.contains("cache invalidation failed"), "{run}");
    sums
}

const VERIFY: [&str; 3] = ["--verify=crc32c", "--verify_fatal=1", "--randrepeat=0"];

#[test]
fn the_published_line_of_the_scheduler_runs() {
    let Some(engine) = engine() else { return };
    let line = "--bs=4096 --group_reporting=1 --gtod_reduce=1 --invalidate=1 \
                --dev=null:///nullb0?size=250G --ioscheduler=mq-deadline --norandommap --runtime=1 \
                --rw=randread --time_based=1 --buffered=0 --numjobs=72 --iodepth=128 \
                --iodepth_batch_submit=64 --iodepth_batch_complete=64 --name=/dev/nullb0 \
                --filename=/dev/nullb0";
    let run = fio(&engine, &line.split_whitespace().collect::<Vec<_>>());
    assert!(!run.err.contains("WARNING"), "{run}");
    assert!(done(run)[0] > 0);
}

#[test]
fn the_scheduler_of_a_job_orders_what_reaches_the_device() {
    let Some(engine) = engine() else { return };
    // How many of a thousand reads start at a higher sector than the read before: about half by
    // chance, and nearly all where 64 requests wait and are sorted.
    let ascents = |scheduler: &str, dev: &str| {
        let place = Place::new();
        let dev = format!(
            "--dev=null:///t?size=1G&hw_queue_depth=4&irqmode=timer&completion_nsec=20000{dev}\
             &trace={}",
            place.file("trace")
        );
        let mut line = vec!["--thread", &dev, "--name=t", "--filename=t", "--rw=randread"];
        line.extend(["--bs=4k", "--norandommap", "--number_ios=4096", "--iodepth=64", scheduler]);
        line.extend(["--iodepth_batch_submit=64", "--iodepth_batch_complete=64"]);
        assert_eq!(done(fio_in(&place, &engine, &line))[0], 4096);
        let trace = printed(&place.file("trace"));
        let starts: Vec<u64> = trace.lines().filter_map(started).collect();
        // Two reads may have merged.
        assert!(starts.len() > 4000, "{trace}");
        starts.windows(2).filter(|pair| pair[0] < pair[1]).count() * 1000 / starts.len()
    };
    assert!(ascents("--ioscheduler=mq-deadline", "") > 900);
    assert!(ascents("--ioscheduler=deadline", "&fifo_batch=8") > 900);
    // fio's option overrides the device's parameter.
    let none = ascents("--ioscheduler=none", "&scheduler=mq-deadline");
    assert!((400..600).contains(&none), "{none}");
}

/// The sector of a started read in a line of a trace.
fn started(line: &str) -> Option<u64> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    (fields.get(5) == Some(&"D")).then(|| fields[7].parse().unwrap())
}

#[test]
fn classes_of_jobs_become_classes_of_requests() {
    let Some(engine) = engine() else { return };
    let device = "--dev=null:///c?size=64M&memory_backed=1&irqmode=timer&completion_nsec=20000\
                  &prio_aging_expire=50";
    for class in ["--prioclass=1", "--prioclass=2", "--prioclass=3"] {
        let mut line = vec![device, "--name=c", "--filename=c", "--rw=randwrite", "--bs=4k"];
        line.extend(["--ioscheduler=mq-deadline", class, "--size=2M", "--iodepth=16"]);
        line.extend(VERIFY);
        assert!(done(fio(&engine, &line))[1] > 0);
    }
}

#[test]
fn the_published_lines_of_the_ram_disk_run() {
    let Some(engine) = engine() else { return };
    let line = "--bs=32k --randrepeat=1 --randseed=100 --refill_buffers --scramble_buffers=1 \
                --direct=1 --loops=3 --numjobs=4 --filename=/dev/zram0 --group_reporting \
                --name=seq-write --rw=write --stonewall --name=seq-read --rw=read --stonewall \
                --name=seq-readwrite --rw=rw --stonewall --name=rand-readwrite --rw=randrw";
    // The second device neither copies nor compresses, as an upper limit of the first.
    for device in ["--dev=ram:///zram0?size=10M", "--dev=null:///zram0?size=10M&memory_backed=1"] {
        let line: Vec<&str> = [device].into_iter().chain(line.split_whitespace()).collect();
        let [reads, writes, _] = done(fio(&engine, &line));
        // Four jobs, three loops, 320 blocks: twice as many as one kind of I/O moves, two times.
        assert_eq!(reads + writes, 4 * 4 * 3 * 320, "{device}");
    }
}

#[test]
fn what_is_written_is_read_back() {
    let Some(engine) = engine() else { return };
    for depth in ["--iodepth=1", "--iodepth=16"] {
        for device in [
            "--dev=null:///mem?size=64M&memory_backed=1",
            // Through a volatile cache, which each fsync empties.
            "--dev=null:///mem?size=64M&memory_backed=1&cache_size=4M",
            // No I/O completes inline: each takes the whole path.
            "--dev=null:///mem?size=64M&memory_backed=1&irqmode=timer&completion_nsec=1000",
        ] {
            let mut line = vec![device, "--name=v", "--filename=mem", "--rw=randrw", depth];
            line.extend(["--bsrange=512-64k", "--size=4M", "--offset_increment=4M"]);
            line.extend(["--numjobs=4", "--fsync=32", "--fdatasync=64"]);
            line.extend(VERIFY);
            let [reads, writes, _] = done(fio(&engine, &line));
            assert!(reads > 0 && writes > 0);
        }
    }
}

#[test]
fn each_write_can_be_durable() {
    let Some(engine) = engine() else { return };
    let device = "--dev=null:///mem?size=16M&memory_backed=1&cache_size=4M&fua=1";
    let mut line = vec![device, "--name=v", "--filename=mem", "--rw=randwrite", "--bs=4k"];
    line.extend(["--sync=1", "--iodepth=4"]);
    line.extend(VERIFY);
    done(fio(&engine, &line));
}

#[test]
fn more_in_flight_than_a_channel_holds_wait_their_turn() {
    let Some(engine) = engine() else { return };
    let device = "--dev=null:///t?size=64M&memory_backed=1&irqmode=timer&completion_nsec=100000";
    let mut line = vec![device, "--name=d", "--filename=t", "--rw=randwrite", "--bs=4k"];
    line.extend(["--iodepth=2048", "--iodepth_batch_submit=2048", "--iodepth_batch_complete=64"]);
    line.extend(VERIFY);
    done(fio(&engine, &line));
}

#[test]
fn polling_without_a_minimum_sees_only_what_was_submitted() {
    let Some(engine) = engine() else { return };
    for device in ["--dev=null:///p?size=1G", "--dev=null:///p?size=1G&delay_nsec=1000"] {
        let mut line = vec![device, "--name=p", "--filename=p", "--rw=randread", "--bs=4k"];
        line.extend(["--iodepth=64", "--iodepth_batch_submit=16", "--iodepth_batch_complete=0"]);
        line.extend(["--number_ios=20000"]);
        assert_eq!(done(fio(&engine, &line))[0], 20_000);
    }
}

#[test]
fn trims_are_discards() {
    let Some(engine) = engine() else { return };
    let device = "--dev=null:///mem?size=16M&memory_backed=1&discard=1";
    for depth in ["--iodepth=1", "--iodepth=8"] {
        let line = [device, "--name=t", "--filename=mem", "--rw=randtrim", "--bs=64k", depth];
        assert_eq!(done(fio(&engine, &line))[2], 256);
        let line = [device, "--name=t", "--filename=mem", "--rw=trimwrite", "--bs=64k", depth];
        let [_, writes, trims] = done(fio(&engine, &line));
        assert!(writes > 0 && trims > 0);
    }
}

#[test]
fn jobs_share_a_device_and_a_process_has_several() {
    let Some(engine) = engine() else { return };
    let device = |name: &str| format!("--dev=null:///{name}?size=8M&memory_backed=1");
    let (a, b) = (device("a"), device("b"));
    let job = |name: &'static str, file: &'static str| {
        ["--stonewall", name, file, "--bs=4k", "--verify=crc32c", "--verify_fatal=1"]
    };
    let mut line = Vec::new();
    for (name, file, device) in
        [("--name=wa", "--filename=a", &a), ("--name=wb", "--filename=b", &b)]
    {
        line.extend(job(name, file));
        line.extend([device.as_str(), "--rw=write"]);
    }
    // Another job finds the data of the first: both use one device.
    line.extend(job("--name=ra", "--filename=a"));
    line.extend([a.as_str(), "--rw=read"]);
    let [reads, writes, _] = done(fio(&engine, &line));
    // A job that writes also reads its data back.
    assert_eq!((reads, writes), (3 * 2048, 4096));
}

#[test]
fn filenames_pick_from_a_yard() {
    let Some(engine) = engine() else { return };
    let place = Place::new();
    let text = "[[device]]\nname = 'one'\nkind = 'null'\nsize = '1M'\n\n\
                [[device]]\nname = 'two'\nkind = 'null'\nsize = '3M'\n";
    let yard = place.write("yard.toml", text);
    let dev = format!("--dev={yard}");
    let line = ["--thread", &dev, "--name=y", "--filename=one:/dev/two", "--rw=read", "--bs=64k"];
    assert_eq!(done(fio_in(&place, &engine, &line))[0], 64);
    let dev = format!("--dev={yard}#two");
    let line = ["--thread", &dev, "--name=y", "--filename=any", "--rw=read", "--bs=64k"];
    assert_eq!(done(fio_in(&place, &engine, &line))[0], 48);
}

#[test]
fn errors_of_the_device_are_those_of_the_job() {
    let Some(engine) = engine() else { return };
    let device = "--dev=null:///bad?size=1M&badblocks=%2B16-23";
    for depth in ["--iodepth=1", "--iodepth=8"] {
        let line = [device, "--name=e", "--filename=bad", "--rw=read", "--bs=4k", depth];
        let run = fio(&engine, &line).fails();
        assert!(run.out.contains("\"error\" : 5"), "{run}");
        let run = fio(&engine, &[&line[..], &["--continue_on_error=all"]].concat());
        assert!(run.out.contains("\"total_err\" : 1,"), "{run}");
    }
}

#[test]
fn a_log_is_replayed_whose_blocks_grow() {
    // fio allocates its buffers again in the middle of the job.
    let Some(engine) = engine() else { return };
    let place = Place::new();
    let mut log = String::from("fio version 2 iolog\nmem add\nmem open\n");
    for at in 0..64 {
        log += &format!("mem write {} {}\n", at << 16, 4096 << (at / 16));
    }
    log += "mem close\n";
    let log = format!("--read_iolog={}", place.write("log", &log));
    let dev = "--dev=null:///mem?size=16M&memory_backed=1";
    let mut line = vec!["--thread", dev, "--name=l", "--filename=mem", &log, "--bs=4k"];
    line.extend(["--read_iolog_chunked=1", "--iodepth=4", "--replay_no_stall=1"]);
    assert_eq!(done(fio_in(&place, &engine, &line))[1], 64);
}

#[test]
fn a_log_may_name_a_file_late() {
    // fio reads the log piece by piece, and adds the second file in the middle of the job.
    let Some(engine) = engine() else { return };
    let place = Place::new();
    let mut log = String::from("fio version 2 iolog\nmem add\nmem open\n");
    for at in 0..64 {
        log += &format!("mem write {} {}\n", at << 16, 4096 << (at / 16));
    }
    log += "mem2 add\nmem2 open\n";
    for at in 0..64 {
        log += &format!("mem2 read {} {}\n", at << 16, 4096 << (at / 12));
    }
    log += "mem2 close\nmem close\n";
    let log = format!("--read_iolog={}", place.write("log", &log));
    for depth in ["--iodepth=1", "--iodepth=4"] {
        let dev = "--dev=null:///mem?size=16M&memory_backed=1";
        let mut line = vec!["--thread", dev, "--name=l", "--filename=mem", &log, "--bs=4k"];
        line.extend(["--read_iolog_chunked=1", depth, "--replay_no_stall=1"]);
        let [reads, writes, _] = done(fio_in(&place, &engine, &line));
        assert_eq!((reads, writes), (64, 64));
    }
    // A configuration that lacks the device of the late name.
    let text = "[[device]]\nname = 'mem'\nkind = 'null'\nsize = '16M'\n\n\
                [[device]]\nname = 'other'\nkind = 'null'\nsize = '16M'\n";
    let dev = format!("--dev={}", place.write("yard.toml", text));
    let mut line = vec!["--thread", &dev, "--name=l", "--filename=mem", &log, "--bs=4k"];
    line.extend(["--read_iolog_chunked=1", "--iodepth=4", "--replay_no_stall=1"]);
    let run = fio_in(&place, &engine, &line).fails();
    assert_eq!(run.err.matches("fio: blockyard: dev: ").count(), 1, "{run}");
}

/// A trace as blkparse prints it.
fn printed(trace: &str) -> String {
    ok(&["sh", "-c", &format!("blkparse -i - <{trace}")])
}

#[test]
fn a_trace_is_written_out_at_the_end() {
    let Some(engine) = engine() else { return };
    let place = Place::new();
    let dev = format!("--dev=null:///t?size=1M&trace={}", place.file("trace"));
    let line = ["--thread", &dev, "--name=t", "--filename=t", "--rw=read", "--bs=64k"];
    done(fio_in(&place, &engine, &line));
    let trace = printed(&place.file("trace"));
    assert!(trace.contains("R 1920 + 128"), "{trace}");
}
