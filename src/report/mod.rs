//! What a plan does, shown: data computed once, and printers of it.
//!
//! [`account`] is the data: memory over the schedule before and after ([`memory`]), what becomes of every value and why
//! ([`verdict`]), what layers hold; [`labels`] says what indices are called. Everything else prints it and computes
//! nothing of its own: [`explain`] for a name on the console. All of it is predicted by the rules that plans are judged
//! by, so totals in every viewer are the plan's.

pub mod account;
pub mod explain;
pub mod labels;
pub mod memory;
pub mod verdict;
pub mod written;
