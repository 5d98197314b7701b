//! Writeback: blocks in a backing file are read from there, and no failure of the file loses them.

use super::*;

#[test]
fn written_back_block_is_read_from_the_backing_file() {
    let scratch = Scratch::new("writeback");
    for checksum in [false, true] {
        let backing = Some(scratch.file("backing"));
        let ram = Ram::open(RamConfig { backing, checksum, ..plain() }).unwrap();
        let (mut io, data) = (io(&ram), contents());
        fill(&mut io, &data);
        let before = ram.stats();
        let none = ram.write_back(&selection(Which::Idle), u64::MAX).unwrap();
        assert_eq!(none.blocks, 0);
        let some = ram.write_back(&selection(Which::Huge), 10 * 4200).unwrap();
        assert_eq!(some.blocks, 10);
        ram.idle();
        let mut block = vec![0; BLOCK];
        io.read(Sector(0), &mut block).unwrap();
        let rest = ram.write_back(&selection(Which::Idle), u64::MAX).unwrap();
        ram.compact().unwrap();
        let stats = ram.stats();
        assert_eq!(stats.bd.bd_count, some.blocks + rest.blocks, "{stats:?}");
        assert_eq!(stats.bd.bd_writes, stats.bd.bd_count);
        assert_eq!(stats.mm.orig_data_size, before.mm.orig_data_size);
        assert!(stats.mm.compr_data_size < before.mm.compr_data_size / 100, "{stats:?}");
        assert!(stats.mm.mem_used_total < before.mm.mem_used_total / 8, "{stats:?}");
        compare(&mut io, &data);
        assert!(ram.stats().bd.bd_reads >= stats.bd.bd_count);
        // Half of the data is written again, as parts and as whole blocks, and written back once
        // more, into places that are free again.
        let mut data = data;
        data[..SIZE as usize / 2].rotate_left(BLOCK);
        io.write(Sector(0), &data[..1 << 20], Flags::NONE).unwrap();
        io.write(Sector(2048), &data[1 << 20..2 << 20], Flags::NONE).unwrap();
        compare(&mut io, &data);
        let length = || std::fs::metadata(scratch.file("backing")).unwrap().len();
        let long = length();
        assert!(ram.write_back(&selection(Which::All), u64::MAX).unwrap().blocks > 200);
        compare(&mut io, &data);
        assert!(length() < long + long / 4, "{long} {}", length());
        // Discarding all blocks frees everything.
        io.run(Bio::new(Op::Discard, Sector(0), SIZE / 512)).unwrap();
        let stats = ram.stats();
        assert_eq!((stats.bd.bd_count, stats.mm.orig_data_size), (0, 0));
        drop((io, ram));
        std::fs::remove_file(scratch.file("backing")).unwrap();
    }
}

#[test]
fn a_full_file_loses_nothing() {
    // A full device is simulated by a file system of a few pages: /dev/full is no regular file, and
    // a resource limit on files would apply to the whole process.
    let scratch = Scratch::new("full");
    let dir = scratch.file("mount");
    std::fs::create_dir(&dir).unwrap();
    let run = |program: &str, args: &[&str]| {
        let status = std::process::Command::new(program).args(args).status();
        assert!(status.unwrap().success(), "{program} {args:?}");
    };
    let at = dir.to_str().unwrap();
    run("mount", &["-t", "tmpfs", "-o", "size=64k", "tmpfs", at]);
    let ram = Ram::open(RamConfig { backing: Some(dir.join("backing")), ..plain() }).unwrap();
    let (mut io, data) = (io(&ram), contents());
    fill(&mut io, &data);
    let error = ram.write_back(&selection(Which::All), u64::MAX).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("cannot be written") && text.contains("No space left"), "{text}");
    compare(&mut io, &data);
    assert!(ram.states(0, 2000).states.iter().all(|state| state.flags[1] == b'.'));
    // A snapshot that does not fit leaves no file.
    let error =
        ram.save(&dir.join("snapshot"), blockyard_ram::Replace::Own).unwrap_err().to_string();
    assert!(error.contains("cannot be written") && error.contains("No space left"), "{error}");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1, "the backing file");
    // A selection that fits is written back.
    assert!(ram.write_back(&selection(Which::All), 32 << 10).unwrap().blocks > 0);
    compare(&mut io, &data);
    // If the file becomes full half way, the error says how much was written back. Those blocks are
    // in the file and no longer in memory.
    run("mount", &["-o", "remount,size=1300k", at]);
    let before = ram.stats().bd.bd_count;
    let error = ram.write_back(&selection(Which::All), u64::MAX).unwrap_err();
    let RamError::WriteBack { done, .. } = &error else { panic!("{error}") };
    assert!(done.blocks > 0 && done.bytes > 0, "{done:?}");
    assert_eq!(ram.stats().bd.bd_count, before + done.blocks);
    let want = format!("; {} blocks went in {} bytes there before", done.blocks, done.bytes);
    assert!(error.to_string().contains(&want), "{error}");
    compare(&mut io, &data);
}

