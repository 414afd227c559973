//! Models that PyTorch saves: what TorchScript files and `torch.export` archives share.
//!
//! [`archive`] reads the zip, [`pickle`] runs its pickles without executing anything, [`stored`] reads the tensors they
//! describe. [`aten`] is the vocabulary of PyTorch's ops, lowered to rows of the op table, and the memory that tensors
//! share.

pub mod archive;
pub mod aten;
pub mod pickle;
pub mod stored;
