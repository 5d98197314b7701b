//! Mode parameters: SPC-5 7.5, SBC-4 6.5. None of them can be changed.

use crate::cdb::{Form, ModeRequest, PageControl};
use crate::config::DiskConfig;
use crate::sense::{Sense, SenseFormat};

/// Read-write error recovery.
pub const ERROR_RECOVERY: u8 = 0x01;
/// Caching.
pub const CACHING: u8 = 0x08;
/// Control.
pub const CONTROL: u8 = 0x0a;
/// Informational exceptions control.
pub const EXCEPTIONS: u8 = 0x1c;
/// All pages.
pub const ALL: u8 = 0x3f;
/// All subpages.
const ALL_SUBPAGES: u8 = 0xff;

/// The supported pages.
const PAGES: [u8; 4] = [ERROR_RECOVERY, CACHING, CONTROL, EXCEPTIONS];

/// DPO and FUA are supported: SBC-4 6.5.1.
const DPOFUA: u8 = 0x10;
/// The block descriptor is the long one.
const LONGLBA: u8 = 0x01;

/// The response to MODE SENSE.
pub(crate) fn sense(
    config: &DiskConfig,
    form: Form,
    request: ModeRequest,
) -> Result<Vec<u8>, Sense> {
    let ModeRequest { control, page, subpage, .. } = request;
    if control == PageControl::Saved {
        return Err(Sense::SAVING_PARAMETERS_NOT_SUPPORTED);
    }
    let numbers: &[u8] = match PAGES.iter().position(|&known| known == page) {
        _ if page == ALL => &PAGES,
        Some(at) => &PAGES[at..=at],
        None => return Err(Sense::invalid_field(2, Some(5))),
    };
    // No page has subpages.
    if subpage != 0 && subpage != ALL_SUBPAGES {
        return Err(Sense::invalid_field(3, None));
    }
    let long = request.long_lba && form != Form::Six;
    let blocks = match request.without_blocks {
        true => Vec::new(),
        false => block_descriptor(config, long),
    };
    let mut pages = Vec::new();
    for &number in numbers {
        let mut bytes = page_of(config, number);
        if control == PageControl::Changeable {
            bytes[2..].fill(0);
        }
        pages.extend(bytes);
    }
    let rest = blocks.len() + pages.len();
    let mut answer = match form {
        // SPC-5 7.5.6: the length field does not count itself.
        Form::Six => vec![(rest + 3) as u8, 0, DPOFUA, blocks.len() as u8],
        _ => {
            let long = if long && !blocks.is_empty() { LONGLBA } else { 0 };
            let [high, low] = ((rest + 6) as u16).to_be_bytes();
            vec![high, low, 0, DPOFUA, long, 0, 0, blocks.len() as u8]
        }
    };
    answer.extend(blocks);
    answer.extend(pages);
    Ok(answer)
}

/// SBC-4 6.5.2: number and length of the blocks.
fn block_descriptor(config: &DiskConfig, long: bool) -> Vec<u8> {
    let count = config.size / u64::from(config.logical_block);
    let mut bytes = Vec::new();
    if long {
        bytes.extend(count.to_be_bytes());
        bytes.extend([0; 4]);
    } else {
        bytes.extend(u32::try_from(count).unwrap_or(u32::MAX).to_be_bytes());
    }
    // In the short form the first of these four bytes is reserved, and always 0.
    bytes.extend(config.logical_block.to_be_bytes());
    bytes
}

/// A page with its header.
fn page_of(config: &DiskConfig, number: u8) -> Vec<u8> {
    let len = if number == CACHING { 20 } else { 12 };
    let mut bytes = vec![0; len];
    bytes[0] = number;
    bytes[1] = (len - 2) as u8;
    match number {
        // AWRE and ARRE.
        ERROR_RECOVERY => bytes[2] = 0xc0,
        CACHING => bytes[2] = u8::from(config.write_cache) << 2,
        CONTROL => {
            // D_SENSE; GLTSD, because nothing is logged; commands may be reordered freely.
            bytes[2] = u8::from(config.sense_format == SenseFormat::Descriptor) << 2 | 0x02;
            bytes[3] = 0x10;
            // An unlimited busy timeout.
            bytes[8..10].fill(0xff);
        }
        // DEXCPT: no exceptions are reported.
        _ => bytes[2] = 0x08,
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: ModeRequest = ModeRequest {
        without_blocks: false,
        long_lba: false,
        control: PageControl::Current,
        page: ALL,
        subpage: 0,
    };

    #[test]
    fn lengths_add_up() {
        let config = DiskConfig::default();
        let six = sense(&config, Form::Six, PLAIN).unwrap();
        assert_eq!(usize::from(six[0]) + 1, six.len());
        assert_eq!(six.len(), 4 + 8 + 12 + 20 + 12 + 12);
        for (without_blocks, long_lba, blocks) in
            [(false, false, 8), (false, true, 16), (true, true, 0)]
        {
            let request = ModeRequest { without_blocks, long_lba, ..PLAIN };
            let ten = sense(&config, Form::Ten, request).unwrap();
            assert_eq!(usize::from(u16::from_be_bytes([ten[0], ten[1]])) + 2, ten.len());
            assert_eq!(ten.len(), 8 + blocks + 56);
            assert_eq!(usize::from(ten[7]), blocks);
        }
    }

    #[test]
    fn the_cache_setting_is_reported_and_read_only() {
        let of = |config: &DiskConfig, control| {
            let request = ModeRequest { without_blocks: true, page: CACHING, control, ..PLAIN };
            sense(config, Form::Six, request).unwrap()[4 + 2]
        };
        let on = DiskConfig::default();
        let off = DiskConfig { write_cache: false, ..on.clone() };
        assert_eq!(of(&on, PageControl::Current), 4);
        assert_eq!(of(&on, PageControl::Changeable), 0);
        assert_eq!(of(&off, PageControl::Default), 0);
    }

    #[test]
    fn unsupported_mode_page_is_refused() {
        let config = DiskConfig::default();
        let refused = |request| sense(&config, Form::Six, request).unwrap_err();
        let saved = ModeRequest { control: PageControl::Saved, ..PLAIN };
        assert_eq!(refused(saved), Sense::SAVING_PARAMETERS_NOT_SUPPORTED);
        let page = ModeRequest { page: 0x02, ..PLAIN };
        assert_eq!(refused(page), Sense::invalid_field(2, Some(5)));
        let subpage = ModeRequest { subpage: 1, ..PLAIN };
        assert_eq!(refused(subpage), Sense::invalid_field(3, None));
    }
}
