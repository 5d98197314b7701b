//! A zoned null device on a medium, with one channel.

use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{Disk, Sector};
use blockyard_null::{NullConfig, NullError, NullOnMedia};
use blockyard_zone_media::Media;

/// Longest I/O in bytes.
const IO_BYTES: usize = 1 << 20;

/// A device and a channel to it. Dropping it closes the device in order.
pub(crate) struct Fixture {
    pub(crate) io: Io,
    pub(crate) disk: Arc<dyn Disk>,
}

impl Fixture {
    pub(crate) fn open<M: Media + 'static>(
        config: &NullConfig,
        media: M,
    ) -> Result<Fixture, NullError> {
        let null = Arc::new(NullOnMedia::open_on(config, media)?);
        let disk = Composed::new("test".to_owned(), "null", null, ChannelConfig::default());
        let disk: Arc<dyn Disk> = Arc::new(disk);
        Ok(Fixture { io: Io::new(disk.open().unwrap(), IO_BYTES), disk })
    }

    pub(crate) fn zones(&self) -> Vec<ZoneInfo> {
        let mut zones = Vec::new();
        self.disk.report_zones(Sector(0), usize::MAX, &mut zones).unwrap();
        zones
    }

    /// Reads sectors.
    pub(crate) fn read(&mut self, at: Sector, sectors: u64) -> Vec<u8> {
        let mut bytes = vec![0x55; Sector(sectors).bytes() as usize];
        for (number, part) in bytes.chunks_mut(IO_BYTES).enumerate() {
            self.io.read(at + (number * IO_BYTES / 512) as u64, part).unwrap();
        }
        bytes
    }
}
