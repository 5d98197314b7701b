//! Properties of a volume that the catalogue has, and that can be changed while the volume is a
//! device. A property that is not set has its default, or what the device is opened with.

use crate::bytes::Reader;

/// The properties of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Properties {
    /// How blocks are compressed: 0 not, 1 by LZ4, 2 to 20 by Zstandard at level 1 to 19.
    pub compress: Option<u8>,
    /// When writes are durable: 0 on request, 1 always, 2 never on request.
    pub sync: Option<u8>,
    /// Most reads and writes that are started per second; 0: no limit.
    pub iops: Option<u64>,
    /// Most bytes read and written per second; 0: no limit.
    pub bandwidth: Option<u64>,
    /// Whether every change is refused.
    pub read_only: Option<bool>,
}

/// Largest code of a compression, and of a sync mode.
const COMPRESS_MAX: u8 = 20;
const SYNC_MAX: u8 = 2;

impl Properties {
    /// The most bytes that the catalogue has of the properties of a volume.
    pub const BYTES_MAX: usize = 1 + 1 + 1 + 8 + 8 + 1;

    /// Whether no property is set.
    pub fn is_empty(&self) -> bool {
        *self == Properties::default()
    }

    /// These properties, changed by those that are set in `other`.
    #[must_use]
    pub fn with(self, other: Properties) -> Properties {
        Properties {
            compress: other.compress.or(self.compress),
            sync: other.sync.or(self.sync),
            iops: other.iops.or(self.iops),
            bandwidth: other.bandwidth.or(self.bandwidth),
            read_only: other.read_only.or(self.read_only),
        }
    }

    /// Appends the encoded properties: a byte that says which are set, and these in order.
    pub fn print(&self, out: &mut Vec<u8>) {
        let Properties { compress, sync, iops, bandwidth, read_only } = *self;
        let set = [
            compress.is_some(),
            sync.is_some(),
            iops.is_some(),
            bandwidth.is_some(),
            read_only.is_some(),
        ];
        out.push((0..).zip(set).map(|(bit, is_set)| u8::from(is_set) << bit).sum());
        out.extend(compress);
        out.extend(sync);
        out.extend(iops.into_iter().flat_map(u64::to_le_bytes));
        out.extend(bandwidth.into_iter().flat_map(u64::to_le_bytes));
        out.extend(read_only.map(u8::from));
    }

    /// Parses properties; `None` if the bytes end too early, or one has an invalid value.
    pub fn take(reader: &mut Reader<'_>) -> Option<Properties> {
        let set = reader.u8().filter(|set| *set < 1 << 5)?;
        let is_set = |bit: u8| set >> bit & 1 == 1;
        let mut small = |bit, max| match is_set(bit) {
            true => reader.u8().filter(|value| *value <= max).map(Some),
            false => Some(None),
        };
        let (compress, sync) = (small(0, COMPRESS_MAX)?, small(1, SYNC_MAX)?);
        let mut number = |bit| match is_set(bit) {
            true => reader.u64().map(Some),
            false => Some(None),
        };
        let (iops, bandwidth) = (number(2)?, number(3)?);
        let read_only = match is_set(4) {
            true => Some(reader.u8().filter(|value| *value <= 1)? == 1),
            false => None,
        };
        Some(Properties { compress, sync, iops, bandwidth, read_only })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printing_and_parsing_round_trip() {
        let all = Properties {
            compress: Some(20),
            sync: Some(2),
            iops: Some(1 << 40),
            bandwidth: Some(0),
            read_only: Some(true),
        };
        let some = Properties { iops: Some(7), ..Properties::default() };
        for properties in [Properties::default(), some, all] {
            let mut bytes = Vec::new();
            properties.print(&mut bytes);
            assert!(bytes.len() <= Properties::BYTES_MAX);
            assert_eq!(Properties::take(&mut Reader::new(&bytes)), Some(properties));
            for len in 0..bytes.len() {
                assert_eq!(Properties::take(&mut Reader::new(&bytes[..len])), None, "{len}");
            }
        }
        for wrong in [&[32_u8][..], &[1, 21], &[2, 3], &[16, 2]] {
            assert_eq!(Properties::take(&mut Reader::new(wrong)), None, "{wrong:?}");
        }
    }

    #[test]
    fn what_is_not_set_stays() {
        let old = Properties { compress: Some(1), sync: Some(0), ..Properties::default() };
        let new = Properties { sync: Some(2), read_only: Some(false), ..Properties::default() };
        let wanted = Properties { compress: Some(1), ..new };
        assert_eq!(old.with(new), wanted);
        assert!(Properties::default().is_empty() && !new.is_empty());
    }
}
