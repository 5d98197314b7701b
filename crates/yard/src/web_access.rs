//! Who may use the dashboard: the names of its host, and a token.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;

use blockyard_os::private_file::{PrivateFileError, read_private};
use data_encoding::BASE64;
use ring::hmac;
use ring::rand::SystemRandom;

/// The longest file of a token, in bytes.
const FILE_BYTES_MAX: u64 = 4096;

/// The least length of a token in bytes: 16 digits of base 16 are 64 random bits.
const TOKEN_BYTES_MIN: usize = 16;
/// The greatest length of a token in bytes.
const TOKEN_BYTES_MAX: usize = 256;

/// The reason for which a token is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// The file cannot be read, or other users can read it.
    #[error(transparent)]
    File(#[from] PrivateFileError),
    /// The content of the file is no token.
    #[error(
        "{path}: invalid token: expected {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} letters, digits \
         and signs of ASCII on one line, without spaces; `openssl rand -hex 32` prints one"
    )]
    Token {
        /// The path of the file.
        path: String,
    },
    /// The system has no random numbers.
    #[error("the system has no random numbers")]
    Random,
}

/// A token, by which clients are compared in constant time: as a message whose code is known.
#[derive(Debug)]
struct Token {
    key: hmac::Key,
    code: hmac::Tag,
}

impl Token {
    fn new(token: &str) -> Result<Token, TokenError> {
        let generated = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        let key = generated.map_err(|_| TokenError::Random)?;
        let code = hmac::sign(&key, token.as_bytes());
        Ok(Token { key, code })
    }

    fn matches(&self, shown: &[u8]) -> bool {
        hmac::verify(&self.key, shown, self.code.as_ref()).is_ok()
    }
}

/// Who may use the dashboard.
#[derive(Debug, Default)]
pub struct WebAccess {
    /// The name of the host at which it listens, if it is a name.
    host: Option<String>,
    token: Option<Token>,
}

impl WebAccess {
    /// Access with the token of a file, if there is one, to a listener at this host.
    ///
    /// # Errors
    /// If the file is no private file of a token.
    pub fn load(host: Option<&str>, file: Option<&Path>) -> Result<WebAccess, TokenError> {
        let access = match file {
            None => WebAccess::default(),
            Some(file) => {
                let text = read_private(file, FILE_BYTES_MAX)?;
                let token = text.strip_suffix('\n').unwrap_or(&text);
                let token = token.strip_suffix('\r').unwrap_or(token);
                let invalid = || TokenError::Token { path: file.display().to_string() };
                WebAccess::with_token(token)?.ok_or_else(invalid)?
            }
        };
        Ok(WebAccess { host: host.map(str::to_owned), ..access })
    }

    /// Access to any host's listener with this token; `None` if it is no token.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn with_token(token: &str) -> Result<Option<WebAccess>, TokenError> {
        let is_plain = token.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_plain || !(TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&token.len()) {
            return Ok(None);
        }
        Ok(Some(WebAccess { host: None, token: Some(Token::new(token)?) }))
    }

    /// Whether clients have to show a token.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Whether the host of a request is one of this listener: an address, `localhost`, or the name
    /// at which it listens, with or without a port.
    pub fn is_own_host(&self, host: &str) -> bool {
        // RFC 3986, 3.2.2: brackets enclose an IPv6 address.
        if let Some(rest) = host.strip_prefix('[') {
            let parts = rest.split_once(']').filter(|(_, port)| is_port(port));
            return parts.is_some_and(|(address, _)| address.parse::<Ipv6Addr>().is_ok());
        }
        let (name, port) = host.split_at(host.find(':').unwrap_or(host.len()));
        let is_name = |own: &str| own.eq_ignore_ascii_case(name);
        is_port(port)
            && (name.parse::<Ipv4Addr>().is_ok()
                || is_name("localhost")
                || self.host.as_deref().is_some_and(is_name))
    }

    /// Whether a client with this header `Authorization` is admitted.
    pub fn admits(&self, authorization: Option<&str>) -> bool {
        let Some(token) = &self.token else { return true };
        let Some((scheme, shown)) = authorization.and_then(|text| text.split_once(' ')) else {
            return false;
        };
        if scheme.eq_ignore_ascii_case("bearer") {
            return token.matches(shown.trim().as_bytes());
        }
        // RFC 7617, 2: USER:PASSWORD in base 64; the user does not matter.
        let decoded = BASE64.decode(shown.trim().as_bytes()).unwrap_or_default();
        let password = decoded.iter().position(|byte| *byte == b':').map(|at| &decoded[at + 1..]);
        scheme.eq_ignore_ascii_case("basic") && password.is_some_and(|it| token.matches(it))
    }
}

