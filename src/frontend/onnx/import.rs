//! Builds the [`Graph`] of a `ModelProto`: names, initializers, and nodes in the order of the file.
//!
//! Nodes become rows of the op table at its opset (`upgrade.rs`). Calls of local functions are inlined, except those of our
//! own domain (`functions.rs`). Every name is resolved here, so cycles, missing definitions and second definitions are found
//! before any other code sees the graph. Nothing in the file is executed.

use super::tensor::ReadTensor;
use super::types::{input_type, lenient_type};
use super::{claims, exported, gradients, legacy, names, tensor, upgrade};
use crate::frontend::lower::{Dropout, QuantisedValues, lost};
use crate::onnx::keys;
use crate::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    StringStringEntryProto, TensorProto, to_map,
};
use ckpt_passes::ir::edit::NewNode;
use ckpt_passes::ir::op::{Body, Domain};
use ckpt_passes::ir::typing::{Contents, type_node};
use ckpt_passes::ir::{Attr, Attrs, DType, Def, Graph, NodeId, OpDef, Tensor, Ty, ValueId};
use ckpt_passes::ops::collective::RANKS;
use ckpt_passes::ops::shape::STOP_GRADIENT;
use ckpt_passes::{Error, Result, ops};
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The opsets of the standard domain that are read. Before opset 7, only ops that did not change until then are read.
pub const OPSETS: std::ops::RangeInclusive<i64> = 1..=28;

/// A graph, and warnings about how it was read.
pub struct Imported {
    /// The graph of the model, with calls of local functions inlined.
    pub graph: Graph,
    /// Warnings for the user, such as dropouts that the export lost.
    pub warnings: Vec<String>,
}

/// Builds the graph of a decoded model.
///
/// # Errors
/// A file that is not valid or uses what is not supported. The error names the node or value.
pub fn import(model: &ModelProto, read: &mut ReadTensor) -> Result<Imported> {
    let Some(file) = &model.graph else {
        return Err(Error::model("onnx", "the file has no graph").help("is it an ONNX model?"));
    };
    if !file.sparse_initializer.is_empty() {
        bail!("onnx", "sparse initializers are not supported");
    }
    let imports = domain_versions(&model.opset_import)?;
    let parted = exported::unmerge(model, file, read)?;
    let file = parted.as_ref().unwrap_or(file);
    let mut importer = Importer {
        graph: Graph::new(file.name.as_deref().unwrap_or("graph")),
        scope: BTreeMap::new(),
        sequences: BTreeMap::new(),
        declared: BTreeMap::new(),
        functions: BTreeMap::new(),
        contents: Contents::of(&Graph::new("")),
        warnings: Vec::new(),
        read,
        imports,
        inlined: 0,
        calls: Vec::new(),
        absent: BTreeMap::new(),
        dropouts: Vec::new(),
        quantised: QuantisedValues::default(),
    };
    for function in &model.functions {
        let key = function_key(function.domain(), function.name(), function.overload());
        if importer.functions.insert(key, function).is_some() {
            bail!("function", "function {} is defined twice", function.name());
        }
    }
    importer.model_meta(model);
    for info in file.value_info.iter().chain(&file.output) {
        if let Some(ty) = info.r#type.as_ref().and_then(lenient_type) {
            importer.declared.insert(info.name().to_string(), ty);
        }
    }
    importer.sources(file)?;
    let producers: BTreeMap<&str, usize> = file
        .node
        .iter()
        .enumerate()
        .flat_map(|(i, n)| n.output.iter().map(move |o| (o.as_str(), i)))
        .collect();
    let mut copies = Vec::new();
    for (index, node) in file.node.iter().enumerate() {
        importer.resolve_all(node, index, &producers)?;
        let first = importer.graph.order().len();
        importer.node(node, index, 0)?;
        copies.extend(claims::claims(&importer.graph, first));
    }
    importer.outputs(file)?;
    let folded = names::origins(&mut importer.graph, model, file)?;
    importer.warnings.extend(folded);
    let unproved = claims::believe(&mut importer.graph, copies);
    importer.warnings.extend(unproved);
    let (graph, mut warnings) = (importer.graph, importer.warnings);
    warnings.extend(lost(&graph, &importer.dropouts));
    Ok(Imported { graph, warnings })
}

