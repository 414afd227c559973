//! The attention kernels that a run may use.
//!
//! PyTorch has fused kernels for CUDA devices. They round differently from our tiles, so the choice changes bits. It depends
//! only on sizes and types, and it can be switched off.

use ckpt_passes::{Error, Result};
use std::fmt;

/// The kernels for `Attention` and its gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attention {
    /// PyTorch's fused kernels where a CUDA device has equivalent ones, else tiles.
    #[default]
    Auto,
    /// Our kernels, in tiles.
    Tiles,
}

impl Attention {
    /// Reads `auto` or `tiles`.
    ///
    /// # Errors
    /// Any other word.
    pub fn parse(text: &str) -> Result<Attention> {
        match text.trim().to_lowercase().as_str() {
            "auto" => Ok(Attention::Auto),
            "tiles" => Ok(Attention::Tiles),
            _ => Err(Error::usage(
                "attention",
                format!("there are no kernels of attention called `{text}`"),
            )
            .expected("auto or tiles")),
        }
    }
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Attention::Auto => "auto",
            Attention::Tiles => "tiles",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Attention;

    #[test]
    fn words() {
        for attention in [Attention::Auto, Attention::Tiles] {
            let word = attention.to_string().to_uppercase();
            assert_eq!(Attention::parse(&word).unwrap(), attention);
        }
        assert_eq!(Attention::parse("flash").unwrap_err().exit_code(), 2);
    }
}
