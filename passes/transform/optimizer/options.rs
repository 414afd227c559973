//! What updates parameters, and how: optimizers with their constants, and the options of the pass.

use crate::error::Result;
use crate::ir::{DType, Ty};
use crate::ops::blockwise::blocks_of;
use crate::ops::optimizer::{
    BETA, BETA1, BETA2, DAMPENING, EPS, MOMENTUM_FACTOR, WEIGHT_DECAY, decimal,
};
use crate::ops::rule::compute_type;
use std::fmt;

use super::names::{
    COL_VAR, EXP_AVG, EXP_AVG_SCALES, EXP_AVG_SQ, EXP_AVG_SQ_SCALES, MOMENTUM, ROW_VAR, VARIANCE,
    fail,
};

/// Setting: the exponent of Adafactor's decay.
const BETA2_DECAY: &str = "beta2_decay";

/// What updates the parameters in the graph, and how. By default nothing does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UpdateOptions {
    /// The optimizer; `None` for a graph that ends with its gradients. All else means something with an optimizer only.
    pub optimizer: Option<Optimizer>,
    /// Whether each update runs as soon as its gradient is complete; gradients are no outputs then.
    pub fuse: bool,
    /// Patterns of parameters whose weight does not decay.
    pub no_decay: Vec<String>,
    /// Whether the weights of norms and biases, which are parameters of rank 0 and 1, do not decay.
    pub no_decay_vectors: bool,
    /// The largest norm of all gradients together; larger gradients are scaled down to it.
    pub clip: Option<f32>,
    /// The number of micro-batches whose mean gradient makes one update.
    pub accumulate: Option<u32>,
    /// Whether the backward pass starts from a given scale, which updates divide gradients by.
    pub loss_scale: bool,
    /// Whether 16-bit parameters are updated as roundings of float32 ones, which are state, with states in float32.
    pub master_weights: bool,
    /// Whether bfloat16 parameters are updated in float32, with states in float32, and rounded to one of their two
    /// neighbours by chance.
    pub stochastic_rounding: bool,
}

impl UpdateOptions {
    /// Parses a norm to clip to.
    ///
    /// # Errors
    /// No positive number that float32 holds.
    pub fn parse_clip(text: &str) -> Result<f32> {
        let norm: Option<f32> = text.parse().ok();
        norm.filter(|n| n.is_finite() && *n > 0.0).ok_or_else(|| {
            fail(format!("gradients cannot be clipped to a norm of `{text}`"))
                .expected("a number above 0")
        })
    }

    /// Parses a number of micro-batches.
    ///
    /// # Errors
    /// No number of 1 or more.
    pub fn parse_accumulate(text: &str) -> Result<u32> {
        let n: Option<u32> = text.parse().ok();
        n.filter(|n| *n > 0).ok_or_else(|| {
            fail(format!(
                "gradients of `{text}` micro-batches cannot be accumulated"
            ))
            .expected("a number, 1 or more")
        })
    }

    /// Returns true if there are updates, and each of them could run as soon as its gradient is complete.
    pub fn may_fuse(&self) -> bool {
        self.optimizer.is_some() && self.clip.is_none() && !self.loss_scale
    }

    /// Completes what `train` does unless told otherwise: AdamW; no decay of norms and biases; float32 master weights of
    /// 16-bit parameters, unless they are rounded by chance; and updates that run as soon as they can.
    pub fn for_training(mut self) -> UpdateOptions {
        self.optimizer.get_or_insert(Optimizer::ADAMW);
        self.no_decay_vectors = true;
        self.master_weights = !self.stochastic_rounding;
        self.fuse = self.may_fuse();
        self
    }

    /// Checks that the options go together.
    pub(super) fn check(&self) -> Result<()> {
        if self.optimizer.is_none() {
            return match *self == UpdateOptions::default() {
                true => Ok(()),
                false => Err(fail("options of updates are given, and no optimizer".into())
                    .expected("--optimizer beside --fuse-optimizer, --no-decay, --clip, --accumulate, --loss-scale, --master-weights and --stochastic-rounding")
                    .help("add --optimizer adamw")),
            };
        }
        if self.master_weights && self.stochastic_rounding {
            return Err(
                fail("a parameter with a master weight is not rounded by chance".into())
                    .help("leave out --master-weights or --stochastic-rounding"),
            );
        }
        let needs_norm = match (self.clip, self.loss_scale) {
            (Some(_), _) => "--clip",
            (None, true) => "--loss-scale",
            (None, false) => return Ok(()),
        };
        match self.fuse {
            false => Ok(()),
            true => Err(fail(format!(
                "{needs_norm} reads all gradients before the first update: none can run as soon as its own gradient is complete"
            ))
            .help("leave --fuse-optimizer out; with --accumulate each gradient is still freed as soon as it is added up")),
        }
    }
}

