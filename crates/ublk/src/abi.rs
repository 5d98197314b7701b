//! The bytes of the interface of Linux's ublk driver: `include/uapi/linux/ublk_cmd.h`.
//!
//! All numbers have the byte order of the machine, because the kernel that reads them runs on it.

/// The device for commands.
pub const CONTROL_PATH: &str = "/dev/ublk-control";
/// The largest number of a device, which is a minor number.
pub const ID_MAX: u32 = (1 << 20) - 1;

/// The path of a block device.
pub fn block_path(id: u32) -> String {
    format!("/dev/ublkb{id}")
}

/// The path of the character device of a block device.
pub fn char_path(id: u32) -> String {
    format!("/dev/ublkc{id}")
}

/// Features of a device (`UBLK_F_*`).
pub mod feature {
    /// A device outlives its server: requests wait for another one.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// The next server gets the requests again that the killed one had.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands have the numbers of ioctls.
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// The server copies data by reads and writes of `/dev/ublkcN`.
    pub const USER_COPY: u64 = 1 << 7;
    /// The device has zones.
    pub const ZONED: u64 = 1 << 8;
    /// The driver changes the capacity of a block device that is served.
    pub const UPDATE_SIZE: u64 = 1 << 10;
}

/// Operations of a descriptor (`UBLK_IO_OP_*`).
pub mod op {
    #![expect(missing_docs, reason = "the names are those of the kernel")]
    pub const READ: u8 = 0;
    pub const WRITE: u8 = 1;
    pub const FLUSH: u8 = 2;
    pub const DISCARD: u8 = 3;
    pub const WRITE_ZEROES: u8 = 5;
    pub const ZONE_OPEN: u8 = 10;
    pub const ZONE_CLOSE: u8 = 11;
    pub const ZONE_FINISH: u8 = 12;
    pub const ZONE_APPEND: u8 = 13;
    pub const ZONE_RESET_ALL: u8 = 14;
    pub const ZONE_RESET: u8 = 15;
    pub const REPORT_ZONES: u8 = 18;
}

/// Modifiers of a descriptor (`UBLK_IO_F_*`); the others concern retries and accounting.
pub mod io_flag {
    /// The data are durable when the request is complete.
    pub const FUA: u32 = 1 << 13;
    /// A write-zeroes must not deallocate.
    pub const NOUNMAP: u32 = 1 << 15;
}

/// The result of a fetch that the kernel has cancelled (`UBLK_IO_RES_ABORT`).
pub const ABORTED: i32 = -19;
/// The most requests of one queue (`UBLK_MAX_QUEUE_DEPTH`), for which the mapping has room.
pub const MAPPED_DEPTH: u64 = 4096;
/// The length of a descriptor, in bytes.
pub const DESCRIPTOR_BYTES: usize = 24;
/// The length of a command for `/dev/ublkcN`, in bytes.
pub const IO_COMMAND_BYTES: usize = 16;
/// The length of the data area of a command for `/dev/ublk-control`, of which the first 32 bytes
/// have a meaning.
pub const CONTROL_COMMAND_BYTES: usize = 80;
/// The length of the description of a device, in bytes.
pub const INFO_BYTES: usize = 64;
/// The length of the parameters of a device up to those of zones, in bytes.
pub const PARAMS_BYTES: usize = 112;

/// `UBLK_U_IO_FETCH_REQ`: take the next request with a tag.
pub const FETCH: u32 = ioctl(3, 0x20, IO_COMMAND_BYTES as u32);
/// `UBLK_U_IO_COMMIT_AND_FETCH_REQ`: complete a request, and take the next one with its tag.
pub const COMMIT_AND_FETCH: u32 = ioctl(3, 0x21, IO_COMMAND_BYTES as u32);

/// `_IOC` of Linux for the type `u`. `direction`: 2 to read, 3 to write and read.
const fn ioctl(direction: u32, number: u32, len: u32) -> u32 {
    direction << 30 | len << 16 | (b'u' as u32) << 8 | number
}

/// The position in `/dev/ublkcN` of the data of a request.
pub const fn data_offset(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + ((queue as u64) << 41) + ((tag as u64) << 25)
}

