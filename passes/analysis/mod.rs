//! Read-only analyses: a graph in, a table out. Nothing here changes a graph.
//!
//! | question | modules |
//! |---|---|
//! | numbers for symbolic sizes, and sizes a model cannot take | [`sizes`], [`planned_sizes`], [`ranges`], [`index_bounds`], [`index_spans`], [`baked_sizes`] |
//! | storages, lifetimes and the peak | [`memory`], [`arena`], [`breakdown`] |
//! | price and time of nodes | [`cost`], [`device`] |
//! | parameters, gradients and optimizer states | [`params`], [`gradients`], [`zero_gradients`], [`tied_weights`], [`fused_updates`] |
//! | the scores that a loss is of, and what is computed of them | [`class_scores`], [`loss_values`] |
//! | layers and sub-blocks | [`layers`], [`residual_stream`], [`repeats`], [`sub_blocks`], [`cores`], [`sharing`], [`modules`] |
//! | attentions and their masks | [`attention`], [`matcher`], [`symbolic_elements`] |
//! | attention kernels of a device | [`sdpa`] |

pub mod arena;
pub mod attention;
pub mod baked_sizes;
pub mod breakdown;
pub mod class_scores;
pub mod cores;
pub mod cost;
pub mod device;
pub mod fused_updates;
pub mod gradients;
pub mod index_bounds;
pub mod index_spans;
pub mod layer_parts;
pub mod layers;
pub mod liveness;
pub mod loss_values;
pub mod matcher;
pub mod memory;
pub mod modules;
pub mod params;
pub mod placement;
pub mod planned_sizes;
pub mod ranges;
pub mod repeats;
pub mod residual_stream;
pub mod sdpa;
pub mod sharing;
pub mod sizes;
pub mod sub_blocks;
pub mod symbolic_elements;
pub mod tied_weights;
pub mod zero_gradients;

pub use breakdown::Breakdown;
pub use cost::Costs;
pub use device::Device;
pub use layers::{Layer, Layers};
pub use memory::{MemoryProfile, StorageId};
pub use sizes::{Binding, DimKind, Sizes};
