//! The future adapter: bios as futures, for callers with many steps. One thread, any executor.
//!
//! A future only waits. The thread must call [`Io::drive`] (or [`Io::block_on`]) for I/O to
//! progress. A dropped future leaves its bio in flight: the data lies in a region, not in the
//! future.

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::bio::Bio;
use crate::bio::Completion;
use crate::channel::Channel;

/// A channel that executes bios as futures.
pub struct Io {
    state: Rc<RefCell<State>>,
}

struct State {
    channel: Box<dyn Channel>,
    slots: Vec<FutureSlot>,
    free: Vec<usize>,
    done: Vec<Completion>,
    /// The wakers of futures that found the channel full.
    full: Vec<Waker>,
}

enum FutureSlot {
    Free,
    /// In flight. With `wanted` false the future was dropped, and the result is discarded.
    Waiting {
        waker: Option<Waker>,
        wanted: bool,
        user_data: u64,
    },
    Done(Completion),
}

impl Io {
    /// Takes ownership of the channel.
    pub fn new(channel: Box<dyn Channel>) -> Io {
        let (slots, free, done, full) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let state = State { channel, slots, free, done, full };
        Io { state: Rc::new(RefCell::new(state)) }
    }

    /// Calls `f` with the channel, for instance to register a region.
    pub fn with_channel<R>(&self, f: impl FnOnce(&mut dyn Channel) -> R) -> R {
        f(&mut *self.state.borrow_mut().channel)
    }

    /// A bio as a future that resolves to its completion. The first poll pushes the bio; if the
    /// channel is full, the future tries again after the next completion.
    pub fn run(&self, bio: Bio) -> Run {
        Run { state: Rc::clone(&self.state), bio, slot: None }
    }

    /// Submits the pushed bios and wakes the futures whose bios have completed; returns their
    /// number. With `wait`, sleeps until at least one bio has completed.
    pub fn drive(&self, wait: bool) -> usize {
        let mut state = self.state.borrow_mut();
        state.channel.submit();
        let mut done = std::mem::take(&mut state.done);
        if state.channel.reap(&mut done) == 0 && wait {
            state.channel.wait(None);
            state.channel.reap(&mut done);
        }
        let mut wakers: Vec<Waker> = done.iter().filter_map(|end| state.settle(end)).collect();
        if !done.is_empty() {
            wakers.append(&mut state.full);
        }
        let count = done.len();
        done.clear();
        state.done = done;
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        count
    }

    /// Runs one future to completion and drives the channel between polls.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            self.drive(true);
        }
    }
}

impl State {
    /// Records a completion; returns the waker of its future.
    fn settle(&mut self, end: &Completion) -> Option<Waker> {
        let index = end.user_data as usize;
        let slot = std::mem::replace(&mut self.slots[index], FutureSlot::Free);
        let FutureSlot::Waiting { waker, wanted, user_data } = slot else {
            unreachable!("a bio completes once, and its slot waits for it")
        };
        if wanted {
            self.slots[index] = FutureSlot::Done(Completion { user_data, ..*end });
        } else {
            self.free.push(index);
        }
        waker
    }
}

/// The future of one bio; [`Io::run`] returns it.
pub struct Run {
    state: Rc<RefCell<State>>,
    bio: Bio,
    slot: Option<usize>,
}

impl Future for Run {
    type Output = Completion;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Completion> {
        let this = &mut *self;
        let mut state = this.state.borrow_mut();
        let state = &mut *state;
        let Some(index) = this.slot else {
            let index = state.free.pop().unwrap_or_else(|| {
                state.slots.push(FutureSlot::Free);
                state.slots.len() - 1
            });
            if state.channel.push(&[this.bio.with_user_data(index as u64)]) == 0 {
                state.free.push(index);
                state.full.push(context.waker().clone());
                return Poll::Pending;
            }
            let (waker, user_data) = (Some(context.waker().clone()), this.bio.user_data);
            state.slots[index] = FutureSlot::Waiting { waker, wanted: true, user_data };
            this.slot = Some(index);
            return Poll::Pending;
        };
        match &mut state.slots[index] {
            FutureSlot::Done(end) => {
                let end = *end;
                state.slots[index] = FutureSlot::Free;
                state.free.push(index);
                this.slot = None;
                Poll::Ready(end)
            }
            FutureSlot::Waiting { waker, .. } => {
                *waker = Some(context.waker().clone());
                Poll::Pending
            }
            FutureSlot::Free => unreachable!("a polled future holds its slot"),
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let Some(index) = self.slot else { return };
        let mut state = self.state.borrow_mut();
        match &mut state.slots[index] {
            FutureSlot::Waiting { waker, wanted, .. } => (*waker, *wanted) = (None, false),
            slot => {
                *slot = FutureSlot::Free;
                state.free.push(index);
            }
        }
    }
}
