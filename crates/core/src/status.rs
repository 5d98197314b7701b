//! How an I/O ended: one byte, with the names of Linux's `blk_status_t`.

use std::fmt;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $linux:literal, $errno:literal, $errno_name:literal;)*) => {
        /// How an I/O ended. The names are Linux's (`blk_status_t`, include/linux/blk_types.h)
        /// without the prefix `BLK_STS_`; [`Status::errno`] is what Linux maps them to.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Status {
            $($(#[$doc])* $name,)*
        }

        impl Status {
            /// Every status, in declaration order.
            pub const ALL: &'static [Status] = &[$(Status::$name),*];

            /// Linux's name without `BLK_STS_`, e.g. `ZONE_OPEN_RESOURCE`.
            pub const fn name(self) -> &'static str {
                match self { $(Status::$name => $linux,)* }
            }

            /// The Linux error number, 0 for [`Status::Ok`].
            pub const fn errno(self) -> i32 {
                match self { $(Status::$name => $errno,)* }
            }

            /// The error number's name, e.g. `EIO`; empty for [`Status::Ok`].
            pub const fn errno_name(self) -> &'static str {
                match self { $(Status::$name => $errno_name,)* }
            }
        }
    };
}

statuses! {
    /// The I/O succeeded.
    Ok = "OK", 0, "";
    /// The device has no such operation.
    NotSupp = "NOTSUPP", 95, "EOPNOTSUPP";
    /// The device did not answer in time.
    Timeout = "TIMEOUT", 110, "ETIMEDOUT";
    /// No space left to store the data.
    NoSpc = "NOSPC", 28, "ENOSPC";
    /// The link to the device failed.
    Transport = "TRANSPORT", 67, "ENOLINK";
    /// The device reports a critical fault inside it.
    Target = "TARGET", 121, "EREMOTEIO";
    /// Another host holds a reservation.
    ResvConflict = "RESV_CONFLICT", 52, "EBADE";
    /// The medium is damaged at this position.
    Medium = "MEDIUM", 61, "ENODATA";
    /// Protection information does not match the data.
    Protection = "PROTECTION", 84, "EILSEQ";
    /// No memory for the request.
    Resource = "RESOURCE", 12, "ENOMEM";
    /// Any other failure, and a request beyond the end of the device.
    IoErr = "IOERR", 5, "EIO";
    /// The request could not be started without waiting.
    Again = "AGAIN", 11, "EAGAIN";
    /// The device lacks a resource that its other requests hold.
    DevResource = "DEV_RESOURCE", 16, "EBUSY";
    /// Too many zones are open.
    ZoneOpenResource = "ZONE_OPEN_RESOURCE", 109, "ETOOMANYREFS";
    /// Too many zones are active.
    ZoneActiveResource = "ZONE_ACTIVE_RESOURCE", 75, "EOVERFLOW";
    /// The device is gone.
    Offline = "OFFLINE", 19, "ENODEV";
    /// A command's duration limit was exceeded.
    DurationLimit = "DURATION_LIMIT", 62, "ETIME";
    /// The request is invalid: misaligned, of length 0, or without a buffer.
    Inval = "INVAL", 22, "EINVAL";
}

impl Status {
    /// The status that a byte encodes, or `None`.
    pub fn from_u8(byte: u8) -> Option<Status> {
        Status::ALL.get(usize::from(byte)).copied()
    }

    /// The status with this Linux name, with or without `BLK_STS_`, in any case.
    pub fn from_name(name: &str) -> Option<Status> {
        let upper = name.to_ascii_uppercase();
        let short = upper.strip_prefix("BLK_STS_").unwrap_or(&upper);
        Status::ALL.iter().copied().find(|status| status.name() == short)
    }

    /// Whether this is [`Status::Ok`].
    #[inline]
    pub const fn is_ok(self) -> bool {
        matches!(self, Status::Ok)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_names_round_trip() {
        for (index, status) in Status::ALL.iter().enumerate() {
            assert_eq!(*status as usize, index);
            assert_eq!(Status::from_u8(index as u8), Some(*status));
            assert_eq!(Status::from_name(status.name()), Some(*status));
            assert_eq!(Status::from_name(&format!("blk_sts_{}", status.name())), Some(*status));
        }
        assert_eq!(Status::from_u8(Status::ALL.len() as u8), None);
        assert_eq!(Status::from_name("FINE"), None);
    }

    #[test]
    fn only_ok_has_no_errno() {
        for status in Status::ALL {
            assert_eq!(status.errno() == 0, status.is_ok());
            assert_eq!(status.errno_name().is_empty(), status.is_ok());
        }
        // Measured on Linux 6.1 to 7.2 with null_blk.
        assert_eq!(Status::ZoneOpenResource.errno(), 109);
        assert_eq!(Status::ZoneActiveResource.errno(), 75);
    }
}
