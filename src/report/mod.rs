//! What a plan does, shown: data computed once, and printers of it.
//!
//! [`account`] is the data: memory over the schedule before and after ([`memory`]), what becomes of every value and why
//! ([`verdict`]), what layers hold; [`labels`] says what indices are called, [`terms`] what the steps of a schedule are about, [`written`] reads the plan of a file back.
//! Everything else prints it and computes nothing of its own: [`explain`] and [`console`] on the console, [`page`] for a browser,
//! [`trace`] for Perfetto, [`snapshot`] (a [`pickle`]) for PyTorch's memory viewer, [`overlay`] for Model Explorer, [`dot`]
//! for Graphviz; [`files`] chooses by a file's name. All of it is predicted by the rules that plans are judged by, so
//! totals in every viewer are the plan's.

pub mod account;
pub mod console;
pub mod dot;
pub mod explain;
pub mod files;
pub mod labels;
pub mod memory;
pub mod overlay;
pub mod page;
pub mod pickle;
pub mod snapshot;
pub mod terms;
pub mod trace;
pub mod verdict;
pub mod written;
