//! Schedulers: in which order requests that wait are dispatched.
