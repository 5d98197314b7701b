//! The table of parameters. Names and meanings of the null device's parameters are null_blk's.

use super::{DeviceKind, Param, ValueForm};

const KIB: u64 = 1 << 10;
const TIB: u64 = 1 << 40;
const PIB: u64 = 1 << 50;

/// Largest device, in bytes.
const SIZE_MAX: u64 = 8 * PIB;

const fn param(
    name: &'static str,
    form: ValueForm,
    default: &'static str,
    doc: &'static str,
) -> Param {
    Param { name, form, default, doc }
}

const fn size(min: u64, max: u64) -> ValueForm {
    ValueForm::Size { min, max }
}

const fn count(min: u64, max: u64) -> ValueForm {
    ValueForm::Count { min, max }
}

const fn text(len_max: usize) -> ValueForm {
    ValueForm::Text { len_max }
}

/// A path of any length that Linux accepts.
const PATH: ValueForm = ValueForm::Path { len_max: 4 * KIB as usize };

/// A non-negative `int` of Linux.
const INT: ValueForm = count(0, i32::MAX as u64);

/// A non-negative `int` of milliseconds.
const MILLIS: ValueForm = ValueForm::Millis { min: 0, max: i32::MAX as u64 };

/// The schedulers by Linux's names; the first is none.
pub const SCHEDULERS: &[&str] = &["none", "mq-deadline"];

/// Every kind of device.
pub const KINDS: &[DeviceKind] = &[
    DeviceKind {
        name: "null",
        doc: "null device, zoned or not, with or without memory; as Linux's null_blk",
        params: NULL,
        faults: NULL_FAULTS,
        hints: NULL_HINTS,
    },
    DeviceKind {
        name: "smr",
        doc: "host-managed SMR disk over SCSI (ZBC): emulated, in memory or in files, or real",
        params: SMR,
        faults: SMR_FAULTS,
        hints: SMR_HINTS,
    },
    DeviceKind {
        name: "ram",
        doc: "compressed RAM disk; as Linux's zram",
        params: RAM,
        faults: RAM_FAULTS,
        hints: RAM_HINTS,
    },
    DeviceKind {
        name: "volume",
        doc: "durable volume in a pool of files: thin, checksummed; as ZFS' zvol",
        params: VOLUME,
        faults: &[],
        hints: VOLUME_HINTS,
    },
    DeviceKind {
        name: "file",
        doc: "existing regular file or block device; direct I/O by io_uring",
        params: FILE,
        faults: &[],
        hints: FILE_HINTS,
    },
];

/// The parameters of every kind.
pub const COMMON: &[Param] = &[
    param(
        "scheduler",
        ValueForm::Choice(SCHEDULERS),
        "none",
        "I/O scheduler, as in Linux; what follows down to prio_aging_expire is mq-deadline's",
    ),
    param("read_expire", MILLIS, "500", "when a read is overdue, in milliseconds"),
    param("write_expire", MILLIS, "5000", "when any other request is overdue, in milliseconds"),
    param(
        "writes_starved",
        ValueForm::Int { min: i32::MIN, max: i32::MAX },
        "2",
        "how often reads go before waiting writes",
    ),
    param("front_merges", ValueForm::Switch, "1", "merge what ends where a waiting request begins"),
    param(
        "async_depth",
        INT,
        "0",
        "most writes that wait or run at once; 0: as many as there is room for",
    ),
    param("fifo_batch", INT, "16", "requests in order of sectors before the overdue are looked at"),
    param(
        "prio_aging_expire",
        MILLIS,
        "10000",
        "when a lower class is served in spite of a higher",
    ),
    param(
        "gate",
        ValueForm::Choice(&["auto", "pipeline", "plug"]),
        "auto",
        "changes of a zone in flight: plug: one, pipeline: many, auto: by what the device can do",
    ),
    param("read_only", ValueForm::Switch, "0", "refuse every change"),
    param(
        "min_block",
        ValueForm::Sizes(&[1, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536]),
        "1",
        "smallest block over NBD; above 1, a client that does not ask for block sizes is refused",
    ),
    param(
        "delay_nsec",
        count(0, 60_000_000_000),
        "0",
        "delay every completion by this number of nanoseconds; 0: off",
    ),
    param("trace", PATH, "", "record a trace for blkparse in this file; empty: off"),
];

