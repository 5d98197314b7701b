//! An NBD client for these tests: many requests in flight over one connection, with a record of the
//! answers up to the last one before the server died.
//!
//! The protocol is that of the NBD project's doc/proto.md: fixed newstyle, `NBD_OPT_GO`, simple
//! replies.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;

/// `NBD_CMD_FLAG_FUA`.
const FUA: u16 = 1;

/// The timeout of an answer; no live server takes as long.
const PATIENCE: Duration = Duration::from_secs(60);

/// The type of a request, by its number in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Command {
    Read = 0,
    Write = 1,
    Flush = 3,
    Trim = 4,
}

/// A connection to one export.
pub(crate) struct Client {
    stream: UnixStream,
    /// The size of the export in bytes.
    pub(crate) size: u64,
}

/// The server's reply to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) cookie: u64,
    /// 0, or an error number.
    pub(crate) error: u32,
}

fn bytes<const LEN: usize>(stream: &mut UnixStream) -> io::Result<[u8; LEN]> {
    let mut bytes = [0; LEN];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn word(stream: &mut UnixStream) -> io::Result<u32> {
    bytes(stream).map(u32::from_be_bytes)
}

impl Client {
    pub(crate) fn connect(socket: &str, export: &str) -> io::Result<Client> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        // Two magic numbers and the server's flags.
        let _: [u8; 18] = bytes(&mut stream)?;
        // Fixed newstyle, and no zeros after a reply to an option.
        stream.write_all(&3u32.to_be_bytes())?;
        let name = export.as_bytes();
        let mut option = OPTION_MAGIC.to_be_bytes().to_vec();
        option.extend(OPT_GO.to_be_bytes());
        option.extend((name.len() as u32 + 6).to_be_bytes());
        option.extend((name.len() as u32).to_be_bytes());
        option.extend(name);
        option.extend([0, 0]);
        stream.write_all(&option)?;
        let mut size = 0;
        loop {
            assert_eq!(bytes(&mut stream).map(u64::from_be_bytes)?, OPTION_REPLY_MAGIC);
            let _option = word(&mut stream)?;
            let kind = word(&mut stream)?;
            let mut body = vec![0; word(&mut stream)? as usize];
            stream.read_exact(&mut body)?;
            match kind {
                REP_ACK => return Ok(Client { stream, size }),
                // Information 0: size and flags of the export.
                REP_INFO if body.len() >= 10 && body[..2] == [0, 0] => {
                    size = u64::from_be_bytes(body[2..10].try_into().unwrap());
                }
                REP_INFO => {}
                _ => return Err(io::Error::other(format!("`{export}` is refused: {kind:#x}"))),
            }
        }
    }

    fn request(
        &mut self,
        command: Command,
        fua: bool,
        cookie: u64,
        offset: u64,
        len: u32,
    ) -> Vec<u8> {
        let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
        request.extend(if fua { FUA } else { 0 }.to_be_bytes());
        request.extend((command as u16).to_be_bytes());
        request.extend(cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(len.to_be_bytes());
        request
    }

    /// Sends a write without waiting for its answer.
    pub(crate) fn write(
        &mut self,
        cookie: u64,
        offset: u64,
        bytes: &[u8],
        fua: bool,
    ) -> io::Result<()> {
        let mut request = self.request(Command::Write, fua, cookie, offset, bytes.len() as u32);
        request.extend(bytes);
        self.stream.write_all(&request)
    }

    /// Sends a request without data: a flush or a trim.
    pub(crate) fn send(
        &mut self,
        command: Command,
        cookie: u64,
        offset: u64,
        len: u32,
        fua: bool,
    ) -> io::Result<()> {
        let request = self.request(command, fua, cookie, offset, len);
        self.stream.write_all(&request)
    }

    /// Waits for the next answer, which must not be one to a read.
    pub(crate) fn answer(&mut self) -> io::Result<Answer> {
        let magic = word(&mut self.stream)?;
        assert_eq!(magic, REPLY_MAGIC, "a simple reply");
        let error = word(&mut self.stream)?;
        let cookie = bytes(&mut self.stream).map(u64::from_be_bytes)?;
        Ok(Answer { cookie, error })
    }

    /// Sends a flush and waits for its answer; no other request is in flight.
    pub(crate) fn flush(&mut self) -> io::Result<Answer> {
        self.send(Command::Flush, 0, 0, 0, false)?;
        self.answer()
    }

    /// Reads; no other request is in flight. An error in the reply is returned as an error.
    pub(crate) fn read(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.send(Command::Read, 0, offset, into.len() as u32, false)?;
        match self.answer()?.error {
            0 => self.stream.read_exact(into),
            number => Err(io::Error::from_raw_os_error(number as i32)),
        }
    }

    /// Reads the whole export.
    pub(crate) fn contents(&mut self) -> io::Result<Vec<u8>> {
        let mut contents = vec![0; self.size as usize];
        let parts = contents.chunks_mut(1 << 20);
        (0..).zip(parts).try_for_each(|(number, part): (u64, _)| self.read(number << 20, part))?;
        Ok(contents)
    }
}
