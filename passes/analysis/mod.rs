//! Read-only analyses: a graph in, a table out; nothing here changes a graph.
//!
//! [`sizes`] turns symbolic sizes into numbers, [`memory`] says which values share storage, when storage dies and how
//! many bytes are alive at every node, [`arena`] where each lies in one stretch of memory, [`breakdown`] what they are at
//! the peak, [`cost`] prices nodes and
//! [`device`] says what that takes in time, [`index_bounds`] and [`baked_sizes`] which sizes a model cannot take, [`params`] tells
//! parameters from constants, [`layers`] finds the layers ([`residual_stream`] the residual stream, [`repeats`] what repeats along
//! it, [`attention`] the attentions in them and what each computes, [`submodules`] their norms, attentions and MLPs, [`cores`]
//! what lies between the products of those; [`sharing`] which keys, values and weights layers share),
//! [`modules`] says what the file itself tells of its modules. [`symbolic_elements`] tells what an element of an integer or
//! boolean tensor is as a function of its indices, which proves what a mask is, [`matcher`] is a graph as
//! searches for patterns see it. [`tied_weights`] tells of
//! weights stored twice or merged.

pub mod arena;
pub mod attention;
pub mod baked_sizes;
pub mod breakdown;
pub mod cores;
pub mod cost;
pub mod device;
pub mod index_bounds;
pub mod layers;
pub mod liveness;
pub mod matcher;
pub mod memory;
pub mod modules;
pub mod params;
pub mod ranges;
pub mod repeats;
pub mod residual_stream;
pub mod sharing;
pub mod sizes;
pub mod submodules;
pub mod symbolic_elements;
pub mod tied_weights;

pub use breakdown::Breakdown;
pub use cost::Costs;
pub use device::Device;
pub use layers::{Block, Layers};
pub use memory::{MemoryProfile, StorageId};
pub use sizes::{Binding, DimKind, Sizes};
