//! Codecs: compress a block, and decompress it again.
//!
//! A [`Codec`] is configuration (algorithm, level, dictionary) that all channels of a device share.
//! Working memory is separate: an [`Encoder`] and a [`Decoder`] belong to one thread. Opening a
//! channel creates them, so that nothing is allocated afterwards.
//!
//! LZ4 and zstd are their authors' C libraries, for speed. A build without the feature `c-codecs`
//! needs no C compiler: it has LZ4 in Rust, which reads and writes the same format, and no zstd.
//! LZO, the kernel's default, exists under the GPL only and is not included.
#![allow(unsafe_code)]

#[cfg(feature = "c-codecs")]
mod lz4_c;
#[cfg(not(feature = "c-codecs"))]
mod lz4_rust;
#[cfg(feature = "c-codecs")]
mod zstd_c;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::error::{Damaged, RamError};

#[cfg(feature = "c-codecs")]
use lz4_c as lz4;
#[cfg(not(feature = "c-codecs"))]
use lz4_rust as lz4;

/// Maximum size of a dictionary in bytes.
pub(crate) const DICTIONARY_BYTES_MAX: usize = 1 << 20;

/// A compression algorithm, by the name that zram uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algo {
    /// LZ4: compresses and decompresses fast.
    #[default]
    Lz4,
    /// LZ4's high compression: compresses slowly; decompresses as LZ4 does.
    Lz4hc,
    /// Zstandard: smaller output, slower.
    Zstd,
}

impl Algo {
    /// Every algorithm.
    pub const ALL: [Algo; 3] = [Algo::Lz4, Algo::Lz4hc, Algo::Zstd];

    /// The algorithm's name, as zram spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Algo::Lz4 => "lz4",
            Algo::Lz4hc => "lz4hc",
            Algo::Zstd => "zstd",
        }
    }

    /// The default level of the algorithm, as in zram.
    pub const fn default_level(self) -> i32 {
        match self {
            Algo::Lz4 => 1,
            Algo::Lz4hc => 9,
            Algo::Zstd => 3,
        }
    }

    /// The valid levels. For LZ4 the level is its acceleration: a higher one is faster and
    /// compresses less.
    pub const fn levels(self) -> std::ops::RangeInclusive<i32> {
        match self {
            Algo::Lz4 => 1..=65_537,
            Algo::Lz4hc => 1..=12,
            Algo::Zstd => -131_072..=22,
        }
    }

    /// Whether this build includes the algorithm.
    pub const fn is_built_in(self) -> bool {
        cfg!(feature = "c-codecs") || matches!(self, Algo::Lz4)
    }
}

impl fmt::Display for Algo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algo {
    type Err = String;

    fn from_str(text: &str) -> Result<Algo, String> {
        let found = Algo::ALL.into_iter().find(|algo| algo.name() == text);
        found.ok_or_else(|| "lz4, lz4hc or zstd".to_owned())
    }
}

/// An algorithm with level and dictionary, as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CodecConfig {
    /// The algorithm.
    pub algo: Algo,
    /// The compression level; `None` for the algorithm's default.
    pub level: Option<i32>,
    /// Dictionary of content that many blocks share; zstd only.
    pub dictionary: Option<Arc<[u8]>>,
}

/// A codec of a device; shared by its channels.
#[derive(Debug)]
pub struct Codec {
    algo: Algo,
    level: i32,
    #[cfg(feature = "c-codecs")]
    dictionary: Option<zstd_c::Dictionary>,
}

/// The names of the level and dictionary parameters that belong to an algorithm parameter.
fn parameters_of(algo: &str) -> (&'static str, &'static str) {
    match algo {
        "recomp_algo" => ("recomp_level", "recomp_dict"),
        "recomp_algo2" => ("recomp_level2", "recomp_dict2"),
        "recomp_algo3" => ("recomp_level3", "recomp_dict3"),
        // A codec that a snapshot's header describes.
        "load" => ("load", "load"),
        _ => ("level", "dict"),
    }
}

