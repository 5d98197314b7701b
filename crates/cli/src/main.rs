//! `blockyard`: makes block devices, serves them, and looks after them while they are served.

fn main() {}
