//! `top` and `iostat`, on a terminal and in pipes, while clients do I/O.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::Value;

use crate::run::{bounded, nbdsh, python};
use crate::yard::{BLOCKYARD, Yard};

const MEM0: &str = "null:///mem0?size=64M&memory_backed=1&discard=1";
const ZONED: &str = "null:///z0?size=64M&zoned=1&zone_size=4M&zone_nr_conv=2";
const RAM: &str = "ram:///r0?size=64M";

#[test]
fn a_report_has_what_a_client_did() {
    let yard = Yard::serve(&[MEM0, ZONED]);
    let script = "for i in range(10):\n  h.pwrite(bytes(8192), i * 8192)\n\
                  h.pread(4096, 0)\nh.flush()\n\
                  for i in range(5):\n  h.trim(4096, i * 8192)";
    nbdsh(&yard.uri("mem0"), script);
    let line = yard.command(&["iostat", "mem0", "--json"]).ok();
    let report: Value = serde_json::from_str(&line.out).unwrap();
    let device = &report[0];
    let number = |name: &str| device[name].as_f64().unwrap_or_else(|| panic!("{name}: {device}"));
    let ratio = number("writes_per_second") / number("reads_per_second");
    assert!((ratio - 10.0).abs() < 1e-6, "{device}");
    let bytes = number("written_bytes_per_second") / number("writes_per_second");
    assert!((bytes - 8192.0).abs() < 1e-3, "{device}");
    assert!(number("write_await_ns") > 0.0 && number("queue_size") > 0.0, "{device}");
    assert_eq!(device["errors_per_second"], 0.0, "{device}");
    let ratio = number("discards_per_second") / number("reads_per_second");
    assert!((ratio - 5.0).abs() < 1e-6 && number("discard_await_ns") > 0.0, "{device}");
    let ratio = number("flushes_per_second") / number("reads_per_second");
    assert!((ratio - 1.0).abs() < 1e-6, "{device}");
    // The device has no write cache, and no zones.
    assert!(device["flush_await_ns"].is_null() && device["zone_await_ns"].is_null(), "{device}");
    yard.command(&["zone", "open", "z0", "-o", "16384", "-c", "1"]).ok();
    let line = yard.command(&["iostat", "z0", "--json"]).ok();
    let report: Value = serde_json::from_str(&line.out).unwrap();
    let zoned = |name: &str| report[0][name].as_f64().unwrap_or_else(|| panic!("{name}: {report}"));
    assert!(zoned("zone_commands_per_second") > 0.0 && zoned("zone_await_ns") > 0.0, "{report}");

    let text = yard.command(&["iostat"]).ok().out;
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let (head, mem0) = (&rows[0], &rows[1]);
    assert_eq!((head.len(), mem0.len(), rows.len()), (24, 24, 3), "{text}");
    let at = |name: &str| head.iter().position(|it| *it == name).unwrap();
    assert_eq!((mem0[0], mem0[at("wareq-sz")], mem0[at("rareq-sz")]), ("mem0", "8.00", "4.00"));
    assert_eq!(
        (mem0[at("dareq-sz")], mem0[at("z/s")], mem0[at("f_await")]),
        ("4.00", "0.00", "0.000")
    );
    let latency = yard.command(&["iostat", "-l", "mem0", "0.1", "2"]).ok().out;
    assert_eq!(
        latency.matches("read_wait  write_wait  flush_wait  discard_wait").count(),
        2,
        "{latency}"
    );

    let run = yard.command(&["iostat", "never"]).fails().says(&["never"]);
    assert_eq!(run.code, Some(5), "{run}");
    for words in [&["iostat", "-y"][..], &["iostat", "mem0", "0"], &["top", "-d", "0"]] {
        let run = yard.command(words).fails();
        assert_eq!(run.code, Some(2), "{run}");
    }
}

