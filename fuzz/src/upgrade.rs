//! Messages between two processes of an upgrade. Bytes are a message or an error; a message that
//! was read is printed and read again, and is the same.

use blockyard_yard::upgrade::message::{HEADER_BYTES, Message};

use crate::input::Input;

/// A valid message, in which bytes of the input replace bytes.
const STATE: &str = r#"{"state":{"listeners":[{"kind":"nbd","place":"unix:/n","sockets":1},
{"kind":"control","place":"/c","sockets":1}],"connections":[{"listener":0,"id":1,"peer":"unix",
"since_ns":5,"export":"v0","style":"structured","contexts":true,"min_block_bytes":1,
"len_bytes":1073741824,"block_bytes":512,"flags":1517,"unread_bytes":0,"skipped":{"left":1,
"cookie":2,"offset":3,"error":28},"counts":[1,2,3,4,5]}],"devices":[{"device":{"uri":"ram:///r",
"identity":""},"scheduler":{"scheduler":"none","fifo_batch":16},
"memory":true,"ram":{"mem_limit":0,"compact":5}}]}}"#;

/// A message from bytes, which may be changed ones of a valid message.
pub fn message(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut body = match input.below(2) {
        0 => input.take(4096).to_vec(),
        _ => STATE.as_bytes().to_vec(),
    };
    for _ in 0..input.below(8) {
        let at = input.below(body.len().max(1) as u64) as usize;
        if let Some(byte) = body.get_mut(at) {
            *byte = input.byte();
        }
    }
    if let Some(header) = body.first_chunk::<HEADER_BYTES>()
        && let Err(error) = Message::parse_header(header)
    {
        assert!(!error.to_string().is_empty());
    }
    match Message::parse(&body) {
        Ok(message) => {
            if let Message::State(state) = &message {
                // The number of descriptors that a process would wait for is bounded.
                assert!(state.descriptors() <= 64 * state.listeners.len() + 2 * body.len());
                for connection in &state.connections {
                    let again = connection.clone().state(Vec::new());
                    assert_eq!(again.id, connection.id);
                }
            }
            let frame = message.print().expect("it is no longer than what was read");
            let (header, body) = frame.split_first_chunk().expect("a frame has a header");
            assert_eq!(Message::parse_header(header), Ok(body.len()));
            assert_eq!(Message::parse(body), Ok(message));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