/// An optimizer and its constants, which mean what they mean in `torch.optim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// Stochastic gradient descent.
    Sgd {
        /// Factor of the momentum buffer; 0 for no buffer.
        momentum: f32,
        /// Share of the gradient that the buffer does not take.
        dampening: f32,
        /// Factor of the parameter that is added to the gradient.
        weight_decay: f32,
        /// The Nesterov form of momentum.
        nesterov: bool,
    },
    /// Adam with decoupled weight decay.
    AdamW {
        /// Decay of the mean of gradients.
        beta1: f32,
        /// Decay of the mean of squared gradients.
        beta2: f32,
        /// Added to the root of the mean of squares.
        eps: f32,
        /// Factor of the learning rate by which a parameter shrinks in each step.
        weight_decay: f32,
        /// Whether states are 8-bit codes, for parameters that are large enough.
        eight_bits: bool,
    },
    /// Steps of one size in the direction of the signs of a mean.
    Lion {
        /// Decay of the mean whose signs are the step's.
        beta1: f32,
        /// Decay of the mean that is kept.
        beta2: f32,
        /// Factor of the learning rate by which a parameter shrinks in each step.
        weight_decay: f32,
    },
    /// Steps whose squares are estimated from rows and columns.
    Adafactor(Adafactor),
    /// Steps whose singular values are near 1, for matrices; AdamW for all else.
    Muon(Muon),
}

/// Settings of Adafactor, as `torch.optim.Adafactor` has them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    /// The exponent by which the decay of mean squares goes with the step.
    pub beta2_decay: f32,
    /// The least root of an estimate; 0 for the epsilon of the parameter's type.
    pub eps1: f32,
    /// The least scale of a parameter.
    pub eps2: f32,
    /// The largest root mean square of an update before it is scaled.
    pub d: f32,
    /// Factor of the learning rate by which a parameter shrinks in each step.
    pub weight_decay: f32,
}

/// Settings of Muon, as `torch.optim.Muon` has them, and those of AdamW for other parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// Decay of the mean of gradients.
    pub momentum: f32,
    /// The Nesterov form of momentum.
    pub nesterov: bool,
    /// Factor of the learning rate by which a parameter shrinks in each step.
    pub weight_decay: f32,
    /// Whether steps are as large as AdamW's usually are (`adjust_lr_fn="match_rms_adamw"`).
    pub match_rms_adamw: bool,
    /// AdamW's decay of the mean of gradients.
    pub beta1: f32,
    /// AdamW's decay of the mean of squared gradients.
    pub beta2: f32,
    /// What AdamW adds to the root of the mean of squares.
    pub eps: f32,
}

impl Optimizer {
    /// AdamW with PyTorch's defaults.
    pub const ADAMW: Optimizer = Optimizer::adamw(false);

    const fn adamw(eight_bits: bool) -> Optimizer {
        Optimizer::AdamW {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            eight_bits,
        }
    }

