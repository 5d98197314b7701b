//! What one operation of an experiment does, as far as others can be in its way: a list of steps.

/// Which of several alike objects a step touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// Always the same one: everybody meets here.
    Same,
    /// One of them, each as likely as any other.
    Any,
    /// The one that a step before it has chosen.
    Chosen,
}

/// Objects that threads share, each on a cache line of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// What it is: "zone".
    pub name: &'static str,
    /// How many there are.
    pub count: usize,
}

/// How those who find a lock held wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// They look until it is free, and whoever is first takes it: our spinning lock.
    Spin,
    /// They look for a while, and then sleep until they are woken: our sleeping lock.
    Sleep,
    /// They draw numbers and all look whose turn it is: the lab's fair spinning lock.
    Turn,
    /// They queue, each looks at a line of its own, and the lock is handed over in order: the
    /// kernel's spinning lock.
    Queue,
}

/// A step.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Work on what is the thread's own, in nanoseconds.
    Work(f64),
    /// The rest of the operation: what a thread alone takes for all of it, without the other steps.
    Rest,
    /// A read of an object.
    Read(usize, Pick),
    /// An atomic update of an object, or a store to it.
    Update(usize, Pick),
    /// A critical section under a lock in an object.
    Section {
        /// How the others wait.
        waiting: Waiting,
        /// The object that holds the lock, by its index, and which of them.
        lock: (usize, Pick),
        /// How long the lock is held when nobody is in the way, without taking and giving it back.
        hold_ns: f64,
        /// Objects that are touched meanwhile, and whether they are changed.
        touches: Vec<(usize, Pick, bool)>,
    },
}

/// What one operation does.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// The objects that its steps touch.
    pub objects: Vec<Object>,
    /// The steps, in order.
    pub steps: Vec<Step>,
}

impl Operation {
    /// What is wrong with the description, if anything is.
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
