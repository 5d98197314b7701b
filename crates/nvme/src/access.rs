//! Which hosts may use which device: lists of their NQNs, and the secrets by which they prove them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::auth_message::{AuthHash, DhGroup};
use crate::fabrics::{DISCOVERY_NQN, NQN_LEN_MAX};
use crate::secret::HostSecrets;

/// The name that stands for every device without a list of its own.
pub const EVERY_DEVICE: &str = "*";

/// Allow lists. Without any list, every host may use every device; otherwise no host may use a
/// device without a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedHosts(BTreeMap<String, Vec<String>>);

impl AllowedHosts {
    /// Allows the host of this NQN to use a device, or [`EVERY_DEVICE`].
    ///
    /// # Errors
    /// What is expected instead of the NQN, if it is invalid.
    pub fn allow(&mut self, device: &str, host: &str) -> Result<(), &'static str> {
        check_nqn(host)?;
        self.0.entry(device.to_owned()).or_default().push(host.to_owned());
        Ok(())
    }

    /// All hosts in the lists, with the device of each list.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let lists = self.0.iter();
        lists.flat_map(|(device, list)| list.iter().map(|host| (device.as_str(), host.as_str())))
    }

    /// Whether there is no list.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether there are lists, and none of them is for this device.
    pub fn permits_none(&self, device: &str) -> bool {
        !self.0.is_empty() && self.list(device).is_none()
    }

    fn list(&self, device: &str) -> Option<&Vec<String>> {
        self.0.get(device).or_else(|| self.0.get(EVERY_DEVICE))
    }

    /// Whether the host of this NQN may use a device, whichever it is.
    pub fn permits_any(&self, host: &str) -> bool {
        self.0.is_empty() || self.iter().any(|(_, allowed)| allowed == host)
    }

    /// Whether the host of this NQN may use a device.
    pub fn permits(&self, device: &str, host: &str) -> bool {
        if self.0.is_empty() {
            return true;
        }
        self.list(device).is_some_and(|list| list.iter().any(|allowed| allowed == host))
    }
}

/// The access of hosts to the devices of a table of subsystems.
#[derive(Clone, Debug, Default)]
pub struct HostAccess {
    /// The hosts that may use each device.
    pub allowed: AllowedHosts,
    /// How each host authenticates, for every device; `None` if no host has to.
    pub authentication: Option<Arc<AuthRules>>,
}

/// How hosts authenticate, by DH-HMAC-CHAP.
#[derive(Debug)]
pub struct AuthRules {
    /// The secrets. A host without one may use no device.
    pub secrets: HostSecrets,
    /// The allowed hash functions, the preferred one first.
    pub hashes: Vec<AuthHash>,
    /// The allowed Diffie-Hellman groups, the preferred one first.
    pub groups: Vec<DhGroup>,
}

impl HostAccess {
    /// The reason for which the host of this NQN may not use a device, whatever it proves.
    pub fn refusal(&self, device: &str, host: &str) -> Option<&'static str> {
        match self.allowed.permits(device, host) {
            true => self.lack_of_secret(host),
            false => Some("it is not in the allow list of the device"),
        }
    }

    /// The reason for which the host of this NQN may use no device.
    pub fn refusal_of_all(&self, host: &str) -> Option<&'static str> {
        match self.allowed.permits_any(host) {
            true => self.lack_of_secret(host),
            false => Some("it is in no allow list"),
        }
    }

    fn lack_of_secret(&self, host: &str) -> Option<&'static str> {
        let lacks = |rules: &Arc<AuthRules>| rules.secrets.find(host).is_none();
        self.authentication.as_ref().is_some_and(lacks).then_some("it has no secret")
    }
}

fn is_nqn(nqn: &str) -> bool {
    let is_plain = !nqn.contains(|letter: char| letter.is_control() || letter.is_whitespace());
    nqn.starts_with("nqn.") && is_plain && nqn.len() <= NQN_LEN_MAX
}

/// Checks the NQN of a subsystem in a configuration.
///
/// # Errors
/// What is expected instead.
pub fn check_subsystem_nqn(nqn: &str) -> Result<(), &'static str> {
    match is_nqn(nqn) && nqn != DISCOVERY_NQN {
        true => Ok(()),
        false => Err("expected an NQN, which begins with `nqn.`, has no spaces and at most 223 \
                      bytes, and not that of discovery"),
    }
}

/// Checks the NQN of a host in a configuration.
///
/// # Errors
/// What is expected instead.
pub fn check_nqn(nqn: &str) -> Result<(), &'static str> {
    match is_nqn(nqn) {
        true => Ok(()),
        false => Err("expected the NQN of a host, which begins with `nqn.`, has no spaces and at \
                      most 223 bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALICE: &str = "nqn.2014-08.org.nvmexpress:uuid:4dd5a6b1-51c4-4a24-9a6d-1e1c9f7e0a01";
    const BOB: &str = "nqn.2026-11.example:bob";

    #[test]
    fn a_device_is_for_the_hosts_in_its_list() {
        let mut hosts = AllowedHosts::default();
        assert!(hosts.permits("a", BOB) && !hosts.permits_none("a"), "no list, no check");
        hosts.allow("a", ALICE).unwrap();
        assert!(hosts.permits("a", ALICE));
        for other in ["", BOB, &ALICE[1..], &ALICE[..ALICE.len() - 1], &ALICE.to_uppercase()] {
            assert!(!hosts.permits("a", other), "{other}");
        }
        assert!(!hosts.permits("b", ALICE), "a device without a list is for no host");
        assert!(hosts.permits_none("b") && !hosts.permits_none("a"));
        hosts.allow(EVERY_DEVICE, BOB).unwrap();
        assert!(hosts.permits("b", BOB) && !hosts.permits("a", BOB));
        assert!(!hosts.permits_none("b"), "it has the list of every device");
        assert!(hosts.permits_any(ALICE) && hosts.permits_any(BOB) && !hosts.permits_any("nqn.c"));
        assert!(AllowedHosts::default().permits_any("nqn.c"));
    }

    #[test]
    fn a_host_is_named_by_an_nqn() {
        let long = format!("nqn.{}", "x".repeat(NQN_LEN_MAX - 3));
        for wrong in ["", "*", "host", "nqn", "nqn.a b", "nqn.a\n", &long] {
            assert!(AllowedHosts::default().allow("a", wrong).is_err(), "{wrong}");
        }
        assert!(check_nqn(&long[..NQN_LEN_MAX]).is_ok());
        assert!(check_subsystem_nqn(&long[..NQN_LEN_MAX]).is_ok());
        for wrong in ["all", "nqn.a b", &long, DISCOVERY_NQN] {
            assert!(check_subsystem_nqn(wrong).is_err(), "{wrong}");
        }
    }
}