const NULL: &[Param] = &[
    param("size", size(512, SIZE_MAX), "250G", "capacity"),
    param(
        "bs",
        ValueForm::Sizes(&[512, 1024, 2048, 4096]),
        "512",
        "logical block size: 512, 1k, 2k or 4k",
    ),
    param(
        "memory_backed",
        ValueForm::Switch,
        "0",
        "keep what is written; without it reads give nothing",
    ),
    param("discard", ValueForm::Switch, "0", "take discards (memory-backed and not zoned only)"),
    param("fua", ValueForm::Switch, "1", "obey FUA itself where there is a cache"),
    param("cache_size", size(0, PIB), "0", "volatile write cache, emptied by flush; 0: none"),
    param("max_sectors", count(0, 1 << 22), "0", "longest request in sectors; 0: no own limit"),
    param("mbps", count(0, 40_960), "0", "bandwidth limit in MiB a second; 0: none"),
    param("submit_queues", count(0, 1024), "0", "queues that share their tags; 0: one per channel"),
    param("hw_queue_depth", count(1, 32_768), "64", "requests that one queue works on at once"),
    param(
        "irqmode",
        ValueForm::Choice(&["none", "softirq", "timer"]),
        "none",
        "complete inside submit, at the next poll, or after completion_nsec",
    ),
    param("completion_nsec", count(0, 3_600_000_000_000), "10000", "latency with irqmode=timer"),
    param("zoned", ValueForm::Switch, "0", "divide the device into zones"),
    param("zone_size", size(512, SIZE_MAX), "256M", "zone size: a power of two"),
    param("zone_capacity", size(0, SIZE_MAX), "0", "writable part of a zone; 0: all of it"),
    param("zone_nr_conv", count(0, u32::MAX as u64), "0", "conventional zones at the start"),
    param("zone_max_open", count(0, u32::MAX as u64), "0", "most open zones; 0: no limit"),
    param("zone_max_active", count(0, u32::MAX as u64), "0", "most active zones; 0: no limit"),
    param(
        "zone_append_max_sectors",
        count(0, u32::MAX as u64),
        "2147483647",
        "longest zone append in sectors; 0: none of its own, made of writes",
    ),
    param("zone_full", ValueForm::Switch, "0", "sequential zones start full"),
    param(
        "backing",
        PATH,
        "",
        "keep data and zones in files of this folder (zoned=1); empty: lost with the device",
    ),
    param("badblocks", text(KIB as usize), "", "bad sectors at start, e.g. +8-15,+64-64"),
    param("badblocks_once", ValueForm::Switch, "0", "a bad range is good again after one hit"),
    param("badblocks_partial_io", ValueForm::Switch, "0", "move what lies before the bad block"),
    param("timeout", text(64), "", "requests that time out: interval,probability,space,times"),
    param(
        "request_timeout_ms",
        count(1, 3_600_000),
        "5000",
        "when a request that never completes ends with a timeout, in milliseconds",
    ),
    param("requeue", text(64), "", "requests that are requeued: interval,probability,space,times"),
];

const SMR: &[Param] = &[
    param("size", size(4096, SIZE_MAX), "14T", "capacity"),
    param("bs", ValueForm::Sizes(&[512, 4096]), "512", "logical block size: 512 or 4k"),
    param(
        "physical_bs",
        ValueForm::Sizes(&[512, 4096]),
        "4096",
        "writes to sequential zones are whole blocks of this size: 512 or 4k",
    ),
    param("zone_size", size(4096, SIZE_MAX), "256M", "zone size: a power of two"),
    param(
        "zone_capacity",
        size(0, SIZE_MAX),
        "0",
        "length of a sequential zone, followed by a gap zone; 0: zone_size, no gaps",
    ),
    param("zone_nr_conv", count(0, u32::MAX as u64), "0", "conventional zones at the start"),
    param("zone_max_open", count(0, u32::MAX as u64), "128", "most open zones; 0: no limit"),
    param(
        "cache",
        ValueForm::Choice(&["host", "none", "volatile"]),
        "host",
        "what a flush is for: the kernel's cache, nothing, or a cache that a kill loses",
    ),
    param("backing", PATH, "", "keep data in files of this folder; empty: in memory"),
    param(
        "timing",
        ValueForm::Switch,
        "0",
        "take the time that a drive would: seeks, rotation, transfer",
    ),
    param("device", PATH, "", "a real drive instead, e.g. /dev/sg0; takes its own shape"),
];

/// The emulated SMR disk's own faults.
const SMR_FAULTS: &[&str] = &["zone_readonly", "zone_offline"];

