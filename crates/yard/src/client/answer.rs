//! A response that is read while it arrives, and a body that is sent while it is read, in HTTP/1.1
//! chunks.

use std::io::{self, BufRead, BufReader, Read, Write};

use super::patience::Line;

/// The longest response header, in bytes.
const HEAD_MAX: u64 = 64 << 10;

/// The longest line before a chunk, in bytes.
const LINE_MAX: u64 = 256;

/// The size of a chunk that is sent, in bytes.
const CHUNK_BYTES: usize = 256 << 10;

/// A response of the control API, whose body is read from it.
#[derive(Debug)]
pub struct Answer {
    stream: BufReader<Line>,
    status: u16,
    /// The unread bytes of the body, or of the chunk.
    left: u64,
    /// Whether more chunks follow.
    chunked: bool,
    /// Names and values.
    headers: Vec<(String, String)>,
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

impl Answer {
    /// Reads the response header.
    pub(super) fn read(stream: Line) -> io::Result<Answer> {
        let mut stream = BufReader::with_capacity(CHUNK_BYTES, stream);
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let left = HEAD_MAX.saturating_sub(head.len() as u64);
            let read = stream.by_ref().take(left).read_until(b'\n', &mut head);
            match read {
                Ok(0) => return Err(wrong("it ends too early")),
                Ok(_) => {}
                Err(error) => return Err(error),
            }
        }
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let mut parsed = httparse::Response::new(&mut headers);
        parsed.parse(&head).map_err(|error| wrong(&error.to_string()))?;
        let value = |name: &str| {
            let mut headers = parsed.headers.iter();
            let header = headers.find(|header| header.name.eq_ignore_ascii_case(name))?;
            std::str::from_utf8(header.value).ok().map(str::trim)
        };
        let chunked =
            value("transfer-encoding").is_some_and(|it| it.eq_ignore_ascii_case("chunked"));
        let left = match (chunked, value("content-length").map(str::parse)) {
            (true, _) => 0,
            (false, Some(Ok(length))) => length,
            (false, _) => return Err(wrong("its length is not given")),
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let headers = parsed.headers.iter();
        let headers = headers.map(|it| (it.name.to_ascii_lowercase(), text(it.value))).collect();
        Ok(Answer { status: parsed.code.unwrap_or(0), stream, left, chunked, headers })
    }

    /// The value of a header, by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The status code.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// Whether the status code means success.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.stream.by_ref().take(LINE_MAX).read_line(&mut line)?;
        match line.strip_suffix("\r\n") {
            Some(line) => Ok(line.to_owned()),
            None => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the yard has broken off; its log says why",
            )),
        }
    }

    /// Reads the next chunk's length; a chunk of length 0 is the last.
    fn chunk(&mut self) -> io::Result<()> {
        let line = self.line()?;
        let length = line.split(';').next().unwrap_or_default();
        self.left = u64::from_str_radix(length.trim(), 16)
            .map_err(|_| wrong("a chunk of the yard's answer has no length"))?;
        if self.left == 0 {
            self.chunked = false;
        }
        Ok(())
    }
}

impl Read for Answer {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 && self.chunked {
            self.chunk()?;
        }
        if self.left == 0 || into.is_empty() {
            return Ok(0);
        }
        let most = into.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let len = self.stream.read(&mut into[..most])?;
        if len == 0 {
            let what = "the yard has broken off; its log says why";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
        }
        self.left -= len as u64;
        if self.left == 0 && self.chunked && !self.line()?.is_empty() {
            return Err(wrong("a chunk of the yard's answer is longer than it says"));
        }
        Ok(len)
    }
}

/// Sends all data from `input` as chunks.
pub(super) fn pass_on(
    input: &mut dyn Read,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut sent = 0;
    loop {
        let len = match input.read(&mut chunk) {
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        write!(out, "{len:x}\r\n")?;
        out.write_all(&chunk[..len])?;
        out.write_all(b"\r\n")?;
        if len == 0 {
            return Ok(());
        }
        sent += len as u64;
        progress(sent);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::super::patience::Patience;
    use super::*;

    fn answer(text: &[u8]) -> io::Result<Answer> {
        let (here, mut there) = UnixStream::pair().unwrap();
        let text = text.to_vec();
        // More than a socket buffers; the reader may stop before the end.
        std::thread::spawn(move || there.write_all(&text));
        let silence_max = Duration::from_secs(60);
        let patience = Patience { path: "test".into(), silence_max, notice: None };
        Answer::read(Line::new(here, patience))
    }

    #[test]
    fn chunks_are_put_together_and_a_break_is_noticed() {
        let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let mut body = Vec::new();
        pass_on(&mut &[7; 300_000][..], &mut body, &mut |_| {}).unwrap();
        let text = [&head[..], &body].concat();
        let mut found = Vec::new();
        answer(&text).unwrap().read_to_end(&mut found).unwrap();
        assert_eq!(found, [7; 300_000]);
        for len in [head.len(), head.len() + 3, text.len() - 300, text.len() - 5] {
            let mut cut = answer(&text[..len]).unwrap();
            let error = cut.read_to_end(&mut Vec::new()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{len}");
        }
        assert!(answer(&head[..20]).is_err());
        let mut odd = answer(&[&head[..], b"zz\r\n"].concat()).unwrap();
        assert!(odd.read(&mut [0; 1]).is_err());
        let short = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nabc";
        let mut short = answer(short).unwrap();
        assert_eq!(short.status(), 404);
        assert!(short.read_to_end(&mut Vec::new()).is_err());
    }
}
