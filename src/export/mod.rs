//! Trained weights as other tools load them: without a training graph.
//!
//! A training run leaves tensors under names of initializers or of the framework. [`Export`] matches them to the model
//! that was trained ([`weights`]), merges adapters ([`merge`]) and writes what is asked for:
//!
//! | target | content |
//! |---|---|
//! | [`Target::Safetensors`] | all parameters and buffers under the framework's names and in its layout, tied names included |
//! | [`Target::Onnx`] | the model itself with new weights ([`onnx`]) |
//! | [`Target::Peft`] | the adapters alone, as PEFT saves them ([`peft`]) |
//! | [`Target::OrtTraining`] | of a training graph, what ONNX Runtime's on-device training loads ([`ort_training`]) |
//!
//! [`checkpoint`] reads what was trained. All files of a target appear whole or not at all.

pub mod checkpoint;
pub mod merge;
pub mod onnx;
pub mod ort_training;
pub mod peft;
pub mod weights;

use crate::emit::file::refuse_overwrite;
use crate::frontend::given::Given;
use crate::frontend::load;
use crate::tensors::Tensors;
use crate::tensors::framework::{state_dict, transposed};
use ckpt_passes::analysis::gradients::has_backward;
use ckpt_passes::ir::{Graph, Tensor, ValueId};
use ckpt_passes::transform::infer::infer;
use ckpt_passes::transform::lora::Lora;
use ckpt_passes::{Error, Result};
use merge::Adapter;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use weights::{Copies, New};

/// A form in which weights are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// One file with all parameters.
    Safetensors,
    /// The model with new weights.
    Onnx,
    /// A folder with adapters.
    Peft,
    /// A folder for ONNX Runtime's on-device training.
    OrtTraining,
}

impl Target {
    /// Parses the value of `--to`.
    ///
    /// # Errors
    /// Another word.
    pub fn parse(text: &str) -> Result<Target> {
        match text {
            "safetensors" => Ok(Target::Safetensors),
            "onnx" => Ok(Target::Onnx),
            "peft" => Ok(Target::Peft),
            ort_training::FOLDER => Ok(Target::OrtTraining),
            other => Err(Error::usage(
                "convert",
                format!("weights cannot be written as `{other}`"),
            )
            .expected("safetensors, onnx, peft or ort-training")),
        }
    }
}

/// A model and what training changed in it.
pub struct Export {
    /// The model's file.
    source: PathBuf,
    /// The model, typed, with the weights of its file.
    graph: Graph,
    /// New contents of initializers. Adapters are not in them.
    changed: BTreeMap<ValueId, New>,
    /// The initializers that training has a value for.
    given: BTreeSet<ValueId>,
    /// Copies of tied weights, which follow the weight.
    copies: Copies,
    adapters: Vec<Adapter>,
    lora: Option<Lora>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

impl Export {
    /// Reads the model at `source` and matches `trained` to it, by names of initializers or of the framework. `lora` is the
    /// request that its adapters were added with.
    ///
    /// # Errors
    /// A model that cannot be read or has its backward; tensors that do not fit it; adapters without `lora`.
    pub fn new(
        source: &Path,
        given: &Given,
        trained: &Tensors,
        lora: Option<&Lora>,
    ) -> Result<Export> {
        let mut model = load(source, given)?;
        infer(&mut model.graph).map_err(|e| e.at(source.display().to_string()))?;
        if has_backward(&model.graph) {
            let what = "the model is a training graph";
            return Err(Error::usage("convert", what)
                .at(source.display().to_string())
                .help("give the model that it was made from"));
        }
        let (pairs, others) = merge::split(trained);
        let matched = weights::matched(&model.graph, &others)?;
        let adapters = merge::adapters(&model.graph, pairs, lora)?;
        if !trained.is_empty() && matched.given.len() + adapters.len() == 0 {
            return Err(weights::none_matched());
        }
        let mut warnings = model.warnings;
        warnings.extend(matched.warnings);
        Ok(Export {
            source: source.into(),
            copies: weights::copies(&model.graph)?,
            graph: model.graph,
            changed: matched.changed,
            given: matched.given,
            lora: lora.filter(|_| !adapters.is_empty()).cloned(),
            adapters,
            warnings,
        })
    }

