//! A proxy between a client of HTTP and a server, which cuts connections, delays, and answers
//! requests itself, as a test decides for each one. It closes each connection after one request.
#![allow(clippy::disallowed_types)] // The rule of a test.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// What the proxy does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyAction {
    /// Passes request and answer.
    Pass,
    /// Closes the connection; the server does not get the request.
    CutBefore,
    /// Passes the request, and closes the connection when the server has answered.
    CutAfter,
    /// Answers with this status; the server does not get the request.
    AnswerBefore(u16),
    /// Passes the request, and answers with this status when the server has answered.
    AnswerAfter(u16),
    /// Passes the request after a pause.
    DelayRequest(Duration),
    /// Passes the answer after a pause.
    DelayAnswer(Duration),
}

/// A request that the proxy has received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyRequest {
    /// The method.
    pub method: String,
    /// The path with the query.
    pub path: String,
    /// The number of the request, from 0.
    pub number: u64,
}

type Rule = Box<dyn FnMut(&ProxyRequest) -> ProxyAction + Send>;

/// A running proxy. Its thread ends with the process.
pub struct HttpProxy {
    address: SocketAddr,
    state: Arc<Mutex<(u64, Rule)>>,
}

impl fmt::Debug for HttpProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpProxy").field("address", &self.address).finish_non_exhaustive()
    }
}

impl HttpProxy {
    /// Starts a proxy on a loopback port for the server at `HOST:PORT`. It passes everything.
    ///
    /// # Panics
    /// If no port is free.
    pub fn start(server: &str) -> HttpProxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("it has an address");
        let pass: Rule = Box::new(|_| ProxyAction::Pass);
        let state = Arc::new(Mutex::new((0, pass)));
        let (server, shared) = (server.to_owned(), state.clone());
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (server, shared) = (server.clone(), shared.clone());
                // A connection that breaks is what this is for.
                thread::spawn(move || _ = serve(client, &server, &shared));
            }
        });
        HttpProxy { address, state }
    }

    /// The proxy's URL, which the client uses instead of the server's.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Sets what happens to each request from now on.
    pub fn set(&self, rule: impl FnMut(&ProxyRequest) -> ProxyAction + Send + 'static) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1 = Box::new(rule);
    }

    /// The requests that were received.
    pub fn count(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0
    }
}

fn serve(client: TcpStream, server: &str, state: &Mutex<(u64, Rule)>) -> io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if reader.read_until(b'\n', &mut head)? == 0 {
            return Ok(());
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let mut body = vec![0; content_length(&head)];
    reader.read_exact(&mut body)?;
    let mut words = head.split(' ').map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let action = {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let request = ProxyRequest { method, path, number: state.0 };
        state.0 += 1;
        (state.1)(&request)
    };
    match action {
        ProxyAction::CutBefore => return Ok(()),
        ProxyAction::AnswerBefore(status) => return answer(client, status),
        ProxyAction::DelayRequest(pause) => thread::sleep(pause),
        _ => {}
    }
    let response = forward(server, &head, &body)?;
    match action {
        ProxyAction::CutAfter => Ok(()),
        ProxyAction::AnswerAfter(status) => answer(client, status),
        ProxyAction::DelayAnswer(pause) => {
            thread::sleep(pause);
            (&client).write_all(&response)
        }
        _ => (&client).write_all(&response),
    }
}

fn content_length(head: &str) -> usize {
    let fields = head.lines().filter_map(|line| line.split_once(':'));
    let mut lengths = fields.filter(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    lengths.next().and_then(|(_, value)| value.trim().parse().ok()).unwrap_or(0)
}

/// The whole answer of the server, which closes the connection at its end.
fn forward(server: &str, head: &str, body: &[u8]) -> io::Result<Vec<u8>> {
    let mut connection = TcpStream::connect(server)?;
    let (first, fields) = head.split_once("\r\n").unwrap_or((head, "\r\n"));
    let is_kept = |line: &&str| !line.to_ascii_lowercase().starts_with("connection:");
    let fields: Vec<&str> = fields.split("\r\n").filter(is_kept).collect();
    write!(connection, "{first}\r\nConnection: close\r\n{}", fields.join("\r\n"))?;
    connection.write_all(body)?;
    let mut response = Vec::new();
    connection.read_to_end(&mut response)?;
    Ok(response)
}

fn answer(mut client: TcpStream, status: u16) -> io::Result<()> {
    let code = if status == 503 { "SlowDown" } else { "InternalError" };
    let body = format!("<Error><Code>{code}</Code></Error>");
    let len = body.len();
    write!(
        client,
        "HTTP/1.1 {status} X\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n{body}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that answers each request with its first line, and counts.
    fn echo() -> (String, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let seen: Arc<Mutex<Vec<String>>> = Arc::default();
        let shared = seen.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let mut reader = BufReader::new(client.try_clone().unwrap());
                let mut head = String::new();
                while !head.ends_with("\r\n\r\n") {
                    reader.read_line(&mut head).unwrap();
                }
                let mut body = vec![0; content_length(&head)];
                reader.read_exact(&mut body).unwrap();
                let text =
                    format!("{}{}", head.lines().next().unwrap(), String::from_utf8(body).unwrap());
                shared.lock().unwrap().push(text.clone());
                write!(&client, "HTTP/1.1 200 OK\r\n\r\n{text}").unwrap();
            }
        });
        (address, seen)
    }

    #[test]
    fn each_request_is_treated_as_the_rule_says() {
        let (server, seen) = echo();
        let proxy = HttpProxy::start(&server);
        let ask = || {
            let mut connection = TcpStream::connect(proxy.address).unwrap();
            write!(connection, "PUT /a HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi").unwrap();
            let mut answer = String::new();
            connection.read_to_string(&mut answer).unwrap();
            answer
        };
        let whole = "HTTP/1.1 200 OK\r\n\r\nPUT /a HTTP/1.1hi";
        assert_eq!((&ask()[..], seen.lock().unwrap().len()), (whole, 1));
        for (action, begins, reaches) in [
            (ProxyAction::CutBefore, "", 0),
            (ProxyAction::CutAfter, "", 1),
            (ProxyAction::AnswerBefore(503), "HTTP/1.1 503 ", 0),
            (ProxyAction::AnswerAfter(500), "HTTP/1.1 500 ", 1),
            (ProxyAction::DelayRequest(Duration::ZERO), whole, 1),
            (ProxyAction::DelayAnswer(Duration::ZERO), whole, 1),
        ] {
            seen.lock().unwrap().clear();
            proxy.set(move |request| {
                assert_eq!((&request.method[..], &request.path[..]), ("PUT", "/a"));
                action
            });
            let answer = ask();
            assert!(answer.starts_with(begins), "{action:?}: {answer}");
            assert_eq!(answer.is_empty(), begins.is_empty(), "{action:?}: {answer}");
            assert_eq!(seen.lock().unwrap().len(), reaches, "{action:?}");
        }
        assert_eq!(proxy.count(), 7);
    }
}
