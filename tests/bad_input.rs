//! Bad input gets a clear error and harms no other client.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::place::Place;
use crate::run::{nbdsh, run};
use crate::yard::{Yard, blockyard};

const MEM0: &str = "null:///mem0?size=64M&memory_backed=1&discard=1";

#[test]
fn a_bad_uri_is_refused_by_its_name() {
    let bad: [(&str, &[&str]); 12] = [
        ("nonsense", &["nonsense", "null:///"]),
        ("null://n0", &["null://n0"]),
        ("disk:///n0", &["disk", "null"]),
        ("null:///", &["name"]),
        ("null:///a%2fb", &["name"]),
        ("null:///n0?size=10X", &["size", "10X"]),
        ("null:///n0?size=", &["size"]),
        ("null:///n0?size=99999999999G", &["size", "99999999999G"]),
        ("null:///n0?sise=10G", &["sise", "size"]),
        ("null:///n0?bs=1000", &["bs", "1000"]),
        ("null:///n0?size=1G&size=2G", &["size"]),
        ("null:///n0?zoned=1&zone_size=3M", &["zone_size", "3M"]),
    ];
    for (uri, words) in bad {
        let run = blockyard(&["serve", uri, "-U", "-", "--run", "true"]).fails();
        // The text is invalid, or the device that it describes is.
        assert_eq!(run.code, Some(2), "{run}");
        run.says(words);
    }
}

#[test]
fn bad_arguments_are_refused_by_their_name() {
    let bad: [(&[&str], &[&str]); 7] = [
        (&["fly"], &["fly"]),
        (&["serve", "--nbd", "unix:~/n.sock"], &["unix:~/n.sock", "$HOME"]),
        (&["serve", "--wings"], &["--wings"]),
        (&["serve", MEM0, MEM0], &["mem0"]),
        (&["serve", MEM0, "--nbd", "udp:1"], &["udp:1", "unix:"]),
        (&["serve", MEM0, "--nbd", "tcp:localhost:99999"], &["99999"]),
        (&["serve", "-c", "/nonexistent.toml"], &["/nonexistent.toml"]),
    ];
    for (args, words) in bad {
        blockyard(args).fails().says(words);
    }
}

#[test]
fn a_bad_file_is_refused_at_its_line() {
    let place = Place::new();
    let good = blockyard(&["init", &place.file("good.toml")]).ok();
    drop(good);
    blockyard(&["check", &place.file("good.toml")]).ok();
    let bad = [
        ("[[device]]\nname = \"n0\"\nkind = \"null\"\nsize = \"10X\"\n", 4, "10X"),
        ("[[device]]\nname = \"n0\"\nkind = \"null\"\nsise = \"1G\"\n", 4, "sise"),
        ("[[device]]\nname = \"n0\"\n", 1, "kind"),
        ("# a\n# b\nwings = true\n", 3, "wings"),
        ("[serve]\nnbd = [\"udp:1\"]\n", 2, "udp:1"),
        ("[tls]\nmode = \"maybe\"\n", 2, "maybe"),
        ("device = 3\n", 1, "device"),
        ("[[device]\n", 1, "]"),
    ];
    for (text, line, word) in bad {
        let file = place.write("bad.toml", text);
        blockyard(&["check", &file]).fails().says(&[word, &format!("bad.toml:{line}")]);
        blockyard(&["serve", "-c", &file]).fails().says(&[word]);
    }
}

/// A connection that sends raw bytes.
struct Raw(UnixStream);