/// Returns the versions of the imported domains.
///
/// # Errors
/// A file that does not import the standard domain, or a version of it that is not read.
pub(super) fn domain_versions(imports: &[OperatorSetIdProto]) -> Result<BTreeMap<String, i64>> {
    let mut versions = BTreeMap::new();
    for import in imports {
        let domain = plain_domain(import.domain());
        if versions
            .insert(domain.to_string(), import.version())
            .is_some_and(|v| v != import.version())
        {
            bail!("opset", "domain \"{domain}\" is imported in two versions");
        }
    }
    match versions.get("").copied() {
        Some(v) if OPSETS.contains(&v) => Ok(versions),
        Some(v) => Err(Error::model(
            "opset",
            format!("opset {v} of the standard domain is not supported"),
        )
        .expected(format!("{} to {}", OPSETS.start(), OPSETS.end()))
        .help("convert it with onnx.version_converter, or export again")),
        None => bail!(
            "opset",
            "the file does not say which opset of the standard domain it uses"
        ),
    }
}

fn plain_domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// The domain, name and overload of a function.
type FunctionKey = (String, String, String);

fn function_key(domain: &str, name: &str, overload: &str) -> FunctionKey {
    (
        plain_domain(domain).to_string(),
        name.to_string(),
        overload.to_string(),
    )
}

pub(super) struct Importer<'a, 'r> {
    pub(super) graph: Graph,
    /// The values by their names in the file, or by their formal names inside a function.
    pub(super) scope: BTreeMap<String, ValueId>,
    /// The elements of values of sequence type, by the names of these like `scope`.
    pub(super) sequences: BTreeMap<String, Vec<ValueId>>,
    /// The types that the file gives for results. They count only for ops that are not in the op table.
    pub(super) declared: BTreeMap<String, Ty>,
    pub(super) functions: BTreeMap<FunctionKey, &'a FunctionProto>,
    /// Known contents of integer values. Typing needs them.
    pub(super) contents: Contents,
    pub(super) warnings: Vec<String>,
    pub(super) read: &'a mut ReadTensor<'r>,
    /// Versions of the domains that the current graph or function imports. The standard domain is "".
    pub(super) imports: BTreeMap<String, i64>,
    /// The number of nodes that calls of functions have inlined so far.
    pub(super) inlined: usize,
    /// The open calls of local functions, outermost first: the path of the call, and the name of the function.
    pub(super) calls: Vec<(String, String)>,
    /// Names of results that are not computed, with the reasons.
    pub(super) absent: BTreeMap<String, String>,
    /// All dropouts of the file, for warnings about dropouts that an export lost.
    pub(super) dropouts: Vec<Dropout>,
    /// The operands of quantising nodes, by their results, and initializers of four bits.
    pub(super) quantised: QuantisedValues,
}

