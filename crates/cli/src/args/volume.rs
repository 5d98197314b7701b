//! The command line of `volume`.

use std::path::PathBuf;

use blockyard_volume_admin::prune::Retention;
use blockyard_volume_format::catalogue::{NAME_MAX, VOLUME_NAME_MAX, is_name};
use clap::{Args, Subcommand, ValueEnum};

use super::{AttachArgs, PoolsArgs, ScriptArgs, TalkArgs};

const HELP: &str = "\
POOL is the pool's directory or disk. Where a yard has it open, the command asks that yard.

Examples:
  blockyard volume create /srv/pool v0 --size 100G
  blockyard volume snapshot /srv/pool v0@monday
  blockyard volume clone /srv/pool v0@monday try
  blockyard volume send /srv/pool v0@monday | ssh there blockyard volume receive /srv/pool v0
  blockyard volume send /srv/pool v0@tuesday --from v0@monday -o changes
  blockyard volume diff /srv/pool v0@monday
  blockyard volume export /srv/pool v0@monday monday.qcow2
  blockyard volume import /srv/pool v1 debian.qcow2
  blockyard volume scrub /srv/pool --rate 100M
  blockyard volume check /srv/pool
";

const LIST_HELP: &str = "\
USED is what destroying it frees: for a volume its snapshots and its reservation included. REFER is
what it refers to, with what others refer to as well. Both count blocks as they are stored.

Columns for -o, -s and -S: name, pool, type, used, refer, avail, size, origin, created,
volblocksize, reserv, device, usedsnap, usedds, usedrefreserv, lrefer, ratio, holds; and `space`
and `all` for several. Names that zfs has for them work too. Times are UTC.

Examples:
  blockyard volume list /srv/pool
  blockyard volume list -r                      a tree of all volumes, snapshots and clones
  blockyard volume list -t snapshot -s used -Hp -o name,used /srv/pool
";