/// A command for `/dev/ublk-control`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlCommand {
    /// Describe a device.
    GetDevInfo,
    /// Make a device, which has no block device yet.
    AddDev,
    /// Delete a device; wait until its number is free.
    DelDev,
    /// Make the block device, once all requests are fetched.
    StartDev,
    /// Remove the block device, and cancel all fetches.
    StopDev,
    /// Set the parameters of a device that is not started.
    SetParams,
    /// Get the parameters.
    GetParams,
    /// Make a device ready for the fetches of another server.
    StartUserRecovery,
    /// Let the block device go on, once all requests are fetched.
    EndUserRecovery,
    /// Get the features of the driver.
    GetFeatures,
    /// Delete a device without waiting.
    DelDevAsync,
    /// Change the capacity of a block device that is served.
    UpdateSize,
}

impl ControlCommand {
    /// The number of the command.
    pub const fn code(self) -> u32 {
        let (direction, number) = match self {
            ControlCommand::GetDevInfo => (2, 0x02),
            ControlCommand::AddDev => (3, 0x04),
            ControlCommand::DelDev => (3, 0x05),
            ControlCommand::StartDev => (3, 0x06),
            ControlCommand::StopDev => (3, 0x07),
            ControlCommand::SetParams => (3, 0x08),
            ControlCommand::GetParams => (2, 0x09),
            ControlCommand::StartUserRecovery => (3, 0x10),
            ControlCommand::EndUserRecovery => (3, 0x11),
            ControlCommand::GetFeatures => (2, 0x13),
            ControlCommand::DelDevAsync => (2, 0x14),
            ControlCommand::UpdateSize => (3, 0x15),
        };
        ioctl(direction, number, 32)
    }

    /// The verb for messages: "cannot VERB ublk device 0".
    pub const fn verb(self) -> &'static str {
        match self {
            ControlCommand::GetDevInfo => "look at",
            ControlCommand::AddDev => "add",
            ControlCommand::DelDev | ControlCommand::DelDevAsync => "delete",
            ControlCommand::StartDev => "start",
            ControlCommand::StopDev => "stop",
            ControlCommand::SetParams => "set the parameters of",
            ControlCommand::GetParams => "get the parameters of",
            ControlCommand::StartUserRecovery => "begin the recovery of",
            ControlCommand::EndUserRecovery => "end the recovery of",
            ControlCommand::GetFeatures => "get the features for",
            ControlCommand::UpdateSize => "change the size of",
        }
    }
}

/// The data of a control command (`struct ublksrv_ctrl_cmd`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlData {
    /// The device.
    pub id: u32,
    /// The length of the buffer, in bytes.
    pub len: u16,
    /// The address of the buffer.
    pub address: u64,
    /// The process of the server, for a start and the end of a recovery; the capacity in sectors,
    /// for a change of the size.
    pub inline: u64,
}

impl ControlData {
    /// Prints the data of a command.
    pub fn print(&self) -> [u8; CONTROL_COMMAND_BYTES] {
        let mut bytes = [0; CONTROL_COMMAND_BYTES];
        put(&mut bytes, 0, self.id.to_ne_bytes());
        // The command is for no queue.
        put(&mut bytes, 4, u16::MAX.to_ne_bytes());
        put(&mut bytes, 6, self.len.to_ne_bytes());
        put(&mut bytes, 8, self.address.to_ne_bytes());
        put(&mut bytes, 16, self.inline.to_ne_bytes());
        bytes
    }
}

/// The state of a device (`UBLK_S_DEV_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// There is no block device: it is not started, or it was stopped.
    Dead,
    /// A server serves the block device.
    Live,
    /// The server has gone; requests wait for another one.
    Quiesced,
    /// The server has gone; requests fail until another one comes.
    FailIo,
    /// A state of a later kernel.
    Unknown(u16),
}

impl DeviceState {
    /// The name in listings.
    pub const fn name(self) -> &'static str {
        match self {
            DeviceState::Dead => "dead",
            DeviceState::Live => "live",
            DeviceState::Quiesced => "quiesced",
            DeviceState::FailIo => "failing",
            DeviceState::Unknown(_) => "unknown",
        }
    }

    fn of(number: u16) -> DeviceState {
        match number {
            0 => DeviceState::Dead,
            1 => DeviceState::Live,
            2 => DeviceState::Quiesced,
            3 => DeviceState::FailIo,
            other => DeviceState::Unknown(other),
        }
    }
}

