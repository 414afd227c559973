//! Passes: graph to graph, one per file. Each states the phase it takes and the phase it leaves.

pub mod autodiff;
pub mod chains;
pub mod collectives;
pub mod dce;
pub mod fuse;
pub mod gather;
pub mod infer;
pub mod joint;
pub mod lookups;
pub mod lora;
pub mod loss;
pub mod optimizer;
pub mod order;
pub mod overlap;
pub mod remat;
pub mod rng_streams;
pub mod saved_attention;
pub mod sequence;
pub mod sequence_parallel;
pub mod simplify;
pub mod sizes;
pub mod stop_gradient;
pub mod tensor_parallel;
pub mod tie;
pub mod tile;
pub mod widen;