/// `volume`.
#[derive(Debug, Subcommand)]
#[command(after_help = HELP)]
pub(crate) enum VolumeCommand {
    /// Create a volume, and the pool if there is none
    // `-V` is the size, as in `zfs create`.
    #[command(
        disable_version_flag = true,
        mut_arg("name", |arg| arg.help("The volume to create"))
    )]
    Create(VolumeCreateArgs),
    /// List volumes and snapshots of pools, by default of all that a yard has open, with their
    /// space; changes nothing
    #[command(after_help = LIST_HELP)]
    List(VolumeListArgs),
    /// Show a volume or snapshot and its space, or the pool and its activity; changes nothing
    Show(VolumeShowArgs),
    /// Create a snapshot VOLUME@SNAPSHOT, or with -r one of each volume of the pool at one moment
    Snapshot(VolumeSnapshotArgs),
    /// Create a volume from a snapshot; the two share their blocks
    #[command(mut_arg("name", |arg| arg.help("The snapshot to clone: VOLUME@SNAPSHOT")))]
    Clone(VolumeCloneArgs),
    /// Reset a volume that is not in use to a snapshot of it; resize it to the size of the snapshot
    /// before, if that differs
    #[command(mut_arg("name", |arg| arg.help("The snapshot to go back to: VOLUME@SNAPSHOT")))]
    Rollback(VolumeNameArgs),
    /// Change the size of a volume; --force shrinks it, which discards the data beyond the new size
    #[command(mut_arg("name", |arg| arg.help("The volume to resize")))]
    Resize(VolumeResizeArgs),
    /// Set properties of a volume, all or none; those of a volume in use apply at once
    #[command(mut_arg("name", |arg| arg.help("The volume")), after_help = SET_HELP)]
    Set(VolumeSetArgs),
    /// Show the properties of a volume, and where each comes from; changes nothing
    #[command(mut_arg("name", |arg| arg.help("The volume")))]
    Get(VolumeGetArgs),
    /// Decrypt the key of an encrypted volume, and keep it in the memory of the yard that has the
    /// pool open
    #[command(mut_arg("name", |arg| arg.help("The encrypted volume or snapshot")))]
    Unlock(VolumeUnlockArgs),
    /// Remove the key of an encrypted volume from the memory of the yard that has the pool open
    #[command(mut_arg("name", |arg| arg.help("The encrypted volume or snapshot")))]
    Lock(VolumeNameArgs),
    /// Change the passphrase or key of an encrypted volume and of all that share blocks with it;
    /// data are not written again
    #[command(mut_arg("name", |arg| arg.help("The encrypted volume or snapshot")))]
    ChangeKey(VolumeChangeKeyArgs),
    /// Destroy a snapshot, a range of snapshots, or a volume, with -r with its snapshots
    #[command(after_help = DESTROY_HELP)]
    Destroy(VolumeDestroyArgs),
    /// Destroy the snapshots of a volume, or of all volumes of a pool, that a retention does not
    /// keep
    #[command(after_help = PRUNE_HELP)]
    Prune(VolumePruneArgs),
    /// Rename a volume that is not in use, with its snapshots, or a snapshot
    #[command(mut_arg("name", |arg| arg.help("What to rename: VOLUME or VOLUME@SNAPSHOT")))]
    #[command(mut_arg("new", |arg| arg.help("The new name, of the same volume for a snapshot")))]
    Rename(VolumeCloneArgs),
    /// Make a clone the owner of the snapshot that it was cloned from and of the older ones; the
    /// volume that had them becomes its clone
    #[command(mut_arg("name", |arg| arg.help("The clone")))]
    Promote(VolumeNameArgs),
    /// Hold a snapshot, so that it cannot be destroyed
    Hold(VolumeHoldArgs),
    /// Release a hold of a snapshot
    Release(VolumeHoldArgs),
    /// List the holds of a snapshot, or of all snapshots of a pool; changes nothing
    Holds(VolumeHoldsArgs),
    /// List the ranges in which a volume or snapshot differs from a snapshot; reads maps, no data
    #[command(after_help = DIFF_HELP)]
    Diff(VolumeDiffArgs),
    /// Move a volume that is not in use, with its snapshots, to another pool
    #[command(mut_arg("name", |arg| arg.help("The volume to move")), after_help = MOVE_HELP)]
    Move(VolumeMoveArgs),
    /// Write a snapshot, its changes since an older snapshot, or several snapshots, as a stream
    #[command(after_help = SEND_HELP)]
    Send(VolumeSendArgs),
    /// Create or update volumes and their snapshots from a stream; atomic for each snapshot
    #[command(after_help = RECEIVE_HELP)]
    Receive(VolumeReceiveArgs),
    /// Verify a stream that `send` wrote, without a pool: all checksums, the order and the end
    VerifyStream(VerifyStreamArgs),
    /// Write a volume or snapshot as an image: raw or qcow2
    #[command(mut_arg("name", |arg| {
        arg.help("What to export: VOLUME as it is now, or the snapshot VOLUME@SNAPSHOT")
    }))]
    Export(VolumeExportArgs),
    /// Create a volume from a disk image: raw, or qcow2 with its backing files; atomic
    #[command(mut_arg("name", |arg| arg.help("The volume to create")), after_help = IMPORT_HELP)]
    Import(VolumeImportArgs),
    /// Verify every block of a pool, online or not in use, and repair from the other copy
    Scrub(VolumeScrubArgs),
    /// Verify a pool that is not in use, and change nothing
    Check(VolumePoolArgs),
    /// Add an empty directory or disk as the second copy of a pool, and wait until it is good
    Attach(AttachArgs),
}

