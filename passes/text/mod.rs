//! `.ckir`: the graph as text.
//!
//! A language, not a dump: [`parse`] reads what [`print`] writes and gives back an equal graph, and printing a parsed
//! canonical text gives the same text. So an expected output in a test is itself an input for the next test.
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
//! - One node a line, in the order of the schedule: results, op, operands (`_` is an optional one that is not given),
//!   attributes (sorted; those that equal their default are left out), types of the results (`?` is unknown).
//! - Then, each only where it says something: `name "…"` (a node is named as its first result unless it says
//!   otherwise), `recompute_of %v segment N` (a copy of the node of `%v`; older files say `again`), `@place` (where it comes from: unless it
//!   says otherwise itself, and a copy from where its original comes from), `meta {…}`.
//! - `forward:`, `loss:`, `backward:` and `scope …:` lines hold until the next of their kind; a graph starts in
//!   `forward:` with no scope. A module is `"path"`, or `"path" is "Class"`. A copy has role and scope of its original
//!   wherever it stands; one that has others says so: `role loss`, `scope "path"`.
//! - A name is bare where it can be and quoted where not. Comments run from `;` to the end of the line.
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