impl Codec {
    /// Creates a codec. `field` is the parameter that an error names for the algorithm.
    ///
    /// # Errors
    /// If this build lacks the algorithm, or level or dictionary are invalid for it.
    pub fn new(config: &CodecConfig, field: &'static str) -> Result<Codec, RamError> {
        let CodecConfig { algo, level, dictionary } = config;
        if !algo.is_built_in() {
            let wanted = "lz4: this build has no codecs in C (feature `c-codecs`)";
            return Err(RamError::invalid(field, algo, wanted));
        }
        let level = level.unwrap_or(algo.default_level());
        if !algo.levels().contains(&level) {
            let (least, most) = (algo.levels().start().to_owned(), algo.levels().end().to_owned());
            let (field, _) = parameters_of(field);
            return Err(RamError::invalid(field, level, format!("{least} to {most} for {algo}")));
        }
        if dictionary.is_some() && *algo != Algo::Zstd {
            let wanted = format!("{field}=zstd, which alone has dictionaries");
            return Err(RamError::invalid(parameters_of(field).1, algo, wanted));
        }
        if let Some(len) = dictionary.as_ref().map(|bytes| bytes.len())
            && len > DICTIONARY_BYTES_MAX
        {
            // A longer dictionary would make a snapshot that no device can load.
            let wanted = format!("{DICTIONARY_BYTES_MAX} bytes at most");
            return Err(RamError::invalid(parameters_of(field).1, format!("{len} bytes"), wanted));
        }
        Ok(Codec {
            algo: *algo,
            level,
            #[cfg(feature = "c-codecs")]
            dictionary: match dictionary {
                Some(bytes) => Some(zstd_c::Dictionary::new(bytes, parameters_of(field).1)?),
                None => None,
            },
        })
    }

    /// The algorithm.
    pub fn algo(&self) -> Algo {
        self.algo
    }

    /// The level.
    pub fn level(&self) -> i32 {
        self.level
    }

    /// Allocates the working memory to compress blocks of `unit` bytes with this codec.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn encoder(&self, unit: usize) -> Result<Encoder, RamError> {
        let mut encoder = Encoder(match self.algo {
            Algo::Lz4 => Working::Lz4(lz4::Fast::new()),
            #[cfg(feature = "c-codecs")]
            Algo::Lz4hc => Working::Lz4hc(lz4::High::new()),
            #[cfg(feature = "c-codecs")]
            Algo::Zstd => Working::Zstd(zstd_c::Compressor::new(self)?),
            #[cfg(not(feature = "c-codecs"))]
            Algo::Lz4hc | Algo::Zstd => unreachable!("`new` has refused what is not built in"),
        });
        // zstd allocates at the first block of a size and never again for that size: do it now.
        let block: Vec<u8> = (0..unit).map(|at| ((at * at) >> 7) as u8).collect();
        self.compress(&mut encoder, &block, &mut vec![0; packed_bytes_max(unit)], unit);
        Ok(encoder)
    }

    /// Compresses `block` into `packed`, which must hold at least [`packed_bytes_max`] bytes.
    /// Returns the compressed length; `None` if that would exceed `len_max`.
    ///
    /// `block` must not change during the call. Compressors rely on that: from a block that changes
    /// they produce bytes that decompress to other contents or not at all. A caller whose data is
    /// in a client's buffer copies it first.
    ///
    /// # Panics
    /// If another codec made the encoder.
    #[inline]
    pub fn compress(
        &self,
        encoder: &mut Encoder,
        block: &[u8],
        packed: &mut [u8],
        len_max: usize,
    ) -> Option<usize> {
        match (&mut encoder.0, self.algo) {
            (Working::Lz4(fast), Algo::Lz4) => fast.compress(block, packed, len_max, self.level),
            #[cfg(feature = "c-codecs")]
            (Working::Lz4hc(high), Algo::Lz4hc) => {
                high.compress(block, packed, len_max, self.level)
            }
            #[cfg(feature = "c-codecs")]
            (Working::Zstd(compressor), Algo::Zstd) => compressor.compress(block, packed, len_max),
            #[allow(unreachable_patterns)] // A build without C has only one of these arms.
            _ => unreachable!("the encoder was made by another codec"),
        }
    }

    /// Decompresses as [`Codec::decompress`] does, into the caller's slice, which must be exactly
    /// one block long.
    ///
    /// # Errors
    /// As [`Codec::decompress`].
    ///
    /// # Panics
    /// As [`Codec::decompress`].
    pub fn decompress_here(
        &self,
        decoder: &mut Decoder,
        packed: &[u8],
        into: &mut [u8],
    ) -> Result<(), Damaged> {
        // SAFETY: the slice is valid for its length, and only the caller can access it.
        unsafe { self.decompress(decoder, packed, into.as_mut_ptr(), into.len()) }
    }

    /// Decompresses `packed`, which [`Codec::compress`] made of `len_bytes` bytes, into `into`.
    ///
    /// # Errors
    /// If `packed` does not decompress to exactly `len_bytes`; the contents of `into` are then
    /// undefined.
    ///
    /// # Panics
    /// If the codec is zstd and the decoder was created without zstd.
    ///
    /// # Safety
    /// `into` must be valid for reads and writes of `len_bytes`. Other threads or processes may
    /// read and write these bytes concurrently, as they may any buffer under I/O.
    #[inline]
    pub unsafe fn decompress(
        &self,
        decoder: &mut Decoder,
        packed: &[u8],
        into: *mut u8,
        len_bytes: usize,
    ) -> Result<(), Damaged> {
        #[cfg(feature = "c-codecs")]
        {
            if self.algo != Algo::Zstd {
                // SAFETY: this function's own contract.
                return unsafe { lz4::decompress(packed, into, len_bytes) };
            }
            let zstd = decoder.zstd.as_mut().expect("it was made for all of the device's codecs");
            // SAFETY: this function's own contract.
            unsafe { zstd.decompress(self.dictionary.as_ref(), packed, into, len_bytes) }
        }
        #[cfg(not(feature = "c-codecs"))]
        // SAFETY: this function's own contract.
        unsafe {
            decoder.lz4.decompress(packed, into, len_bytes)
        }
    }
}