/// A pool.
#[derive(Args, Debug)]
pub(crate) struct VolumePoolArgs {
    /// The pool's directory or disk, or s3://BUCKET/PREFIX
    #[arg(value_name = "POOL", index = 1)]
    pub(crate) pool: PathBuf,
    /// Open a mirrored pool with this copy only, although the other copy may be newer
    #[arg(long)]
    pub(crate) degraded: bool,
    /// Change a pool in an object store although another machine may have it open, and loses it
    #[arg(long)]
    pub(crate) take_over: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// What `volume list` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ListedKind {
    /// Volumes, clones included
    Volume,
    /// Snapshots
    #[value(alias = "snap")]
    Snapshot,
    /// Both
    All,
}

/// `volume list`.
#[derive(Args, Debug)]
pub(crate) struct VolumeListArgs {
    #[command(flatten)]
    pub(crate) pools: PoolsArgs,
    /// The columns, separated by commas
    #[arg(short = 'o', long = "columns", value_name = "COLUMN,...", value_delimiter = ',')]
    pub(crate) output: Vec<String>,
    /// Sort by a column, ascending; may be repeated, the first one counts most
    #[arg(short = 's', long = "sort", value_name = "COLUMN")]
    pub(crate) sort: Vec<String>,
    /// Sort by a column, descending; columns of -s count more
    #[arg(short = 'S', long = "sort-down", value_name = "COLUMN")]
    pub(crate) sort_down: Vec<String>,
    /// Show a tree: snapshots under their volumes, clones under their snapshots
    #[arg(short = 'r', long)]
    pub(crate) recursive: bool,
    /// Show these only
    #[arg(short = 't', long = "type", value_name = "TYPE", value_delimiter = ',')]
    pub(crate) kinds: Vec<ListedKind>,
    #[command(flatten)]
    pub(crate) script: ScriptArgs,
}

/// A pool and a name in it.
#[derive(Args, Debug)]
pub(crate) struct VolumeAt {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    // `mut_arg` moves an argument after the others, so each states its position.
    /// The name: VOLUME or VOLUME@SNAPSHOT
    #[arg(value_parser = name, index = 2)]
    pub(crate) name: String,
}

/// `volume show`.
#[derive(Args, Debug)]
pub(crate) struct VolumeShowArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// The name: VOLUME or VOLUME@SNAPSHOT; the pool without it
    #[arg(value_parser = name, index = 2)]
    pub(crate) name: Option<String>,
}

/// A command about a name in a pool.
#[derive(Args, Debug)]
pub(crate) struct VolumeNameArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
}

/// `volume snapshot`.
#[derive(Args, Debug)]
pub(crate) struct VolumeSnapshotArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// The snapshot to create: VOLUME@SNAPSHOT, or @SNAPSHOT with -r
    #[arg(index = 2, value_name = "NAME")]
    pub(crate) name: String,
    /// Create a snapshot of this name of each volume, of all at one moment
    #[arg(short = 'r', long)]
    pub(crate) recursive: bool,
}

const DESTROY_HELP: &str = "\
NAME is
  VOLUME           a volume without snapshots, with -r also one with snapshots
  VOLUME@SNAPSHOT  a snapshot
  VOLUME@A%B       the snapshots from A to B in order of creation; VOLUME@A% ends at the newest
                   one, VOLUME@%B begins with the oldest one
  @SNAPSHOT        with -r: the snapshots of this name of all volumes

Nothing is destroyed if one of them has a hold or is a device.

Examples:
  blockyard volume destroy -nv /srv/pool v0@monday%friday
  blockyard volume destroy -r /srv/pool v0
";

/// `volume destroy`.
#[derive(Args, Debug)]
pub(crate) struct VolumeDestroyArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// What to destroy: VOLUME, VOLUME@SNAPSHOT, VOLUME@A%B, or @SNAPSHOT with -r
    #[arg(index = 2, value_name = "NAME")]
    pub(crate) name: String,
    /// Destroy the snapshots of the volume too, or @SNAPSHOT of all volumes
    #[arg(short = 'r', long)]
    pub(crate) recursive: bool,
    /// Destroy nothing: say what would be destroyed, and how much that frees
    #[arg(short = 'n', long)]
    pub(crate) dry_run: bool,
    /// Say what is destroyed, and how much that frees
    #[arg(short = 'v', long)]
    pub(crate) verbose: bool,
}

