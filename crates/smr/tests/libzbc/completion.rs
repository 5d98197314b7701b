//! Section 00, command completion: a valid command succeeds.

use blockyard_core::zone::ZoneCond;
use blockyard_smr::cdb::Command;
use blockyard_smr::transport::Data;

use crate::fixture::{Case, FIRST, Fixture};

/// A report with a filter option must agree with the corresponding part of the full report.
fn report_option(fixture: &Fixture, option: u8, takes: fn(u8) -> bool) {
    let all = fixture.report(0, 0, false).unwrap();
    let wanted: Vec<_> = all.into_iter().filter(|zone| takes(zone.kind)).collect();
    assert_eq!(fixture.report(0, option, false).unwrap(), wanted);
}

/// Reads and writes through one buffer, or as several commands. The transport has one contiguous
/// buffer per command, so a vector is gathered first.
fn write_vector(fixture: &Fixture, zone: u32) {
    let start = fixture.start(zone);
    for piece in 0..4 {
        assert_eq!(fixture.write(start + piece * fixture.physical(), fixture.physical()), Ok(()));
    }
}

fn read_vector(fixture: &Fixture, zone: u32) {
    let start = fixture.start(zone);
    for piece in 0..4 {
        assert_eq!(fixture.read(start + piece * fixture.physical(), fixture.physical()), Ok(()));
    }
}

pub(crate) const CASES: &[Case] = &[
    Case {
        number: "010",
        about: "REPORT ZONES",
        run: |fixture| {
            let zones = fixture.report(0, 0, false).unwrap();
            assert_eq!(zones[0].start, 0);
            assert!(zones.windows(2).all(|pair| pair[0].start + pair[0].blocks == pair[1].start));
            let last = zones.last().unwrap();
            assert_eq!(last.start + last.blocks, fixture.blocks());
        },
    },
    Case {
        number: "011",
        about: "REPORT ZONES, partial",
        run: |fixture| {
            assert_eq!(fixture.report(0, 0, true), fixture.report(0, 0, false));
            let mut room = [0xaa; 64 + 2 * 64];
            for (partial, listed) in
                [(true, 2), (false, fixture.report(0, 0, false).unwrap().len())]
            {
                let allocation = room.len() as u32;
                let command = Command::ReportZones { lba: 0, allocation, partial, option: 0 };
                assert_eq!(fixture.send(command, Data::In(&mut room)), Ok(192));
                assert_eq!(room[..4], (listed as u32 * 64).to_be_bytes());
            }
            // Space for no zone, for a part of the header, and for nothing.
            for allocation in [64, 63, 8, 0] {
                for partial in [true, false] {
                    let command = Command::ReportZones { lba: 0, allocation, partial, option: 0 };
                    let len = fixture.send(command, Data::In(&mut room));
                    assert_eq!(len, Ok(allocation.min(64) as usize));
                    if partial && allocation >= 8 {
                        assert_eq!(room[..4], [0; 4]);
                    }
                }
            }
        },
    },
    Case {
        number: "012",
        about: "REPORT ZONES, option 10h: none recommends a reset",
        run: |fixture| assert_eq!(fixture.report(0, 0x10, false), Ok(vec![])),
    },
    Case {
        number: "013",
        about: "REPORT ZONES, option 11h: none is written out of sequence",
        run: |fixture| assert_eq!(fixture.report(0, 0x11, false), Ok(vec![])),
    },
    Case {
        number: "014",
        about: "REPORT ZONES, option 3Fh: zones without a write pointer",
        run: |fixture| {
            report_option(fixture, 0x3f, |kind| kind != 2);
            report_option(fixture, 0x3e, |kind| kind != 5);
        },
    },
    Case {
        number: "015",
        about: "REPORT ZONES, from a block inside a zone",
        run: |fixture| {
            let all = fixture.report(0, 0, false).unwrap();
            let inside = fixture.report(fixture.start(FIRST) + 1, 0, false).unwrap();
            assert_eq!(inside[0], fixture.zone(FIRST));
            assert!(all.ends_with(&inside));
            let last = fixture.report(fixture.blocks() - 1, 0, false).unwrap();
            assert_eq!(last, all[all.len() - 1..]);
        },
    },
    Case {
        number: "020",
        about: "OPEN ZONE",
        run: |fixture| {
            assert_eq!(fixture.open(FIRST), Ok(()));
            assert_eq!(fixture.state(FIRST), (ZoneCond::ExplicitOpen, Some(0)));
        },
    },
    Case {
        number: "030",
        about: "CLOSE ZONE",
        run: |fixture| {
            fixture.begin(FIRST);
            assert_eq!(fixture.close(FIRST), Ok(()));
            fixture.is(FIRST, ZoneCond::Closed);
        },
    },
    Case {
        number: "040",
        about: "FINISH ZONE",
        run: |fixture| {
            fixture.begin(FIRST);
            assert_eq!(fixture.finish(FIRST), Ok(()));
            fixture.is(FIRST, ZoneCond::Full);
        },
    },
    Case {
        number: "050",
        about: "RESET WRITE POINTER",
        run: |fixture| {
            fixture.begin(FIRST);
            assert_eq!(fixture.reset(FIRST), Ok(()));
            fixture.is(FIRST, ZoneCond::Empty);
        },
    },
    Case {
        number: "060",
        about: "READ, conventional zone",
        run: |fixture| assert_eq!(fixture.read(fixture.start(0), 1), Ok(())),
    },
    Case {
        number: "061",
        about: "READ, sequential zone",
        run: |fixture| {
            fixture.begin(FIRST);
            assert_eq!(fixture.read(fixture.start(FIRST), fixture.physical()), Ok(()));
        },
    },
    Case {
        number: "062",
        about: "READ in pieces, conventional zone",
        run: |fixture| read_vector(fixture, 1),
    },
    Case {
        number: "063",
        about: "READ in pieces, sequential zone",
        run: |fixture| {
            write_vector(fixture, FIRST);
            read_vector(fixture, FIRST);
        },
    },
    Case {
        number: "070",
        about: "WRITE, conventional zone",
        run: |fixture| {
            assert_eq!(fixture.write(fixture.start(0) + 1, 1), Ok(()));
            fixture.is(0, ZoneCond::NotWp);
        },
    },
    Case {
        number: "071",
        about: "WRITE, sequential zone",
        run: |fixture| {
            fixture.begin(FIRST);
            fixture.is(FIRST, ZoneCond::ImplicitOpen);
        },
    },
    Case {
        number: "072",
        about: "WRITE in pieces, conventional zone",
        run: |fixture| write_vector(fixture, 1),
    },
    Case {
        number: "073",
        about: "WRITE in pieces, sequential zone",
        run: |fixture| {
            write_vector(fixture, FIRST);
            assert_eq!(
                fixture.state(FIRST),
                (ZoneCond::ImplicitOpen, Some(4 * fixture.physical()))
            );
        },
    },
];
