//! Interoperability with sg3-utils: its programs send commands to the emulated disk through SG_IO,
//! by means of a preloaded library (`shim.c`), and decode the responses independently.
#![allow(clippy::unwrap_used)] // A test that cannot continue panics.

mod node;

use blockyard_core::zone::ZoneCond;
use blockyard_smr::sense::{Sense, SenseFormat};
use node::Node;

/// Checks that the text has these lines in this order, ignoring indentation.
fn assert_lines(text: &str, lines: &[&str]) {
    let mut found = text.lines().map(str::trim);
    for line in lines {
        assert!(found.any(|found| found == *line), "no line `{line}` there in:\n{text}");
    }
}

#[test]
fn sg_inq_reads_who_it_is() {
    let node = Node::new(|_| {});
    let text = node.run("sg_inq", &["-d"]);
    assert_lines(
        &text,
        &[
            "PQual=0  PDT=20  RMB=0  LU_CONG=0  hot_pluggable=0  version=0x07  [SPC-5]",
            "[AERC=0]  [TrmTsk=0]  NormACA=0  HiSUP=1  Resp_data_format=2",
            "[RelAdr=0]  WBus16=0  Sync=0  [Linked=0]  [TranDis=0]  CmdQue=1",
            "length=96 (0x60)   Peripheral device type: host managed zoned block",
            "Vendor identification: BLKYARD",
            "Product identification: SMR disk",
            "Product revision level: 0001",
            "SAM-5 (no version claimed)",
            "SPC-5 (no version claimed)",
            "SBC-4 (no version claimed)",
            "ZBC (no version claimed)",
        ],
    );
    assert_lines(&node.run("sg_inq", &[]), &["Unit serial number: BY000001"]);
}

#[test]
fn sg_vpd_reads_the_pages() {
    let node = Node::new(|_| {});
    let page = |name| node.run("sg_vpd", &["-p", name]);
    assert_lines(
        &page("sv"),
        &[
            "Supported VPD pages [sv]",
            "Unit serial number [sn]",
            "Device identification [di]",
            "Block limits (SBC) [bl]",
            "Block device characteristics (SBC) [bdc]",
            "Logical block provisioning (SBC) [lbpv]",
            "Zoned block device characteristics [zbdch]",
        ],
    );
    assert_lines(&page("sn"), &["Unit serial number: BY000001"]);
    assert_lines(
        &page("di"),
        &[
            "designator type: T10 vendor identification,  code set: ASCII",
            "vendor id: BLKYARD",
            "vendor specific: SMR disk        BY000001",
            "designator type: NAA,  code set: Binary",
        ],
    );
    assert_lines(
        &page("bl"),
        &[
            "Write same non-zero (WSNZ): 1",
            "Optimal transfer length granularity: 8 blocks",
            "Maximum transfer length: 32768 blocks",
            "Optimal transfer length: 2048 blocks",
            "Maximum unmap LBA count: 2097152",
            "Maximum unmap block descriptor count: 256",
            "Optimal unmap granularity: 8 blocks",
            "Maximum write same length: 0x80000 blocks",
        ],
    );
    assert_lines(
        &page("bdc"),
        &["Nominal rotation rate: 7200 rpm", "Nominal form factor: 3.5 inch", "ZONED=0"],
    );
    assert_lines(
        &page("lbpv"),
        &[
            "Unmap command supported (LBPU): 1",
            "Write same (16) with unmap bit supported (LBPWS): 1",
            "Write same (10) with unmap bit supported (LBPWS10): 1",
            "Logical block provisioning read zeros (LBPRZ): 1",
            "Anchored LBAs supported (ANC_SUP): 0",
            "Provisioning type: 2 (thin provisioned)",
        ],
    );
    assert_lines(
        &page("zbdch"),
        &["URSWRZ: 1", "Maximum number of open sequential write required zones: 4"],
    );
    // The programs also decode pages that they did not request themselves.
    let restricted = Node::new(|config| {
        config.unrestricted_reads = false;
        config.zone_max_open = 0;
    });
    let text = restricted.decode("sg_vpd", 0xb6);
    let unlimited = "Maximum number of open sequential write required zones: no limit";
    assert_lines(&text, &["URSWRZ: 0", unlimited]);
    let text = restricted.decode("sg_vpd", 0xb0);
    assert_lines(&text, &["Maximum transfer length: 32768 blocks"]);
}

#[test]
fn sg_readcap_sg_luns_and_sg_modes_read_the_rest() {
    let node = Node::new(|_| {});
    assert_lines(
        &node.run("sg_readcap", &["--16"]),
        &[
            "Logical block provisioning: lbpme=1, lbprz=1",
            "Last LBA=1439 (0x59f), Number of logical blocks=1440",
            "Logical block length=512 bytes",
            "Logical blocks per physical block exponent=3 [so physical block length=4096 bytes]",
            "Device size: 737280 bytes, 0.7 MiB, 0.00 GB",
        ],
    );
    assert_lines(
        &node.run("sg_readcap", &[]),
        &["Last LBA=1439 (0x59f), Number of logical blocks=1440"],
    );
    assert_lines(&node.run("sg_luns", &[]), &["0000000000000000"]);
    let modes = node.run("sg_modes", &["-a"]);
    assert_lines(
        &modes,
        &[
            "Mode data length=72, medium type=0x00, WP=0, DpoFua=1, longlba=0",
            ">> Read-Write error recovery, page_control: current",
            ">> Caching, page_control: current",
            ">> Control, page_control: current",
            ">> Informational exceptions control, page_control: current",
        ],
    );
    let long = node.run("sg_modes", &["-L", "-p", "8"]);
    assert_lines(&long, &["Mode data length=44, medium type=0x00, WP=0, DpoFua=1, longlba=1"]);
    let saved = node.run("sg_modes", &["-v", "-c", "3", "-p", "8"]);
    assert!(saved.contains("Saving parameters not supported"), "{saved}");
    let request = node.run("sg_requests", &[]);
    assert_lines(&request, &["Fixed format, current; Sense key: No Sense"]);
    assert_eq!(node.run("sg_turs", &[]).trim(), "");
}

