//! `ckpt-opt`: everything that touches the world around the compiler in `ckpt_passes`.
