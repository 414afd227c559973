//! Tests of the runtime inside the process. The allocator counts bytes by process, so each takes its turn
//! (`support::torch::alone`).

#[cfg(feature = "torch")]
mod adamw8bit;
#[cfg(feature = "torch")]
mod all_choices;
#[cfg(feature = "torch")]
mod arena;
#[cfg(feature = "torch")]
mod attention;
#[cfg(feature = "torch")]
mod bits;
#[cfg(feature = "torch")]
mod blocks;
#[cfg(feature = "torch")]
mod cuda;
#[cfg(feature = "torch")]
mod cuda_checks;
#[cfg(feature = "torch")]
mod float8;
#[cfg(feature = "torch")]
mod fused;
#[cfg(feature = "torch")]
mod grouped;
#[cfg(feature = "torch")]
mod kernels;
#[cfg(feature = "torch")]
mod libtorch;
#[cfg(feature = "torch")]
mod linalg;
#[cfg(feature = "torch")]
mod long_runs;
#[cfg(feature = "torch")]
mod lora;
#[cfg(feature = "torch")]
mod masks;
#[cfg(feature = "torch")]
mod offload;
#[cfg(feature = "torch")]
mod optimizer;
#[cfg(feature = "torch")]
mod packed;
#[cfg(feature = "torch")]
mod promises;
#[cfg(feature = "torch")]
mod qlora;
#[cfg(feature = "torch")]
mod random;
#[cfg(feature = "torch")]
mod ranks;
#[cfg(feature = "torch")]
mod sdpa_backends;
mod second_order;
#[cfg(feature = "torch")]
mod sequence;
#[cfg(feature = "torch")]
mod sinks;
#[path = "../support/mod.rs"]
mod support;
#[cfg(feature = "torch")]
mod tiling;
#[cfg(feature = "torch")]
mod tiling_chains;
#[cfg(feature = "torch")]
mod update_options;
