//! Which kernels of attention a run may take.
//!
//! PyTorch has fused ones for CUDA devices. They round otherwise than our tiles do, so that a choice among them changes
//! bits: it is made once, from sizes and types alone, and can be switched off.

use ckpt_passes::{Error, Result};
use std::fmt;

/// Where the kernels of `Attention` and its gradient come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attention {
    /// On a CUDA device PyTorch's fused kernels where they mean the same, tiles elsewhere.
    #[default]
    Auto,
    /// Ours, tile by tile.
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