    /// Parses the name of an optimizer, perhaps with settings: `adamw:beta1=0.9,eps=1e-8`. A setting that is not given has
    /// the default of PyTorch, or of the publication.
    ///
    /// # Errors
    /// An unknown optimizer or setting, a setting given twice, a number out of its range or with more digits than float32
    /// holds.
    pub fn parse(text: &str) -> Result<Optimizer> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let mut optimizer = match name {
            "sgd" => Optimizer::Sgd {
                momentum: 0.0,
                dampening: 0.0,
                weight_decay: 0.0,
                nesterov: false,
            },
            "adamw" => Optimizer::ADAMW,
            "adamw8bit" => Optimizer::adamw(true),
            "lion" => Optimizer::Lion {
                beta1: 0.9,
                beta2: 0.99,
                weight_decay: 0.0,
            },
            "adafactor" => Optimizer::Adafactor(Adafactor {
                beta2_decay: -0.8,
                eps1: 0.0,
                eps2: 1e-3,
                d: 1.0,
                weight_decay: 0.0,
            }),
            "muon" => Optimizer::Muon(Muon {
                momentum: 0.95,
                nesterov: true,
                weight_decay: 0.1,
                match_rms_adamw: false,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
            }),
            other => {
                return Err(fail(format!("there is no optimizer `{other}`")).expected(
                    "sgd, adamw, adamw8bit, lion, adafactor or muon, perhaps with settings: sgd:momentum=0.9",
                ));
            }
        };
        let mut seen: Vec<&str> = Vec::new();
        for setting in settings.split(',').filter(|_| text.contains(':')) {
            let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
            if seen.contains(&key) {
                return Err(fail(format!("`{key}` is set twice")));
            }
            seen.push(key);
            optimizer.set(key, value)?;
        }
        if let Optimizer::Sgd {
            momentum,
            dampening,
            nesterov: true,
            ..
        } = optimizer
            && (momentum == 0.0 || dampening != 0.0)
        {
            return Err(fail("nesterov needs a momentum, and no dampening".into()));
        }
        Ok(optimizer)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let known = self.words();
        let truth = self.truths().into_iter().find(|(name, _)| *name == key);
        if let Some((_, setting)) = truth {
            *setting = value.parse().map_err(|_| {
                fail(format!("`{key}` cannot be `{value}`")).expected("true or false")
            })?;
            return Ok(());
        }
        let found = self.numbers().into_iter().find(|(name, _)| *name == key);
        let Some((_, setting)) = found else {
            return Err(fail(format!("there is no setting `{key}`")).expected(known));
        };
        *setting = match (key, value.strip_prefix('-')) {
            (BETA2_DECAY, Some(exponent)) => -number(key, exponent, false)?,
            (BETA2_DECAY, None) if number(key, value, false)? != 0.0 => {
                return Err(
                    fail(format!("`{key}` cannot be {value}")).expected("a number, 0 or less")
                );
            }
            _ => number(key, value, key.starts_with(BETA))?,
        };
        Ok(())
    }

    /// Returns the optimizer of a parameter of type `ty` that Muon takes or does not, and whose weight decays or does not.
    pub(super) fn of(mut self, ty: &Ty, is_for_muon: bool, decays: bool) -> Optimizer {
        match &mut self {
            Optimizer::AdamW { eight_bits, .. } => *eight_bits &= may_have_codes(ty),
            Optimizer::Muon(settings) if !is_for_muon => {
                self = Optimizer::AdamW {
                    beta1: settings.beta1,
                    beta2: settings.beta2,
                    eps: settings.eps,
                    weight_decay: settings.weight_decay,
                    eight_bits: false,
                };
            }
            _ => {}
        }
        let mut numbers = self.numbers().into_iter();
        if let Some((_, decay)) = numbers.find(|(word, _)| *word == WEIGHT_DECAY && !decays) {
            *decay = 0.0;
        }
        self
    }

    /// Returns the settings that are numbers, by their words.
    fn numbers(&mut self) -> Vec<(&'static str, &mut f32)> {
        match self {
            Optimizer::Sgd {
                momentum,
                dampening,
                weight_decay,
                ..
            } => vec![
                (MOMENTUM_FACTOR, momentum),
                (DAMPENING, dampening),
                (WEIGHT_DECAY, weight_decay),
            ],
            Optimizer::AdamW {
                beta1,
                beta2,
                eps,
                weight_decay,
                ..
            } => vec![
                (BETA1, beta1),
                (BETA2, beta2),
                (EPS, eps),
                (WEIGHT_DECAY, weight_decay),
            ],
            Optimizer::Lion {
                beta1,
                beta2,
                weight_decay,
            } => vec![(BETA1, beta1), (BETA2, beta2), (WEIGHT_DECAY, weight_decay)],
            Optimizer::Adafactor(settings) => vec![
                (BETA2_DECAY, &mut settings.beta2_decay),
                ("eps1", &mut settings.eps1),
                ("eps2", &mut settings.eps2),
                ("d", &mut settings.d),
                (WEIGHT_DECAY, &mut settings.weight_decay),
            ],
            Optimizer::Muon(settings) => vec![
                (MOMENTUM_FACTOR, &mut settings.momentum),
                (WEIGHT_DECAY, &mut settings.weight_decay),
                (BETA1, &mut settings.beta1),
                (BETA2, &mut settings.beta2),
                (EPS, &mut settings.eps),
            ],
        }
    }

    /// Returns the settings that are truth values, by their words.
    fn truths(&mut self) -> Vec<(&'static str, &mut bool)> {
        match self {
            Optimizer::Sgd { nesterov, .. } => vec![("nesterov", nesterov)],
            Optimizer::Muon(settings) => vec![
                ("nesterov", &mut settings.nesterov),
                ("match_rms_adamw", &mut settings.match_rms_adamw),
            ],
            Optimizer::AdamW { .. } | Optimizer::Lion { .. } | Optimizer::Adafactor(_) => {
                Vec::new()
            }
        }
    }

    /// Returns the words of all settings, for an error.
    fn words(mut self) -> String {
        let numbers = self.numbers().into_iter().map(|(word, _)| word);
        let mut words: Vec<&str> = numbers.collect();
        words.extend(self.truths().into_iter().map(|(word, _)| word));
        words.join(", ")
    }

    /// Returns the states that it keeps for a parameter: suffixes and types. `ty` is the type of the parameter, or of its
    /// master.
    pub(super) fn states(&self, ty: &Ty) -> Vec<(&'static str, Ty)> {
        let alike = |ends: &[&'static str]| ends.iter().map(|end| (*end, ty.clone())).collect();
        match self {
            Optimizer::Sgd { momentum: 0.0, .. } => Vec::new(),
            Optimizer::Sgd { .. } | Optimizer::Muon(_) => alike(&[MOMENTUM]),
            Optimizer::AdamW {
                eight_bits: false, ..
            } => alike(&[EXP_AVG, EXP_AVG_SQ]),
            Optimizer::AdamW { .. } => {
                let elements = ty.elements();
                let codes = Ty::new(DType::U8, [elements.clone()]);
                let scales = Ty::new(DType::F32, [blocks_of(&elements)]);
                vec![
                    (EXP_AVG, codes.clone()),
                    (EXP_AVG_SCALES, scales.clone()),
                    (EXP_AVG_SQ, codes),
                    (EXP_AVG_SQ_SCALES, scales),
                ]
            }
            Optimizer::Lion { .. } => alike(&[EXP_AVG]),
            Optimizer::Adafactor(_) => adafactor_states(ty),
        }
    }

    /// Returns true if its formula reads the number of the step.
    pub(super) fn counts_steps(&self) -> bool {
        match self {
            Optimizer::Sgd {
                momentum,
                dampening,
                ..
            } => *momentum != 0.0 && *dampening != 0.0,
            Optimizer::Lion { .. } => false,
            Optimizer::AdamW { .. } | Optimizer::Adafactor(_) | Optimizer::Muon(_) => true,
        }
    }
}

