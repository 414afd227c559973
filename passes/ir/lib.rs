//! The graph that a model is compiled in.
//!
//! Nodes and values are in arenas with typed ids ([`id`]). Types are symbolic ([`ty`], [`dim`]), constants are never
//! copied ([`tensor`]), and one row defines each op ([`op`]). [`graph`] is read access, [`edit`] holds the only
//! mutators, [`typing`] infers types, and [`verify`] checks the numbered invariants. [`layout`] computes the strides of
//! views, and [`view`] makes petgraph views. [`arithmetic`] states ops as functions of single elements.
#![warn(missing_docs)]

pub mod arithmetic;
pub mod attr;
pub mod dim;
pub mod edit;
pub mod float8;
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
pub use graph::{Def, FusedNode, Graph, Loc, Node, Origin, Phase, Role, Use, Value};
pub use id::{Arena, Id, NodeId, SecondaryMap, ValueId};
pub use op::{Emit, OpDef, OpRef};
pub use tensor::{Data, External, Tensor};
pub use ty::{DType, Ty};
