//! The server's information about its exports is true.

use crate::run::{nbdsh, ok, run};
use crate::yard::Yard;

const MEM0: &str = "null:///mem0?size=64M&memory_backed=1&discard=1";

#[test]
fn an_export_announces_its_capabilities() {
    let yard = Yard::serve(&[MEM0]);
    let info = run(&["nbdinfo", "--json", &yard.uri("mem0")]).ok().json();
    assert_eq!(info["protocol"], "newstyle-fixed");
    assert_eq!(info["structured"], true);
    let export = &info["exports"][0];
    assert_eq!(export["export-name"], "mem0");
    assert_eq!(export["export-size"], 64 << 20);
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["contexts"], serde_json::json!(["base:allocation"]));
    let can = [
        "can_cache",
        "can_df",
        "can_fast_zero",
        "can_flush",
        "can_fua",
        "can_multi_conn",
        "can_trim",
        "can_zero",
    ];
    for name in can {
        assert_eq!(export[name], true, "{name}: {export}");
    }
    assert_eq!(export["block_size_minimum"], 512);
    let preferred = export["block_size_preferred"].as_u64().unwrap();
    let maximum = export["block_size_maximum"].as_u64().unwrap();
    assert!(preferred.is_power_of_two() && 512 <= preferred && preferred <= maximum, "{export}");
}

#[test]
fn the_block_size_of_the_device_is_announced_and_enforced() {
    let yard = Yard::serve(&["null:///big?size=64M&bs=4k&memory_backed=1"]);
    let info = run(&["nbdinfo", "--json", &yard.uri("big")]).ok().json();
    assert_eq!(info["exports"][0]["block_size_minimum"], 4096);
    let script = "
h.set_strict_mode(0)
h.pwrite(b'x' * 4096, 8192)
assert h.pread(4096, 8192) == b'x' * 4096
for offset, length in [(512, 4096), (0, 512), (8191, 4096)]:
    try:
        h.pread(length, offset)
    except nbd.Error as error:
        assert error.errno == 'EINVAL', error
    else:
        raise SystemExit('%d at %d was read' % (length, offset))
";
    nbdsh(&yard.uri("big"), script);
}

#[test]
fn all_exports_are_listed() {
    let yard = Yard::serve(&[MEM0, "null:///n1?size=1G", "null:///n2?size=10T"]);
    let uri = format!("nbd+unix:///?socket={}", yard.socket());
    let list = run(&["nbdinfo", "--list", "--json", &uri]).ok().json();
    let exports = list["exports"].as_array().unwrap();
    let mut seen: Vec<_> = exports
        .iter()
        .map(|e| (e["export-name"].as_str().unwrap(), e["export-size"].as_u64().unwrap()))
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, [("mem0", 64 << 20), ("n1", 1 << 30), ("n2", 10 << 40)]);
}

#[test]
fn the_map_is_what_was_written() {
    let yard = Yard::serve(&[MEM0]);
    let uri = yard.uri("mem0");
    let map = || {
        let map = run(&["nbdinfo", "--map", "--json", &uri]).ok().json();
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        let mut extents: Vec<(u64, u64, u64)> = Vec::new();
        for extent in map.as_array().unwrap() {
            let (offset, len, kind) =
                (number(&extent["offset"]), number(&extent["length"]), number(&extent["type"]));
            match extents.last_mut() {
                Some(last) if last.2 == kind => last.1 += len,
                _ => extents.push((offset, len, kind)),
            }
        }
        extents
    };
    // 0 is data, 3 is a hole that reads as zeroes.
    let (all, mib) = (64 << 20, 1 << 20);
    assert_eq!(map(), [(0, all, 3)]);
    nbdsh(&uri, "h.pwrite(b'x' * 65536, 1 << 20); h.pwrite(b'y' * 65536, 32 << 20)");
    let written = [
        (0, mib, 3),
        (mib, 65536, 0),
        (mib + 65536, 31 * mib - 65536, 3),
        (32 * mib, 65536, 0),
        (32 * mib + 65536, 32 * mib - 65536, 3),
    ];
    assert_eq!(map(), written);
    nbdsh(&uri, "h.trim(65536, 1 << 20); h.zero(65536, 32 << 20)");
    assert_eq!(map(), [(0, all, 3)]);
    // A range zeroed with NO_HOLE is no hole.
    nbdsh(&uri, "h.zero(65536, 0, nbd.CMD_FLAG_NO_HOLE)");
    let first = map()[0];
    assert!(first.1 == 65536 && first.2 & 1 == 0, "{first:?}");
    let totals = ok(&["nbdinfo", "--map", "--totals", &uri]);
    assert!(totals.contains("65536"), "{totals}");
}

#[test]
fn a_null_device_is_all_hole() {
    let yard = Yard::serve(&["null:///n0?size=10T"]);
    let uri = yard.uri("n0");
    nbdsh(&uri, "h.pwrite(b'x' * 65536, 1 << 40); h.pread(512, 1 << 40)");
    let map = run(&["nbdinfo", "--map", "--json", &uri]).ok().json();
    // 1 is a hole with undefined contents: the device stores no data.
    assert!(map.as_array().unwrap().iter().all(|e| e["type"] == 1), "{map}");
}

#[test]
fn commands_do_what_their_flags_say() {
    let yard = Yard::serve(&[MEM0]);
    let script = "
h.pwrite(b'a' * 4096, 0, nbd.CMD_FLAG_FUA)
h.flush()
h.cache(4096, 0)
assert h.pread(4096, 0) == b'a' * 4096
chunks = []
def chunk(data, offset, status, error):
    assert status == nbd.READ_DATA, status
    chunks.append((offset, bytes(data)))
h.pread_structured(8192, 0, chunk, nbd.CMD_FLAG_DF)
assert chunks == [(0, b'a' * 4096 + bytes(4096))], 'DF sends one chunk'
h.zero(4096, 0, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(4096, 0) == bytes(4096)
extents = []
def extent(context, offset, entries, error):
    extents.extend(entries)
h.block_status(8192, 0, extent, nbd.CMD_FLAG_REQ_ONE)
assert len(extents) == 2, extents
";
    let line = ["nbdsh", "--base-allocation", "--uri", &yard.uri("mem0"), "--command", script];
    ok(&line);
}