const PRUNE_HELP: &str = "\
24h,7d,4w,12m keeps the newest snapshot of each of the last 24 hours, 7 days, 4 weeks and 12 months
that have a snapshot, and destroys the others, as restic and borg do. Units are h, d, w, m and y.
Hours, days, months and years are those of UTC; weeks begin on Monday (ISO 8601).

Kept in any case: snapshots that have a hold, that a volume was cloned from or that are in use;
those without a creation time, or with one in the future.

Examples:
  blockyard volume prune -n --keep 24h,7d,4w,12m /srv/pool
  blockyard volume prune --keep 48h --prefix auto- /srv/pool v0
";

/// `volume prune`.
#[derive(Args, Debug)]
pub(crate) struct VolumePruneArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// The volume; all volumes of the pool without it, each for itself
    #[arg(index = 2, value_name = "NAME", value_parser = name)]
    pub(crate) name: Option<String>,
    /// What to keep, e.g. 24h,7d,4w,12m
    #[arg(long, value_name = "COUNTS")]
    pub(crate) keep: Retention,
    /// Consider only the snapshots whose names begin so, after the `@`
    #[arg(long, value_name = "PREFIX")]
    pub(crate) prefix: Option<String>,
    /// Destroy nothing: say what would be destroyed, what would be kept and why
    #[arg(short = 'n', long)]
    pub(crate) dry_run: bool,
    /// Say what is destroyed, how much that frees, and what is kept and why
    #[arg(short = 'v', long)]
    pub(crate) verbose: bool,
}

/// `volume hold` and `volume release`.
#[derive(Args, Debug)]
pub(crate) struct VolumeHoldArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// The name of the hold
    #[arg(index = 2, value_name = "TAG")]
    pub(crate) tag: String,
    /// The snapshot: VOLUME@SNAPSHOT
    #[arg(index = 3, value_name = "NAME", value_parser = name)]
    pub(crate) name: String,
}

/// `volume holds`.
#[derive(Args, Debug)]
pub(crate) struct VolumeHoldsArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// The snapshot: VOLUME@SNAPSHOT; all without it
    #[arg(index = 2, value_name = "NAME", value_parser = name)]
    pub(crate) name: Option<String>,
}

const SET_HELP: &str = "\
Properties:
  compress=none|lz4|zstd|zstd:1..19     how blocks are compressed that are written from now on
  sync=standard|always|disabled         whether flush and FUA are durable, every write, or nothing
  iops=N                                most reads and writes in a second; 0: any number
  bandwidth=SIZE                        most of their bytes in a second; 0: any number
  reservation=SIZE                      space that only this volume may use, before compression
  read_only=0|1                         refuse every change

The pool stores them. A parameter in the configuration or URI of a device takes effect in place of
the property of the same name. read_only, and sync from `always` on, cannot be changed while the
device has clients, which would not learn of it.

Examples:
  blockyard volume set /srv/pool v0 iops=5000 bandwidth=200M
  blockyard volume set /srv/pool v0 compress=zstd:3
  blockyard volume get /srv/pool v0
";

/// `volume set`.
#[derive(Args, Debug)]
pub(crate) struct VolumeSetArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    /// Properties and their values
    #[arg(value_name = "KEY=VALUE", index = 3, required = true)]
    pub(crate) properties: Vec<String>,
}

/// `volume get`.
#[derive(Args, Debug)]
pub(crate) struct VolumeGetArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    /// The properties to show; all without it
    #[arg(value_name = "PROPERTY", index = 3)]
    pub(crate) properties: Vec<String>,
    #[command(flatten)]
    pub(crate) script: ScriptArgs,
}

const DIFF_HELP: &str = "\
A range was `written`, or `discarded`: it reads as zeros now. A block that was overwritten with
equal data was written. If a yard has the pool open, a volume is compared as it is when the command
begins, by a hidden snapshot, which is removed at the end. -H leaves the totals out too.