/// Names from other programs that users try on SMR disks.
const SMR_HINTS: &[(&str, &str)] = &[
    ("capacity", "write size=14T, or zone_capacity=192M for zones with gaps"),
    ("block_size", "write bs=512"),
    ("max_open", "write zone_max_open"),
    ("zone_max_active", "SMR disks have no such limit; zone_max_open there is"),
    ("zoned", "SMR disks always are; leave it out"),
    ("memory_backed", "it keeps what is written, in memory or with backing=DIR; leave it out"),
    ("cache_size", "write cache=volatile"),
    ("path", "write backing=DIR for files, device=/dev/sg0 for a real drive"),
    ("dir", "write backing=DIR"),
    ("zone_readonly", "set it at run time: blockyard inject NAME zone_readonly=SECTOR"),
    ("zone_offline", "set it at run time: blockyard inject NAME zone_offline=SECTOR"),
    ("name", "the name is the path of the URI: smr:///NAME"),
];

const RAM: &[Param] = &[
    param("size", size(4096, 1 << 46), "4G", "capacity"),
    param(
        "bs",
        ValueForm::Sizes(&[512, 1024, 2048, 4096]),
        "4096",
        "logical block size: 512, 1k, 2k or 4k",
    ),
    param(
        "unit",
        ValueForm::Sizes(&[4096, 8192, 16_384, 32_768, 65_536]),
        "4096",
        "bytes compressed as one block: 4k, 8k, 16k, 32k or 64k; larger ones compress better",
    ),
    param("algo", ValueForm::Choice(&["lz4", "lz4hc", "zstd"]), "lz4", "how blocks are compressed"),
    param(
        "level",
        text(8),
        "",
        "lz4: acceleration, 1 to 65537; lz4hc: 1 to 12; zstd: -131072 to 22; empty: its default",
    ),
    param("dict", PATH, "", "a zstd dictionary in a file, as `zstd --train` makes"),
    param(
        "recomp_algo",
        ValueForm::Choice(&["none", "lz4", "lz4hc", "zstd"]),
        "none",
        "algorithm of `blockyard ram recompress`",
    ),
    param("recomp_level", text(8), "", "its level, as for level"),
    param("recomp_dict", PATH, "", "its dictionary, as for dict"),
    param(
        "recomp_algo2",
        ValueForm::Choice(&["none", "lz4", "lz4hc", "zstd"]),
        "none",
        "another such algorithm, tried where recomp_algo gains nothing, or with --priority 2",
    ),
    param("recomp_level2", text(8), "", "its level, as for level"),
    param("recomp_dict2", PATH, "", "its dictionary, as for dict"),
    param(
        "recomp_algo3",
        ValueForm::Choice(&["none", "lz4", "lz4hc", "zstd"]),
        "none",
        "and one more, tried last, or with --priority 3",
    ),
    param("recomp_level3", text(8), "", "its level, as for level"),
    param("recomp_dict3", PATH, "", "its dictionary, as for dict"),
    param("dedup", ValueForm::Switch, "0", "store equal blocks once"),
    param(
        "checksum",
        ValueForm::Switch,
        "0",
        "a CRC-32 with each object; a changed bit is an error",
    ),
    param(
        "backing",
        PATH,
        "",
        "a file for blocks that `blockyard ram writeback` takes out of memory",
    ),
    param("load", PATH, "", "a file of `blockyard ram save`, to begin with"),
    param(
        "mem_limit",
        size(0, 1 << 46),
        "0",
        "most memory for data; what would need more fails with NOSPC; 0: no limit",
    ),
    param(
        "warn_fill",
        count(0, 100),
        "80",
        "warn when data fill this percentage of mem_limit; 0: never",
    ),
    param(
        "compact",
        count(0, 100),
        "3",
        "overhead in percent over which the pool is compacted in the background; 0: never",
    ),
];

/// The RAM disk's own faults.
const RAM_FAULTS: &[&str] = &["nospc", "flip", "backing_eio", "backing_late_eio", "backing_enospc"];

/// zram's attributes that have another form here, or none.
const RAM_HINTS: &[(&str, &str)] = &[
    ("disksize", "write size=4G"),
    ("capacity", "write size=4G"),
    ("comp_algorithm", "write algo=zstd"),
    ("compression", "write algo=zstd"),
    ("algorithm_params", "write level=3, dict=FILE"),
    ("max_comp_streams", "every channel has a stream of its own; leave it out"),
    ("block_size", "write unit=16k for what is compressed as one, bs=4k for the logical block"),
    ("blocksize", "write unit=16k for what is compressed as one, bs=4k for the logical block"),
    ("memory_backed", "it always is; leave it out"),
    ("discard", "it always takes discards; leave it out"),
    ("recomp_algorithm", "write recomp_algo=zstd"),
    ("use_dedup", "write dedup=1"),
    ("backing_dev", "write backing=FILE"),
    ("writeback_limit", "it is of each command: blockyard ram writeback NAME --limit SIZE"),
    (
        "mem_used_max",
        "it is a statistic: blockyard stats NAME; blockyard ram set NAME mem_used_max=0",
    ),
    ("name", "the name is the path of the URI: ram:///NAME"),
];