#[test]
fn sg_opcodes_lists_the_commands() {
    let node = Node::new(|_| {});
    let text = node.run("sg_opcodes", &["-n"]);
    for name in [
        "Test Unit Ready",
        "Inquiry",
        "Mode sense(10)",
        "Read(16)",
        "Write(16)",
        "Write same(16)",
        "Unmap",
        "Close zone",
        "Finish zone",
        "Open zone",
        "Reset write pointer",
        "Report zones",
        "Read capacity(16)",
        "Report luns",
        "Report supported operation codes",
    ] {
        assert!(text.lines().any(|line| line.ends_with(name)), "no {name} in:\n{text}");
    }
    let rows = text.lines().filter(|line| line.contains("0,0")).count();
    assert_eq!(rows, blockyard_smr::cdb::operations::OPERATIONS.len(), "{text}");
    let reset = node.run("sg_opcodes", &["-n", "-R", "--opcode=0x94,4"]);
    assert_lines(
        &reset,
        &[
            "Command_name: Reset write pointer",
            "Command is supported [conforming to SCSI standard]",
            "Usage data: 94 04 ff ff ff ff ff ff ff ff 00 00 00 01 01 00",
            "no nominal timeout, recommended timeout: 30 secs",
        ],
    );
}

#[test]
fn sg_rep_zones_and_sg_zone_see_the_same_zones() {
    let node = Node::new(|config| config.zone_capacity = 48 << 10);
    let text = node.run("sg_rep_zones", &[]);
    assert_lines(
        &text,
        &[
            "Maximum LBA: 0x59f",
            "Zone descriptor: 0",
            "Zone type: Conventional",
            "Zone condition: Not write pointer",
            "Zone Length: 0x80",
            "Write pointer LBA: -1",
            "Zone descriptor: 3",
            "Zone type: Sequential write required",
            "Zone condition: Empty",
            "Zone Length: 0x60",
            "Zone start LBA: 0x180",
            "Write pointer LBA: 0x180",
        ],
    );
    assert_eq!(text.matches("Zone Length: 0x20").count(), 9, "gaps and the runt: {text}");
    assert_eq!(node.run("sg_zone", &["--open", "--zone=0x180"]).trim(), "");
    assert_eq!(node.disk.zone(3).cond, ZoneCond::ExplicitOpen);
    let open = node.run("sg_rep_zones", &["--report=3"]);
    assert_lines(&open, &["Zone condition: Explicitly opened", "Zone start LBA: 0x180"]);
    assert_eq!(open.matches("Zone descriptor").count(), 1);
    assert_eq!(node.run("sg_zone", &["--finish", "--zone=0x180"]).trim(), "");
    assert_lines(&node.run("sg_rep_zones", &["--report=5"]), &["Zone condition: Full"]);
    assert_eq!(node.run("sg_reset_wp", &["--all"]).trim(), "");
    assert_eq!(node.disk.zone(3).cond, ZoneCond::Empty);
    let refused = node.run("sg_reset_wp", &["-v", "--zone=0x181"]);
    assert!(refused.contains("Invalid field in cdb"), "{refused}");
    assert!(refused.contains("Field pointer"), "{refused}");
}

#[test]
fn sg_write_same_and_sg_unmap_are_understood() {
    let node = Node::new(|_| {});
    let write = ["--16", "--lba=0x180", "--num=16", "--ndob"];
    assert_eq!(node.run("sg_write_same", &write).trim(), "");
    assert_eq!(node.disk.zone(3).wp.0, 0x190);
    let again = node.run("sg_write_same", &[&write[..], &["-v"]].concat());
    assert!(again.contains("Unaligned write command"), "{again}");
    assert_eq!(node.run("sg_unmap", &["--force", "--lba=0", "--num=64"]).trim(), "");
    let beyond = node.run("sg_unmap", &["--force", "-v", "--lba=0x5a0", "--num=1"]);
    assert!(beyond.contains("Logical block address out of range"), "{beyond}");
    assert_eq!(node.run("sg_sync", &["--16"]).trim(), "");
}

#[test]
fn sg_decode_sense_names_every_code_as_we_do() {
    for (sense, _) in Sense::NAMED {
        let about = sense.at(0x1234_5678);
        for format in [SenseFormat::Descriptor, SenseFormat::Fixed] {
            let bytes = about.print(format);
            let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            let output = std::process::Command::new("sg_decode_sense").args(&hex).output();
            let text = String::from_utf8(output.unwrap().stdout).unwrap().to_lowercase();
            let line = format!("additional sense: {}", sense.text().unwrap().to_lowercase());
            assert!(text.lines().any(|found| found.trim() == line), "no `{line}` in:\n{text}");
            assert!(text.contains("12345678") || text.contains("305419896"), "{text}");
        }
    }
}