impl Optimizer {
    fn name(&self) -> &'static str {
        match self {
            Optimizer::Sgd { .. } => "sgd",
            Optimizer::AdamW {
                eight_bits: true, ..
            } => "adamw8bit",
            Optimizer::AdamW { .. } => "adamw",
            Optimizer::Lion { .. } => "lion",
            Optimizer::Adafactor(_) => "adafactor",
            Optimizer::Muon(_) => "muon",
        }
    }
}

impl fmt::Display for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut own = *self;
        let shown = |(word, number): (&str, &mut f32)| match (0.0..1e-4).contains(&number.abs())
            && *number != 0.0
        {
            true => format!("{word}={number:e}"),
            false => format!("{word}={number}"),
        };
        let mut settings: Vec<String> = own.numbers().into_iter().map(shown).collect();
        let truths = own.truths().into_iter();
        settings.extend(truths.map(|(word, truth)| format!("{word}={truth}")));
        write!(f, "{}:{}", self.name(), settings.join(","))
    }
}

/// The fewest elements of a parameter whose states are 8-bit codes, as bitsandbytes' `min_8bit_size`.
const LEAST_WITH_CODES: i64 = 4096;

/// Returns true for a parameter whose states may be 8-bit codes.
fn may_have_codes(ty: &Ty) -> bool {
    let elements = ty.elements().as_const();
    elements.is_some_and(|n| n >= LEAST_WITH_CODES) && compute_type(ty.dtype) == DType::F32
}

/// Returns the states of Adafactor: of all rows and columns of a parameter's matrices, or of each element.
fn adafactor_states(ty: &Ty) -> Vec<(&'static str, Ty)> {
    let rank = ty.rank();
    if rank < 2 {
        return vec![(VARIANCE, ty.clone())];
    }
    let without = |axis: usize| {
        let mut ty = ty.clone();
        ty.dims[axis] = 1.into();
        ty
    };
    vec![(ROW_VAR, without(rank - 1)), (COL_VAR, without(rank - 2))]
}

fn number(key: &str, text: &str, below_one: bool) -> Result<f32> {
    let expected = match below_one {
        true => "a number from 0 to below 1",
        false => "a number, 0 or more",
    };
    let wrong = |what: String| Err(fail(what).expected(expected));
    let Ok(wide) = text.parse::<f64>() else {
        return wrong(format!("`{key}` cannot be `{text}`"));
    };
    let narrow = wide as f32;
    if !narrow.is_finite() || wide < 0.0 || (below_one && narrow >= 1.0) {
        return wrong(format!("`{key}` cannot be {text}"));
    }
    if decimal(narrow) != wide {
        return wrong(format!(
            "`{key}` has more digits than float32 holds: {text}"
        ));
    }
    Ok(narrow)
}
