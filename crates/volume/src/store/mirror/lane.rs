//! The log writer of a mirror. Each copy has its own lane, and a parcel has ended when it has ended
//! in both.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use blockyard_sync::bell::{Bell, Caller};

use super::{MirrorFile, Shared};
use crate::store::Directory;
use crate::store::lane::{Durability, Ended, Lane, Parcel};

/// A parcel in flight.
struct Flight<D: Directory> {
    file: Arc<MirrorFile<D>>,
    range: Range<u64>,
    /// The copies to which it is written.
    goes: [bool; 2],
}

/// The log writer of a mirror.
pub struct MirrorLane<D: Directory> {
    shared: Arc<Shared<D>>,
    lanes: [Option<D::Lane>; 2],
    /// Parcels in flight, the oldest first.
    flights: VecDeque<Flight<D>>,
    /// Parcels for the second copy, to be reused.
    spare: Vec<Parcel>,
}

impl<D: Directory> MirrorLane<D> {
    pub(super) fn new(shared: &Arc<Shared<D>>, lanes: [Option<D::Lane>; 2]) -> MirrorLane<D> {
        let (flights, spare) = (VecDeque::new(), Vec::new());
        MirrorLane { shared: Arc::clone(shared), lanes, flights, spare }
    }

    /// Duplicates a parcel for the second copy.
    fn twin(&mut self, parcel: &Parcel) -> Parcel {
        let memory = &self.shared.memory;
        let spare = self.spare.pop();
        let mut twin =
            spare.unwrap_or_else(|| Parcel::new(memory.take_beyond(parcel.head_bytes_max())));
        parcel.copy_into(&mut twin, memory);
        twin
    }
}

impl<D: Directory> Lane<MirrorFile<D>> for MirrorLane<D> {
    fn depth(&self) -> usize {
        let depths = self.lanes.iter().flatten().map(Lane::depth);
        depths.min().unwrap_or(1)
    }

    /// Wakes both lanes: when a copy fails, the committer sleeps in the other lane.
    fn caller(&self) -> Option<Caller> {
        let callers: Vec<Caller> = self.lanes.iter().flatten().filter_map(Lane::caller).collect();
        let call = move || callers.iter().for_each(Caller::call);
        Some(Caller::new(call))
    }

    fn begin(
        &mut self,
        file: &Arc<MirrorFile<D>>,
        offset: u64,
        parcel: Parcel,
        durability: Durability,
    ) {
        let range = offset..offset + parcel.len() as u64;
        file.begin(range.clone());
        let good = self.shared.good();
        let goes = std::array::from_fn(|at| {
            good[at] && file.side(at).is_some() && self.lanes[at].is_some()
        });
        let both = goes == [true, true];
        let twin = both.then(|| self.twin(&parcel));
        let first = usize::from(!goes[0]);
        if let (true, Some(lane), Some(file)) =
            (goes[first], &mut self.lanes[first], file.side(first))
        {
            lane.begin(file, offset, parcel, durability);
        }
        if let (Some(twin), Some(lane), Some(file)) = (twin, &mut self.lanes[1], file.side(1)) {
            lane.begin(file, offset, twin, durability);
        }
        self.flights.push_back(Flight { file: Arc::clone(file), range, goes });
    }

    fn wait(&mut self, bell: &Bell, is_there: &dyn Fn() -> bool) -> bool {
        let Some(flight) = self.flights.front() else { return true };
        let lanes = self.lanes.iter_mut().zip(flight.goes).filter(|(_, goes)| *goes);
        // The other lane ends at about the same time.
        lanes.filter_map(|(lane, _)| lane.as_mut()).next().is_none_or(|it| it.wait(bell, is_there))
    }

    fn end(&mut self) -> Option<Ended> {
        let Flight { file, range, goes } = self.flights.pop_front()?;
        let mut results: [Option<io::Result<()>>; 2] = [None, None];
        let mut parcel = None;
        let first = usize::from(!goes[0]);
        for number in 0..2 {
            let lane = self.lanes[number].as_mut().filter(|_| goes[number]);
            let Some((back, result)) = lane.and_then(Lane::end) else { continue };
            results[number] = Some(result);
            match back {
                Some(back) if number == first => parcel = Some(back),
                Some(mut twin) => {
                    twin.clear();
                    self.spare.push(twin);
                }
                None => {}
            }
        }
        // Record the failure of a copy before a repair may write to this range.
        let settled = self.shared.settle(results);
        file.end(&range);
        Some((parcel, settled))
    }
}

impl<D: Directory> fmt::Debug for MirrorLane<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flights = self.flights.len();
        f.debug_struct("MirrorLane").field("flights", &flights).finish_non_exhaustive()
    }
}
