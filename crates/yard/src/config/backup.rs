//! The settings of backup policies.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use blockyard_volume_admin::prune::{Period, Retention};
use blockyard_volume_format::catalogue::is_tag;

/// The most backup policies of a yard.
pub const BACKUPS_MAX: usize = 64;

/// The longest name of a backup policy: the name of a snapshot has a period after it.
pub const BACKUP_NAME_MAX: usize = 48;

/// How long the command of a backup may take for one stream, if the policy does not say it.
pub const BACKUP_TIMEOUT: Duration = Duration::from_secs(6 * 3600);

/// How long it may take at least and at most, in seconds.
const TIMEOUTS_S: RangeInclusive<u64> = 1..=720 * 3600;

/// A backup policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupSettings {
    /// The name, which begins the names of its snapshots and is the tag of its holds.
    pub name: String,
    /// The directory or disk of the pool, which must be open as a device's.
    pub pool: PathBuf,
    /// The volumes; all of the pool if there are none.
    pub volumes: Vec<String>,
    /// The period of which each has one snapshot.
    pub snapshots: Period,
    /// Which of its snapshots are kept; all without it.
    pub keep: Option<Retention>,
    /// The program that receives the streams on its standard input, and its arguments, in which
    /// `{volume}` stands for the name of the volume. Snapshots are not sent if it is empty.
    pub target: Vec<String>,
    /// How long the program may take for one stream.
    pub timeout: Duration,
    /// Whether encrypted volumes are sent as they are stored, without their keys.
    pub raw: bool,
}

impl BackupSettings {
    /// Whether this can be the name of a policy: it is the tag of a hold, and names snapshots.
    pub fn is_name(text: &str) -> bool {
        is_tag(text) && text.len() <= BACKUP_NAME_MAX
    }

    /// Whether both policies send a volume to one target. Each of them would build on the snapshot
    /// that it has sent last, though the target has a newer one of the other policy.
    pub fn sends_same(&self, other: &BackupSettings) -> bool {
        let has = |volume: &String| other.volumes.contains(volume);
        let has_all = self.volumes.is_empty() || other.volumes.is_empty();
        self.pool == other.pool
            && !self.target.is_empty()
            && self.target == other.target
            && (has_all || self.volumes.iter().any(has))
    }

    /// Parses how long the program may take: a number of seconds (`s`), minutes (`m`) or hours
    /// (`h`), at most 720 hours.
    pub fn parse_timeout(text: &str) -> Option<Duration> {
        let unit = text.chars().next_back()?;
        let seconds = match unit {
            's' => 1,
            'm' => 60,
            'h' => 3600,
            _ => return None,
        };
        let digits = &text[..text.len() - 1];
        let count = digits.parse::<u64>().ok();
        let count = count.filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
        let seconds = count.checked_mul(seconds).filter(|it| TIMEOUTS_S.contains(it))?;
        Some(Duration::from_secs(seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_have_a_unit_and_bounds() {
        for (text, seconds) in [("1s", 1), ("90m", 5400), ("720h", 2_592_000)] {
            let timeout = BackupSettings::parse_timeout(text);
            assert_eq!(timeout, Some(Duration::from_secs(seconds)), "{text}");
        }
        for text in
            ["", "h", "0s", "721h", "1", "1d", "+1s", "1.5h", "99999999999999999999h", "1\u{e9}"]
        {
            assert_eq!(BackupSettings::parse_timeout(text), None, "{text}");
        }
    }
}
