//! Compressed RAM disks.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::Arc;

use blockyard_ram::{Algo, CodecConfig, Ram, RamConfig, RamError};

use super::{Conventional, Made, as_given, given_as, with_delay};
use crate::error::StackError;
use crate::spec::DeviceSpec;

/// The longest dictionary: zstd trains none beyond 112 KiB by default, and blocks are 64 KiB.
const DICTIONARY_BYTES_MAX: u64 = 1 << 20;

/// Opens the device.
pub(super) fn open(spec: &DeviceSpec) -> Result<Made, StackError> {
    let config = ram_config(spec, read_dictionary)?;
    let ram = Ram::open(config).map_err(|error| refused(spec, error))?;
    let disk = with_delay::<Conventional, _>(spec, Arc::clone(&ram))?;
    Ok(Made { ram: Some(ram), ..Made::without_files(disk) })
}

/// The configuration, including the contents of files that it names.
pub(super) fn config(spec: &DeviceSpec) -> Result<RamConfig, StackError> {
    ram_config(spec, read_dictionary)
}

/// Checks that the parameters do not conflict, without reading the files that they name.
pub(super) fn check(spec: &DeviceSpec) -> Result<Vec<String>, StackError> {
    // The check only asks whether a dictionary is allowed, so any bytes serve as one.
    let config = ram_config(spec, |_, _| Ok(vec![1; 64].into()))?;
    config.check().map_err(|error| refused(spec, error))?;
    Ok(Vec::new())
}

fn refused(spec: &DeviceSpec, error: RamError) -> StackError {
    let error = match error {
        RamError::Invalid { field, value, wanted } => StackError::Invalid { field, value, wanted },
        RamError::Memory { field, value, errno } => {
            let value = given_as(spec, field).unwrap_or(value);
            let message = RamError::Memory { field, value, errno }.to_string();
            StackError::Refused { field, message }
        }
        other => StackError::Refused { field: other.field(), message: other.to_string() },
    };
    as_given(spec, error)
}

fn read_dictionary(field: &'static str, path: &str) -> Result<Arc<[u8]>, StackError> {
    let refused =
        |what: String| StackError::Refused { field, message: format!("{field}: `{path}` {what}") };
    let mut bytes = Vec::new();
    // A device file has length 0 and no end, and opening a pipe waits for a writer.
    if std::fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo()) {
        return Err(refused("is a pipe; a dictionary is a file".to_owned()));
    }
    let read = File::open(path)
        .and_then(|file| file.take(DICTIONARY_BYTES_MAX + 1).read_to_end(&mut bytes));
    match read {
        Err(error) => Err(refused(format!("cannot be read: {error}"))),
        Ok(len) if len as u64 > DICTIONARY_BYTES_MAX => {
            Err(refused("is too long; a dictionary has a MiB at most".to_owned()))
        }
        Ok(_) => Ok(bytes.into()),
    }
}

/// Algorithm, level and dictionary of each recompression, by priority.
const RECOMPRESS: [(&str, &str, &str); 3] = [
    ("recomp_algo", "recomp_level", "recomp_dict"),
    ("recomp_algo2", "recomp_level2", "recomp_dict2"),
    ("recomp_algo3", "recomp_level3", "recomp_dict3"),
];