/// The description of a device (`struct ublksrv_ctrl_dev_info`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevInfo {
    /// The number of queues.
    pub queues: u16,
    /// The requests of a queue.
    pub depth: u16,
    /// The state; ignored by [`ControlCommand::AddDev`].
    pub state: DeviceState,
    /// The longest request, in bytes.
    pub io_bytes_max: u32,
    /// The number of the device; [`u32::MAX`] lets the kernel choose one.
    pub id: u32,
    /// The process of the server; not positive if there is none.
    pub pid: i32,
    /// The features: [`feature`].
    pub features: u64,
    /// A number of the server's own, which the driver keeps (`ublksrv_flags`).
    pub identity: u64,
}

impl DevInfo {
    /// Parses a description.
    pub fn parse(bytes: &[u8; INFO_BYTES]) -> DevInfo {
        DevInfo {
            queues: u16::from_ne_bytes(get(bytes, 0)),
            depth: u16::from_ne_bytes(get(bytes, 2)),
            state: DeviceState::of(u16::from_ne_bytes(get(bytes, 4))),
            io_bytes_max: u32::from_ne_bytes(get(bytes, 8)),
            id: u32::from_ne_bytes(get(bytes, 12)),
            pid: i32::from_ne_bytes(get(bytes, 16)),
            features: u64::from_ne_bytes(get(bytes, 24)),
            identity: u64::from_ne_bytes(get(bytes, 32)),
        }
    }

    /// Prints the description of a device that is to be added.
    pub fn print(&self) -> [u8; INFO_BYTES] {
        let mut bytes = [0; INFO_BYTES];
        put(&mut bytes, 0, self.queues.to_ne_bytes());
        put(&mut bytes, 2, self.depth.to_ne_bytes());
        put(&mut bytes, 8, self.io_bytes_max.to_ne_bytes());
        put(&mut bytes, 12, self.id.to_ne_bytes());
        put(&mut bytes, 16, self.pid.to_ne_bytes());
        put(&mut bytes, 24, self.features.to_ne_bytes());
        put(&mut bytes, 32, self.identity.to_ne_bytes());
        bytes
    }
}

/// The parameters of a device (`struct ublk_params`). Lengths are in sectors of 512 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Params {
    /// Whether the device refuses all changes.
    pub read_only: bool,
    /// Whether writes may be lost that no flush has followed.
    pub write_cache: bool,
    /// Whether the device executes FUA itself.
    pub fua: bool,
    /// The binary logarithm of the length of a logical block in bytes.
    pub logical_shift: u8,
    /// The binary logarithm of the length of a physical block in bytes.
    pub physical_shift: u8,
    /// The longest request.
    pub sectors_max: u32,
    /// The length of a zone, or a boundary at which the kernel splits requests; 0: none.
    pub chunk_sectors: u32,
    /// The capacity.
    pub sectors: u64,
    /// The longest discard; 0: none.
    pub discard_sectors_max: u32,
    /// The longest write-zeroes; 0: none.
    pub write_zeroes_sectors_max: u32,
    /// The limits of zones, for a zoned device.
    pub zones: Option<ZoneParams>,
}

/// The limits of a zoned device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZoneParams {
    /// The most open zones; 0: no limit.
    pub open_max: u32,
    /// The most active zones; 0: no limit.
    pub active_max: u32,
    /// The longest append.
    pub append_sectors_max: u32,
}

/// `UBLK_PARAM_TYPE_*`.
const BASIC: u32 = 1 << 0;
const DISCARD: u32 = 1 << 1;
const ZONED: u32 = 1 << 3;

/// `UBLK_ATTR_*`.
const READ_ONLY: u32 = 1 << 0;
const VOLATILE_CACHE: u32 = 1 << 2;
const FUA: u32 = 1 << 3;

