//! The graph: what a model is while we work on it.
//!
//! Arenas with typed ids ([`id`]), values with symbolic types ([`ty`], [`dim`]), constants that are never copied
//! ([`tensor`]), nodes whose meaning is one row of the op table ([`op`]). [`graph`] is read access, [`edit`] holds the
//! only mutators, [`verify`] the numbered invariants, [`layout`] the strides of views, [`view`] throw-away petgraph
//! lenses.

pub mod attr;
pub mod dim;
pub mod edit;
pub mod graph;
pub mod id;
pub mod layout;
pub mod name;
pub mod op;
pub mod tensor;
pub mod ty;
pub mod typing;
pub mod verify;
pub mod view;

pub use ckpt_error as error;

pub use attr::{Attr, AttrDefault, AttrKind, AttrSpec, Attrs};
pub use dim::{Atom, Dim, Same, same_dims};
pub use graph::{Def, Graph, Loc, Node, Origin, Phase, Role, Use, Value};
pub use id::{Arena, Id, NodeId, SecondaryMap, ValueId};
pub use op::{Emit, OpDef, OpRef};
pub use tensor::{Data, External, Tensor};
pub use ty::{DType, Ty};