#[test]
fn samples_follow_a_client_and_name_every_page() {
    let yard = Yard::serve(&[MEM0, ZONED, RAM]);
    let control = yard.control();
    let line = [BLOCKYARD, "top", "--json", "-d", "0.1", "--control", &control];
    let mut top = bounded(&line).stdout(Stdio::piped()).spawn().unwrap();
    let mut samples = BufReader::new(top.stdout.take().unwrap()).lines();
    let mut next = || -> Value { serde_json::from_str(&samples.next().unwrap().unwrap()).unwrap() };
    let first = next();
    assert_eq!(first["zones"][0]["device"], "z0", "{first}");
    assert_eq!(first["zones"][0]["zones"]["not-wp"], 2, "{first}");
    assert_eq!(first["zones"][0]["zones"]["empty"], 14, "{first}");
    assert!(first["process"]["resident_bytes"].as_u64().unwrap() > 1 << 20, "{first}");
    assert_eq!(first["devices"][2]["device"], "r0", "{first}");
    assert!(first["devices"][2]["ram"].is_object(), "{first}");
    nbdsh(&yard.uri("mem0"), "h.pwrite(bytes(8192), 0)");
    // The program's time limit bounds this.
    while next()["devices"][0]["writes_per_second"] == 0.0 {}
    top.kill().unwrap();
    top.wait().unwrap();

    let text = yard.command(&["top", "--batch", "-n", "1", "-d", "0.1"]).ok().out;
    for words in ["IOPS", "DEVICE", "imp-open", "ratio"] {
        assert!(text.contains(words), "no {words}: {text}");
    }
    let run = yard.command(&["top"]).fails().says(&["not a terminal", "--batch"]);
    assert_eq!(run.code, Some(2), "{run}");
}

/// Draws on a terminal of its own, turns a page, and leaves the terminal as it was: by a key, by a
/// signal, and while the yard does not answer.
#[test]
fn a_terminal_shows_pages_and_is_left_as_it_was() {
    const SCRIPT: &str = "
import fcntl, os, pty, select, signal, struct, sys, termios
program, control, yard = sys.argv[1], sys.argv[2], int(sys.argv[3])
seen = wanted = b''
def expired(*_):
    sys.exit(f'{top} has not drawn {wanted}, but {seen[-4000:]}')
# Before the time limit of the test, which says nothing of it.
signal.signal(signal.SIGALRM, expired)
signal.alarm(100)
def mode():
    return termios.tcgetattr(screen)
def start():
    global before, top, keys, screen, lines
    keys, screen = pty.openpty()
    before = mode()
    top = os.fork()
    if top == 0:
        os.setsid()
        fcntl.ioctl(screen, termios.TIOCSCTTY, 0)
        for descriptor in range(3):
            os.dup2(screen, descriptor)
        os.environ['TERM'] = 'xterm'
        os.execv(program, [program, 'top', '-d', '0.2', '--control', control])
    lines = 24
def await_text(text):
    # Only what has changed is drawn, unless the terminal has another size.
    global lines, seen, wanted
    seen, wanted = b'', text
    while text not in seen:
        lines = 49 - lines
        fcntl.ioctl(keys, termios.TIOCSWINSZ, struct.pack('HHHH', lines, 120, 0, 0))
        while select.select([keys], [], [], 0.1)[0] and text not in seen:
            seen += os.read(keys, 65536)
def await_end():
    await_text(b'\\x1b[?1049l')
    _, status = os.waitpid(top, 0)
    assert status == 0, status
    assert mode() == before
    os.close(keys)
    os.close(screen)
start()
await_text(b'mem0')
assert mode() != before
os.write(keys, b'2')
await_text(b'imp-open')
os.write(keys, b'q')
await_end()
start()
await_text(b'mem0')
os.kill(top, signal.SIGTERM)
await_end()
start()
await_text(b'mem0')
os.kill(yard, signal.SIGSTOP)
await_text(b'has not answered')
os.write(keys, b'q')
await_end()
os.kill(yard, signal.SIGCONT)
start()
await_text(b'mem0')
# The window is closed: top reads the end of the terminal, and ends.
os.close(screen)
os.close(keys)
os.waitpid(top, 0)
";
    let yard = Yard::serve(&[MEM0, ZONED]);
    python(SCRIPT, &[BLOCKYARD, &yard.control(), &yard.pid().to_string()]);
}