impl<'a> Importer<'a, '_> {
    fn model_meta(&mut self, model: &ModelProto) {
        let meta = &mut self.graph.meta;
        for prop in &model.metadata_props {
            meta.insert(prop.key().to_string(), prop.value().to_string());
        }
        meta.insert("ir_version".into(), model.ir_version().to_string());
        if !model.producer_name().is_empty() {
            meta.insert(
                "producer".into(),
                format!("{} {}", model.producer_name(), model.producer_version()),
            );
        }
    }

    /// Adds graph inputs and initializers. An input with the name of an initializer is that initializer, which a caller may
    /// override.
    fn sources(&mut self, file: &'a GraphProto) -> Result<()> {
        let initial: BTreeSet<&str> = file.initializer.iter().map(|t| t.name()).collect();
        for input in &file.input {
            if initial.contains(input.name()) {
                continue;
            }
            let told = input.r#type.as_ref();
            let ty = told.map(|t| input_type(input, t)).transpose()?.flatten();
            self.claim_name(input.name())?;
            let id = self.graph.add_input(input.name(), ty);
            self.scope.insert(input.name().into(), id);
        }
        for tensor in &file.initializer {
            self.initializer(tensor.name(), tensor)?;
        }
        Ok(())
    }

    /// Adds a constant of the file. Integers of four bits stay two in a byte.
    pub(super) fn initializer(&mut self, name: &str, tensor: &TensorProto) -> Result<()> {
        self.claim_name(name)?;
        let (bytes, packed) = tensor::of_four_bits(tensor)?.unzip();
        let data = (self.read)(bytes.as_ref().unwrap_or(tensor))?;
        let id = self.graph.add_init(name, data);
        if let Some(packed) = packed {
            self.quantised.packed.insert(id, packed);
        }
        self.contents.read_init(&self.graph, id);
        self.scope.insert(name.into(), id);
        Ok(())
    }

    /// Fails if an op reads integers of four bits and does not dequantise them.
    fn refuse_packed(&self, node: &NodeProto, ins: &[Option<ValueId>]) -> Result<()> {
        let mut given = ins.iter().flatten();
        match given.find(|v| self.quantised.packed.contains_key(v)) {
            Some(v) if node.op_type() != "DequantizeLinear" => {
                let name = &self.graph.value(*v).name;
                let what = format!("{} reads `{name}`, integers of four bits", node.op_type());
                Err(Error::model("type", what)
                    .expected("DequantizeLinear as the only reader")
                    .help("dequantise the weight before other ops read it"))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn claim_name(&self, name: &str) -> Result<()> {
        if name.is_empty() {
            bail!("name", "an input or initializer has no name");
        }
        if self.is_defined(name) {
            bail!("name", "`{name}` is defined twice");
        }
        Ok(())
    }

    /// Returns true if a tensor or sequence has that name.
    fn is_defined(&self, name: &str) -> bool {
        self.scope.contains_key(name) || self.sequences.contains_key(name)
    }

    /// Returns the error for a result of a fused op that is not computed.
    pub(super) fn undefined(&self, name: &str) -> Option<Box<Error>> {
        let why = self.absent.get(name)?;
        Some(
            Error::model("op", format!("`{name}` is not computed"))
                .found(why.clone())
                .help("export without this fusion, or without the result"),
        )
    }

    /// Fails unless every operand of a top-level node is defined before the node.
    fn resolve_all(
        &self,
        node: &NodeProto,
        index: usize,
        producers: &BTreeMap<&str, usize>,
    ) -> Result<()> {
        for name in node.input.iter().filter(|n| !n.is_empty()) {
            if self.is_defined(name) {
                continue;
            }
            let place = describe(node, index);
            if let Some(error) = self.undefined(name) {
                return Err(error.at(place));
            }
            return Err(match producers.get(name.as_str()) {
                Some(later) if *later == index => {
                    Error::model("cycle", format!("a node reads its own result `{name}`")).at(place)
                }
                Some(later) => {
                    Error::model("cycle", format!("`{name}` is read before it is computed"))
                        .at(place)
                        .found(format!(
                            "node {later} computes it: the nodes form a cycle or are out of order"
                        ))
                        .help("ONNX nodes must be in topological order")
                }
                None => Error::model("name", format!("nothing defines `{name}`"))
                    .at(place)
                    .help("an initializer is missing, or the file was cut"),
            });
        }
        Ok(())
    }

    /// Reads a node, at `depth` calls of local functions.
    pub(super) fn node(&mut self, node: &NodeProto, index: usize, depth: usize) -> Result<()> {
        self.read_node(node, index, depth)
            .map_err(|e| e.at(describe(node, index)))
    }

    fn read_node(&mut self, node: &NodeProto, index: usize, depth: usize) -> Result<()> {
        let key = function_key(node.domain(), node.op_type(), node.overload());
        let nested = |a: &AttributeProto| a.g.is_some() || !a.graphs.is_empty();
        if node.attribute.iter().any(nested) {
            let what = format!("{} holds a nested graph", node.op_type());
            return Err(Error::model("op", what)
                .help("control flow is not supported: export with it unrolled"));
        }
        if let Some(function) = self.functions.get(&key).copied() {
            return self.call(node, index, function, depth);
        }
        let standard = key.0.is_empty();
        if standard {
            upgrade::refuse_ancient(node.op_type(), self.imports[""])?;
            if node.op_type() == "Constant" {
                return self.constant(node);
            }
            if self.sequence(node, index)? {
                return Ok(());
            }
        }
        let ins = self.operands(node)?;
        self.refuse_packed(node, &ins)?;
        if depth == 0 && self.another_name(node, &key.0, &ins)?
            || self.decompose(node, &key.0, index, &ins)?
        {
            return Ok(());
        }
        let op = match key.0.as_str() {
            "" => ops::find_onnx(node.op_type()),
            // As `ckpt_opt.stop_gradient` has it exported. Other ops of ours come with a function.
            Domain::CKPT if node.op_type() == STOP_GRADIENT.name => Some(&STOP_GRADIENT),
            // What ranks compute together has no function.
            Domain::CKPT => ops::find(node.op_type()).filter(|op| {
                let is_of_ranks = op.attrs.iter().any(|spec| spec.name == RANKS);
                op.domain == Domain::Ckpt && (is_of_ranks || matches!(op.body, Body::None(_)))
            }),
            _ => None,
        };
        match op {
            Some(op) => self.known(node, index, op, ins),
            None => self.opaque(node, index, ins, depth),
        }
    }

    /// Reads an `Identity` of an initializer as another name of it. The legacy exporter writes it for tied weights, and for
    /// constants of equal contents: these are initializers of their own again.
    fn another_name(
        &mut self,
        node: &NodeProto,
        domain: &str,
        ins: &[Option<ValueId>],
    ) -> Result<bool> {
        let ([Some(weight)], [name]) = (ins, node.output.as_slice()) else {
            return Ok(false);
        };
        let ours = |p: &StringStringEntryProto| p.key().starts_with("ckpt.");
        let is_initializer = matches!(self.graph.value(*weight).def, Def::Init(_));
        if node.op_type() != "Identity"
            || !domain.is_empty()
            || !is_initializer
            || node.metadata_props.iter().any(ours)
        {
            return Ok(false);
        }
        self.claim_name(name)?;
        let tensor = self.graph.value(*weight).tensor();
        let merged = tensor.filter(|t| t.dtype.is_float() && exported::holds_one_number(t));
        let id = match merged.filter(|_| legacy::is_parameter_name(name)).cloned() {
            Some(tensor) => self.graph.add_init(name, tensor),
            None => *weight,
        };
        self.scope.insert(name.clone(), id);
        Ok(true)
    }

    pub(super) fn operands(&self, node: &NodeProto) -> Result<Vec<Option<ValueId>>> {
        let find = |name: &String| match name.as_str() {
            "" => Ok(None),
            name => match self.scope.get(name) {
                Some(id) => Ok(Some(*id)),
                // Only calls and ops of sequences get here with one.
                None if self.sequences.contains_key(name) => Ok(None),
                None => Err(self
                    .undefined(name)
                    .unwrap_or_else(|| Error::model("name", format!("nothing defines `{name}`")))),
            },
        };
        node.input.iter().map(find).collect()
    }

    /// Reads a node whose op is a row of the op table.
    fn known(
        &mut self,
        node: &NodeProto,
        index: usize,
        op: &'static OpDef,
        ins: Vec<Option<ValueId>>,
    ) -> Result<()> {
        let mut raw: BTreeMap<&str, &AttributeProto> =
            node.attribute.iter().map(|a| (a.name(), a)).collect();
        let mut ins = ins;
        upgrade::upgrade(
            &mut self.graph,
            &mut self.contents,
            op,
            self.imports[""],
            &mut raw,
            &mut ins,
        )?;
        while ins.last() == Some(&None) {
            ins.pop();
        }
        let mut attrs = Attrs::new();
        for (name, attribute) in raw {
            let Some(spec) = op.attrs.iter().find(|s| s.name == name) else {
                bail!("attribute", "{} has no attribute `{name}`", op.name);
            };
            attrs.set(name, self.attribute(attribute, spec.kind)?);
        }
        if op == &ops::concat::SPLIT && self.imports[""] < 18 && ins.len() < 2 {
            // Before opset 18, the number of results says into how many equal chunks to split.
            attrs.set("num_outputs", (node.output.len() as i64).into());
        }
        if op == &ops::shape::TRANSPOSE
            && let Some(perm) = attrs.opt_ints("perm").map(<[i64]>::to_vec)
        {
            // The TorchScript exporter counts some axes from the back, which ONNX does not allow.
            let rank = perm.len() as i64;
            let from_front = perm.iter().map(|p| if *p < 0 { p + rank } else { *p });
            attrs.set("perm", from_front.collect::<Vec<i64>>().into());
        }
        self.add(node, index, op, attrs, ins)?;
        Ok(())
    }

    /// Adds a node under the names of the file. Infers the types of its results if its operands have types.
    pub(super) fn add(
        &mut self,
        node: &NodeProto,
        index: usize,
        op: &'static OpDef,
        attrs: Attrs,
        ins: Vec<Option<ValueId>>,
    ) -> Result<NodeId> {
        let name = node.name_or_index(index);
        let mut named: Vec<String> = node.output.clone();
        while named.last().is_some_and(String::is_empty) {
            named.pop();
        }
        let outs = named.iter().enumerate().map(|(slot, n)| {
            // A result without a name keeps its slot.
            (
                if n.is_empty() {
                    format!("{name}:{slot}")
                } else {
                    n.clone()
                },
                None,
            )
        });
        let outs: Vec<(String, Option<Ty>)> = outs.collect();
        let mut own = BTreeSet::new();
        for output in named.iter().filter(|n| !n.is_empty()) {
            self.claim_name(output)?;
            if !own.insert(output) {
                bail!("name", "`{output}` is defined twice");
            }
        }
        let mut props: BTreeMap<String, String> = to_map(&node.metadata_props);
        let mut role = claims::role_of(&props);
        if op.is_transfer()
            && let Some(maker) = ins.iter().flatten().find_map(|v| self.graph.def_node(*v))
        {
            role = self.graph.node(maker).role;
        }
        let loc = Arc::new(names::within(&self.calls, names::loc(node, &props)));
        // The location holds these now, and the writer writes them from there.
        props.remove(keys::SCOPES);
        props.remove(keys::SOURCE);
        let id = self.graph.add_node(NewNode {
            op,
            name: &name,
            attrs,
            ins,
            outs,
            loc,
            role,
        });
        *self.graph.meta_mut(id) = props;
        ckpt_passes::ir::typing::check_arity(&self.graph, id)?;
        ckpt_passes::ir::verify::check_attrs(&self.graph, id)?;
        let results = self.graph.node(id).outs.clone();
        for (output, value) in named.iter().zip(&results) {
            if !output.is_empty() {
                self.scope.insert(output.clone(), *value);
            }
        }
        let known = |v: &Option<ValueId>| v.is_none_or(|v| self.graph.value(v).ty.is_some());
        if op.domain != Domain::Opaque && self.graph.node(id).ins.iter().all(known) {
            for (value, (ty, ints)) in
                results
                    .into_iter()
                    .zip(type_node(&self.graph, id, &self.contents)?)
            {
                self.graph.set_type(value, ty);
                self.contents.set(value, ints);
            }
        }
        Ok(id)
    }

    /// Adds an opaque node for an op that is not in the op table. Its types are those of `gradients.rs` or of the file.
    fn opaque(
        &mut self,
        node: &NodeProto,
        index: usize,
        ins: Vec<Option<ValueId>>,
        depth: usize,
    ) -> Result<()> {
        let raw = node.encode_to_vec();
        let domain = plain_domain(node.domain());
        let Some(version) = self.imports.get(domain).copied() else {
            bail!("opset", "the file does not import domain \"{domain}\"");
        };
        let attrs = Attrs::new()
            .with("domain", domain)
            .with("op_type", node.op_type())
            .with("version", version)
            .with(
                "node",
                Attr::Tensor(Tensor::new(DType::U8, [raw.len() as u64], raw)),
            );
        let known = self.foreign_types(domain, node, &ins);
        let id = self.add(node, index, &ops::opaque::OPAQUE, attrs, ins)?;
        let results = self.graph.node(id).outs.clone();
        for (slot, (name, value)) in node.output.iter().zip(results).enumerate() {
            // The file gives types for its own names, not for names inside a function.
            let given = || self.declared.get(name).filter(|_| depth == 0).cloned();
            let known = known.get(slot).cloned().flatten();
            if let Some(ty) = known.or_else(given) {
                self.graph.set_type(value, ty);
            }
        }
        Ok(())
    }

    fn foreign_types(
        &self,
        domain: &str,
        node: &NodeProto,
        ins: &[Option<ValueId>],
    ) -> Vec<Option<Ty>> {
        let operand = |v: &Option<ValueId>| {
            let value = (*v)?;
            Some(gradients::Operand {
                ty: self.graph.value(value).ty.as_ref()?,
                ints: self.contents.get(value),
            })
        };
        let operands: Vec<Option<gradients::Operand>> = ins.iter().map(operand).collect();
        gradients::types(domain, node, &operands)
    }
}

fn describe(node: &NodeProto, index: usize) -> String {
    format!("node {index} \"{}\" ({})", node.name(), node.op_type())
}
