//! Room: the role.
//!
//! Protects   what one thread at a time does for all: ordering the requests of a scheduler, or
//!            starting them on a device queue and looking what has become of them.
//! Why        work that is in series anyway is done by whoever comes first, also for those who come
//!            meanwhile: they say so and go on, instead of waiting for a lock to do it themselves.
//! States     idle; running: one thread has the role; brief: it has it for a moment; kicked: it is
//!            to go round once more, because something was left for it.
//! Order      none: nobody waits for the role. Its holder may take locks of any rank.
//! Common     one compare-exchange to take it and one to give it up.
//! Cost       about 10 ns for both; a kick is one compare-exchange.
//! Before     a lock that every submitter takes for each of its requests.
//!
//! | | idle | running | brief | kicked |
//! | --- | --- | --- | --- | --- |
//! | who comes | takes it: running | kicked, goes on | kicked, goes on | goes on |
//! | who comes for a moment | takes it: brief | goes on | looks again, so many times | goes on |
//! | its holder leaves | - | idle | - | running, another round |
//! | its holder has had enough | - | idle | - | idle, and says so |
//! | its holder for a moment leaves | - | - | idle | idle, and is told |
//!
//! For a moment it is taken for what is over sooner than another thread could be told about: then
//! who finds it taken looks again instead, but only so many times, because the holder may have lost
//! its processor.
//!
//! What was published before a kick is seen by the round that answers it: each kick is a
//! read-modify-write of the word, also where it changes nothing, and so is the holder's answer.
#![allow(unsafe_code)]

use crate::atomics::{AtomicU32, Ordering, spin_hint};
use crate::cell::RoomCell;

const IDLE: u32 = 0;
const RUNNING: u32 = 1;
const KICKED: u32 = 2;
const BRIEF: u32 = 3;

/// A role, and what its holder works on. The word begins a line, and what the value begins with is
/// on that line too: where threads take turns, that one goes from one to the other.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Role<T> {
    word: AtomicU32,
    value: RoomCell<T>,
}

// SAFETY: the value is reached by the holder of the role only, one thread at a time.
unsafe impl<T: Send> Sync for Role<T> {}

/// What a round leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// Everything was seen to: the role is given up unless somebody has kicked meanwhile.
    Whole,
    /// The holder has had enough, and gives the role up whoever has kicked.
    Enough,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Ran {
    /// It did not: another thread has the role, and has been told to go round once more.
    Elsewhere,
    /// Nothing was left.
    Whole,
    /// The holder had had enough: something may be left, which is the caller's to see to.
    Enough,
}

/// Gives the role up when the holder has had enough, or panics: what it worked on stays as it then
/// is.
struct GiveUp<'a>(&'a AtomicU32);

impl Drop for GiveUp<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the next holder. A read-modify-write, behind a kick
        // that came meanwhile: the caller sees to what that was about.
        self.0.swap(IDLE, Ordering::AcqRel);
    }
}

impl<T> Role<T> {
    /// A role that nobody has.
    pub fn new(value: T) -> Role<T> {
        Role { word: AtomicU32::new(IDLE), value: RoomCell::new(value) }
    }

    /// Takes the role and works in rounds until nobody has kicked; or kicks the one who has it.
    #[inline]
    pub fn run(&self, mut round: impl FnMut(&mut T) -> Round) -> Ran {
        if self.enter() {
            let guard = GiveUp(&self.word);
            let ran = loop {
                // SAFETY: this thread has the role.
                let done = unsafe { self.value.with_mut(&mut round) };
                match done {
                    Round::Enough => break Ran::Enough,
                    Round::Whole if self.leave() => break Ran::Whole,
                    Round::Whole => {}
                }
            };
            if ran == Ran::Whole {
                std::mem::forget(guard);
            }
            return ran;
        }
        Ran::Elsewhere
    }

