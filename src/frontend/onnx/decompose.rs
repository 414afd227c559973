//! Foreign nodes that a recipe of [`lower`](crate::frontend::lower) turns into nodes of rows.
//!
//! The new nodes keep the origin and metadata of the file's node. A result that is not computed stays undefined, and its
//! readers learn the reason.

use super::attributes::plain;
use super::claims::role_of;
use super::import::Importer;
use super::{names, upgrade};
use crate::frontend::lower::{Call, Dropout, Out, recipe, run};
use crate::onnx::proto::{NodeProto, to_map};
use ckpt_passes::ir::typing::Contents;
use ckpt_passes::ir::{Def, Graph, Id, Origin, ValueId};
use ckpt_passes::ops::Builder;
use ckpt_passes::{Error, Result, ops};
use std::sync::Arc;

impl Importer<'_, '_> {
    /// Lowers a foreign node by its recipe and names its results. Returns false where there is none, or where an operand has
    /// no type.
    pub(super) fn decompose(
        &mut self,
        node: &NodeProto,
        domain: &str,
        index: usize,
        ins: &[Option<ValueId>],
    ) -> Result<bool> {
        let Some(outs) = self.lowered(node, domain, index, ins)? else {
            return Ok(false);
        };
        if outs.len() < node.output.len() {
            return Err(Error::model(
                "arity",
                format!("{}: more results than the op has", node.op_type()),
            )
            .expected(format!("at most {}", outs.len()))
            .found(node.output.len().to_string()));
        }
        for (name, out) in node.output.iter().zip(outs) {
            match out {
                _ if name.is_empty() => {}
                Out::Value(id) => {
                    self.claim_name(name)?;
                    self.graph.rename_value(id, name);
                    self.scope.insert(name.clone(), id);
                }
                Out::Absent(why) => {
                    let why = format!("{} of \"{}\": {why}", node.op_type(), node.name());
                    self.absent.insert(name.clone(), why);
                }
            }
        }
        Ok(true)
    }

    /// Lowers a foreign node by its recipe and returns its results. Returns nothing where there is none, or where an operand
    /// has no type.
    pub(super) fn lowered(
        &mut self,
        node: &NodeProto,
        domain: &str,
        index: usize,
        ins: &[Option<ValueId>],
    ) -> Result<Option<Vec<Out>>> {
        let Some(recipe) = recipe(domain, node.op_type()) else {
            return Ok(None);
        };
        if domain.is_empty() {
            upgrade::refuse_newer(node.op_type(), self.imports[""])?;
        }
        let mut given = ins.iter().flatten();
        if given.any(|v| self.graph.value(*v).ty.is_none()) {
            if ops::find_onnx(node.op_type()).is_none() {
                self.warnings.push(format!(
                    "{} \"{}\" is not taken apart: a type of its operands is not known",
                    node.op_type(),
                    node.name()
                ));
            }
            return Ok(None);
        }
        let (first, first_value) = (self.graph.order().len(), self.graph.value_bound());
        let props = to_map(&node.metadata_props);
        let contents = std::mem::replace(&mut self.contents, Contents::of(&Graph::new("")));
        let mut b = Builder::resume(&mut self.graph, contents);
        b.loc = Arc::new(names::loc(node, &props));
        b.role = role_of(&props);
        b.prefix = node.name_or_index(index);
        let attributes = node.attribute.iter();
        let attributes = attributes.map(|a| (a.name().to_string(), plain(a)));
        let wanted = node.output.iter().map(|name| !name.is_empty()).collect();
        let mut call = Call::new(
            b,
            node.op_type(),
            self.imports[""],
            attributes.collect(),
            ins,
            wanted,
            &self.quantised,
        );
        let outs = run(recipe, &mut call);
        let (dropout, quantised) = (call.dropout, call.quantised);
        self.contents = call.b.contents;
        let Some(outs) = outs? else {
            return Ok(None);
        };
        if let Some(active) = dropout {
            self.dropouts.push(Dropout {
                node: node.name().to_string(),
                active,
            });
        }
        if let (Some(quantised), Some(Out::Value(integers))) = (quantised, outs.first()) {
            self.quantised.integers.insert(*integers, quantised);
        }
        let added = self.graph.order()[first..].to_vec();
        for id in added {
            self.graph.meta_mut(id).clone_from(&props);
        }
        self.mark_tables(first_value);
        Ok(Some(outs))
    }

    /// Marks the tables with which a node was lowered, such as the weights of an interpolation, as no parameters.
    fn mark_tables(&mut self, first: usize) {
        for id in (first..self.graph.value_bound()).map(ValueId::new) {
            let is_table = self.graph.contains_value(id)
                && matches!(self.graph.value(id).def, Def::Init(_))
                && self.graph.value(id).ty().dtype.is_float();
            if is_table {
                let origin = Origin::constant(&self.graph.value(id).name);
                self.graph.origins.entry(id).or_insert(origin);
            }
        }
    }
}
