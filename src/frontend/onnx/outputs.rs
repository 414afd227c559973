//! Adds the graph outputs under the names that the file gives them.

use super::import::Importer;
use crate::onnx::proto::GraphProto;
use ckpt_passes::ir::edit::NewNode;
use ckpt_passes::ir::{Attrs, Role, ValueId};
use ckpt_passes::{Error, Result, ops};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

impl Importer<'_, '_> {
    /// Adds the graph outputs and renames their values. A value has another name so far if a function only passes it through,
    /// or if a value inside a function has its name.
    pub(super) fn outputs(&mut self, file: &GraphProto) -> Result<()> {
        let mut names = BTreeSet::new();
        let mut found = Vec::new();
        for output in &file.output {
            let name = output.name();
            let Some(id) = self.scope.get(name).copied() else {
                if self.sequences.contains_key(name) {
                    bail!("outputs", "graph output `{name}` is a sequence of tensors");
                }
                return Err(self.undefined(name).unwrap_or_else(|| {
                    Error::model("name", format!("graph output `{name}` is never defined"))
                }));
            };
            if self.quantised.packed.contains_key(&id) {
                bail!(
                    "type",
                    "graph output `{name}` is an initializer of integers of four bits"
                );
            }
            if !names.insert(name) {
                bail!("name", "graph output `{name}` is listed twice");
            }
            found.push((name, id));
        }
        if found.is_empty() {
            bail!("onnx", "the graph has no outputs");
        }
        let wrong = |(name, id): &(&str, ValueId)| self.graph.value(*id).name != **name;
        let mut holders: BTreeMap<String, ValueId> = BTreeMap::new();
        if found.iter().any(wrong) {
            let values = self.graph.values();
            let wanted = values.filter(|(_, v)| names.contains(v.name.as_str()));
            holders = wanted.map(|(id, v)| (v.name.clone(), id)).collect();
        }
        let mut listed = BTreeSet::new();
        for (name, mut id) in found {
            if self.graph.value(id).name != name {
                if listed.contains(&id) || self.graph.def_node(id).is_none() {
                    id = self.same_as(id, name);
                }
                if let Some(holder) = holders.get(name).copied().filter(|h| *h != id) {
                    self.graph.rename_value(holder, &format!("{name}.inner"));
                }
                self.graph.rename_value(id, name);
            }
            listed.insert(id);
            self.graph.add_output(id);
        }
        Ok(())
    }

    /// Adds an `Identity` of a value and returns its result.
    fn same_as(&mut self, id: ValueId, name: &str) -> ValueId {
        let ty = self.graph.value(id).ty.clone();
        let node = self.graph.add_node(NewNode {
            op: &ops::shape::IDENTITY,
            name,
            attrs: Attrs::new(),
            ins: vec![Some(id)],
            outs: vec![(name.to_string(), ty)],
            loc: Arc::default(),
            role: Role::Forward,
        });
        self.graph.node(node).outs[0]
    }
}