Examples:
  blockyard volume diff /srv/pool v0@monday            what was written to v0 since
  blockyard volume diff /srv/pool v0@monday v0@friday
  blockyard volume diff -Hp /srv/pool v0@monday        offset, length and change, by tabs
";

/// `volume diff`.
#[derive(Args, Debug)]
pub(crate) struct VolumeDiffArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// The snapshot to compare with: VOLUME@SNAPSHOT
    #[arg(index = 2, value_name = "FROM", value_parser = name)]
    pub(crate) from: String,
    /// What to compare: a volume, or a snapshot, of which `@SNAPSHOT` suffices if it is of the same
    /// volume [default: the volume of FROM]
    #[arg(index = 3, value_name = "TO", value_parser = name_or_snapshot)]
    pub(crate) to: Option<String>,
    #[command(flatten)]
    pub(crate) script: ScriptArgs,
}

impl VolumeDiffArgs {
    /// The name of what is compared.
    pub(crate) fn to(&self) -> String {
        let volume = self.from.split('@').next().unwrap_or_default();
        match self.to.as_deref() {
            None => volume.to_owned(),
            Some(snapshot) if snapshot.starts_with('@') => format!("{volume}{snapshot}"),
            Some(to) => to.to_owned(),
        }
    }
}

/// `volume create`.
#[derive(Args, Debug)]
pub(crate) struct VolumeCreateArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    /// Size of the volume
    #[arg(long, short = 'V', value_name = "SIZE", value_parser = bytes)]
    pub(crate) size: u64,
    /// Block size, the unit of checksum and compression: 4k to 64k
    #[arg(long, value_name = "SIZE", value_parser = bytes, default_value = "16k")]
    pub(crate) volblocksize: u64,
    /// Create the pool on a disk that holds other data, which is lost; never over a pool
    #[arg(long)]
    pub(crate) force: bool,
    /// Capacity of a pool in an object store that this creates
    #[arg(long = "pool-size", value_name = "SIZE", value_parser = bytes, default_value = "0")]
    pub(crate) capacity: u64,
    /// Space reserved for the volume, before compression
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) reservation: Option<u64>,
    /// Encrypt the volume; asks for a passphrase unless an option below names one, or a key
    #[arg(long)]
    pub(crate) encrypt: bool,
    #[command(flatten)]
    pub(crate) secret: SecretArgs,
}

/// Where the passphrase or key of an encrypted volume comes from.
#[derive(Args, Debug, Default)]
#[group(id = "secret", multiple = false)]
pub(crate) struct SecretArgs {
    /// File of mode 0600 with the key: 32 to 4096 bytes that cannot be guessed
    #[arg(long, value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// File of mode 0600 with the passphrase, or `-` for standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) passphrase_file: Option<PathBuf>,
    /// Command whose output is the key, such as `systemd-creds decrypt FILE -`; the shell runs it
    #[arg(long, value_name = "COMMAND")]
    pub(crate) key_command: Option<String>,
}

/// `volume unlock`.
#[derive(Args, Debug)]
pub(crate) struct VolumeUnlockArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    #[command(flatten)]
    pub(crate) secret: SecretArgs,
}

/// `volume change-key`.
#[derive(Args, Debug)]
pub(crate) struct VolumeChangeKeyArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    #[command(flatten)]
    pub(crate) secret: SecretArgs,
    /// File of mode 0600 with the new key
    #[arg(long, value_name = "FILE", group = "new")]
    pub(crate) new_key_file: Option<PathBuf>,
    /// File of mode 0600 with the new passphrase
    #[arg(long, value_name = "FILE", group = "new")]
    pub(crate) new_passphrase_file: Option<PathBuf>,
    /// Command whose output is the new key
    #[arg(long, value_name = "COMMAND", group = "new")]
    pub(crate) new_key_command: Option<String>,
}

