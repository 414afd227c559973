//! Calls of model-local functions.
//!
//! A call in our own domain becomes a node of the op table if the body of the function equals the one that we would write.
//! Any other call is inlined. The depth of calls and the number of inlined nodes are limited, because the number of nodes
//! may grow exponentially with the size of the file.

use super::import::{Importer, domain_versions};
use crate::onnx::messages;
use crate::onnx::proto::{AttributeProto, FunctionProto, NodeProto};
use ckpt_passes::ir::edit::NewNode;
use ckpt_passes::ir::op::{Domain, SlotKind};
use ckpt_passes::ir::typing::{Contents, type_node};
use ckpt_passes::ir::{Attrs, Graph, Role, ValueId};
use ckpt_passes::{Error, Result, ops};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The largest depth of calls.
const MAX_CALL_DEPTH: usize = 64;

/// The largest number of inlined nodes: a hundred times that of the largest model we know.
const MAX_INLINED_NODES: usize = 250_000;

fn too_large() -> Box<Error> {
    Error::model(
        "function",
        format!("local functions bring more than {MAX_INLINED_NODES} nodes"),
    )
    .help("export the model without local functions")
}

impl<'a> Importer<'a, '_> {
    /// Reads a call of a local function: as a node of the op table, or by inlining it.
    pub(super) fn call(
        &mut self,
        node: &NodeProto,
        index: usize,
        function: &'a FunctionProto,
        depth: usize,
    ) -> Result<()> {
        if depth >= MAX_CALL_DEPTH {
            bail!(
                "function",
                "functions call each other more than {MAX_CALL_DEPTH} deep"
            );
        }
        if node.domain() == Domain::CKPT && self.ours(node, index, function)? {
            return Ok(());
        }
        let ins = self.operands(node)?;
        if ins.len() > function.input.len() {
            bail!(
                "arity",
                "function {} takes {} operands",
                function.name(),
                function.input.len()
            );
        }
        let imports = domain_versions(&function.opset_import)?;
        let given: BTreeMap<&str, &AttributeProto> = function
            .attribute_proto
            .iter()
            .chain(&node.attribute)
            .map(|a| (a.name(), a))
            .collect();
        let base = node.name_or_index(index);
        let inner: BTreeMap<String, ValueId> = function
            .input
            .iter()
            .zip(ins)
            .filter_map(|(name, v)| Some((name.clone(), v?)))
            .collect();
        let lists = function.input.iter().zip(&node.input);
        let lists = lists.filter_map(|(formal, actual)| {
            let list = self.sequences.get(actual)?;
            Some((formal.clone(), list.clone()))
        });
        let lists: BTreeMap<String, Vec<ValueId>> = lists.collect();
        let path = base.trim_start_matches('/').replace('/', ".");
        self.calls.push((path, function.name().to_string()));
        let outer = std::mem::replace(&mut self.scope, inner);
        let outer_sequences = std::mem::replace(&mut self.sequences, lists);
        let outer_imports = std::mem::replace(&mut self.imports, imports);
        let mut done = Ok(());
        for (i, step) in function.node.iter().enumerate() {
            let mut step = step.clone();
            bind_attributes(&mut step, &given);
            step.name = Some(format!(
                "{base}/{}",
                if step.name().is_empty() {
                    step.op_type().to_string()
                } else {
                    step.name().to_string()
                }
            ));
            self.inlined += 1;
            done = match self.inlined {
                n if n > MAX_INLINED_NODES => Err(too_large()),
                _ => self.node(&step, i, depth + 1),
            };
            if done.is_err() {
                break;
            }
        }
        let inner = std::mem::replace(&mut self.scope, outer);
        let mut lists = std::mem::replace(&mut self.sequences, outer_sequences);
        self.imports = outer_imports;
        self.calls.pop();
        done?;
        for (formal, actual) in function
            .output
            .iter()
            .zip(&node.output)
            .filter(|(_, a)| !a.is_empty())
        {
            if let Some(list) = lists.remove(formal) {
                self.claim_name(actual)?;
                self.sequences.insert(actual.clone(), list);
                continue;
            }
            let Some(id) = inner.get(formal).copied() else {
                bail!(
                    "function",
                    "function {} never defines `{formal}`",
                    function.name()
                );
            };
            self.claim_name(actual)?;
            if self.graph.def_node(id).is_some() {
                self.graph.rename_value(id, actual);
            }
            if depth == 0
                && self.graph.value(id).ty.is_none()
                && let Some(ty) = self.declared.get(actual)
            {
                self.graph.set_type(id, ty.clone());
            }
            self.scope.insert(actual.clone(), id);
        }
        Ok(())
    }

    /// Tries to read a call in our domain as a node of a row: `ckpt.TanhGrad_1` is of the row `TanhGrad`. Returns false if
    /// the body is another one.
    fn ours(&mut self, node: &NodeProto, index: usize, function: &FunctionProto) -> Result<bool> {
        let row = node.op_type().split('_').next().unwrap_or("");
        let Some(op) = ops::find(row).filter(|op| op.domain == Domain::Ckpt) else {
            return Ok(false);
        };
        let ins = self.operands(node)?;
        let variadic = op.ins.last().is_some_and(|s| s.kind == SlotKind::Variadic);
        let typed = ins
            .iter()
            .flatten()
            .all(|v| self.graph.value(*v).ty.is_some());
        if (ins.len() > op.ins.len() && !variadic) || !typed {
            return Ok(false);
        }
        // The trial uses a graph of its own, because the graph of the file must not change if the bodies differ.
        let mut trial = Graph::new("trial");
        let mut trial_ins = Vec::new();
        for value in &ins {
            trial_ins.push(value.map(|v| match self.graph.value(v).tensor() {
                Some(tensor)
                    if tensor.elements() <= ckpt_passes::ir::typing::MAX_KNOWN_ELEMENTS =>
                {
                    trial.add_init("operand", tensor.clone())
                }
                _ => trial.add_input("operand", self.graph.value(v).ty.clone()),
            }));
        }
        let mut attrs = Attrs::new();
        for attribute in &node.attribute {
            let Some(spec) = op.attrs.iter().find(|s| s.name == attribute.name()) else {
                return Ok(false);
            };
            attrs.set(spec.name, self.attribute(attribute, spec.kind)?);
        }
        let outs = node.output.iter().map(|n| (n.clone(), None)).collect();
        let new = NewNode {
            op,
            name: "trial",
            attrs: attrs.clone(),
            ins: trial_ins,
            outs,
            loc: Arc::default(),
            role: Role::Forward,
        };
        let id = trial.add_node(new);
        if ckpt_passes::ir::typing::check_arity(&trial, id).is_err()
            || ckpt_passes::ir::verify::check_attrs(&trial, id).is_err()
        {
            return Ok(false);
        }
        // The body may depend on the types of the results.
        let mut contents = Contents::of(&trial);
        for (value, operand) in ins.iter().zip(trial.node(id).ins.clone()) {
            if let (Some(value), Some(operand)) = (*value, operand) {
                contents.set(operand, self.contents.get(value).map(<[_]>::to_vec));
            }
        }
        let Ok(types) = type_node(&trial, id, &contents) else {
            return Ok(false);
        };
        for (out, (ty, _)) in trial.node(id).outs.clone().into_iter().zip(types) {
            trial.set_type(out, ty);
        }
        let Some(Ok(body)) = ckpt_passes::ops::body_of(&trial, id) else {
            return Ok(false);
        };
        let mine = messages::function(&body, function.name(), trial.node(id))?;
        if mine.node != function.node
            || mine.input != function.input
            || mine.output != function.output
        {
            let warning = format!(
                "function {} is not the one we would write: its nodes are read one by one",
                function.name()
            );
            if !self.warnings.contains(&warning) {
                self.warnings.push(warning);
            }
            return Ok(false);
        }
        self.add(node, index, op, attrs, ins)?;
        Ok(true)
    }
}

/// Replaces references to attributes of the call by their values.
fn bind_attributes(step: &mut NodeProto, given: &BTreeMap<&str, &AttributeProto>) {
    step.attribute.retain_mut(|attribute| {
        let Some(wanted) = attribute.ref_attr_name.clone().filter(|n| !n.is_empty()) else {
            return true;
        };
        match given.get(wanted.as_str()) {
            Some(value) => {
                let name = attribute.name.clone();
                *attribute = (*value).clone();
                attribute.name = name;
                true
            }
            // The call does not give it, so the default of the node's op counts.
            None => false,
        }
    });
}
