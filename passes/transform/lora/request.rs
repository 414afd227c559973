//! The value of `--lora`.

use crate::error::{Error, Result};
use crate::ir::DType;
use std::fmt;

/// Which adapters to add. Defaults are PEFT's.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// Rows of A and columns of B.
    pub rank: u32,
    /// Numerator of the scale.
    pub alpha: f32,
    /// Probability with which an element of the adapter's operand is dropped.
    pub dropout: f32,
    /// The scale is `alpha / √rank` instead of `alpha / rank`.
    pub rslora: bool,
    /// Element type of the adapters; `None` for that of the weight.
    pub dtype: Option<DType>,
    /// Seed of A.
    pub seed: i64,
    /// Patterns of weights or their modules; a word without wildcards is also the end of a module's path.
    pub targets: Vec<String>,
}

impl Default for Lora {
    fn default() -> Lora {
        Lora {
            rank: 8,
            alpha: 8.0,
            dropout: 0.0,
            rslora: false,
            dtype: None,
            seed: 0,
            targets: Vec::new(),
        }
    }
}

const SETTINGS: &str = "r, alpha, dropout, rslora, dtype, seed, targets";

impl Lora {
    /// Parses settings with commas between them: `r=16,alpha=32,targets=*q_proj*,*v_proj*`. A word without `=` is a
    /// further target.
    ///
    /// # Errors
    /// An unknown setting, one given twice, a value out of range, no target.
    pub fn parse(text: &str) -> Result<Lora> {
        let mut lora = Lora::default();
        let mut seen: Vec<&str> = Vec::new();
        for word in text.split(',') {
            let Some((key, value)) = word.split_once('=') else {
                match seen.last() {
                    Some(&"targets") if !word.trim().is_empty() => {
                        lora.targets.push(word.trim().into());
                    }
                    _ => {
                        return Err(fail(format!("`{word}` is not a setting")).expected(
                            "KEY=VALUE,…, such as r=16,alpha=32,targets=*q_proj*,*v_proj*",
                        ));
                    }
                }
                continue;
            };
            let key = key.trim();
            if seen.contains(&key) {
                return Err(fail(format!("`{key}` is set twice")));
            }
            seen.push(key);
            lora.set(key, value.trim())?;
        }
        match lora.targets.is_empty() {
            true => Err(fail("no layer is named".into())
                .expected("targets=PATTERN,…, such as targets=*q_proj*,*v_proj*")
                .help("`ckpt-opt inspect MODEL` lists the parameters")),
            false => Ok(lora),
        }
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let wrong = |expected: &'static str| {
            Err(fail(format!("`{key}` cannot be `{value}`")).expected(expected))
        };
        match key {
            "r" => match value.parse() {
                Ok(rank @ 1..=0x7fff_ffff) => self.rank = rank,
                _ => return wrong("a whole number, 1 or more"),
            },
            "alpha" => match value.parse::<f32>() {
                Ok(alpha) if alpha.is_finite() && alpha > 0.0 => self.alpha = alpha,
                _ => return wrong("a number above 0"),
            },
            "dropout" => match value.parse::<f32>() {
                Ok(ratio) if (0.0..1.0).contains(&ratio) => self.dropout = ratio,
                _ => return wrong("a number from 0 to below 1"),
            },
            "rslora" => match value.parse() {
                Ok(rslora) => self.rslora = rslora,
                Err(_) => return wrong("true or false"),
            },
            "dtype" => match value {
                "f32" => self.dtype = Some(DType::F32),
                "base" => self.dtype = None,
                _ => return wrong("base (the type of the weight) or f32"),
            },
            "seed" => match value.parse() {
                Ok(seed) => self.seed = seed,
                Err(_) => return wrong("a whole number"),
            },
            "targets" if value.is_empty() => return wrong("patterns of weights"),
            "targets" => self.targets.push(value.into()),
            _ => return Err(fail(format!("there is no setting `{key}`")).expected(SETTINGS)),
        }
        Ok(())
    }

    /// Returns the factor of `B·A`.
    pub fn scale(&self) -> f64 {
        let rank = f64::from(self.rank);
        let divisor = if self.rslora { rank.sqrt() } else { rank };
        f64::from(self.alpha) / divisor
    }
}

impl fmt::Display for Lora {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r={},alpha={}", self.rank, self.alpha)?;
        if self.dropout > 0.0 {
            write!(f, ",dropout={}", self.dropout)?;
        }
        if self.rslora {
            write!(f, ",rslora=true")?;
        }
        if let Some(dtype) = self.dtype {
            write!(f, ",dtype={dtype}")?;
        }
        if self.seed != 0 {
            write!(f, ",seed={}", self.seed)?;
        }
        write!(f, ",targets={}", self.targets.join(","))
    }
}

pub(super) fn fail(text: String) -> Box<Error> {
    Error::usage("lora", text)
}
