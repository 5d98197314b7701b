//! The blocking and future adapters, for callers that do not want a completion ring.

use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::middleware::Delayed;
use blockyard_core::*;

use crate::common::*;

#[test]
fn blocking_adapter_reads_its_own_writes() {
    let mut recorder = Recorder::new();
    recorder.late = true;
    let disk = composed(recorder);
    let mut io = Io::new(disk.open().unwrap(), 8192);
    io.write(Sector(16), &[7; 4096], Flags::FUA).unwrap();
    let mut back = [0; 4096];
    io.read(Sector(16), &mut back).unwrap();
    assert_eq!(back, [7; 4096]);
    assert_eq!(io.read(Sector(SECTORS), &mut back), Err(Status::IoErr));
    assert_eq!(io.read(Sector(0), &mut back[..100]), Err(Status::Inval));
    assert_eq!(io.append(Sector(0), &back), Err(Status::NotSupp));
}

#[test]
fn blocking_adapter_times_out_and_ignores_late_completion() {
    let mut recorder = Recorder::new();
    recorder.bad = Some(0);
    let disk = composed_of(Delayed::new(recorder, 1 << 40), 64, Still::default());
    let mut io = Io::new(disk.open().unwrap(), 8192).with_timeout(std::time::Duration::ZERO);
    assert_eq!(io.write(Sector(0), &[1; 512], Flags::NONE), Err(Status::Timeout));
    // The clock has now reached the due time of the first write, which timed out.
    let mut io = io.with_timeout(std::time::Duration::from_secs(3600));
    assert_eq!(io.write(Sector(64), &[1; 512], Flags::NONE), Ok(()));
}

#[test]
fn futures_resolve_when_bios_complete() {
    let mut recorder = Recorder::new();
    recorder.late = true;
    let disk = composed_of(recorder, 4, Still::default());
    let io = blockyard_core::future::Io::new(disk.open().unwrap());
    let region = Region::alloc(8192);
    let id = io.with_channel(|channel| channel.register(Arc::clone(&region)));
    region.write(0, &[9; 4096]);
    let (out, back) = (BufRef { region: id, offset: 0 }, BufRef { region: id, offset: 4096 });
    let status = io.block_on(async {
        let write = io.run(Bio::write(Sector(0), 8, out).with_user_data(5)).await;
        assert_eq!((write.status, write.user_data), (Status::Ok, 5));
        io.run(Bio::read(Sector(0), 8, back)).await.status
    });
    assert_eq!(status, Status::Ok);
    let mut read = [0; 4096];
    region.read(4096, &mut read);
    assert_eq!(read, [9; 4096]);
    // A dropped future leaves its bio to complete by itself, and its slot is used again.
    let mut given_up = Box::pin(io.run(Bio::read(Sector(0), 8, back)));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(given_up.as_mut().poll(&mut context).is_pending());
    drop(given_up);
    assert_eq!(io.drive(true), 1);
    assert_eq!(io.block_on(io.run(Bio::flush())).status, Status::Ok);
}
