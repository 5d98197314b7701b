//! `lab`: measurements and reports; what it does is in the lab's own crate.

use std::io::Write;

use blockyard_lab::command::{self, CommandError, LabCommand};

use crate::failure::{Code, Failure};

pub(crate) fn run(command: &LabCommand, out: &mut impl Write) -> Result<(), Failure> {
    command::run(command, out).map_err(|error| match error {
        CommandError::Usage(message) => Failure::new(Code::Usage, message),
        CommandError::Interrupted(message) => Failure::new(Code::Interrupted, message),
        CommandError::Output(error) => Failure::from(error),
        other => Failure::new(Code::Failed, other),
    })
}
