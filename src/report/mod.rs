//! Everything that people look at.
//!
//! Reports of commands: [`inspection`] (`inspect`), [`summary`] (`optimize`), [`frontier`] with its picture ([`svg`]) and the
//! [`ablation`] of memory-saving techniques, [`difference`] (`diff`), [`explain`]. [`advice`] warns of plans that save nothing.
//!
//! Views of one plan print an [`account`], which holds all data and is computed once: memory over the schedule before and
//! after ([`memory`]), the fate of every value and its reason ([`verdict`]), and totals for each layer. [`terms`] maps
//! schedule steps to ops, and [`written`] reads the plan of a training graph back. [`console`] draws on the console,
//! [`page`] writes HTML, [`trace`] a Perfetto trace, [`snapshot`] (a [`pickle`]) a file for PyTorch's memory viewer,
//! [`overlay`] node data for Model Explorer, [`dot`] a Graphviz graph. [`files`] chooses the view by the file's name. All
//! numbers come from the judge of plans, so totals in every viewer are the plan's.

pub mod ablation;
pub mod account;
pub mod advice;
pub mod console;
pub mod difference;
pub mod dot;
pub mod explain;
pub mod files;
pub mod frontier;
pub mod inspection;
pub mod memory;
pub mod overlay;
pub mod page;
pub mod pickle;
pub mod sharing;
pub mod snapshot;
pub mod sub_blocks;
pub mod summary;
pub mod svg;
pub mod terms;
pub mod trace;
pub mod verdict;
mod words;
pub mod written;
