//! Keys of metadata that the files we write carry on nodes and values.

/// What a node is for: `forward`, `loss`, `backward`, `update`, `recompute`, ….
pub const ROLE: &str = "ckpt.role";
/// The name of the node that a recomputation computes again.
pub const OF: &str = "ckpt.of";
/// The number of a recomputation's segment.
pub const SEGMENT: &str = "ckpt.segment";
/// A JSON list: the names that the framework has for an initializer.
pub const NAMES: &str = "ckpt.names";
/// Whether an initializer is the transpose of the framework's tensor.
pub const TRANSPOSED: &str = "ckpt.transposed";
/// Whether an initializer is a parameter; absent where that is not known.
pub const PARAMETER: &str = "ckpt.parameter";
/// `true` for a buffer that the framework saves with the parameters.
pub const PERSISTENT: &str = "ckpt.persistent";
/// `true` for a parameter that the framework froze.
pub const FROZEN: &str = "ckpt.frozen";
/// A JSON list: the framework's parameters from which an exporter computed an initializer that is none of them.
pub const FOLDED_FROM: &str = "ckpt.folded_from";
/// A JSON list of module paths with classes, outermost first.
pub const SCOPES: &str = "ckpt.scopes";
/// The name of the node in the file that the model was first read from.
pub const SOURCE: &str = "ckpt.source";