/// Maximum length of a trained dictionary in bytes: the usual size among zram's users.
#[cfg(feature = "c-codecs")]
const DICTIONARY_BYTES: usize = 32 << 10;

/// Trains a zstd dictionary on `samples`, which are concatenated and have these lengths.
pub(crate) fn train(samples: &[u8], lengths: &[usize]) -> Result<Vec<u8>, RamError> {
    #[cfg(feature = "c-codecs")]
    if let Some(dictionary) = zstd_c::train(samples, lengths, DICTIONARY_BYTES) {
        return Ok(dictionary);
    }
    let _ = samples;
    let why = match Algo::Zstd.is_built_in() {
        true => "they are too few, or have too little in common; write more data first",
        false => "this build has no codecs in C (feature `c-codecs`)",
    };
    Err(RamError::Untrained { blocks: lengths.len(), why })
}

/// The maximum compressed length of a block of `unit` bytes, over all codecs.
pub const fn packed_bytes_max(unit: usize) -> usize {
    if cfg!(feature = "c-codecs") {
        // LZ4's bound is n + n/255 + 16, zstd's n + n/256 + 64 for what is below 128 KiB.
        unit + unit / 128 + 128
    } else {
        // LZ4 in Rust asks for 1.1 n + 20.
        unit + unit / 8 + 128
    }
}

/// Working memory for compressing; belongs to one thread.
#[derive(Debug)]
pub struct Encoder(Working);

#[derive(Debug)]
enum Working {
    Lz4(lz4::Fast),
    #[cfg(feature = "c-codecs")]
    Lz4hc(lz4::High),
    #[cfg(feature = "c-codecs")]
    Zstd(zstd_c::Compressor),
}

/// Working memory for decompressing with any of a device's codecs; belongs to one thread.
#[derive(Debug)]
pub struct Decoder {
    #[cfg(not(feature = "c-codecs"))]
    lz4: lz4::Unpacker,
    /// `Some` only if one of the codecs is zstd.
    #[cfg(feature = "c-codecs")]
    zstd: Option<zstd_c::Decompressor>,
}