/// Whether the end of a header `Host` is a colon and a port, or nothing.
fn is_port(end: &str) -> bool {
    let is_number = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    end.is_empty() || end.strip_prefix(':').is_some_and(is_number)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::paths::TempDir;

    const TOKEN: &str = "0123456789abcdef";

    #[test]
    fn a_host_is_an_address_localhost_or_the_name_of_the_listener() {
        let access = WebAccess { host: Some("nas.example".to_owned()), token: None };
        for own in [
            "127.0.0.1",
            "127.0.0.1:9465",
            "[::1]:9465",
            "[::1]",
            "localhost",
            "LocalHost:1",
            "nas.example",
            "NAS.example:9465",
            "192.168.1.2:80",
        ] {
            assert!(access.is_own_host(own), "{own}");
        }
        for other in [
            "",
            ":9465",
            "evil.example",
            "evil.example:9465",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "localhost:x",
            "[::1",
            "[localhost]",
            "[127.0.0.1]",
            "[nas.example]",
            "[::1]x",
            "::1",
            "a:b:c",
            "nas.example.evil.example",
            "localhost/",
            " localhost",
        ] {
            assert!(!access.is_own_host(other), "{other}");
        }
    }

    #[test]
    fn a_token_comes_as_password_or_as_bearer() {
        let access = WebAccess::with_token(TOKEN).unwrap().unwrap();
        let basic = |text: &str| format!("Basic {}", BASE64.encode(text.as_bytes()));
        for allowed in [
            format!("Bearer {TOKEN}"),
            format!("bearer {TOKEN}"),
            basic(&format!(":{TOKEN}")),
            basic(&format!("me:{TOKEN}")),
        ] {
            assert!(access.admits(Some(&allowed)), "{allowed}");
        }
        for bad in [
            TOKEN.to_owned(),
            "Bearer".to_owned(),
            "Bearer ".to_owned(),
            format!("Bearer {TOKEN}0"),
            "Bearer 0123456789abcde".to_owned(),
            basic(TOKEN),
            basic(&format!("{TOKEN}:")),
            basic("me:"),
            "Basic %%%".to_owned(),
            format!("Digest {TOKEN}"),
        ] {
            assert!(!access.admits(Some(&bad)), "{bad}");
        }
        assert!(!access.admits(None));
        assert!(WebAccess::default().admits(None));
    }

    #[test]
    fn a_token_is_a_line_of_a_private_file() {
        let temp = TempDir::new().unwrap();
        let file = temp.path().join("token");
        let load = |text: &str, mode: u32| {
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
            WebAccess::load(None, Some(&file)).map_err(|error| error.to_string())
        };
        let access = load(&format!("{TOKEN}\n"), 0o600).unwrap();
        assert!(access.has_token() && access.admits(Some(&format!("Bearer {TOKEN}"))));
        assert!(load(TOKEN, 0o400).is_ok());
        let error = load(TOKEN, 0o644).unwrap_err();
        assert!(error.starts_with("invalid mode 0644 of "), "{error}");
        let long = "x".repeat(257);
        for bad in ["", "\n", "short", "0123456789abcdef\nmore", "0123456789 abcdef", &long] {
            let error = load(bad, 0o600).unwrap_err();
            assert!(error.contains("invalid token: expected 16 to 256 letters"), "{error}");
        }
        let missing = temp.path().join("missing");
        let error = WebAccess::load(None, Some(&missing)).unwrap_err().to_string();
        assert!(error.starts_with("cannot read "), "{error}");
    }
}
