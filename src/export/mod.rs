//! Trained weights as other tools load them: without a training graph.
//!
//! A training run leaves tensors under names of initializers or of the framework. [`Export`] matches them to the model
//! that was trained ([`weights`]), merges adapters ([`merge`]) and writes what is asked for:
//!
//! | target | content |
//! |---|---|
//! | [`Target::Safetensors`] | all parameters under the framework's names and in its layout, tied names included |
//! | [`Target::Onnx`] | the model itself with new weights ([`onnx`]) |
//! | [`Target::Peft`] | the adapters alone, as PEFT saves them ([`peft`]) |
//!
//! [`checkpoint`] reads what was trained. All files of a target appear whole or not at all.

pub mod checkpoint;
pub mod merge;
pub mod onnx;
pub mod peft;
pub mod weights;

use crate::emit::file::{Batch, refuse_overwrite};
use crate::frontend::given::Given;
use crate::frontend::load;
use crate::tensors::{self, Tensors};
use ckpt_passes::analysis::gradients::has_backward;
use ckpt_passes::ir::{Graph, Tensor, ValueId};
use ckpt_passes::transform::infer::infer;
use ckpt_passes::transform::lora::Lora;
use ckpt_passes::{Error, Result};
use merge::Adapter;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use weights::Copies;

/// A form in which weights are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// One file with all parameters.
    Safetensors,
    /// The model with new weights.
    Onnx,
    /// A folder with adapters.
    Peft,
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
            other => Err(Error::usage(
                "convert",
                format!("weights cannot be written as `{other}`"),
            )
            .expected("safetensors, onnx or peft")),
        }
    }
}

/// A model and what training changed in it.
pub struct Export {
    /// The model's file.
    source: PathBuf,
    /// The model, typed, with the weights of its file.
    graph: Graph,
    /// New contents of initializers, in the layout of the graph. Adapters are not in them.
    changed: BTreeMap<ValueId, Tensor>,
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
            let what = "no tensor has the name of a weight of the model";
            return Err(
                Error::usage("weights", what).help("`ckpt-opt inspect MODEL` lists the parameters")
            );
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
        }
    }

    /// Returns the number of weights that differ from the model's, and of adapters.
    pub fn counts(&self) -> (usize, usize) {
        (self.changed.len(), self.adapters.len())
    }

    /// Returns all parameters under the framework's names and in its layout, with adapters merged.
    ///
    /// # Errors
    /// A weight whose file is absent.
    pub fn parameters(&self) -> Result<Tensors> {
        weights::in_framework(&self.merged_graph()?)
    }

    /// Returns the model with new weights.
    fn merged_graph(&self) -> Result<Graph> {
        let mut graph = self.graph.clone();
        let mut values = self.changed.clone();
        for id in self.changed.keys() {
            weights::follow(&self.copies, *id, &mut values);
        }
        // A copy that has a value of its own keeps it.
        values.retain(|id, _| !self.given.contains(id) || self.changed.contains_key(id));
        values.extend(self.changed.clone());
        for adapter in &self.adapters {
            let own = values
                .get(&adapter.weight)
                .or(graph.value(adapter.weight).tensor());
            let weight = own.ok_or_else(|| Error::bug("lora", "an adapter of no weight"))?;
            values.insert(adapter.weight, adapter.merged(weight)?);
            weights::follow(&self.copies, adapter.weight, &mut values);
        }
        for (id, tensor) in values {
            graph.set_init(id, tensor);
        }
        Ok(graph)
    }

    fn write_safetensors(&self, output: &Path) -> Result<Vec<PathBuf>> {
        refuse_overwrite(output, std::slice::from_ref(&self.source))?;
        // `transformers` asks which framework wrote a file.
        let meta = [("format".to_string(), "pt".to_string())];
        let bytes = tensors::safetensors::write_with(&self.parameters()?, meta.into())?;
        let mut batch = Batch::new();
        batch.add(output, |out| out.write_all(&bytes))?;
        batch.publish()?;
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
