//! The table of exports: disks by name, shared by all servers and changeable while they run.
//!
//! Control plane: the locks here are taken when a client connects, lists or disconnects, and when
//! an export is added or removed; never for an I/O.
#![allow(clippy::disallowed_types)] // Control plane only, as said above.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_core::Disk;
use blockyard_core::rmw::SharedDisk;
use blockyard_sync::rmw_lock::RmwLock;

use crate::client::{CUT_GRACE, Client};
use crate::wire::{self, BlockSizes, REQUEST_BYTES_MAX, STRING_BYTES_MAX, Style, export_flag};

/// The most exports of one table.
pub const EXPORTS_MAX: usize = 4096;

/// The options of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Refuses every change of the disk.
    pub read_only: bool,
    /// The smallest block of clients, in bytes: a power of two. Above 1, a client that does not ask
    /// for block sizes is refused.
    pub min_block_bytes: u32,
    /// A description for people, shown when clients list the exports. It is cut off after 4096
    /// bytes, the longest string of the protocol.
    pub description: String,
}

impl Default for ExportOptions {
    fn default() -> ExportOptions {
        ExportOptions { read_only: false, min_block_bytes: 1, description: String::new() }
    }
}

/// A disk that clients can use under a name.
pub struct Export {
    name: String,
    disk: SharedDisk,
    options: ExportOptions,
    attached: Mutex<Attached>,
    detached: Condvar,
}

/// The clients of an export.
#[derive(Default)]
struct Attached {
    closed: bool,
    clients: Vec<Arc<Client>>,
}

/// An export as listings show it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportInfo {
    /// The export's name.
    pub name: String,
    /// The export's description.
    pub description: String,
    /// Whether changes are refused.
    pub read_only: bool,
    /// Whether the empty name stands for this export.
    pub default: bool,
    /// The export's size in bytes.
    pub len_bytes: u64,
    /// Clients that use it now.
    pub clients: usize,
}

/// The reason for which the table of exports refused a change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportError {
    /// There is an export of this name already.
    Taken {
        /// The name.
        name: String,
    },
    /// There is no export of this name.
    Unknown {
        /// The name.
        name: String,
    },
    /// The name or description violates the protocol's rules for strings.
    Text {
        /// Which of the two it is.
        field: &'static str,
        /// The given text.
        value: String,
    },
    /// There are [`EXPORTS_MAX`] exports already.
    Full,
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExportError::Taken { name } => {
                write!(f, "export `{name}` exists already: remove it first or take another name")
            }
            ExportError::Unknown { name } => write!(f, "there is no export `{name}`"),
            ExportError::Text { field, value } => write!(
                f,
                "invalid export {field} `{}`: expected at most {STRING_BYTES_MAX} bytes of UTF-8 \
                 without NUL, and a name of at least one",
                value.escape_debug()
            ),
            ExportError::Full => write!(f, "there are {EXPORTS_MAX} exports already: remove one"),
        }
    }
}

impl std::error::Error for ExportError {}

impl Export {
    /// The export's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The export's description; empty if it has none.
    pub fn description(&self) -> &str {
        &self.options.description
    }