/// The function that reads a dictionary, by parameter and value.
type Dictionaries = fn(&'static str, &str) -> Result<Arc<[u8]>, StackError>;

fn ram_config(spec: &DeviceSpec, dictionaries: Dictionaries) -> Result<RamConfig, StackError> {
    let codec = |algo, level, dict| -> Result<CodecConfig, StackError> {
        let dictionary = spec.text(dict).map(|path| dictionaries(dict, &path)).transpose()?;
        Ok(CodecConfig { algo, level: number(spec, level)?, dictionary })
    };
    let mut recompress = Vec::new();
    for (priority, (field, level, dict)) in RECOMPRESS.into_iter().enumerate() {
        match spec.choice(field) {
            0 => {
                // Without an algorithm they would have no effect, which the user does not expect.
                let given = [level, dict].map(|name| (name, spec.text(name).unwrap_or_default()));
                if let Some((name, value)) = given.into_iter().find(|(_, value)| !value.is_empty())
                {
                    let wanted = format!("{field} as well, whose parameter it is");
                    return Err(StackError::Invalid { field: name, value, wanted });
                }
            }
            choice if recompress.len() < priority => {
                let value = Algo::ALL[choice - 1].name().to_owned();
                let wanted = "none, or an algorithm of each lower priority as well".to_owned();
                return Err(StackError::Invalid { field, value, wanted });
            }
            choice => recompress.push(codec(Algo::ALL[choice - 1], level, dict)?),
        }
    }
    let path = |name| spec.text(name).map(PathBuf::from);
    Ok(RamConfig {
        size: spec.number("size"),
        bs: spec.small("bs"),
        unit: spec.small("unit"),
        codec: codec(Algo::ALL[spec.choice("algo")], "level", "dict")?,
        recompress,
        dedup: spec.switch("dedup"),
        checksum: spec.switch("checksum"),
        backing: path("backing"),
        load: path("load"),
        mem_limit: spec.number("mem_limit"),
        compact: spec.small("compact") as u8,
    })
}

/// An optional number, which may be negative.
fn number(spec: &DeviceSpec, field: &'static str) -> Result<Option<i32>, StackError> {
    let wanted = || "a whole number".to_owned();
    let text = spec.text(field).filter(|text| !text.is_empty());
    text.map(|value| {
        let parsed = value.parse().ok();
        parsed.ok_or_else(|| StackError::Invalid { field, value, wanted: wanted() })
    })
    .transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::param::DeviceKind;
    use crate::uri;

    fn refusal(query: &str) -> String {
        match open(&uri::parse(&format!("ram:///r?{query}")).unwrap()) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{query} was made"),
        }
    }

    #[test]
    fn the_table_has_the_defaults_of_the_device() {
        let spec = DeviceSpec::new(DeviceKind::find("ram").unwrap(), "r").unwrap();
        assert_eq!(ram_config(&spec, read_dictionary).unwrap(), RamConfig::default());
        let Some(words) =
            DeviceKind::find("ram").unwrap().params.iter().find(|param| param.name == "algo")
        else {
            panic!("the table has no algo")
        };
        let names = Algo::ALL.map(Algo::name).join("|");
        assert_eq!(words.placeholder(), names);
    }

    #[test]
    fn a_size_beyond_memory_is_named_as_it_was_given() {
        let spec = uri::parse("ram:///r?size=64T").unwrap();
        let memory =
            RamError::Memory { field: "size", value: (64u64 << 40).to_string(), errno: 12 };
        let error = refused(&spec, memory).to_string();
        assert!(error.starts_with("size: `64T` takes more memory than there is"), "{error}");
    }

    #[test]
    fn conflicting_parameters_are_refused_by_field() {
        for (query, want) in [
            ("size=1000001k", "invalid size `1000001k`: expected a multiple of"),
            ("size=12k&unit=8k", "invalid size `12k`"),
            ("level=fast", "invalid level `fast`: expected a whole number"),
            ("level=0", "invalid level `0`: expected 1 to 65537 for lz4"),
            ("recomp_algo2=zstd", "invalid recomp_algo2 `zstd`: expected none, or an algorithm of"),
            ("recomp_algo=lz4&recomp_algo2=zstd&recomp_level2=99", "invalid recomp_level2 `99`"),
            ("algo=zstd&level=23", "invalid level `23`: expected -131072 to 22 for zstd"),
            ("recomp_algo=zstd&recomp_level=99", "invalid recomp_level `99`"),
            ("recomp_level=3", "invalid recomp_level `3`: expected recomp_algo as well"),
            ("recomp_algo=none&recomp_dict=/no", "invalid recomp_dict `/no`: expected recomp_"),
            (
                "recomp_algo=zstd&recomp_level2=3",
                "invalid recomp_level2 `3`: expected recomp_algo2 as well",
            ),
            (
                "recomp_algo=zstd&recomp_dict=/dev/null",
                "invalid recomp_dict `0 bytes`: expected a dictionary",
            ),
            ("mem_limit=4k", "invalid mem_limit `4k`: expected 32k to 64T, or 0"),
            ("load=/no/such/file", "load: `/no/such/file`: cannot be opened"),
            ("backing=/dev/null", "invalid backing `/dev/null`: expected a regular file"),
            ("dict=/etc/hostname", "invalid dict `lz4`: expected algo=zstd"),
            ("algo=zstd&dict=/no/such/file", "dict: `/no/such/file` cannot be read"),
            ("algo=zstd&dict=/dev/zero", "dict: "),
        ] {
            let error = refusal(query);
            assert!(error.starts_with(want), "{query}: {error}");
        }
    }
}
