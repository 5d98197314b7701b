//! The table of commands that the disk knows: how each is identified, and which of its bits are
//! used. REPORT SUPPORTED OPERATION CODES reports this table.

/// The bits of byte 1 that hold the service action.
pub(crate) const SERVICE_ACTION: u8 = 0x1f;

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The command's name in the standards.
    pub name: &'static str,
    /// Byte 0.
    pub opcode: u8,
    /// Distinguishes commands with the same operation code.
    pub service_action: Option<u8>,
    /// The usage map: the command's length, and for each byte the bits that are used or may be set;
    /// any other bit must be 0. Operation code and service action appear as their values: SPC-5
    /// 6.35.3.
    pub usage: &'static [u8],
}

macro_rules! operations {
    ($(
        $constant:ident: $name:literal, [$opcode:literal $(, $usage:literal)*]
            $(, $action:literal)?;
    )*) => {
        $(#[doc = $name] pub const $constant: Operation = Operation {
            name: $name,
            opcode: $opcode,
            service_action: operations!(@action $($action)?),
            usage: &[$opcode $(, $usage)*],
        };)*

        /// All commands, by operation code and service action.
        pub const OPERATIONS: &[Operation] = &[$($constant),*];
    };
    (@action) => { None };
    (@action $action:literal) => { Some($action) };
}

operations! {
    TEST_UNIT_READY: "TEST UNIT READY", [0x00, 0, 0, 0, 0, 0];
    REQUEST_SENSE: "REQUEST SENSE", [0x03, 0x01, 0, 0, 0xff, 0];
    INQUIRY: "INQUIRY", [0x12, 0x01, 0xff, 0xff, 0xff, 0];
    MODE_SENSE_6: "MODE SENSE(6)", [0x1a, 0x08, 0xff, 0xff, 0xff, 0];
    READ_CAPACITY_10: "READ CAPACITY(10)", [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    READ_10: "READ(10)", [0x28, 0x18, 0xff, 0xff, 0xff, 0xff, 0x3f, 0xff, 0xff, 0];
    WRITE_10: "WRITE(10)", [0x2a, 0x18, 0xff, 0xff, 0xff, 0xff, 0x3f, 0xff, 0xff, 0];
    SYNCHRONIZE_CACHE_10: "SYNCHRONIZE CACHE(10)",
        [0x35, 0x02, 0xff, 0xff, 0xff, 0xff, 0x3f, 0xff, 0xff, 0];
    WRITE_SAME_10: "WRITE SAME(10)", [0x41, 0x08, 0xff, 0xff, 0xff, 0xff, 0x3f, 0xff, 0xff, 0];
    UNMAP: "UNMAP", [0x42, 0, 0, 0, 0, 0, 0x3f, 0xff, 0xff, 0];
    MODE_SENSE_10: "MODE SENSE(10)", [0x5a, 0x18, 0xff, 0xff, 0, 0, 0, 0xff, 0xff, 0];
    READ_16: "READ(16)", [
        0x88, 0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 0
    ];
    WRITE_16: "WRITE(16)", [
        0x8a, 0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 0
    ];
    SYNCHRONIZE_CACHE_16: "SYNCHRONIZE CACHE(16)", [
        0x91, 0x02, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 0
    ];
    WRITE_SAME_16: "WRITE SAME(16)", [
        0x93, 0x09, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 0
    ];
    CLOSE_ZONE: "CLOSE ZONE", [
        0x94, 0x1f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0x01, 0x01, 0
    ], 0x01;
    FINISH_ZONE: "FINISH ZONE", [
        0x94, 0x1f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0x01, 0x01, 0
    ], 0x02;
    OPEN_ZONE: "OPEN ZONE", [
        0x94, 0x1f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0x01, 0x01, 0
    ], 0x03;
    RESET_WRITE_POINTER: "RESET WRITE POINTER", [
        0x94, 0x1f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0x01, 0x01, 0
    ], 0x04;
    REPORT_ZONES: "REPORT ZONES", [
        0x95, 0x1f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xbf, 0
    ], 0x00;
    READ_CAPACITY_16: "READ CAPACITY(16)", [
        0x9e, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0
    ], 0x10;
    REPORT_LUNS: "REPORT LUNS", [0xa0, 0, 0xff, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0];
    REPORT_SUPPORTED_OPERATION_CODES: "REPORT SUPPORTED OPERATION CODES",
        [0xa3, 0x1f, 0x87, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0], 0x0c;
    READ_12: "READ(12)", [0xa8, 0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 0];
    WRITE_12: "WRITE(12)", [0xaa, 0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 0];
}

impl Operation {
    /// The commands with an operation code.
    pub fn with_opcode(opcode: u8) -> impl Iterator<Item = &'static Operation> {
        OPERATIONS.iter().filter(move |operation| operation.opcode == opcode)
    }

    /// A byte of the usage map, as REPORT SUPPORTED OPERATION CODES reports it.
    pub fn usage_byte(&self, at: usize) -> u8 {
        match self.service_action {
            Some(action) if at == 1 => self.usage[1] & !SERVICE_ACTION | action,
            _ => self.usage[at],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stands_in_its_place_with_the_length_of_its_group() {
        let key = |operation: &Operation| (operation.opcode, operation.service_action);
        assert!(OPERATIONS.is_sorted_by(|a, b| key(a) < key(b)));
        for operation in OPERATIONS {
            // SPC-5 4.2.5.1: the operation code determines the command's length.
            let len = match operation.opcode >> 5 {
                0 => 6,
                1 | 2 => 10,
                4 => 16,
                5 => 12,
                group => panic!("{}: group {group}", operation.name),
            };
            assert_eq!(operation.usage.len(), len, "{}", operation.name);
            assert_eq!(operation.usage[0], operation.opcode);
            assert_eq!(operation.usage[len - 1], 0, "the control byte");
            let has_action = operation.service_action.is_some();
            let bits = operation.usage[1] & SERVICE_ACTION == SERVICE_ACTION;
            assert_eq!(has_action, bits, "{}", operation.name);
        }
    }
}