impl VolumeChangeKeyArgs {
    /// Where the new passphrase or key comes from.
    pub(crate) fn new_secret(&self) -> SecretArgs {
        SecretArgs {
            key_file: self.new_key_file.clone(),
            passphrase_file: self.new_passphrase_file.clone(),
            key_command: self.new_key_command.clone(),
        }
    }
}

/// `volume clone`.
#[derive(Args, Debug)]
pub(crate) struct VolumeCloneArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    /// The name of the new volume
    #[arg(value_parser = name, index = 3)]
    pub(crate) new: String,
}

/// `volume resize`.
#[derive(Args, Debug)]
pub(crate) struct VolumeResizeArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    /// New size of the volume
    #[arg(long, value_name = "SIZE", value_parser = bytes, required_unless_present = "reservation")]
    pub(crate) size: Option<u64>,
    /// Shrink the volume, and discard its data beyond the new size; snapshots keep theirs
    #[arg(long, requires = "size")]
    pub(crate) force: bool,
    /// Space reserved for the volume, before compression; 0 takes it back
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) reservation: Option<u64>,
}

const MOVE_HELP: &str = "\
The volume keeps its name, its snapshots and its properties. An encrypted volume stays encrypted,
and opens by the same passphrase or key. The volume is destroyed in POOL when TO has all of it,
durably. A copy that fails is removed. If the command is killed, or says that both pools have the
volume, run it again: it removes an incomplete copy, or ends the move. Do not destroy the volume
in TO; an incomplete copy has the name blockyard-move-ID there.

Examples:
  blockyard volume move /srv/pool v0 s3://volumes/pool0 --pool-size 1T
  blockyard volume move s3://volumes/pool0 v0 /srv/pool
";

/// `volume move`.
#[derive(Args, Debug)]
pub(crate) struct VolumeMoveArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    /// The other pool, which is created if there is none: a directory or s3://BUCKET/PREFIX
    #[arg(value_name = "TO", index = 3)]
    pub(crate) to: PathBuf,
    /// Change TO in an object store although another machine may have it open, and loses it.
    /// --take-over is for POOL
    #[arg(long)]
    pub(crate) take_over_to: bool,
    /// Capacity of a pool in an object store that this creates
    #[arg(long = "pool-size", value_name = "SIZE", value_parser = bytes, default_value = "0")]
    pub(crate) capacity: u64,
}

const SEND_HELP: &str = "\
-i sends the changes between two snapshots, -I also the snapshots between them, one stream after the
other. -R sends all snapshots up to the one that is named, with -i or -I those after another one;
-R @SNAPSHOT does so for all volumes that have a snapshot of this name, a clone after its origin.

-w sends an encrypted volume without its key: it stays encrypted, and opens at the receiver by the
passphrase or key that it has here.

Examples:
  blockyard volume send /srv/pool v0@b -i @a | ssh there blockyard volume receive -s /backup v0
  blockyard volume send --resume TOKEN /srv/pool | ssh there blockyard volume receive -s /backup v0
  blockyard volume send -R --compressed /srv/pool @b -o all
";