const VOLUME: &[Param] = &[
    param(
        "path",
        PATH,
        "",
        "the pool: a directory, which is made if there is none, a block device, or \
         s3://BUCKET/PREFIX in an object store; empty: a directory of the volume's name, in the \
         state directory",
    ),
    param(
        "path2",
        PATH,
        "",
        "the directory or disk of the pool's second copy; empty: the one that the first one knows, \
         or none",
    ),
    param(
        "copies",
        count(0, 2),
        "0",
        "how many copies of everything there have to be: 1, or 2 in path and path2; 0: as many as \
         there are",
    ),
    param(
        "degraded",
        ValueForm::Switch,
        "0",
        "open a pool of two copies with one of them, although the missing one may be newer",
    ),
    param(
        "size",
        size(0, PIB),
        "0",
        "capacity; the volume is made if there is none of its name; 0: what it has",
    ),
    param(
        "volblocksize",
        ValueForm::Sizes(&[0, 4096, 8192, 16_384, 32_768, 65_536]),
        "0",
        "block size of a volume that is made: 4k to 64k; 0: what it has, or 16k",
    ),
    param(
        "compress",
        ValueForm::Choice(VOLUME_COMPRESS),
        "lz4",
        "how blocks are compressed: not, by LZ4, or by Zstandard with a level; zstd is zstd:3",
    ),
    param(
        "sync",
        ValueForm::Choice(&["standard", "always", "disabled"]),
        "standard",
        "durable is what asks to be, every write, or nothing by request",
    ),
    param("iops", count(0, 1 << 32), "0", "most reads and writes in a second; 0: any number"),
    param("bandwidth", size(0, PIB), "0", "most of their bytes in a second; 0: any number"),
    param(
        "reservation",
        size(0, PIB),
        "0",
        "space that only it may use, before compression; 0: what it has",
    ),
    param(
        "map_cache",
        size(0, PIB),
        "0",
        "memory for the maps of the pool, of the volume that opens it; 0: 128m",
    ),
    param(
        "commit",
        text(16),
        "",
        "how writes to the pool become durable; group: what waits is written together and synced \
         once; taskq:N: each write by one of N workers, which syncs for it; empty: group, or as \
         the pool is open",
    ),
    param(
        "store",
        ValueForm::Choice(&["auto", "uring", "threads"]),
        "auto",
        "by what the pool's files are read and written: io_uring where the system lets it, or as \
         the pool is open; io_uring; or calls that block",
    ),
    param(
        "warn_fill",
        count(0, 100),
        "80",
        "warn when the pool is filled to this percentage; 0: never; of several volumes the least \
         that is given",
    ),
    param(
        "scrub",
        text(16),
        "never",
        "how often the pool is scrubbed: never, daily, weekly, monthly, or a time such as 36h; of \
         several volumes the most frequent",
    ),
    param(
        "scrub_rate",
        size(0, PIB),
        "100M",
        "most bytes that such a scrub reads in a second; 0: any number",
    ),
    param(
        "resync_rate",
        size(0, PIB),
        "0",
        "most bytes that a resync compares in a second while the pool is in use; 0: any number; of \
         several volumes the last that is opened decides",
    ),
    param(
        "pool_size",
        size(0, PIB),
        "0",
        "capacity of a pool in an object store that is made; 0: what it has",
    ),
    param(
        "cache",
        PATH,
        "",
        "the directory with the cache of a pool in an object store; empty: one in the state \
         directory",
    ),
    param("cache_size", size(0, 4 * TIB), "0", "most bytes of that cache; 0: 4g"),
    param(
        "ack",
        ValueForm::Choice(&["auto", "object", "local"]),
        "auto",
        "what acknowledges a sync of a pool in an object store; object: the object store; local: a \
         log on a disk of this machine, which is uploaded later; auto: object, or as the pool is \
         open",
    ),
    param(
        "max_lag",
        size(0, TIB),
        "0",
        "with ack=local, most bytes that the object store may lack, 16M or more; 0: 64M",
    ),
    param(
        "max_lag_time",
        MILLIS,
        "0",
        "with ack=local, syncs wait for the object store while it lacks a write that is older; 0: \
         30s",
    ),
    param(
        "lease",
        MILLIS,
        "0",
        "of a pool in an object store: a standby takes it over if the lease is not renewed for \
         this time, 3s or more; 0: none",
    ),
    param(
        "key_file",
        PATH,
        "",
        "the file (mode 0600) with the key of an encrypted volume; with size=, a new volume is \
         encrypted; empty: the volume is not encrypted, or unlocked",
    ),
    param(
        "passphrase_file",
        PATH,
        "",
        "the file (mode 0600) with the passphrase of an encrypted volume, in place of key_file",
    ),
];

