//! The steps of one operation of an experiment that use shared data.

/// Which of several equal objects a step touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// Always the same one, at which all threads meet.
    Same,
    /// Any of them, with equal probability.
    Any,
    /// The one that an earlier step has chosen.
    Chosen,
}

/// Objects that threads share, each on a cache line of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// The kind of object, for example "zone".
    pub name: &'static str,
    /// The number of objects.
    pub count: usize,
}

/// How threads that find a lock held wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// They poll until it is free, and the first one takes it: our spin lock.
    Spin,
    /// They poll for a while, and then sleep until they are woken: our sleeping lock.
    Sleep,
    /// They draw tickets and all poll for their turn: the lab's fair spin lock.
    Turn,
    /// They queue, each polls a line of its own, and the lock is handed over in order: the kernel's
    /// spin lock.
    Queue,
}

/// A step.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Work on the thread's own data, in nanoseconds.
    Work(f64),
    /// The rest of the operation: its time for a thread alone, less the other steps.
    Rest,
    /// A read of an object.
    Read(usize, Pick),
    /// An atomic update of an object, or a store to it.
    Update(usize, Pick),
    /// A critical section under a lock in an object.
    Section {
        /// How other threads wait.
        waiting: Waiting,
        /// The object that holds the lock, by its index, and which of them.
        lock: (usize, Pick),
        /// The uncontended hold time, without taking and releasing the lock.
        hold_ns: f64,
        /// The objects that are touched under the lock, and whether they are changed.
        touches: Vec<(usize, Pick, bool)>,
    },
}

/// The description of one operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// The objects that its steps touch.
    pub objects: Vec<Object>,
    /// The steps, in order.
    pub steps: Vec<Step>,
}

impl Operation {
    /// Checks the description.
    ///
    /// # Errors
    /// The step and what it lacks.
    pub fn check(&self) -> Result<(), String> {
        if self.steps.is_empty() {
            return Err("an operation needs a step".into());
        }
        if let Some(object) = self.objects.iter().find(|object| object.count == 0) {
            return Err(format!("there are no objects `{}`; at least 1 is needed", object.name));
        }
        for (number, step) in self.steps.iter().enumerate() {
            let touched: Vec<usize> = match step {
                Step::Work(_) | Step::Rest => Vec::new(),
                Step::Read(object, _) | Step::Update(object, _) => vec![*object],
                Step::Section { lock, touches, .. } => {
                    touches.iter().map(|touch| touch.0).chain([lock.0]).collect()
                }
            };
            if let Some(object) = touched.iter().find(|&&object| object >= self.objects.len()) {
                return Err(format!("step {number} touches object {object}, which is not listed"));
            }
        }
        Ok(())
    }
}
