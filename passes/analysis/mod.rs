//! Read-only analyses: a graph in, a table out; nothing here changes a graph.
//!
//! [`sizes`] turns symbolic sizes into numbers, [`memory`] says which values share storage, when storage dies and how
//! many bytes are alive at every node, [`arena`] where each lies in one stretch of memory, [`breakdown`] what they are at
//! the peak, [`cost`] prices nodes and
//! [`device`] says what that takes in time, [`limits`] and [`traced`] which sizes a model cannot take, [`params`] tells
//! parameters from constants, [`blocks`] finds the layers ([`spine`] the residual stream, [`runs`] what repeats along
//! it, [`attention`] the attentions in them and what each computes, [`submodules`] their norms, attentions and MLPs, [`cores`]
//! what lies between the products of those; [`sharing`] which keys, values and weights layers share),
//! [`modules`] says what the file itself tells of its modules. [`elements`] tells what an element of an integer or
//! boolean tensor is as a function of its indices, which proves what a mask is, [`reading`] is a graph as
//! searches for patterns see it. [`ties`] tells of
//! weights stored twice or merged.

pub mod arena;
pub mod attention;
pub mod blocks;
pub mod breakdown;
pub mod cores;
pub mod cost;
pub mod device;
pub mod elements;
pub mod limits;
pub mod memory;
pub mod modules;
pub mod params;
pub mod ranges;
pub mod reading;
pub mod runs;
pub mod sharing;
pub mod sizes;
pub mod spine;
pub mod submodules;
pub mod ties;
pub mod traced;

pub use blocks::{Block, Blocks};
pub use breakdown::Breakdown;
pub use cost::Costs;
pub use device::Device;
pub use memory::{MemoryProfile, StorageId};
pub use sizes::{Binding, DimKind, Sizes};
