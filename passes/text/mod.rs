//! `.ckir`: the graph as text.
//!
//! [`parse`] reads what [`print()`] writes and returns an equal graph. Printing a parsed canonical text returns the same
//! text. So the expected output of one test is a valid input of another.
//!
//! ```text
//! graph @mlp training (%x: f32[batch, 64]) -> (%loss) {
//!   meta producer = "pytorch"
//!   init %w : f32[64, 64] = hash "97c5…" origin "fc.weight" parameter
//!   init %axes : i64[1] = [0]
//!   %h = MatMul %x, %w : f32[batch, 64]
//! loss:
//!   %loss = ReduceSum %h, %axes {keepdims=0} : f32[64]
//! backward:
//!   %h/recompute = MatMul %x, %w : f32[batch, 64] recompute_of %h segment 0
//! }
//! ```
//!
//! - Each line is a node, in schedule order: results, op, operands (`_` for an optional operand that is not given),
//!   attributes (sorted, without those that equal their default), types of the results (`?` for unknown).
//! - Clauses follow, each only where it differs from the default: `name "…"` (default: the name of the first result),
//!   `recompute_of %v segment N` (the node recomputes that of `%v`; older files say `again`), `@place` (the origin of
//!   the node; default: its own name, or the origin of the node that it recomputes), `meta {…}`.
//! - `forward:`, `loss:`, `backward:` and `scope …:` lines hold until the next of their kind. A graph starts in
//!   `forward:` without a scope. A module is `"path"`, or `"path" is "Class"`. A recompute node has the role and scope
//!   of its original, unless it states others: `role loss`, `scope "path"`.
//! - Names are quoted only if they have to be. Comments run from `;` to the end of the line.
//! - Sizes are sums of products of integers, words, `?words` (data decides) and `floordiv`, `mod`, `min`, `max`,
//!   `broadcast`.
//! - Small constants show their contents, row-major; `splat x` is one value everywhere. A large one shows a `hash` of
//!   its bytes: identity, not content. Read back, it is a constant whose bytes cannot be had (`Data::Absent`, as for a
//!   missing weight file), so that nothing invented is ever taken for a weight; [`parse_filled`] invents content on
//!   request. [`print_full`] writes everything out. `file "w.bin" offset N length N` is a slice of a file that is absent.

mod dims;
mod literal;
mod parse;
mod print;
mod scan;
#[cfg(test)]
mod tests;

pub use dims::{parse_dim, parse_dim_param};
pub use parse::{parse, parse_filled};
pub use print::{digest, phase_word, print, print_full};
