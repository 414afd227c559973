//! The source of random numbers in a run.
//!
//! A written graph fixes the seed of each random op. Its functions in standard ops implement the counter rule, which every
//! device and runtime can follow. The other two sources exist only in our runtime, for comparison.

use ckpt_passes::{Error, Result};
use std::fmt;

/// A source of random bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rng {
    /// The integer hash of seed, node and element that the written graph holds: the same bits everywhere.
    #[default]
    Counter,
    /// libtorch's generator, seeded for each node by its seed and stream.
    Native,
    /// libtorch's generator, seeded once. Nodes draw in turn, like the modules of a PyTorch model.
    Eager,
}

impl Rng {
    /// Reads `counter`, `native` or `eager`.
    ///
    /// # Errors
    /// Any other word.
    pub fn parse(text: &str) -> Result<Rng> {
        match text.trim().to_lowercase().as_str() {
            "counter" => Ok(Rng::Counter),
            "native" => Ok(Rng::Native),
            "eager" => Ok(Rng::Eager),
            _ => Err(
                Error::usage("rng", format!("there is no source of random bits `{text}`"))
                    .expected("counter, native or eager"),
            ),
        }
    }
}

/// Mixes the bits of a number: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), a bijection.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl fmt::Display for Rng {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rng::Counter => "counter",
            Rng::Native => "native",
            Rng::Eager => "eager",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Rng;

    #[test]
    fn words() {
        for rng in [Rng::Counter, Rng::Native, Rng::Eager] {
            assert_eq!(Rng::parse(&rng.to_string().to_uppercase()).unwrap(), rng);
        }
        assert_eq!(Rng::parse("philox").unwrap_err().exit_code(), 2);
    }
}
