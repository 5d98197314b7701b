//! The keys of a terminal in raw mode, from the bytes that it sends.
//!
//! crossterm's own source of events is not used. It loses keys that arrive together with a change
//! of the window's size, and waits without an end for the rest of an escape sequence and on a
//! terminal that has hung up.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

const ESCAPE: u8 = 0x1b;
/// What Ctrl-C sends.
const INTERRUPT: u8 = 0x03;

/// Most bytes that are read at once. The terminal has the rest the next time.
const READ_BYTES: usize = 256;

/// The keyboard of the terminal.
#[derive(Debug)]
pub(crate) struct Keyboard {
    /// The terminal, if standard input is another file.
    terminal: Option<File>,
    parser: KeyParser,
}

impl Keyboard {
    /// Opens the terminal of the process.
    ///
    /// # Errors
    /// If the process has none.
    pub(crate) fn open() -> io::Result<Keyboard> {
        let terminal = if io::stdin().is_terminal() { None } else { Some(File::open("/dev/tty")?) };
        Ok(Keyboard { terminal, parser: KeyParser::default() })
    }

    /// Whether a key may be incomplete. A wait without another byte then decides what it is.
    pub(crate) fn is_in_key(&self) -> bool {
        self.parser.state != ParserState::Start
    }

    /// Waits at most this long for keys, and returns those that were pressed. A signal ends the
    /// wait. `None` if the terminal has hung up: its window was closed, or the connection to it has
    /// ended.
    ///
    /// # Errors
    /// If the terminal cannot be read.
    pub(crate) fn await_keys(&mut self, wait: Duration) -> io::Result<Option<Vec<KeyEvent>>> {
        let stdin = io::stdin();
        let terminal: BorrowedFd<'_> = match &self.terminal {
            None => stdin.as_fd(),
            Some(terminal) => terminal.as_fd(),
        };
        let mut keys = Vec::new();
        let mut polled = [PollFd::from_borrowed_fd(terminal, PollFlags::IN)];
        let wait = Timespec::try_from(wait).map_err(io::Error::other)?;
        match poll(&mut polled, Some(&wait)) {
            Ok(0) => keys.extend(self.parser.end()),
            Ok(_) => {
                let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
                if polled[0].revents().intersects(gone) {
                    return Ok(None);
                }
                let mut bytes = [0; READ_BYTES];
                match rustix::io::read(terminal, &mut bytes) {
                    Ok(0) => return Ok(None),
                    Ok(len) => {
                        keys.extend(bytes[..len].iter().filter_map(|b| self.parser.push(*b)))
                    }
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Some(keys))
    }
}

/// Where in the bytes of a key the parser is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ParserState {
    /// Before a key.
    #[default]
    Start,
    /// After ESC: the Esc key, or the start of a sequence.
    Escape,
    /// After ESC O: one more byte.
    SingleShift,
    /// After ESC [: parameters, and a last byte from `@` to `~`.
    Control,
}

/// Makes keys from bytes. Sequences of keys that `top` does not use are skipped.
#[derive(Debug, Default)]
struct KeyParser {
    state: ParserState,
}