    /// The exported disk.
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk.disk
    }

    /// The lock for sub-block writes to the disk.
    pub(crate) fn lock(&self) -> &Arc<RmwLock> {
        &self.disk.lock
    }

    /// Whether changes are refused, by the export or by the disk.
    pub fn read_only(&self) -> bool {
        self.options.read_only || self.disk().limits().read_only
    }

    /// The block sizes ("Block size constraints") for a client that obeys them. A client that does
    /// not ask for them may send any range, so its minimum is 1.
    pub fn block_sizes(&self, asked: bool) -> BlockSizes {
        let geometry = self.disk().geometry();
        let block = geometry.logical_block_bytes.max(self.options.min_block_bytes);
        let preferred = geometry.physical_block_bytes.max(block).max(4096);
        let minimum = if asked { block } else { 1 };
        BlockSizes { minimum, preferred, maximum: REQUEST_BYTES_MAX }
    }

    /// Whether a client must ask for block sizes.
    pub fn demands_block_sizes(&self) -> bool {
        self.options.min_block_bytes > 1
    }

    /// The transmission flags, given the negotiated options.
    pub fn flags(&self, style: Style, contexts: bool) -> u16 {
        let limits = self.disk().limits();
        // All connections' channels lead to one disk with one cache: a flush on any of them covers
        // the writes that completed on the others.
        let mut flags = export_flag::HAS_FLAGS
            | export_flag::SEND_FLUSH
            | export_flag::SEND_FUA
            | export_flag::CAN_MULTI_CONN
            | export_flag::SEND_CACHE;
        if self.read_only() {
            flags |= export_flag::READ_ONLY;
        }
        if limits.discard_sectors_max > 0 {
            flags |= export_flag::SEND_TRIM;
        }
        if limits.write_zeroes_sectors_max > 0 {
            flags |= export_flag::SEND_WRITE_ZEROES | export_flag::SEND_FAST_ZERO;
        }
        if style >= Style::Structured {
            flags |= export_flag::SEND_DF;
        }
        if style == Style::Extended && contexts {
            flags |= export_flag::BLOCK_STATUS_PAYLOAD;
        }
        flags
    }

    fn attached(&self) -> MutexGuard<'_, Attached> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a client; `false` if the export is being removed.
    pub(crate) fn attach(&self, client: &Arc<Client>) -> bool {
        let mut attached = self.attached();
        if attached.closed {
            return false;
        }
        attached.clients.push(Arc::clone(client));
        true
    }

    /// Whether a mounted file system has claimed the disk. To be asked after [`Export::attach`].
    pub(crate) fn is_claimed(&self) -> bool {
        self.disk.claim.is_claimed()
    }

    /// Removes a client.
    pub(crate) fn detach(&self, client: &Arc<Client>) {
        self.attached().clients.retain(|other| !Arc::ptr_eq(other, client));
        self.detached.notify_all();
    }

    /// Admits no new client, asks the present ones to drain, and at `drain` cuts off those that
    /// have not disconnected. Returns when all have, or soon after the cut.
    fn close(&self, drain: Duration) {
        let deadline = Instant::now() + drain;
        let mut attached = self.attached();
        attached.closed = true;
        attached.clients.iter().for_each(|client| client.drain());
        while !attached.clients.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            attached = self
                .detached
                .wait_timeout(attached, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        attached.clients.iter().for_each(|client| client.cut());
        // They end at their next check; only a system call that does not return can delay one.
        let gone = |attached: &mut Attached| !attached.clients.is_empty();
        let waited = self.detached.wait_timeout_while(attached, CUT_GRACE, gone);
        let attached = waited.unwrap_or_else(PoisonError::into_inner).0;
        for client in &attached.clients {
            let (id, peer) = (client.id, &client.peer);
            tracing::warn!(id, peer, export = self.name, "a client that was cut has not left");
        }
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The table of exports.
#[derive(Debug, Default)]
pub struct Exports {
    table: Mutex<ExportTable>,
}

#[derive(Debug, Default)]
struct ExportTable {
    /// In the order in which they were added.
    exports: Vec<Arc<Export>>,
    default: Option<String>,
}

impl ExportTable {
    fn find(&self, name: &str) -> Option<&Arc<Export>> {
        self.exports.iter().find(|export| export.name == name)
    }

    /// The configured default; without one, or if it was removed, the first export.
    fn default(&self) -> Option<&Arc<Export>> {
        let configured = self.default.as_deref().and_then(|name| self.find(name));
        configured.or_else(|| self.exports.first())
    }
}

impl Exports {
    /// An empty table.
    pub fn new() -> Arc<Exports> {
        Arc::default()
    }

    fn table(&self) -> MutexGuard<'_, ExportTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Exports a disk under a name.
    ///
    /// # Errors
    /// If the name is taken or violates the protocol's rules, or the table is full.
    pub fn add(
        &self,
        name: &str,
        disk: impl Into<SharedDisk>,
        mut options: ExportOptions,
    ) -> Result<(), ExportError> {
        let description = &mut options.description;
        description.truncate(description.floor_char_boundary(STRING_BYTES_MAX));
        for (field, text) in [("name", name), ("description", &options.description)] {
            let empty_name = field == "name" && text.is_empty();
            if empty_name || wire::parse_name(text.as_bytes()).is_err() {
                return Err(ExportError::Text { field, value: text.to_owned() });
            }
        }
        let mut table = self.table();
        if table.find(name).is_some() {
            return Err(ExportError::Taken { name: name.to_owned() });
        }
        if table.exports.len() >= EXPORTS_MAX {
            return Err(ExportError::Full);
        }
        table.exports.push(Arc::new(Export {
            name: name.to_owned(),
            disk: disk.into(),
            options,
            attached: Mutex::default(),
            detached: Condvar::new(),
        }));
        Ok(())
    }

    /// Removes an export. Its clients' requests in flight are answered, then the clients are
    /// disconnected; those that take longer than `drain` are cut off, whatever their requests still
    /// wait for. Returns when the last one has ended.
    ///
    /// # Errors
    /// If there is no such export.
    pub fn remove(&self, name: &str, drain: Duration) -> Result<(), ExportError> {
        let export = {
            let mut table = self.table();
            let Some(index) = table.exports.iter().position(|export| export.name == name) else {
                return Err(ExportError::Unknown { name: name.to_owned() });
            };
            table.exports.remove(index)
        };
        export.close(drain);
        Ok(())
    }

    /// Sets the export for which the empty name stands. By default it is the first.
    ///
    /// # Errors
    /// If there is no such export.
    pub fn set_default(&self, name: &str) -> Result<(), ExportError> {
        let mut table = self.table();
        if table.find(name).is_none() {
            return Err(ExportError::Unknown { name: name.to_owned() });
        }
        table.default = Some(name.to_owned());
        Ok(())
    }

    /// The export of this name; the empty name stands for the default.
    pub fn find(&self, name: &str) -> Option<Arc<Export>> {
        let table = self.table();
        if name.is_empty() { table.default().cloned() } else { table.find(name).cloned() }
    }

    /// The exports themselves, in the order in which they were added.
    pub fn snapshot(&self) -> Vec<Arc<Export>> {
        self.table().exports.clone()
    }

    /// All exports, in the order in which they were added.
    pub fn list(&self) -> Vec<ExportInfo> {
        let table = self.table();
        let default = table.default().map(|export| export.name.clone());
        let describe = |export: &Arc<Export>| ExportInfo {
            name: export.name.clone(),
            description: export.options.description.clone(),
            read_only: export.read_only(),
            default: default.as_ref() == Some(&export.name),
            len_bytes: export.disk().geometry().len_bytes(),
            clients: export.attached().clients.len(),
        };
        table.exports.iter().map(describe).collect()
    }
}
