//! Planning without writing a model: what `plan`, `frontier`, `diff` and `--maximize` do, for models and cost graphs.
//!
//! [`read`] takes cost graphs and plans from files that nobody vouches for, [`task`] makes one thing to plan of either
//! source, [`report`] and [`curve`] say what came of it (the latter as a picture too, [`svg`]), [`difference`] compares
//! two plans, [`maximize`] finds the largest size that fits, [`device`] reads what the cost model rests on.

pub mod curve;
pub mod device;
pub mod difference;
pub mod maximize;
pub mod read;
pub mod report;
pub mod svg;
pub mod task;