impl Raw {
    /// Connects and reads the greeting.
    fn connect(yard: &Yard) -> Raw {
        let stream = UnixStream::connect(yard.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut raw = Raw(stream);
        assert_eq!(raw.read(18)[..16], *b"NBDMAGICIHAVEOPT");
        raw
    }

    /// Enters transmission with the oldest option for it.
    fn transmit(yard: &Yard, export: &str) -> Raw {
        let mut raw = Raw::connect(yard);
        raw.write(&[0, 0, 0, 3]);
        raw.write(b"IHAVEOPT");
        raw.write(&1u32.to_be_bytes());
        raw.write(&(export.len() as u32).to_be_bytes());
        raw.write(export.as_bytes());
        assert_eq!(raw.read(10)[..8], (64u64 << 20).to_be_bytes());
        raw
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    /// A request's header.
    fn request(&mut self, magic: u32, command: u16, offset: u64, len: u32) {
        self.write(&magic.to_be_bytes());
        self.write(&0u16.to_be_bytes());
        self.write(&command.to_be_bytes());
        self.write(&7u64.to_be_bytes());
        self.write(&offset.to_be_bytes());
        self.write(&len.to_be_bytes());
    }

    fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// The server closes the connection, whatever it sends before.
    fn sees_the_end(mut self) {
        let mut rest = Vec::new();
        match self.0.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
}

const REQUEST: u32 = 0x2560_9513;
const WRITE: u16 = 1;

#[test]
fn a_bad_handshake_ends_its_own_connection_only() {
    let yard = Yard::serve(&[MEM0]);
    let bad: [&[u8]; 6] = [
        // Invalid flags.
        &[0xff; 4],
        // An option without its magic.
        b"\0\0\0\x03NOTMAGIC\0\0\0\x03\0\0\0\0",
        // An option of four gigabytes.
        b"\0\0\0\x03IHAVEOPT\0\0\0\x07\xff\xff\xff\xff",
        // GO for a name that is longer than its option.
        b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\xff\xff\0\0",
        // An export that does not exist, by the option that has no error reply.
        b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x02no",
        b"GET / HTTP/1.1\r\n\r\n",
    ];
    for bytes in bad {
        let mut raw = Raw::connect(&yard);
        raw.write(bytes);
        // The server may still wait for the rest of an announced length.
        raw.0.shutdown(std::net::Shutdown::Write).unwrap();
        raw.sees_the_end();
        yard.serves("mem0");
    }
}

#[test]
fn a_request_without_its_magic_ends_its_own_connection_only() {
    let yard = Yard::serve(&[MEM0]);
    let mut raw = Raw::transmit(&yard, "mem0");
    raw.request(0xdead_beef, WRITE, 0, 512);
    raw.sees_the_end();
    yard.serves("mem0");
}

#[test]
fn a_client_that_stops_in_mid_write_stalls_no_other_client() {
    let yard = Yard::serve(&[MEM0]);
    let mut stalled = Raw::transmit(&yard, "mem0");
    stalled.request(REQUEST, WRITE, 0, 1 << 20);
    stalled.write(&[0xee; 300_000]);
    // The client is still connected and has not sent the rest, while another client uses the same
    // blocks.
    let script = "
h.pwrite(b'a' * (1 << 20), 0)
assert h.pread(1 << 20, 0) == b'a' * (1 << 20)
";
    nbdsh(&yard.uri("mem0"), script);
    drop(stalled);
    yard.serves("mem0");
}

#[test]
fn a_client_killed_in_mid_write_harms_no_other_client() {
    let yard = Yard::serve(&[MEM0]);
    let script = "
import os
for i in range(32):
    h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(b'k' * (1 << 20))), i << 20)
os.kill(os.getpid(), 9)
";
    let killed = run(&["nbdsh", "--uri", &yard.uri("mem0"), "--command", script]);
    assert_ne!(killed.code, Some(0), "{killed}");
    // A write that arrived completely is stored, another one is not; no block is half written.
    let script = "
for i in range(32):
    data = h.pread(1 << 20, i << 20)
    for at in range(0, 1 << 20, 512):
        assert data[at:at + 512] in (b'k' * 512, bytes(512)), 'block %d' % at
h.pwrite(b'a' * 4096, 0)
assert h.pread(4096, 0) == b'a' * 4096
";
    nbdsh(&yard.uri("mem0"), script);
}

#[test]
fn requests_that_make_no_sense_get_an_error_each() {
    let yard = Yard::serve(&[MEM0]);
    let script = "
h.set_strict_mode(0)
size = h.get_size()
def refused(what, call, *expected):
    try:
        call()
    except nbd.Error as error:
        assert error.errno in expected, '%s: %s' % (what, error)
    else:
        raise SystemExit(what + ' was accepted')
block = bytes(512)
refused('a read past the end', lambda: h.pread(512, size), 'EINVAL')
refused('a read across the end', lambda: h.pread(1024, size - 512), 'EINVAL')
refused('a write past the end', lambda: h.pwrite(block, size), 'ENOSPC', 'EINVAL')
refused('a trim across the end', lambda: h.trim(1 << 20, size - 512), 'EINVAL', 'ENOSPC')
refused('a misaligned read', lambda: h.pread(512, 1), 'EINVAL')
refused('a misaligned length', lambda: h.pread(100, 0), 'EINVAL')
refused('a misaligned write', lambda: h.pwrite(bytes(100), 0), 'EINVAL')
refused('a read above the maximum', lambda: h.pread(64 << 20, 0), 'EINVAL', 'EOVERFLOW')
refused('an offset beyond reason', lambda: h.pread(512, (1 << 63) - 512), 'EINVAL')
refused('an unknown flag', lambda: h.pwrite(block, 0, 0x8000), 'EINVAL')
h.pwrite(b'a' * 512, 0)
assert h.pread(512, 0) == b'a' * 512
";
    nbdsh(&yard.uri("mem0"), script);
}

#[test]
fn an_export_that_is_not_there_is_refused_by_its_name() {
    let yard = Yard::serve(&[MEM0]);
    run(&["nbdinfo", &yard.uri("mem1")]).fails().says(&["mem1"]);
    run(&["qemu-img", "info", &yard.uri("mem1")]).fails();
    yard.serves("mem0");
}