    /// Takes the role, or kicks its holder; says which.
    #[inline]
    fn enter(&self) -> bool {
        let mut state = self.word.load(Ordering::Relaxed);
        loop {
            let next = if state == IDLE { RUNNING } else { KICKED };
            // Acquire: pairs with the Release of the holder before. Release: pairs with the
            // Acquire in `leave` of the one who is kicked.
            match self.word.compare_exchange_weak(state, next, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return state == IDLE,
                Err(now) => state = now,
            }
        }
    }

    /// Takes the role for a moment, if nobody has it, or if whoever has it for a moment gives it up
    /// within so many looks; nobody is kicked. Answers what `work` does, and whether somebody has
    /// kicked meanwhile: to look once more is the caller's duty then.
    #[inline]
    pub fn brief<R>(&self, looks: u32, work: impl FnOnce(&mut T) -> R) -> Option<(R, bool)> {
        // Acquire: pairs with the Release of the holder before.
        let taken = self.word.compare_exchange(IDLE, BRIEF, Ordering::Acquire, Ordering::Relaxed);
        if let Err(state) = taken
            && !(state == BRIEF && self.look(looks))
        {
            return None;
        }
        let guard = GiveUp(&self.word);
        // SAFETY: this thread has the role.
        let done = unsafe { self.value.with_mut(work) };
        std::mem::forget(guard);
        // Release: pairs with the Acquire of the next holder. Acquire: pairs with the Release of
        // who has kicked, so that the caller finds what that was about.
        let left = self.word.swap(IDLE, Ordering::AcqRel);
        Some((done, left == KICKED))
    }

    /// Looks whether a brief holder gives the role up, and takes it then for a moment.
    #[cold]
    fn look(&self, looks: u32) -> bool {
        for _ in 0..looks {
            spin_hint();
            match self.word.load(Ordering::Relaxed) {
                BRIEF => {}
                IDLE => {
                    // Acquire: pairs with the Release of the holder before.
                    let taken = self.word.compare_exchange(
                        IDLE,
                        BRIEF,
                        Ordering::Acquire,
                        Ordering::Relaxed,
                    );
                    if taken.is_ok() {
                        return true;
                    }
                }
                _ => return false,
            }
        }
        false
    }

    /// Gives the role up, unless somebody has kicked; says whether.
    #[inline]
    fn leave(&self) -> bool {
        // Release: pairs with the Acquire in `enter` of the next holder.
        let left =
            self.word.compare_exchange(RUNNING, IDLE, Ordering::Release, Ordering::Relaxed).is_ok();
        if !left {
            // Acquire: pairs with the Release in `enter` of those who have kicked.
            self.word.swap(RUNNING, Ordering::Acquire);
        }
        left
    }

