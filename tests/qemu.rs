//! qemu's block layer as the client: a stack that shares nothing with libnbd.

use crate::copy::{MEM0, ext4_image};
use crate::run::{ok, run};
use crate::yard::Yard;

#[test]
fn an_image_goes_to_qcow2_and_back() {
    let yard = Yard::serve(&[MEM0, "null:///mem1?size=96M&memory_backed=1&discard=1"]);
    let image = ext4_image(&yard.place);
    let qcow2 = yard.place.file("qcow2");
    let (mem0, mem1) = (yard.uri("mem0"), yard.uri("mem1"));
    let convert = |options: &[&str], from: &str, to: &str| {
        let line = [&["qemu-img", "convert"], options, &[from, to]].concat();
        ok(&line);
    };
    convert(&["-n", "-f", "raw", "-O", "raw"], &image, &mem0);
    convert(&["-f", "raw", "-O", "qcow2", "-m", "8", "-W"], &mem0, &qcow2);
    ok(&["qemu-img", "check", "-f", "qcow2", &qcow2]);
    convert(&["-n", "-f", "qcow2", "-O", "raw"], &qcow2, &mem1);
    for (format, other) in [("raw", &mem0), ("qcow2", &qcow2), ("raw", &mem1)] {
        let line = ["qemu-img", "compare", "-f", "raw", "-F", format, &image, other];
        assert!(ok(&line).contains("Images are identical"), "{other}");
    }
}

#[test]
fn patterns_are_read_as_they_were_written() {
    let yard = Yard::serve(&[MEM0]);
    let io = |commands: &[&str]| {
        let mut line = vec!["qemu-io", "-f", "raw"];
        line.extend(commands.iter().flat_map(|command| ["-c", *command]));
        let uri = yard.uri("mem0");
        line.push(&uri);
        run(&line)
    };
    io(&[
        "write -P 0xa5 64k 256k",
        "write -P 0x5a -f 128k 64k",
        "writev -P 0x77 1M 4k 8k 512",
        "flush",
        "read -P 0xa5 64k 64k",
        "read -P 0x5a 128k 64k",
        "read -P 0xa5 192k 128k",
        "read -P 0x77 1M 12800",
        "read -P 0 512k 512k",
    ])
    .ok();
    // Discarded or zeroed ranges read as zeroes, their neighbours do not.
    io(&[
        "write -z 64k 64k",
        "write -z -u 128k 32k",
        "discard 160k 32k",
        "read -P 0 64k 128k",
        "read -P 0xa5 192k 128k",
    ])
    .ok();
    let wrong = io(&["read -P 0xa6 192k 4k"]);
    assert!(wrong.out.contains("Pattern verification failed"), "{wrong}");
    // Concurrent requests.
    let many: Vec<String> = (0..64).map(|i| format!("aio_write -P {i} {}k 64k", i * 64)).collect();
    let mut many: Vec<&str> = many.iter().map(String::as_str).collect();
    many.push("aio_flush");
    io(&many).ok();
    let reads: Vec<String> = (0..64).map(|i| format!("read -P {i} {}k 64k", i * 64)).collect();
    io(&reads.iter().map(String::as_str).collect::<Vec<_>>()).ok();
}

#[test]
fn qemu_sees_what_is_allocated() {
    let yard = Yard::serve(&[MEM0]);
    let uri = yard.uri("mem0");
    ok(&["qemu-io", "-f", "raw", "-c", "write -P 1 32M 1M", &uri]);
    let map = run(&["qemu-img", "map", "-f", "raw", "--output=json", &uri]).ok().json();
    let is_data = |entry: &&serde_json::Value| entry["data"] == true;
    let data: Vec<_> = map.as_array().unwrap().iter().filter(is_data).collect();
    assert_eq!(data.len(), 1, "{map}");
    assert_eq!((&data[0]["start"], &data[0]["length"]), (&(32 << 20).into(), &(1 << 20).into()));
}

#[test]
fn qemu_lists_the_exports() {
    let yard = Yard::serve(&[MEM0, "null:///n1?size=1G"]);
    let list = ok(&["qemu-nbd", "--list", "--socket", &yard.socket()]);
    for part in ["exports available: 2", "export: 'mem0'", "export: 'n1'", "base:allocation"] {
        assert!(list.contains(part), "{part}: {list}");
    }
}
