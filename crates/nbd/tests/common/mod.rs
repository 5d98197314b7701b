//! A raw NBD client that sends whatever a test needs, and a disk to serve.
#![allow(dead_code)] // Each test program uses a part.
#![allow(clippy::unwrap_used)] // A test may.

pub(crate) mod ram;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::Disk;
use blockyard_nbd::wire::{self, Style, command_flag, option, option_reply};
use blockyard_nbd::{Endpoint, ExportOptions, Exports, Server, ServerOptions};

/// The timeout of a server that sends nothing, after which the test fails.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// A directory of its own, removed on drop.
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    pub(crate) fn new() -> Directory {
        use std::collections::hash_map::RandomState;
        use std::hash::BuildHasher;
        let unique = RandomState::new().hash_one(0);
        let path = std::env::temp_dir().join(format!("blockyard-nbd-{unique:x}"));
        std::fs::create_dir(&path).unwrap();
        Directory(path)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.join("nbd.sock")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server on a unix socket with one export, `disk`.
pub(crate) struct Fixture {
    pub(crate) server: Option<Server>,
    pub(crate) exports: Arc<Exports>,
    pub(crate) directory: Directory,
}

impl Fixture {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Fixture {
        Fixture::with(disk, ExportOptions::default(), ServerOptions::default())
    }

    pub(crate) fn with(
        disk: Arc<dyn Disk>,
        export: ExportOptions,
        options: ServerOptions,
    ) -> Fixture {
        let directory = Directory::new();
        let exports = Exports::new();
        exports.add("disk", disk, export).unwrap();
        let endpoint = Endpoint::Unix(directory.socket().into());
        let server = Server::start(Arc::clone(&exports), endpoint, options).unwrap();
        Fixture { server: Some(server), exports, directory }
    }

    pub(crate) fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    /// A new connection on which nothing was sent.
    pub(crate) fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.directory.socket()).unwrap();
        stream.set_read_timeout(Some(SILENCE_MAX)).unwrap();
        stream
    }

    /// A client in transmission on `disk`.
    pub(crate) fn client(&self, style: Style) -> Client<UnixStream> {
        let mut client = Client::greet(self.connect());
        client.negotiate("disk", style, style >= Style::Structured);
        client
    }
}

/// A reply, assembled from its chunks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) cookie: u64,
    pub(crate) error: u32,
    pub(crate) text: String,
    pub(crate) data: Vec<u8>,
    /// The lengths and states of a block status reply.
    pub(crate) extents: Vec<(u64, u64)>,
}

/// A client on any stream.
pub(crate) struct Client<S> {
    pub(crate) stream: S,
    pub(crate) style: Style,
    pub(crate) export_bytes: u64,
    pub(crate) flags: u16,
    pub(crate) block_sizes: Option<(u32, u32, u32)>,
}

impl<S: Read + Write> Client<S> {
    /// Exchanges greetings.
    pub(crate) fn greet(mut stream: S) -> Client<S> {
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        assert_eq!(greeting[16..], [0, 3]);
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        Client { stream, style: Style::Simple, export_bytes: 0, flags: 0, block_sizes: None }
    }

