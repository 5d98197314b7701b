//! The access of NVMe hosts, the resources for their connections, and conflicts of its settings. A
//! file and a command line can each set some of them, so the rules apply to the combination.

use std::num::NonZeroUsize;
use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;
use std::sync::Arc;

use blockyard_nvme::auth_message::{AuthHash, DhGroup};
use blockyard_nvme::secret::{HostSecrets, SecretsError};
use blockyard_nvme::{AllowedHosts, AuthRules, HostAccess, THREADS_MAX};

/// The numbers of threads that may serve NVMe hosts.
pub const NVME_THREADS: RangeInclusive<usize> = 1..=THREADS_MAX;

/// The bounds of the connections of an NVMe listener.
pub const NVME_CONNECTIONS: RangeInclusive<usize> = 2..=16_384;

/// The access of NVMe hosts, and the resources for their connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmeSettings {
    /// The hosts that may use each device.
    pub allow: AllowedHosts,
    /// The file with the secrets of hosts, which then have to authenticate.
    pub secrets: Option<PathBuf>,
    /// The hash functions for the authentication, the preferred one first; empty for all.
    pub hashes: Vec<AuthHash>,
    /// The Diffie-Hellman groups for the authentication, the preferred one first; empty for all.
    pub dh_groups: Vec<DhGroup>,
    /// The NQN of a subsystem with all devices as namespaces, if there is to be one.
    pub subsystem: Option<String>,
    /// The most threads that serve the connections of all listeners.
    pub threads: Option<NonZeroUsize>,
    /// The most connections of each listener.
    pub connections: Option<NonZeroUsize>,
}

/// The reason for which the settings of NVMe are refused when the secrets are read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NvmeSettingsError {
    /// The file of secrets is invalid.
    #[error("secrets: {0}")]
    Secrets(#[from] SecretsError),
    /// An allowed host has no secret.
    #[error("allow: {host} may use `{device}`, but has no secret in {secrets}; add a line for it")]
    NoSecret {
        /// The device.
        device: String,
        /// The NQN of the host.
        host: String,
        /// The file of secrets.
        secrets: String,
    },
}

impl NvmeSettings {
    /// Checks for conflicts.
    ///
    /// # Errors
    /// The first conflict.
    pub fn check(&self) -> Result<(), NvmeProblem> {
        match self.secrets {
            None if !self.hashes.is_empty() => Err(NvmeProblem::HashesWithoutSecrets),
            None if !self.dh_groups.is_empty() => Err(NvmeProblem::GroupsWithoutSecrets),
            _ => Ok(()),
        }
    }

    /// Reads the secrets.
    ///
    /// # Errors
    /// If their file is invalid, or an allowed host has none.
    pub fn load(&self) -> Result<HostAccess, NvmeSettingsError> {
        let allowed = self.allow.clone();
        let Some(path) = &self.secrets else {
            return Ok(HostAccess { allowed, authentication: None });
        };
        let secrets = HostSecrets::read(path)?;
        if let Some((device, host)) = allowed.iter().find(|(_, host)| secrets.find(host).is_none())
        {
            let (device, host) = (device.to_owned(), host.to_owned());
            let secrets = path.display().to_string();
            return Err(NvmeSettingsError::NoSecret { device, host, secrets });
        }
        let hashes = match self.hashes.is_empty() {
            true => AuthHash::ALL.to_vec(),
            false => self.hashes.clone(),
        };
        let groups = match self.dh_groups.is_empty() {
            true => DhGroup::ALL.to_vec(),
            false => self.dh_groups.clone(),
        };
        let authentication = Some(Arc::new(AuthRules { secrets, hashes, groups }));
        Ok(HostAccess { allowed, authentication })
    }
}

/// A conflict between settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvmeProblem {
    /// Hash functions without secrets.
    HashesWithoutSecrets,
    /// Diffie-Hellman groups without secrets.
    GroupsWithoutSecrets,
}

/// The positions of the settings in the text, if they are set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmePlaces {
    /// The hash functions.
    pub hashes: Option<Range<usize>>,
    /// The groups.
    pub dh_groups: Option<Range<usize>>,
}

impl NvmePlaces {
    /// The position, message and help for a conflict in the file.
    pub(super) fn tell(&self, problem: NvmeProblem) -> (Range<usize>, &'static str, &'static str) {
        let (place, message) = match problem {
            NvmeProblem::HashesWithoutSecrets => {
                (&self.hashes, "hashes: no host authenticates without secrets")
            }
            NvmeProblem::GroupsWithoutSecrets => {
                (&self.dh_groups, "dh_groups: no host authenticates without secrets")
            }
        };
        (place.clone().unwrap_or(0..0), message, "add secrets = \"FILE\"")
    }
}