/// The compression of blocks: zstd has level 3, or the given level.
const VOLUME_COMPRESS: &[&str] = &[
    "none", "lz4", "zstd", "zstd:1", "zstd:2", "zstd:3", "zstd:4", "zstd:5", "zstd:6", "zstd:7",
    "zstd:8", "zstd:9", "zstd:10", "zstd:11", "zstd:12", "zstd:13", "zstd:14", "zstd:15",
    "zstd:16", "zstd:17", "zstd:18", "zstd:19",
];

/// zvol's properties that have another form here, or none.
const VOLUME_HINTS: &[(&str, &str)] = &[
    ("volsize", "write size=100G"),
    ("capacity", "write size=100G"),
    ("compression", "write compress=lz4 or compress=zstd"),
    ("bs", "it is 4k; write volblocksize=16k for what is checksummed as one"),
    ("blocksize", "write volblocksize=16k"),
    ("pool", "write path=DIRECTORY"),
    ("dir", "write path=DIRECTORY"),
    ("backing", "write path=DIRECTORY"),
    ("mirror", "write path=PLACE&path2=PLACE"),
    ("checksum", "it always has checksums; leave it out"),
    ("sparse", "it always is; leave it out"),
    ("refreservation", "write reservation=100G"),
    ("readonly", "write read_only=1"),
    ("name", "the name is the path of the URI: volume:///NAME"),
];

const FILE: &[Param] = &[
    param("path", PATH, "", "the regular file or block device, which has to be given"),
    param(
        "size",
        size(0, SIZE_MAX),
        "0",
        "length of the file, which is created if there is none; an existing file must have it and \
         is never resized; 0: what it has",
    ),
    param(
        "direct",
        ValueForm::Choice(&["auto", "on", "off"]),
        "auto",
        "bypass the page cache (O_DIRECT); auto: where the kernel reports that the file allows it",
    ),
    param(
        "io",
        ValueForm::Choice(&["auto", "uring", "blocking"]),
        "auto",
        "how requests are executed: by io_uring where the system allows it; by io_uring; or by \
         calls that block",
    ),
];

/// Names from other programs that users try on files.
const FILE_HINTS: &[(&str, &str)] = &[
    ("file", "write path=FILE"),
    ("filename", "write path=FILE"),
    ("device", "write path=/dev/NAME"),
    ("backing", "write path=FILE"),
    ("capacity", "write size=100G"),
    ("bs", "it is that of the block device, or 512; direct=on takes what the file system needs"),
    ("cache", "write direct=on or direct=off"),
    ("aio", "write io=uring or io=blocking"),
    ("format", "a file is served as it is, in raw format; leave it out"),
    ("discard", "it takes discards where the file system does; leave it out"),
    ("readonly", "write read_only=1"),
    ("name", "the name is the path of the URI: file:///NAME"),
];

/// The null device's own faults.
const NULL_FAULTS: &[&str] = &[
    "badblocks",
    "badblocks_once",
    "badblocks_partial_io",
    "zone_readonly",
    "zone_offline",
    "timeout",
    "requeue",
    "power_cut",
];

/// null_blk parameters that have another form here, or none.
const NULL_HINTS: &[(&str, &str)] = &[
    ("gb", "give the capacity with a unit, e.g. size=10G"),
    ("blocksize", "write bs=4k"),
    ("block_size", "write bs=4k"),
    ("capacity", "write size=10G, or zone_capacity=192M for zones"),
    ("nr_devices", "name every device by a URI of its own"),
    ("max_open", "write zone_max_open"),
    ("max_active", "write zone_max_active"),
    ("queues", "write submit_queues"),
    ("queue_mode", "there is one queue mode; leave it out"),
    ("blocking", "there is nothing to choose; leave it out"),
    ("no_sched", "write scheduler=none"),
    ("power", "a device is on from the moment it is added; `blockyard remove` takes it away"),
    ("zone_readonly", "set it at run time: blockyard inject NAME zone_readonly=SECTOR"),
    ("zone_offline", "set it at run time: blockyard inject NAME zone_offline=SECTOR"),
    ("base_dir", "write backing=DIR"),
    ("path", "write backing=DIR; `file:` serves an existing file"),
    ("name", "the name is the path of the URI: null:///NAME"),
];
