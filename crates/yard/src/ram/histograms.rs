//! Histograms of a RAM disk: the sizes of its objects, and the idle ages of its blocks.

use blockyard_ram::Ram;
use serde::{Deserialize, Serialize};

/// The number of size steps in the metrics, up to a whole block.
const STEPS: u64 = 16;

/// `GET /v1/devices/{name}/histograms`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct HistogramsView {
    /// Objects by size class, for classes that have any, the smallest first.
    pub sizes: Vec<SizeView>,
    /// Blocks that hold data, by idle age: 0 to 7.
    pub ages: Vec<u64>,
}

/// A size class.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct SizeView {
    /// The length of the largest object of the class; the smallest is at most 15 bytes shorter.
    pub bytes: u64,
    /// The number of objects.
    pub objects: u64,
}

impl HistogramsView {
    pub(crate) fn new(ram: &Ram) -> HistogramsView {
        let classes = ram.size_classes().into_iter();
        let view = |class: blockyard_ram::SizeClass| SizeView {
            bytes: class.bytes as u64,
            objects: class.objects,
        };
        HistogramsView { sizes: classes.map(view).collect(), ages: ram.ages() }
    }

    /// The sizes in classes that are few enough for a metric each: sixteenths of a block of `unit`
    /// bytes, and one for longer objects, which are blocks with a checksum.
    pub(crate) fn coarse(&self, unit: u64) -> Vec<SizeView> {
        let step = unit / STEPS;
        let mut coarse: Vec<_> =
            (1..=STEPS + 1).map(|part| SizeView { bytes: part * step, objects: 0 }).collect();
        for size in &self.sizes {
            let class = size.bytes.div_ceil(step).clamp(1, STEPS + 1);
            coarse[class as usize - 1].objects += size.objects;
        }
        coarse
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coarse_classes_lose_no_object() {
        let sizes = [(16, 5), (256, 7), (272, 1), (4096, 3), (4112, 2)];
        let sizes = sizes.map(|(bytes, objects)| SizeView { bytes, objects }).to_vec();
        let coarse = HistogramsView { sizes, ages: Vec::new() }.coarse(4096);
        assert_eq!(coarse.len(), 17);
        let found = |bytes: u64| coarse.iter().find(|size| size.bytes == bytes).unwrap().objects;
        assert_eq!((found(256), found(512), found(4096), found(4352)), (12, 1, 3, 2));
        assert_eq!(coarse.iter().map(|size| size.objects).sum::<u64>(), 18);
    }
}
