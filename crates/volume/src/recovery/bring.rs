//! Leaves that the log changes, read by several threads at once: one after the other they would
//! take longer than the log.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;

use super::{Group, Recovery};
use crate::error::VolumeError;
use crate::format::group::{Descriptor, Kind};
use crate::map::{Away, Leaf, Map};
use crate::segments::Segments;
use crate::store::Directory;

/// Leaves that are read at once.
const READERS: usize = 16;

/// A thread that reads leaves: what it is to read, and how that has ended.
type Reader = (Sender<Vec<Arc<Leaf>>>, Receiver<Result<(), VolumeError>>);

/// Threads that are there for all groups; none until a group has leaves for all of them.
#[derive(Default)]
pub(super) struct Readers(Vec<Reader>);

impl Readers {
    /// Reads leaves.
    fn read<'scope, D: Directory>(
        &mut self,
        scope: &'scope Scope<'scope, '_>,
        segments: &'scope Segments<D>,
        leaves: &[Arc<Leaf>],
    ) -> Result<(), VolumeError> {
        if self.0.is_empty() {
            self.0.extend((0..READERS).map(|_| start(scope, segments)));
        }
        let parts = leaves.chunks(leaves.len().div_ceil(READERS));
        let busy: Vec<&Reader> = self
            .0
            .iter()
            .zip(parts)
            .map(|(reader, part)| {
                // Of one that is gone nothing comes below.
                _ = reader.0.send(part.to_vec());
                reader
            })
            .collect();
        // All of them, whatever comes of one.
        let ended: Vec<_> = busy.iter().map(|(_, ended)| ended.recv()).collect();
        ended.into_iter().try_for_each(|ended| {
            let gone = |_| io::Error::other("a thread that reads them has panicked");
            ended.map_err(gone).map_err(VolumeError::io("cannot read pages of the map"))?
        })
    }
}

fn start<'scope, D: Directory>(
    scope: &'scope Scope<'scope, '_>,
    segments: &'scope Segments<D>,
) -> Reader {
    let (work, parts) = channel::<Vec<Arc<Leaf>>>();
    let (end, ended) = channel();
    scope.spawn(move || {
        for part in parts {
            let read = part.iter().try_for_each(|leaf| segments.load(leaf).map(drop));
            if end.send(read).is_err() {
                return;
            }
        }
    });
    (work, ended)
}

impl<D: Directory> Recovery<'_, D> {
    /// Reads the leaves that a group changes, if they are many.
    pub(super) fn bring<'scope>(
        &self,
        group: &Group,
        scope: &'scope Scope<'scope, '_>,
        segments: &'scope Segments<D>,
        readers: &mut Readers,
    ) -> Result<(), VolumeError> {
        let mut leaves: HashMap<*const Leaf, Arc<Leaf>> = HashMap::new();
        for Descriptor { kind, volume, block, .. } in &group.descriptors {
            let live = self.volumes.by_id.get(volume).filter(|_| *kind == Kind::Data);
            let Some(live) = live.filter(|live| *block < live.traits.blocks) else { continue };
            let (span, at) = Map::place(*block);
            if let Some(Away(leaf)) = live.map.with(span, |span| span.away(at, at + 1)) {
                leaves.insert(Arc::as_ptr(&leaf), leaf);
            }
        }
        if leaves.len() < READERS {
            return Ok(());
        }
        let leaves: Vec<Arc<Leaf>> = leaves.into_values().collect();
        readers.read(scope, segments, &leaves)
    }
}
