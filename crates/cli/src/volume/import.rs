//! `volume import`: a volume from a disk image.

use std::io::{self, Write};
use std::thread::Builder;

use blockyard_volume::VolumeError;
use blockyard_volume::admin::check_new;
use blockyard_volume_admin::import::{
    BackingPolicy, DiskFormat, DiskImage, IMPORT_SNAPSHOT, ImportError, Imported,
};
use blockyard_volume_admin::receive::{ReceiveTarget, receive as receive_here};
use blockyard_yard::size::rounded;
use blockyard_yard::volumes::VolumeRequest;
use serde_json::json;

use super::pool::{Make, PoolAccess, text};
use super::progress::ProgressLine;
use super::refused;
use crate::args::{BackingFiles, ImageFormat, VolumeImportArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};

pub(super) fn import(args: &VolumeImportArgs, out: &mut impl Write) -> Result<(), Failure> {
    let format = args.format.map(|format| match format {
        ImageFormat::Raw => DiskFormat::Raw,
        ImageFormat::Qcow2 => DiskFormat::Qcow2,
    });
    let policy = match args.backing {
        BackingFiles::None => BackingPolicy::None,
        BackingFiles::SameDirectory => BackingPolicy::SameDirectory,
        BackingFiles::Any => BackingPolicy::Any,
    };
    let image = DiskImage::open(&args.file, format, policy).map_err(failed)?;
    let (format, files) = (image.format(), image.files());
    let (name, block_bytes) = (&args.at.name, u32::try_from(args.volblocksize).unwrap_or(u32::MAX));
    // Everything is checked before a pool is made.
    check_new(name, image.volume_bytes(block_bytes), block_bytes, 0).map_err(refused)?;
    let pool = PoolAccess::find(&args.at.pool, Make::IfMissing { consent: false, capacity: 0 })?;
    let imported = receive(&pool, args, image, block_bytes)?;
    let snapshot = format!("{name}@{IMPORT_SNAPSHOT}");
    let request = VolumeRequest { name: snapshot.clone(), ..VolumeRequest::default() };
    if let Err(error) = pool.work("destroy", request) {
        let error = error.text();
        let text = format!("imported {name}, and its snapshot `{snapshot}` stays: {error}");
        return Err(Failure::new(Code::Failed, text));
    }
    let Imported { size_bytes, data_bytes } = imported;
    let file = args.file.display();
    if args.at.pool.talk.json {
        let said = json!({
            "name": name,
            "file": file.to_string(),
            "format": if format == DiskFormat::Raw { "raw" } else { "qcow2" },
            "files": files,
            "size_bytes": size_bytes,
            "data_bytes": data_bytes,
        });
        return print_json(&said, out);
    }
    let (size, data) = (rounded(size_bytes), rounded(data_bytes));
    Ok(writeln!(out, "imported {file} to {name}: {size}, {data} written")?)
}

fn failed(error: ImportError) -> Failure {
    match error {
        ImportError::Stream(error) => refused(error),
        ImportError::Refused { .. } => Failure::new(Code::Refused, error),
        error => Failure::new(Code::Failed, error),
    }
}

/// Receives the image, which another thread reads, as a stream.
fn receive(
    pool: &PoolAccess,
    args: &VolumeImportArgs,
    image: DiskImage,
    block_bytes: u32,
) -> Result<Imported, Failure> {
    let name = args.at.name.clone();
    let no_thread = |error: io::Error| Failure::new(Code::Failed, format!("import: {error}"));
    let (mut input, mut output) = io::pipe().map_err(no_thread)?;
    let send = move || {
        let mut progress = ProgressLine::new("imported");
        let mut tell = |bytes, total| progress.tell(bytes, Some(total));
        image.send(&name, block_bytes, &mut output, &mut tell)
    };
    let thread = Builder::new().name("volume-import".to_owned()).spawn(send).map_err(no_thread)?;
    let target = ReceiveTarget { name: Some(&args.at.name), is_resumable: false };
    let received = match pool {
        PoolAccess::Here(running) => {
            let received = receive_here(running, &target, &mut input, &mut |_| {});
            received.map(drop).map_err(refused)
        }
        PoolAccess::There(client, path) => {
            let received =
                client.receive(&text(path)?, Some(&args.at.name), false, &mut input, &mut |_| {});
            received.map(drop).map_err(Failure::from)
        }
    };
    // The reader of the stream has gone.
    drop(input);
    match thread.join() {
        Ok(Ok(imported)) => received.map(|()| imported),
        Ok(Err(ImportError::Stream(VolumeError::Pipe(error)))) => {
            received?;
            Err(no_thread(error))
        }
        // Why the stream has ended early counts for more than that it did.
        Ok(Err(error)) => Err(failed(error)),
        Err(_) => Err(Failure::new(Code::Failed, "reading the image has failed")),
    }
}
