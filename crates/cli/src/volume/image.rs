//! `volume export`.

use std::io::{self, IsTerminal, Write};

use blockyard_volume::VolumeError;
use blockyard_volume::image::{Exported, Image, export as write_image};
use blockyard_yard::size::Bytes;
use serde_json::json;

use super::pool::{Make, Pool};
use super::progress::Progress;
use super::refused;
use super::stream::Source;
use super::written::{Written, file_failed};
use crate::args::{ImageFormat, VolumeExportArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};

pub(super) fn export(args: &VolumeExportArgs, out: &mut impl Write) -> Result<(), Failure> {
    let to_stdout = args.file.as_os_str() == "-";
    let named = args.file.extension().is_some_and(|ending| ending == "qcow2");
    let format = args.format.unwrap_or(if named { ImageFormat::Qcow2 } else { ImageFormat::Raw });
    if to_stdout && format == ImageFormat::Qcow2 {
        let text = "export: a qcow2 image is not written in order; wanted a file, or --format raw";
        return Err(Failure::new(Code::Usage, text));
    }
    if to_stdout && std::io::stdout().is_terminal() {
        let text = "export: standard output is a terminal; wanted a pipe or a file";
        return Err(Failure::new(Code::Usage, text));
    }
    let pool = Pool::find(&args.at.pool, Make::Never)?;
    let mut source = Source::export(&pool, &args.at.name)?;
    let mut progress = Progress::new("exported");
    let mut tell = |bytes, total| progress.tell(bytes, Some(total));
    if args.file.as_os_str() == "-" {
        let done = write_image(&mut source, Image::RawPipe(out), &mut tell);
        drop(progress);
        let exported = source.finish(done.map_err(refused))?;
        // The image has the other one.
        return match args.at.pool.talk.json {
            true => print_json(&said(args, &exported), &mut io::stderr()),
            false => Ok(()),
        };
    }
    let done = Written::create(&args.file).and_then(|written| {
        let image = match format {
            ImageFormat::Raw => Image::Raw(&written.file),
            ImageFormat::Qcow2 => Image::Qcow2(&written.file),
        };
        let exported = write_image(&mut source, image, &mut tell).map_err(|error| match error {
            VolumeError::Io { source, .. } => file_failed(&args.file, &source),
            error => refused(error),
        })?;
        written.finish()?;
        Ok(exported)
    });
    drop(progress);
    let exported = source.finish(done)?;
    if args.at.pool.talk.json {
        return print_json(&said(args, &exported), out);
    }
    let Exported { size_bytes, data_bytes } = exported;
    let (file, size, data) = (args.file.display(), Bytes(size_bytes), Bytes(data_bytes));
    Ok(writeln!(out, "{file}: {} of {size}, {data} written", args.at.name)?)
}

/// What is said of an image.
fn said(args: &VolumeExportArgs, exported: &Exported) -> serde_json::Value {
    json!({
        "name": args.at.name,
        "file": args.file.display().to_string(),
        "size_bytes": exported.size_bytes,
        "data_bytes": exported.data_bytes,
    })
}
