//! The TLS settings of NBD, and their conflicts. A file and a command line can each set some of
//! them, so the rules apply to the combination.

use std::ops::Range;
use std::path::PathBuf;

use blockyard_nbd::AllowLists;

/// The TLS settings of NBD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsSettings {
    /// Whether TLS is offered or required.
    pub mode: TlsMode,
    /// Directory with `server-cert.pem`, `server-key.pem` and, to verify clients, `ca-cert.pem`.
    pub certificates: Option<PathBuf>,
    /// Whether clients must show a certificate that `ca-cert.pem` signed.
    pub verify_peer: bool,
    /// The clients that may use each export, by the subjects of their certificates.
    pub allow: AllowLists,
}

impl TlsSettings {
    /// Checks for conflicts; `asked` says that the mode was set explicitly. Certificates without
    /// any mode are a mistake. With an explicit `off` they are allowed, as the user may enable TLS
    /// later.
    ///
    /// # Errors
    /// The first conflict.
    pub fn check(&self, asked: bool) -> Result<(), TlsProblem> {
        let given = self.certificates.is_some() || self.verify_peer || !self.allow.is_empty();
        match self.mode {
            TlsMode::Off if given && !asked => Err(TlsProblem::Off),
            TlsMode::On | TlsMode::Require if self.certificates.is_none() => {
                Err(TlsProblem::NoCertificates)
            }
            TlsMode::On if self.verify_peer => Err(TlsProblem::VerifyPeerIsOptional),
            TlsMode::On | TlsMode::Require if !self.verify_peer && !self.allow.is_empty() => {
                Err(TlsProblem::AllowWithoutVerifyPeer)
            }
            _ => Ok(()),
        }
    }
}

/// A conflict between settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsProblem {
    /// Certificates without TLS.
    Off,
    /// TLS without certificates.
    NoCertificates,
    /// Certificates of clients are verified, but TLS is optional: a client without TLS shows none.
    VerifyPeerIsOptional,
    /// There are allow lists, but `verify_peer` is off, so that clients show no certificate.
    AllowWithoutVerifyPeer,
}

/// Whether TLS is offered or required, as with `nbdkit --tls`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// Not offered.
    #[default]
    Off,
    /// Offered.
    On,
    /// Required.
    Require,
}

impl TlsMode {
    /// The words for the modes.
    pub const WORDS: [&'static str; 3] = ["off", "on", "require"];

    /// The mode of a word.
    pub fn from_word(word: &str) -> Option<TlsMode> {
        match word {
            "off" => Some(TlsMode::Off),
            "on" => Some(TlsMode::On),
            "require" => Some(TlsMode::Require),
            _ => None,
        }
    }
}

/// The positions of the settings in the text, if they are set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsPlaces {
    /// The mode.
    pub mode: Option<Range<usize>>,
    /// The certificates' directory.
    pub certificates: Option<Range<usize>>,
    /// The verification of clients.
    pub verify_peer: Option<Range<usize>>,
    /// The allow lists.
    pub allow: Option<Range<usize>>,
}

impl TlsPlaces {
    /// The position, message and help for a conflict in the file.
    pub(super) fn tell(&self, problem: TlsProblem) -> (Range<usize>, &'static str, &'static str) {
        let (place, message, help) = match problem {
            TlsProblem::Off => (
                self.certificates.as_ref().or(self.verify_peer.as_ref()).or(self.allow.as_ref()),
                "tls: certificates are given but TLS is off",
                "add mode = \"require\" (or \"on\")",
            ),
            TlsProblem::NoCertificates => (
                self.mode.as_ref(),
                "certificates: missing, and TLS is on",
                "name the directory that holds server-cert.pem and server-key.pem",
            ),
            TlsProblem::VerifyPeerIsOptional => (
                self.verify_peer.as_ref(),
                "verify_peer: with mode = \"on\" a client without TLS is let in and shows no \
                 certificate",
                "use mode = \"require\"",
            ),
            TlsProblem::AllowWithoutVerifyPeer => (
                self.allow.as_ref(),
                "allow: clients show no certificate whose subject could be in a list",
                "add mode = \"require\" and verify_peer = true",
            ),
        };
        (place.cloned().unwrap_or(0..0), message, help)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicting_settings_are_refused() {
        use TlsMode::{Off, On, Require};
        use TlsProblem::{NoCertificates, VerifyPeerIsOptional};
        let cases = [
            (Off, true, false, Ok(()), Err(TlsProblem::Off)),
            (Off, false, true, Ok(()), Err(TlsProblem::Off)),
            (Off, false, false, Ok(()), Ok(())),
            (On, false, false, Err(NoCertificates), Err(NoCertificates)),
            (On, true, false, Ok(()), Ok(())),
            (On, true, true, Err(VerifyPeerIsOptional), Err(VerifyPeerIsOptional)),
            (Require, false, true, Err(NoCertificates), Err(NoCertificates)),
            (Require, true, true, Ok(()), Ok(())),
        ];
        for (mode, certificates, verify_peer, asked, unasked) in cases {
            let certificates = certificates.then(|| PathBuf::from("/c"));
            let tls = TlsSettings { mode, certificates, verify_peer, ..TlsSettings::default() };
            assert_eq!((tls.check(true), tls.check(false)), (asked, unasked), "{tls:?}");
        }
    }
}