impl KeyParser {
    /// Takes a byte; returns the key that it completes.
    fn push(&mut self, byte: u8) -> Option<KeyEvent> {
        use ParserState::{Control, Escape, SingleShift, Start};
        let state = std::mem::take(&mut self.state);
        let code = match (state, byte) {
            (Escape, ESCAPE) => {
                self.state = Escape;
                KeyCode::Esc
            }
            // A control byte is never a part of a sequence: a sequence before it was cut off.
            (_, ESCAPE) => {
                self.state = Escape;
                return None;
            }
            (_, INTERRUPT) => {
                return Some(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
            }
            (_, b'\t') => KeyCode::Tab,
            (_, ..b' ') => return None,
            (Start, b' '..=b'~') => KeyCode::Char(byte.into()),
            (Escape, b'O') => {
                self.state = SingleShift;
                return None;
            }
            (Escape, b'[') => {
                self.state = Control;
                return None;
            }
            (Control, b' '..=b'?') => {
                self.state = Control;
                return None;
            }
            (SingleShift | Control, b'A') => KeyCode::Up,
            (SingleShift | Control, b'B') => KeyCode::Down,
            (SingleShift | Control, b'C') => KeyCode::Right,
            (SingleShift | Control, b'D') => KeyCode::Left,
            (Control, b'Z') => KeyCode::BackTab,
            // Characters beyond ASCII, keys with Alt, and other keys.
            _ => return None,
        };
        Some(KeyEvent::from(code))
    }

    /// Ends a sequence of which no more bytes came in time; returns the key that it is.
    fn end(&mut self) -> Option<KeyEvent> {
        let state = std::mem::take(&mut self.state);
        (state == ParserState::Escape).then(|| KeyEvent::from(KeyCode::Esc))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The keys of bytes that came at once, and the one that the time after them completes.
    fn keys(bytes: &[u8]) -> Vec<KeyCode> {
        let mut parser = KeyParser::default();
        let mut keys: Vec<_> = bytes.iter().filter_map(|byte| parser.push(*byte)).collect();
        keys.extend(parser.end());
        keys.into_iter().map(|key| key.code).collect()
    }

    #[test]
    fn every_key_of_the_screen_is_parsed() {
        use KeyCode::{BackTab, Char, Down, Esc, Left, Right, Tab, Up};
        let arrows = [Up, Down, Right, Left];
        assert_eq!(keys(b"\x1b[A\x1b[B\x1b[C\x1b[D"), arrows);
        assert_eq!(keys(b"\x1bOA\x1bOB\x1bOC\x1bOD"), arrows, "in application mode");
        assert_eq!(keys(b"\x1b[1;5A"), [Up], "with Ctrl");
        assert_eq!(
            keys(b"1q \t\x1b[Z<"),
            [Char('1'), Char('q'), Char(' '), Tab, BackTab, Char('<')]
        );
        assert_eq!(keys(b"\x1b"), [Esc]);
        assert_eq!(keys(b"\x1b\x1b"), [Esc, Esc]);
        let interrupt = KeyParser::default().push(3).unwrap();
        assert_eq!(interrupt, KeyEvent::new(Char('c'), KeyModifiers::CONTROL));
    }

    #[test]
    fn time_decides_between_the_esc_key_and_a_sequence() {
        let mut parser = KeyParser::default();
        assert_eq!(parser.push(ESCAPE), None);
        assert_eq!(parser.push(b'['), None);
        assert_eq!(parser.push(b'A'), Some(KeyEvent::from(KeyCode::Up)));
        assert_eq!(parser.end(), None);
        assert_eq!(parser.push(ESCAPE), None);
        assert_eq!(parser.end(), Some(KeyEvent::from(KeyCode::Esc)));
        assert_eq!(parser.push(b'['), Some(KeyEvent::from(KeyCode::Char('['))));
        // A sequence that is cut off takes no later key with it.
        for byte in *b"\x1b[1;" {
            assert_eq!(parser.push(byte), None);
        }
        assert_eq!(parser.end(), None);
        assert_eq!(parser.push(b'q'), Some(KeyEvent::from(KeyCode::Char('q'))));
    }

    #[test]
    fn unknown_sequences_are_skipped() {
        use KeyCode::{Char, Tab, Up};
        // F5, Delete, F1, Home, Alt-q, a mouse report, and e with an acute accent.
        for unknown in [
            &b"\x1b[15~"[..],
            b"\x1b[3~",
            b"\x1bOP",
            b"\x1b[H",
            b"\x1bq",
            b"\x1b[<0;1;1M",
            b"\xc3\xa9",
        ] {
            assert_eq!(keys(&[unknown, b"p"].concat()), [Char('p')], "{unknown:?}");
        }
        // A control byte ends a sequence that is cut off.
        assert_eq!(keys(b"\x1b[1;\t"), [Tab]);
        assert_eq!(keys(b"\x1b[1\x1b[A"), [Up]);
        assert_eq!(keys(b"\x1b[\x03"), [Char('c')]);
        assert_eq!(keys(b"\x1bO\x1b[A"), [Up]);
    }

    #[test]
    fn no_bytes_keep_a_later_key_from_being_parsed() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..1000 {
            let mut parser = KeyParser::default();
            for _ in 0..random.usize(..64) {
                // Mostly bytes of sequences.
                let sequences = b"\x1b[O;19AZ~";
                let byte = match random.u8(..4) {
                    0 => random.u8(..),
                    _ => sequences[random.usize(..sequences.len())],
                };
                parser.push(byte);
            }
            parser.end();
            assert_eq!(parser.push(b'q'), Some(KeyEvent::from(KeyCode::Char('q'))));
        }
    }
}