/// `volume send`.
#[derive(Args, Debug)]
pub(crate) struct VolumeSendArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// The snapshot to send: VOLUME@SNAPSHOT, or @SNAPSHOT with -R
    #[arg(value_name = "NAME", index = 2, required_unless_present = "resume")]
    pub(crate) name: Option<String>,
    /// Only what has changed since this older snapshot of the same volume: VOLUME@SNAPSHOT or
    /// @SNAPSHOT
    #[arg(short = 'i', long, value_name = "SNAPSHOT")]
    pub(crate) from: Option<String>,
    /// As --from, with all snapshots in between
    #[arg(short = 'I', long, value_name = "SNAPSHOT", conflicts_with = "from")]
    pub(crate) intermediate: Option<String>,
    /// All snapshots of the volume up to this one; with @SNAPSHOT those of all volumes
    #[arg(short = 'R', long)]
    pub(crate) replicate: bool,
    /// Compress blocks by Zstandard, where that saves space
    #[arg(short = 'c', long)]
    pub(crate) compressed: bool,
    /// Send encrypted volumes as they are stored, without their keys; others as without this. With
    /// --resume: refuse a token by which an encrypted volume would be sent in plain
    #[arg(short = 'w', long, conflicts_with = "secret")]
    pub(crate) raw: bool,
    /// Continue the stream of an interrupted receive, whose `receive --token` printed this
    #[arg(
        short = 't',
        long,
        value_name = "TOKEN",
        conflicts_with_all = ["name", "from", "intermediate", "replicate"]
    )]
    pub(crate) resume: Option<String>,
    /// Send nothing: say how long the stream is, with --compressed or --raw how long at most
    #[arg(short = 'n', long, conflicts_with = "output")]
    pub(crate) estimate: bool,
    /// The file to write [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Replace FILE even if it is no such stream
    #[arg(long, requires = "output")]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) secret: SecretArgs,
}

impl VolumeSendArgs {
    /// Checks the names, which may be `@SNAPSHOT` where that has a meaning.
    ///
    /// # Errors
    /// Which one is invalid, and what is expected instead.
    pub(crate) fn check(&self) -> Result<(), (&'static str, &str, String)> {
        let names = [
            ("NAME", &self.name, self.replicate),
            ("--from", &self.from, true),
            ("--intermediate", &self.intermediate, true),
        ];
        for (what, text, may_be_short) in names {
            if let Some(text) = text {
                one_or_all(text, may_be_short).map_err(|wanted| (what, text.as_str(), wanted))?;
            }
        }
        Ok(())
    }
}

const RECEIVE_HELP: &str = "\
NAME is the volume to create or update, whose snapshots get the names that they had;
VOLUME@SNAPSHOT gives a single one another name. Without NAME each volume of the input gets the
name that it had.

With -s, what was received is kept if the stream ends early or the process is killed, and the error
has the token for `volume send --resume`. `receive --token` prints it again, `receive --abort` drops
what was kept.
";

/// `volume receive`.
#[derive(Args, Debug)]
pub(crate) struct VolumeReceiveArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// The volume to create or update, or VOLUME@SNAPSHOT
    #[arg(value_name = "NAME", index = 2, value_parser = name)]
    pub(crate) name: Option<String>,
    /// The file to read [default: standard input]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) input: Option<PathBuf>,
    /// Keep what was received if the stream is interrupted, so that it can be continued
    #[arg(short = 's', long)]
    pub(crate) resumable: bool,
    /// Receive nothing: print the token of an interrupted receive, or without NAME a list of all
    #[arg(long, conflicts_with_all = ["input", "resumable", "abort"])]
    pub(crate) token: bool,
    /// Receive nothing: drop what an interrupted receive has kept
    #[arg(long, conflicts_with_all = ["input", "resumable"], requires = "name")]
    pub(crate) abort: bool,
}

/// `volume verify-stream`.
#[derive(Args, Debug)]
pub(crate) struct VerifyStreamArgs {
    /// The file to read; `-` for standard input
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// What an image can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImageFormat {
    /// The bytes of the disk
    Raw,
    /// QEMU's own format
    Qcow2,
}

/// `volume export`.
#[derive(Args, Debug)]
pub(crate) struct VolumeExportArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    /// The file to write; `-` for standard output, raw only
    #[arg(value_name = "FILE", index = 3)]
    pub(crate) file: PathBuf,
    /// Image format [default: qcow2 for FILE.qcow2, else raw; required where FILE has the suffix of
    /// another image format]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<ImageFormat>,
    /// Replace FILE if it holds something, or write over a block device
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) secret: SecretArgs,
}

/// Which backing files of an image are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackingFiles {
    /// None: refuse an image that has one
    None,
    /// Those in the directory of FILE, or below
    SameDirectory,
    /// All that the images name: only for images whose origin you trust
    Any,
}

