//! What the families of the op table share: constructors of rows ([`rows`]), formulas that gradients and bodies emit
//! ([`expr`]), steps that both share ([`steps`]), and rules for typing, folding and memory ([`typing`], [`axes`]).

mod axes;
mod expr;
mod rows;
mod steps;
mod typing;

pub use axes::*;
pub use expr::*;
pub use rows::*;
pub use steps::*;
pub use typing::*;

pub use ckpt_ir::arithmetic as scalar;