    /// Kicks the holder, if there is one; says whether.
    #[inline]
    pub fn kick(&self) -> bool {
        let mut state = self.word.load(Ordering::Relaxed);
        while state != IDLE {
            // Release: pairs with the Acquire in `leave`.
            match self.word.compare_exchange_weak(
                state,
                KICKED,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// Works on the value where nobody else can have it.
    #[inline]
    pub fn alone<R>(&mut self, f: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the role is borrowed mutably.
        unsafe { self.value.with_mut(f) }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn a_kick_is_answered_by_one_more_round_and_enough_ends_it() {
        let role = Role::new(0);
        let mut kicks = 2;
        let ran = role.run(|rounds| {
            *rounds += 1;
            if kicks > 0 {
                kicks -= 1;
                assert!(role.kick());
                assert_eq!(role.run(|_| unreachable!("one has it")), Ran::Elsewhere);
            }
            Round::Whole
        });
        assert_eq!(ran, Ran::Whole);
        assert!(!role.kick(), "nobody has it");
        let ran = role.run(|rounds| {
            *rounds += 10;
            role.kick();
            Round::Enough
        });
        let mut role = role;
        assert_eq!((ran, role.alone(|rounds| *rounds)), (Ran::Enough, 13));
    }

    #[test]
    fn who_has_it_for_a_moment_is_told_of_a_kick() {
        let role = Role::new(0);
        assert_eq!(role.brief(0, |value| std::mem::replace(value, 5)), Some((0, false)));
        let nested = role.brief(0, |value| {
            assert_eq!(role.brief(9, |_| unreachable!("one has it")), None);
            assert_eq!(role.run(|_| unreachable!("one has it")), Ran::Elsewhere);
            *value
        });
        assert_eq!(nested, Some((5, true)));
        let ran = role.run(|_| {
            assert_eq!(role.brief(9, |_| unreachable!("one has it")), None);
            Round::Whole
        });
        assert_eq!(ran, Ran::Whole, "who comes for a moment does not kick");
    }

    #[test]
    fn a_panic_gives_the_role_up() {
        let role = Role::new(0);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            role.run(|_| panic!("inside the round"))
        }));
        assert!(panicked.is_err());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            role.brief(0, |_| panic!("for a moment"))
        }));
        assert!(panicked.is_err());
        assert_eq!(role.run(|_| Round::Whole), Ran::Whole);
    }

    #[test]
    fn four_threads_leave_nothing_undone() {
        let role = Role::new(0_u64);
        let wanted = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (role, wanted) = (&role, &wanted);
                scope.spawn(move || {
                    for _ in 0..10_000 {
                        wanted.fetch_add(1, Ordering::Relaxed);
                        let take = |done: &mut u64| {
                            *done += u64::from(wanted.swap(0, Ordering::Relaxed));
                        };
                        if thread % 2 == 0 && role.brief(20, take) == Some(((), false)) {
                            continue;
                        }
                        let _ = role.run(|done| {
                            *done += u64::from(wanted.swap(0, Ordering::Relaxed));
                            Round::Whole
                        });
                    }
                });
            }
        });
        let mut role = role;
        assert_eq!(role.alone(|done| *done), 40_000);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    /// What is left for the holder before a kick is found by a round behind it, and rounds exclude
    /// each other.
    #[test]
    fn every_kick_is_answered() {
        loom::model(|| {
            let shared = Arc::new((Role::new(0), [AtomicU32::new(0), AtomicU32::new(0)]));
            let come = |shared: &(Role<u32>, [AtomicU32; 2]), index: usize| {
                // Relaxed: the role orders it.
                shared.1[index].fetch_add(1, Ordering::Relaxed);
                let _ = shared.0.run(|done| {
                    *done += shared.1.iter().map(|it| it.swap(0, Ordering::Relaxed)).sum::<u32>();
                    Round::Whole
                });
            };
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || come(&other, 1));
            come(&shared, 0);
            thread.join().unwrap();
            let _ = shared.0.run(|done| {
                assert_eq!(*done, 2, "found by the rounds before");
                Round::Whole
            });
        });
    }

    /// The same where one of them comes for a moment, and sees to what it was kicked for.
    #[test]
    fn who_has_it_for_a_moment_loses_no_kick() {
        loom::model(|| {
            let shared = Arc::new((Role::new(0), [AtomicU32::new(0), AtomicU32::new(0)]));
            let take = |shared: &(Role<u32>, [AtomicU32; 2]), done: &mut u32| {
                *done += shared.1.iter().map(|it| it.swap(0, Ordering::Relaxed)).sum::<u32>();
            };
            let run = move |shared: &(Role<u32>, [AtomicU32; 2])| {
                let _ = shared.0.run(|done| {
                    take(shared, done);
                    Round::Whole
                });
            };
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || {
                // Relaxed: the role orders it.
                other.1[1].fetch_add(1, Ordering::Relaxed);
                run(&other);
            });
            shared.1[0].fetch_add(1, Ordering::Relaxed);
            if shared.0.brief(1, |done| take(&shared, done)) != Some(((), false)) {
                run(&shared);
            }
            thread.join().unwrap();
            let _ = shared.0.run(|done| {
                assert_eq!(*done, 2, "found by the rounds before");
                Round::Whole
            });
        });
    }
}