const IMPORT_HELP: &str = "\
FILE is a file or a block device that no other program writes. Zeros take no space in the volume.
qcow2 images may have versions 2 and 3, compressed clusters, subclusters and backing files; their
internal snapshots are left out. Encrypted images and those with a data file are refused.

An image names its backing files, so an image of unknown origin could name any file of this machine.
Also give --format raw for a raw image of unknown origin: its first bytes may be those of a qcow2
image.

Examples:
  blockyard volume import /srv/pool v0 debian.qcow2
  blockyard volume import /srv/pool v0 overlay.qcow2 --backing any
  blockyard volume import /srv/pool v0 /dev/vg0/disk --format raw --volblocksize 8k
";

/// `volume import`.
#[derive(Args, Debug)]
pub(crate) struct VolumeImportArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    /// The image
    #[arg(value_name = "FILE", index = 3)]
    pub(crate) file: PathBuf,
    /// Image format [default: qcow2 if FILE begins as such an image, else raw]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<ImageFormat>,
    /// The backing files that are read
    #[arg(long, value_name = "WHICH", default_value = "same-directory")]
    pub(crate) backing: BackingFiles,
    /// Block size of the volume, the unit of checksum and compression: 4k to 64k
    #[arg(long, value_name = "SIZE", value_parser = bytes, default_value = "16k")]
    pub(crate) volblocksize: u64,
}

/// `volume scrub`.
#[derive(Args, Debug)]
pub(crate) struct VolumeScrubArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// Read at most so much in a second, e.g. 100M
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) rate: Option<u64>,
    /// Pause the scrub that runs in a yard; its position is kept, also when the yard ends
    #[arg(long, conflicts_with_all = ["rate", "resume"])]
    pub(crate) pause: bool,
    /// Let the yard continue a scrub that was paused or stopped, without waiting for its end
    #[arg(long, conflicts_with = "rate")]
    pub(crate) resume: bool,
}

impl VolumeSnapshotArgs {
    /// Checks the name, which may be `@SNAPSHOT` with `-r`.
    ///
    /// # Errors
    /// What is expected instead.
    pub(crate) fn check(&self) -> Result<(), String> {
        one_or_all(&self.name, self.recursive)
    }
}

impl VolumeDestroyArgs {
    /// Checks the name, which may also be a range, or `@SNAPSHOT` with `-r`.
    ///
    /// # Errors
    /// What is expected instead.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self.name.split_once('%') {
            Some((first, last)) if first.contains('@') => {
                let whole = |end: &str| match end.is_empty() {
                    true => Ok(()),
                    false => name(&format!("v@{end}")).map(drop),
                };
                let (volume, first) = first.split_once('@').unwrap_or_default();
                name(volume).and_then(|_| whole(first)).and_then(|()| whole(last))
            }
            _ => one_or_all(&self.name, self.recursive),
        }
    }
}

/// Checks the name of something in a pool, or of a snapshot of all volumes.
fn one_or_all(text: &str, is_recursive: bool) -> Result<(), String> {
    match text.strip_prefix('@') {
        Some(_) if is_recursive => name(&format!("v{text}")).map(drop),
        _ => name(text).map(drop),
    }
}

/// The name of something in a pool, or `@SNAPSHOT` of a volume that another argument names.
fn name_or_snapshot(text: &str) -> Result<String, String> {
    one_or_all(text, true).map(|()| text.to_owned())
}

/// The name of something in a pool.
fn name(text: &str) -> Result<String, String> {
    match is_name(text) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "expected VOLUME or VOLUME@SNAPSHOT of at most {NAME_MAX} characters: VOLUME of \
             letters, digits, `-`, `_` and `.`, at most {VOLUME_NAME_MAX}; SNAPSHOT also of `:` \
             and `+`"
        )),
    }
}

pub(super) fn bytes(text: &str) -> Result<u64, String> {
    blockyard_yard::size::parse(text).map_err(|error| error.to_string())
}