#[test]
fn a_failing_file_is_an_error_and_loses_nothing() {
    let scratch = Scratch::new("eio");
    let ram = Ram::open(RamConfig { backing: Some(scratch.file("backing")), ..plain() }).unwrap();
    let (mut io, data) = (io(&ram), contents());
    fill(&mut io, &data);
    let fail = |times: u64| {
        let fault = Injection::Device { name: "backing_eio".to_owned(), value: times.to_string() };
        ram.inject(&fault).unwrap();
    };
    fail(1);
    let error = ram.write_back(&selection(Which::All), u64::MAX).unwrap_err().to_string();
    assert!(error.contains("cannot be written") && error.contains("Input/output"), "{error}");
    assert!(ram.states(0, 2000).states.iter().all(|state| state.flags[1] == b'.'));
    assert_eq!(ram.stats().bd.bd_count, 0);
    compare(&mut io, &data);
    assert!(ram.write_back(&selection(Which::Huge), u64::MAX).unwrap().blocks >= 128);
    // A failed read can be retried, and a write of the whole block needs no read.
    fail(2);
    let mut found = vec![0; BLOCK];
    assert_eq!(io.read(Sector(0), &mut found), Err(Status::IoErr));
    let error =
        ram.save(&scratch.file("snapshot"), blockyard_ram::Replace::Own).unwrap_err().to_string();
    assert_eq!(error, "block 0 cannot be read from the backing file (IOERR)");
    assert!(!scratch.file("snapshot").exists());
    compare(&mut io, &data);
    fail(1);
    io.write(Sector(0), &data[..BLOCK], Flags::NONE).unwrap();
    fail(0);
    compare(&mut io, &data);
    assert_eq!(ram.stats().io.failed_reads, 1);
    let none = Ram::open(plain()).unwrap();
    let fault = Injection::Device { name: "backing_eio".to_owned(), value: "1".to_owned() };
    assert!(none.inject(&fault).unwrap_err().to_string().contains("backing=FILE"));
}

/// The kernel accepts the write, and the disk below the page cache rejects it. Blocks leave memory
/// only after the sync, so a late error loses no data.
#[test]
fn block_stays_in_memory_if_the_backing_sync_fails() {
    let scratch = Scratch::new("late");
    let ram = Ram::open(RamConfig { backing: Some(scratch.file("backing")), ..plain() }).unwrap();
    let (mut io, data) = (io(&ram), contents());
    fill(&mut io, &data);
    let before = ram.stats().mm;
    let fault = Injection::Device { name: "backing_late_eio".to_owned(), value: "1".to_owned() };
    ram.inject(&fault).unwrap();
    let error = ram.write_back(&selection(Which::All), u64::MAX).unwrap_err().to_string();
    assert!(error.contains("cannot be written") && error.contains("Input/output"), "{error}");
    assert!(std::fs::metadata(scratch.file("backing")).unwrap().len() > 1 << 20, "it was taken");
    // The contents of a disk that rejected what was written.
    let len = std::fs::metadata(scratch.file("backing")).unwrap().len();
    std::fs::write(scratch.file("backing"), vec![0; len as usize]).unwrap();
    assert!(ram.states(0, 2000).states.iter().all(|state| state.flags[1] == b'.'));
    assert_eq!((ram.stats().bd.bd_count, ram.stats().mm), (0, before));
    compare(&mut io, &data);
    // The second batch fails after the first was written; the first stays in the file.
    let selected = Selection { blocks_max: 200, ..selection(Which::Huge) };
    let there = ram.write_back(&selected, u64::MAX).unwrap().blocks;
    assert!(there > 0);
    ram.inject(&fault).unwrap();
    assert!(ram.write_back(&selection(Which::All), u64::MAX).is_err());
    assert_eq!(ram.stats().bd.bd_count, there);
    compare(&mut io, &data);
    assert!(ram.write_back(&selection(Which::All), u64::MAX).unwrap().blocks > 0);
    compare(&mut io, &data);
}