    /// Writes one target, and returns the written files. `output` is a folder for [`Target::Peft`], else a file.
    ///
    /// # Errors
    /// A target that cannot say what was trained; a disk that refuses.
    pub fn write(&self, target: Target, output: &Path) -> Result<Vec<PathBuf>> {
        match target {
            Target::Safetensors => self.write_safetensors(output),
            Target::Onnx => onnx::write(&self.source, &self.merged_graph()?, output),
            Target::Peft => self.write_peft(output),
            Target::OrtTraining => Err(ort_training::no_training_graph()),
        }
    }

    /// Returns the number of weights that differ from the model's, and of adapters.
    pub fn counts(&self) -> (usize, usize) {
        (self.changed.len(), self.adapters.len())
    }

    /// Returns an initializer with its new content, which is made when it is asked for. A copy of a tied weight follows it.
    fn tensor(&self, id: ValueId) -> Result<Tensor> {
        let is_adapted = |id: ValueId| self.adapters.iter().any(|a| a.weight == id);
        if !is_adapted(id)
            && let Some((of, is_turned)) = self.copied(id, &is_adapted)
        {
            return Ok(turned(self.tensor(of)?, is_turned));
        }
        let mut tensor = self.unmerged(id)?;
        for adapter in self.adapters.iter().filter(|a| a.weight == id) {
            tensor = adapter.merged(&tensor)?;
        }
        Ok(tensor)
    }

    /// Returns an initializer with its new content, without adapters.
    fn unmerged(&self, id: ValueId) -> Result<Tensor> {
        if let Some(new) = self.changed.get(&id) {
            return Ok(new.tensor());
        }
        // A copy that has a value of its own keeps it.
        let is_changed = |of: ValueId| self.changed.contains_key(&of);
        let copied = self.copied(id, &is_changed);
        if let Some((of, is_turned)) = copied.filter(|_| !self.given.contains(&id)) {
            return Ok(turned(self.changed[&of].tensor(), is_turned));
        }
        let value = self.graph.value(id);
        let tensor = value.tensor().filter(|tensor| tensor.bytes().is_some());
        tensor.cloned().ok_or_else(|| {
            let what = format!("the file that holds `{}` is absent", value.name);
            Error::environment("weights", what)
        })
    }

    /// Returns a weight that `id` is a copy of, and whether it is its transpose.
    fn copied(&self, id: ValueId, wanted: &dyn Fn(ValueId) -> bool) -> Option<(ValueId, bool)> {
        let mut ties = self.copies.iter();
        let found = ties.find(|(of, copy, _)| *copy == id && wanted(*of));
        found.map(|(of, _, is_turned)| (*of, *is_turned))
    }

    /// Returns the model with new weights.
    fn merged_graph(&self) -> Result<Graph> {
        let mut graph = self.graph.clone();
        let own = self.changed.keys().copied();
        let mut new: BTreeSet<ValueId> =
            own.chain(self.adapters.iter().map(|a| a.weight)).collect();
        let copies = self.copies.iter().filter(|(of, ..)| new.contains(of));
        let copies: Vec<ValueId> = copies.map(|(_, copy, _)| *copy).collect();
        new.extend(copies);
        for id in new {
            graph.set_init(id, self.tensor(id)?);
        }
        Ok(graph)
    }

    fn write_safetensors(&self, output: &Path) -> Result<Vec<PathBuf>> {
        refuse_overwrite(output, std::slice::from_ref(&self.source))?;
        state_dict(&self.graph)?.write(output, &mut |entry, write| {
            let tensor = self.tensor(entry.initializer).map_err(io::Error::other)?;
            write(tensor.bytes().map_or(&[], |bytes| bytes))
        })?;
        Ok(vec![output.into()])
    }

    fn write_peft(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let Some(lora) = &self.lora else {
            let what = "there are no adapters to write";
            return Err(Error::usage("convert", what)
                .help("train with --lora, or use --to safetensors or --to onnx"));
        };
        if let Some(id) = self.changed.keys().next() {
            let name = &self.graph.value(*id).name;
            let what = format!("`{name}` was trained too, and a PEFT adapter does not hold it");
            return Err(Error::usage("convert", what).help("use --to safetensors or --to onnx"));
        }
        peft::write(&self.graph, &self.adapters, lora, folder)
    }
}

fn turned(tensor: Tensor, is_turned: bool) -> Tensor {
    is_turned
        .then(|| transposed(&tensor))
        .flatten()
        .unwrap_or(tensor)
}
