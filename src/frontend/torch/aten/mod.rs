//! PyTorch's ops as rows of the op table: one vocabulary for every format that PyTorch writes.
//!
//! A reader makes a [`Lowering`], declares inputs and weights, and replays the program one [`Lowering::call`] at a time.
//! Tensors are handles ([`TensorId`](super::value::TensorId)). Views remember what they are views of, and a write to one
//! gives every other view of the same memory its new value ([`lowering`]). So in-place programs become graphs of values,
//! here and nowhere else.
//!
//! Each family of ops is one file. An op is one line of its table: a signature ([`signature`]) with a function, or with a
//! formula over rows and other ops ([`formula`]).
//!
//! Whatever is known when the file is read stays a number or an expression over named sizes. It becomes a value of the
//! graph only if an op needs one.

mod activation;
mod arrange;
mod attention;
mod axes;
mod backward;
mod complex;
mod composed;
mod create;
mod formula;
mod fourier;
mod image;
mod index;
mod loss;
mod lowering;
mod native;
mod norm;
mod pointwise;
mod products;
mod promotion;
mod quantised;
mod random;
mod ranks;
mod recurrent;
mod reduce;
mod signature;
mod strided;
mod views;
mod vocabulary;
mod weights;

pub use lowering::{Lowering, Place, TRACED};
pub use signature::{complex_of_code, dtype_of_code};
pub use weights::{Kind, Weight};
