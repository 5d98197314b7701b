//! `volume export`.

use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use blockyard_volume::VolumeError;
use blockyard_volume_admin::image::{Exported, Image, export as write_image};
use blockyard_yard::size::rounded;
use serde_json::json;

use super::pool::{Make, PoolAccess};
use super::progress::ProgressLine;
use super::refused;
use super::secret::unlock_here;
use super::stream::StreamSource;
use crate::args::{ImageFormat, VolumeExportArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};
use crate::output_file::{OutputFile, Replace, file_failed};

/// Why a qcow2 image is not written to a pipe.
const NO_ORDER: &str =
    "export: a qcow2 image is not written in order; expected a file, or --format raw";

pub(super) fn export(args: &VolumeExportArgs, out: &mut impl Write) -> Result<(), Failure> {
    let to_stdout = args.file.as_os_str() == "-";
    let format = args.format.map_or_else(|| format_of(&args.file), Ok)?;
    if to_stdout && format == ImageFormat::Qcow2 {
        return Err(Failure::new(Code::Usage, NO_ORDER));
    }
    if to_stdout && std::io::stdout().is_terminal() {
        let text = "export: standard output is a terminal; expected a pipe or a file";
        return Err(Failure::new(Code::Usage, text));
    }
    let pool = PoolAccess::find(&args.at.pool, Make::Never)?;
    unlock_here(&pool, &args.at.name, &args.secret)?;
    let mut source = StreamSource::export(&pool, &args.at.name)?;
    let mut progress = ProgressLine::new("exported");
    let mut tell = |bytes, total| progress.tell(bytes, Some(total));
    if args.file.as_os_str() == "-" {
        let done = write_image(&mut source, Image::RawPipe(out), &mut tell);
        drop(progress);
        let exported = source.finish(done.map_err(|error| match error {
            // A reader that has enough, such as head, leaves early.
            VolumeError::Io { source, .. } if source.kind() == io::ErrorKind::BrokenPipe => {
                Failure::OutputClosed
            }
            error => refused(error),
        }))?;
        // The image has the other one.
        return match args.at.pool.talk.json {
            true => print_json(&said(args, &exported), &mut io::stderr()),
            false => Ok(()),
        };
    }
    // A raw image is like any other file: whose it is cannot be told.
    let replace = Replace { force: args.force, magic: b"" };
    let done = OutputFile::create(&args.file, replace).and_then(|output| {
        let mut file = output.file();
        let kind = file.metadata().map_err(|error| file_failed(&args.file, &error))?.file_type();
        let image = match format {
            ImageFormat::Raw if kind.is_file() => Image::Raw(file),
            ImageFormat::Raw if kind.is_block_device() => Image::Device(file),
            ImageFormat::Raw => Image::RawPipe(&mut file),
            ImageFormat::Qcow2 if kind.is_file() || kind.is_block_device() => Image::Qcow2(file),
            ImageFormat::Qcow2 => return Err(Failure::new(Code::Usage, NO_ORDER)),
        };
        let exported = write_image(&mut source, image, &mut tell).map_err(|error| match error {
            VolumeError::Io { source, .. } => file_failed(&args.file, &source),
            error => refused(error),
        })?;
        output.finish()?;
        Ok(exported)
    });
    drop(progress);
    let exported = source.finish(done)?;
    if args.at.pool.talk.json {
        return print_json(&said(args, &exported), out);
    }
    let Exported { size_bytes, data_bytes } = exported;
    let (file, size, data) = (args.file.display(), rounded(size_bytes), rounded(data_bytes));
    Ok(writeln!(out, "exported {} to {file}: {size}, {data} written", args.at.name)?)
}

/// Endings of image formats that are not written.
const OTHER_FORMATS: [&str; 8] = ["vmdk", "vdi", "vhd", "vhdx", "qed", "qcow", "dmg", "parallels"];

/// The format that a file's name asks for.
fn format_of(file: &Path) -> Result<ImageFormat, Failure> {
    let ending = file.extension().map(|ending| ending.to_string_lossy().to_ascii_lowercase());
    let Some(ending) = ending else { return Ok(ImageFormat::Raw) };
    if ending == "qcow2" {
        return Ok(ImageFormat::Qcow2);
    }
    if !OTHER_FORMATS.contains(&ending.as_str()) {
        return Ok(ImageFormat::Raw);
    }
    let text = format!(
        "invalid FILE `{}`: expected a raw or qcow2 image, for no other is written; export \
         NAME.qcow2 and convert it (qemu-img convert -O FORMAT ...), or write this file with \
         --format raw or --format qcow2",
        file.display()
    );
    Err(Failure::new(Code::Usage, text))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// `volume export pool v0 x.vmdk` wrote a raw image without a word, which no hypervisor opens
    /// as what its name says.
    #[test]
    fn a_name_of_another_image_format_is_refused() {
        for (name, format) in [
            ("x", ImageFormat::Raw),
            ("x.raw", ImageFormat::Raw),
            ("x.img", ImageFormat::Raw),
            ("x.vmdk.img", ImageFormat::Raw),
            ("-", ImageFormat::Raw),
            ("/dev/sda", ImageFormat::Raw),
            ("x.qcow2", ImageFormat::Qcow2),
            ("x.QCOW2", ImageFormat::Qcow2),
        ] {
            assert_eq!(format_of(Path::new(name)).unwrap(), format, "{name}");
        }
        for name in OTHER_FORMATS.map(|ending| format!("a/x.{ending}")) {
            let Err(Failure::Said(Code::Usage, text)) = format_of(Path::new(&name)) else {
                panic!("{name} is refused as wrong use");
            };
            assert!(text.contains("--format raw") && text.contains("qemu-img"), "{text}");
        }
    }
}