impl Params {
    /// Parses parameters that the kernel has.
    pub fn parse(bytes: &[u8; PARAMS_BYTES]) -> Params {
        let word = |at| u32::from_ne_bytes(get(bytes, at));
        let (types, attributes) = (word(4), word(8));
        let of = |kind: u32, at| if types & kind != 0 { word(at) } else { 0 };
        Params {
            read_only: attributes & READ_ONLY != 0,
            write_cache: attributes & VOLATILE_CACHE != 0,
            fua: attributes & FUA != 0,
            logical_shift: bytes[12],
            physical_shift: bytes[13],
            sectors_max: word(16),
            chunk_sectors: word(20),
            sectors: u64::from_ne_bytes(get(bytes, 24)),
            discard_sectors_max: of(DISCARD, 48),
            write_zeroes_sectors_max: of(DISCARD, 52),
            zones: (types & ZONED != 0).then(|| ZoneParams {
                open_max: word(76),
                active_max: word(80),
                append_sectors_max: word(84),
            }),
        }
    }

    /// Prints parameters.
    pub fn print(&self) -> [u8; PARAMS_BYTES] {
        let mut bytes = [0; PARAMS_BYTES];
        let discards = self.discard_sectors_max > 0 || self.write_zeroes_sectors_max > 0;
        let kind = |has: bool, kind: u32| if has { kind } else { 0 };
        let types = BASIC | kind(discards, DISCARD) | kind(self.zones.is_some(), ZONED);
        let attributes = kind(self.read_only, READ_ONLY)
            | kind(self.write_cache, VOLATILE_CACHE)
            | kind(self.fua, FUA);
        put(&mut bytes, 0, (PARAMS_BYTES as u32).to_ne_bytes());
        put(&mut bytes, 4, types.to_ne_bytes());
        put(&mut bytes, 8, attributes.to_ne_bytes());
        // The preferred and the smallest lengths of I/O are those of a physical block.
        let shifts = [self.logical_shift, self.physical_shift];
        put(&mut bytes, 12, [shifts[0], shifts[1], shifts[1], shifts[1]]);
        put(&mut bytes, 16, self.sectors_max.to_ne_bytes());
        put(&mut bytes, 20, self.chunk_sectors.to_ne_bytes());
        put(&mut bytes, 24, self.sectors.to_ne_bytes());
        if discards {
            put(&mut bytes, 44, (1_u32 << self.logical_shift).to_ne_bytes());
            put(&mut bytes, 48, self.discard_sectors_max.to_ne_bytes());
            put(&mut bytes, 52, self.write_zeroes_sectors_max.to_ne_bytes());
            // The driver takes one segment.
            put(&mut bytes, 56, u16::from(self.discard_sectors_max > 0).to_ne_bytes());
        }
        if let Some(zones) = &self.zones {
            put(&mut bytes, 76, zones.open_max.to_ne_bytes());
            put(&mut bytes, 80, zones.active_max.to_ne_bytes());
            put(&mut bytes, 84, zones.append_sectors_max.to_ne_bytes());
        }
        bytes
    }

    /// The name of the first parameter in which two devices differ.
    pub fn difference(&self, other: &Params) -> Option<&'static str> {
        let pairs = [
            ("capacity", self.sectors == other.sectors),
            ("logical block size", self.logical_shift == other.logical_shift),
            ("physical block size", self.physical_shift == other.physical_shift),
            ("read-only mode", self.read_only == other.read_only),
            ("write cache", (self.write_cache, self.fua) == (other.write_cache, other.fua)),
            ("zones", self.zones == other.zones),
            ("longest request", self.sectors_max == other.sectors_max),
            ("chunk size", self.chunk_sectors == other.chunk_sectors),
            ("longest discard", self.discard_sectors_max == other.discard_sectors_max),
        ];
        let named = pairs.iter().find(|(_, is_equal)| !is_equal).map(|(name, _)| *name);
        named.or((self != other).then_some("longest write-zeroes"))
    }
}

/// A descriptor: what the kernel asks for (`struct ublksrv_io_desc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The operation: one of [`op`].
    pub op: u8,
    /// The modifiers: [`io_flag`].
    pub flags: u32,
    /// The length in sectors; the number of zones of a report.
    pub count: u32,
    /// The first sector.
    pub sector: u64,
}

impl Descriptor {
    /// Parses a descriptor.
    pub fn parse(bytes: &[u8; DESCRIPTOR_BYTES]) -> Descriptor {
        let word = u32::from_ne_bytes(get(bytes, 0));
        Descriptor {
            op: word as u8, // The low 8 bits.
            flags: word & !0xff,
            count: u32::from_ne_bytes(get(bytes, 4)),
            sector: u64::from_ne_bytes(get(bytes, 8)),
        }
    }
}