    pub(crate) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.bytes())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes())
    }

    fn vec(&mut self, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub(crate) fn send_option(&mut self, option: u32, data: &[u8]) {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        self.stream.write_all(&bytes).unwrap();
    }

    /// One reply to an option: its type and data.
    pub(crate) fn option_reply(&mut self, option: u32) -> (u32, Vec<u8>) {
        assert_eq!(self.u64(), wire::OPTION_REPLY_MAGIC);
        assert_eq!(self.u32(), option);
        let reply = self.u32();
        let len = self.u32();
        (reply, self.vec(len.into()))
    }

    /// Sends an option and collects replies up to the last.
    pub(crate) fn option(&mut self, option: u32, data: &[u8]) -> (u32, Vec<(u32, Vec<u8>)>) {
        self.send_option(option, data);
        let mut replies = Vec::new();
        loop {
            let (reply, data) = self.option_reply(option);
            if reply == option_reply::ACK || reply >> 31 == 1 {
                return (reply, replies);
            }
            replies.push((reply, data));
        }
    }

    /// `NBD_OPT_INFO` or `NBD_OPT_GO` with all information.
    pub(crate) fn info(&mut self, option: u32, name: &str) -> u32 {
        let mut data = wire::server_data(name, "");
        data.extend_from_slice(&[0, 3, 0, 1, 0, 2, 0, 3]);
        let (reply, infos) = self.option(option, &data);
        for (kind, data) in infos {
            assert_eq!(kind, option_reply::INFO);
            match data[1] {
                0 => {
                    self.export_bytes = u64::from_be_bytes(data[2..10].try_into().unwrap());
                    self.flags = u16::from_be_bytes(data[10..12].try_into().unwrap());
                }
                3 => {
                    let at =
                        |from: usize| u32::from_be_bytes(data[from..from + 4].try_into().unwrap());
                    self.block_sizes = Some((at(2), at(6), at(10)));
                }
                _ => {}
            }
        }
        reply
    }

    pub(crate) fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
        let mut data = wire::server_data(name, "");
        data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
        for query in queries {
            data.extend_from_slice(&wire::server_data(query, ""));
        }
        data
    }

    /// Enters transmission.
    pub(crate) fn negotiate(&mut self, name: &str, style: Style, contexts: bool) {
        match style {
            Style::Simple => {}
            Style::Structured => {
                assert_eq!(self.option(option::STRUCTURED_REPLY, &[]).0, option_reply::ACK);
            }
            Style::Extended => {
                assert_eq!(self.option(option::EXTENDED_HEADERS, &[]).0, option_reply::ACK);
            }
        }
        self.style = style;
        if contexts {
            let data = Self::context_data(name, &["base:allocation"]);
            let (reply, found) = self.option(option::SET_META_CONTEXT, &data);
            assert_eq!((reply, found.len()), (option_reply::ACK, 1));
        }
        assert_eq!(self.info(option::GO, name), option_reply::ACK);
    }

    /// The bytes of a request.
    pub(crate) fn request(
        &self,
        command: u16,
        flags: u16,
        cookie: u64,
        offset: u64,
        len: u64,
    ) -> Vec<u8> {
        let extended = self.style == Style::Extended;
        let magic = if extended { wire::EXTENDED_REQUEST_MAGIC } else { wire::REQUEST_MAGIC };
        let payload = extended && command == wire::command::WRITE;
        let flags = flags | if payload { command_flag::PAYLOAD_LEN } else { 0 };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend_from_slice(&flags.to_be_bytes());
        bytes.extend_from_slice(&command.to_be_bytes());
        bytes.extend_from_slice(&cookie.to_be_bytes());
        bytes.extend_from_slice(&offset.to_be_bytes());
        if extended {
            bytes.extend_from_slice(&len.to_be_bytes());
        } else {
            bytes.extend_from_slice(&u32::try_from(len).unwrap().to_be_bytes());
        }
        bytes
    }

    pub(crate) fn send(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, len: u64) {
        let bytes = self.request(command, flags, cookie, offset, len);
        self.stream.write_all(&bytes).unwrap();
    }

    /// A request and its reply. `data_len` is how many bytes follow a simple reply.
    pub(crate) fn call(&mut self, command: u16, flags: u16, offset: u64, len: u64) -> Reply {
        let cookie = offset ^ 0x5555;
        self.send(command, flags, cookie, offset, len);
        let data_len = if command == wire::command::READ { len } else { 0 };
        let reply = self.reply(data_len);
        assert_eq!(reply.cookie, cookie);
        reply
    }

    pub(crate) fn read(&mut self, offset: u64, len: u64) -> Reply {
        self.call(wire::command::READ, 0, offset, len)
    }

    pub(crate) fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> Reply {
        let len = data.len() as u64;
        let mut bytes = self.request(wire::command::WRITE, flags, offset, offset, len);
        bytes.extend_from_slice(data);
        self.stream.write_all(&bytes).unwrap();
        self.reply(0)
    }

    /// The next reply, to any request. After a simple reply without error, reads `data_len` bytes.
    pub(crate) fn reply(&mut self, data_len: u64) -> Reply {
        let mut reply = Reply::default();
        loop {
            let magic = self.u32();
            if magic == wire::SIMPLE_REPLY_MAGIC {
                assert_ne!(self.style, Style::Extended);
                reply.error = self.u32();
                reply.cookie = self.u64();
                if reply.error == 0 && self.style == Style::Simple {
                    reply.data = self.vec(data_len);
                }
                return reply;
            }
            if self.chunk(magic, &mut reply) {
                return reply;
            }
        }
    }

    /// Reads a chunk; returns whether it is the last.
    fn chunk(&mut self, magic: u32, reply: &mut Reply) -> bool {
        let extended = self.style == Style::Extended;
        let wanted =
            if extended { wire::EXTENDED_REPLY_MAGIC } else { wire::STRUCTURED_REPLY_MAGIC };
        assert_eq!(magic, wanted);
        let flags = self.u16();
        let kind = self.u16();
        reply.cookie = self.u64();
        if extended {
            self.u64();
        }
        let len = if extended { self.u64() } else { self.u32().into() };
        match kind {
            wire::chunk::NONE => assert_eq!(len, 0),
            wire::chunk::OFFSET_DATA => {
                self.u64();
                reply.data = self.vec(len - 8);
            }
            wire::chunk::ERROR => {
                reply.error = self.u32();
                let text_len = self.u16();
                assert_eq!(u64::from(text_len), len - 6);
                reply.text = String::from_utf8(self.vec(text_len.into())).unwrap();
            }
            wire::chunk::BLOCK_STATUS => {
                assert!(!extended);
                assert_eq!(self.u32(), wire::BASE_ALLOCATION_ID);
                for _ in 0..(len - 4) / 8 {
                    let extent = (self.u32().into(), self.u32().into());
                    reply.extents.push(extent);
                }
            }
            wire::chunk::BLOCK_STATUS_EXT => {
                assert!(extended);
                assert_eq!(self.u32(), wire::BASE_ALLOCATION_ID);
                let count = self.u32();
                assert_eq!(u64::from(count), (len - 8) / 16);
                for _ in 0..count {
                    let extent = (self.u64(), self.u64());
                    reply.extents.push(extent);
                }
            }
            other => panic!("chunk of type {other}"),
        }
        flags & wire::chunk::FLAG_DONE != 0
    }

    /// Asserts that the server has closed the connection.
    pub(crate) fn assert_closed(&mut self) {
        let mut rest = [0; 64];
        match self.stream.read(&mut rest) {
            Ok(len) => assert_eq!(len, 0, "the server said {:?}", &rest[..len]),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
            }
        }
    }
}