impl Decoder {
    /// Allocates the working memory for blocks of `unit` bytes, including zstd's if `zstd` is set.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(unit: usize, zstd: bool) -> Result<Decoder, RamError> {
        let _ = (unit, zstd);
        Ok(Decoder {
            #[cfg(not(feature = "c-codecs"))]
            lz4: lz4::Unpacker::new(unit),
            #[cfg(feature = "c-codecs")]
            zstd: match zstd {
                true => Some(zstd_c::Decompressor::new()?),
                false => None,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of every kind: text, noise, runs, and mixtures of them.
    fn blocks(unit: usize) -> Vec<Vec<u8>> {
        let mut random = fastrand::Rng::with_seed(7);
        let words = [&b"sector "[..], b"request ", b"queue ", b"zone ", b"\n", b"the "];
        let text = std::iter::repeat_with(|| words[random.usize(0..words.len())]);
        let text: Vec<u8> = text.flatten().copied().take(unit).collect();
        let noise: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(unit).collect();
        let mut half = noise.clone();
        half[unit / 2..].fill(0x55);
        let steps = (0..unit).map(|at| (at / 3) as u8).collect();
        vec![text, noise, half, steps, vec![0; unit]]
    }

    fn configs() -> Vec<CodecConfig> {
        let with = |algo, level| CodecConfig { algo, level, dictionary: None };
        let mut configs = vec![with(Algo::Lz4, None), with(Algo::Lz4, Some(8))];
        if cfg!(feature = "c-codecs") {
            for (algo, level) in [(Algo::Lz4hc, None), (Algo::Lz4hc, Some(12)), (Algo::Zstd, None)]
            {
                configs.push(with(algo, level));
            }
            for level in [-5, 1, 19] {
                configs.push(with(Algo::Zstd, Some(level)));
            }
            let dictionary: Arc<[u8]> = blocks(4096)[0].clone().into();
            let zstd = with(Algo::Zstd, Some(1));
            configs.push(CodecConfig { dictionary: Some(dictionary), ..zstd });
        }
        configs
    }

    fn unpack(codec: &Codec, decoder: &mut Decoder, packed: &[u8], len: usize) -> Option<Vec<u8>> {
        let mut block = vec![0xee; len];
        // SAFETY: the vector has `len` bytes.
        let done = unsafe { codec.decompress(decoder, packed, block.as_mut_ptr(), len) };
        done.ok().map(|()| block)
    }

    #[test]
    fn compressed_blocks_round_trip() {
        for config in configs() {
            let codec = Codec::new(&config, "algo").unwrap();
            for unit in [4096, 16_384, 65_536] {
                let mut encoder = codec.encoder(unit).unwrap();
                let mut decoder = Decoder::new(unit, true).unwrap();
                let mut packed = vec![0; packed_bytes_max(unit)];
                for (kind, block) in blocks(unit).into_iter().enumerate() {
                    let len = codec.compress(&mut encoder, &block, &mut packed, usize::MAX);
                    let len = len.expect("there is room for anything");
                    assert!(len < unit || kind == 1, "{config:?}: block {kind} becomes {len}");
                    let back = unpack(&codec, &mut decoder, &packed[..len], unit);
                    assert!(back.as_deref() == Some(&block[..]), "{config:?}: block {kind}");
                    // Too small a `len_max` returns `None`; an exact one succeeds.
                    let tight = codec.compress(&mut encoder, &block, &mut packed, len / 2);
                    assert_eq!(tight, None, "{config:?}: block {kind}");
                }
            }
        }
    }

    #[test]
    fn damage_is_noticed_or_harmless() {
        for config in configs() {
            let codec = Codec::new(&config, "algo").unwrap();
            let mut encoder = codec.encoder(4096).unwrap();
            let mut decoder = Decoder::new(4096, true).unwrap();
            let mut packed = vec![0; packed_bytes_max(4096)];
            let block = &blocks(4096)[0];
            let len = codec.compress(&mut encoder, block, &mut packed, usize::MAX).unwrap();
            for cut in [0, 1, len / 2, len - 1] {
                assert_eq!(unpack(&codec, &mut decoder, &packed[..cut], 4096), None, "{cut}");
            }
            for bit in 0..len * 8 {
                let mut damaged = packed[..len].to_vec();
                damaged[bit / 8] ^= 1 << (bit % 8);
                // The result may be another block of the same length, which only a checksum
                // detects. It must not write beyond the block, which a sanitizer would see.
                let _ = unpack(&codec, &mut decoder, &damaged, 4096);
            }
            // After an error the decoder still works.
            assert!(unpack(&codec, &mut decoder, &packed[..len], 4096).as_ref() == Some(block));
        }
    }

    #[test]
    fn conflicting_parameters_are_refused_by_name() {
        let with = |algo, level| CodecConfig { algo, level, dictionary: None };
        let refused = |config| Codec::new(&config, "algo").unwrap_err();
        assert_eq!(refused(with(Algo::Lz4, Some(0))).field(), "level");
        let dictionary = Some(vec![1; 100].into());
        let lz4 = CodecConfig { dictionary, ..CodecConfig::default() };
        assert_eq!(refused(lz4).field(), "dict");
        if cfg!(feature = "c-codecs") {
            assert_eq!(refused(with(Algo::Zstd, Some(23))).field(), "level");
            let dictionary = Some(vec![1; 3].into());
            let short = CodecConfig { dictionary, ..with(Algo::Zstd, None) };
            assert_eq!(refused(short).field(), "dict");
        } else {
            assert_eq!(refused(with(Algo::Zstd, None)).field(), "algo");
        }
        assert_eq!("zstd".parse(), Ok(Algo::Zstd));
        assert!("lzo".parse::<Algo>().is_err());
    }

    /// A build without C reads what a build with C wrote, and vice versa.
    #[cfg(feature = "c-codecs")]
    #[test]
    fn another_implementation_of_lz4_agrees() {
        let codec = Codec::new(&CodecConfig::default(), "algo").unwrap();
        let mut encoder = codec.encoder(4096).unwrap();
        let mut decoder = Decoder::new(4096, false).unwrap();
        let mut packed = vec![0; packed_bytes_max(4096)];
        for block in blocks(4096) {
            let len = codec.compress(&mut encoder, &block, &mut packed, usize::MAX).unwrap();
            let theirs = lz4_flex::block::decompress(&packed[..len], 4096);
            assert!(theirs.ok().as_ref() == Some(&block));
            let theirs = lz4_flex::block::compress(&block);
            assert!(unpack(&codec, &mut decoder, &theirs, 4096) == Some(block));
        }
    }
}