/// Prints a command for `/dev/ublkcN` (`struct ublksrv_io_cmd`). `result` is the number of bytes or
/// a negative error number, `sector` where the data of an append are.
pub fn io_command(queue: u16, tag: u16, result: i32, sector: u64) -> [u8; IO_COMMAND_BYTES] {
    let mut bytes = [0; IO_COMMAND_BYTES];
    put(&mut bytes, 0, queue.to_ne_bytes());
    put(&mut bytes, 2, tag.to_ne_bytes());
    put(&mut bytes, 4, result.to_ne_bytes());
    put(&mut bytes, 8, sector.to_ne_bytes());
    bytes
}

fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|byte| bytes[at + byte])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_of_the_kernel() {
        assert_eq!(FETCH, 0xc010_7520);
        assert_eq!(COMMIT_AND_FETCH, 0xc010_7521);
        assert_eq!(ControlCommand::AddDev.code(), 0xc020_7504);
        assert_eq!(ControlCommand::GetFeatures.code(), 0x8020_7513);
        assert_eq!(ControlCommand::UpdateSize.code(), 0xc020_7515);
        assert_eq!(data_offset(1, 3), 0x8000_0000 + (1 << 41) + (3 << 25));
    }

    #[test]
    fn a_description_round_trips_without_its_state() {
        let info = DevInfo {
            queues: 2,
            depth: 128,
            state: DeviceState::Dead,
            io_bytes_max: 1 << 19,
            id: u32::MAX,
            pid: 7,
            features: feature::USER_COPY | feature::ZONED,
            identity: 0x0123_4567_89ab_cdef,
        };
        let mut bytes = info.print();
        assert_eq!(DevInfo::parse(&bytes), info);
        for (number, state) in [(1, DeviceState::Live), (2, DeviceState::Quiesced)] {
            bytes[4] = number;
            assert_eq!(DevInfo::parse(&bytes).state, state);
        }
        bytes[5] = 1;
        assert_eq!(DevInfo::parse(&bytes).state.name(), "unknown");
    }

    #[test]
    fn parameters_round_trip_and_differences_have_names() {
        let zones = ZoneParams { open_max: 4, active_max: 6, append_sectors_max: 1024 };
        let plain = Params {
            write_cache: true,
            fua: true,
            logical_shift: 12,
            physical_shift: 14,
            sectors_max: 1024,
            sectors: 1 << 21,
            discard_sectors_max: 8,
            ..Params::default()
        };
        let zoned = Params {
            read_only: true,
            discard_sectors_max: 0,
            write_zeroes_sectors_max: 64,
            chunk_sectors: 1 << 19,
            zones: Some(zones),
            ..plain
        };
        for params in [plain, zoned, Params { write_zeroes_sectors_max: 0, ..zoned }] {
            assert_eq!(Params::parse(&params.print()), params);
            assert_eq!(params.difference(&params), None);
        }
        // The offsets are those of a C compiler for the structures of the header.
        let bytes = zoned.print();
        assert_eq!((bytes[0], bytes[4], bytes[8], bytes[12]), (112, 1 | 2 | 8, 1 | 4 | 8, 12));
        assert_eq!((bytes[56], bytes[52], bytes[76], bytes[80]), (0, 64, 4, 6));
        assert_eq!(plain.difference(&zoned), Some("read-only mode"));
        assert_eq!(plain.difference(&Params { sectors: 8, ..plain }), Some("capacity"));
        let other = Params { write_zeroes_sectors_max: 1, ..plain };
        assert_eq!(plain.difference(&other), Some("longest write-zeroes"));
    }

    #[test]
    fn a_descriptor_has_its_operation_in_the_low_byte() {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        put(&mut bytes, 0, (u32::from(op::WRITE) | io_flag::FUA).to_ne_bytes());
        put(&mut bytes, 4, 8_u32.to_ne_bytes());
        put(&mut bytes, 8, 4096_u64.to_ne_bytes());
        let wanted = Descriptor { op: op::WRITE, flags: io_flag::FUA, count: 8, sector: 4096 };
        assert_eq!(Descriptor::parse(&bytes), wanted);
    }
}
