//! Models that PyTorch saves: what TorchScript files and `torch.export` archives share.
//!
//! [`archive`] reads the zip, [`pickle`] runs its pickles without executing anything, [`stored`] reads the tensors they
//! describe.

pub mod archive;
pub mod pickle;
pub mod stored;
