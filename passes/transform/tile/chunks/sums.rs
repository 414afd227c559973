//! What is added up over the parts: losses, gradients of weights and of biases.
//!
//! Sums of 16-bit numbers are float32 from their first term to their last, so that cutting rows adds no rounding: a term that
//! was rounded to 16 bits before it is added would be one more rounding a part. So a sum over the rows of a 16-bit matrix is the
//! product with a vector of ones, which like other products is widened some elements at a time, and a loss is
//! `ClassLoss`, which is float32.

use super::*;
use crate::ir::Same;
use crate::ops::arith::ADD;
use crate::ops::batch_axes::each_loss;
use crate::ops::loss::CLASS_LOSS;
use crate::ops::reduce::REDUCE_SUM;
use crate::ops::shape::EXPAND;
use crate::ops::softmax::LOG_SOFTMAX;

/// A sum to which the parts add products.
#[derive(Clone)]
pub struct Summed {
    term: Term,
    /// The type of the sum, a matrix.
    ty: Ty,
}

#[derive(Clone)]
enum Term {
    /// Of the operands of the node, turned like this.
    Product(Attrs),
    /// Of ones and the first operand: the sum of its rows, so many elements each.
    Rows(i64),
}

impl Parts<'_, '_> {
    /// Finds the results that can be added up as products.
    pub(super) fn products(&mut self, outputs: &[ValueId]) {
        for v in outputs {
            let found = (self.region.classes[v] == Rows::Sum)
                .then(|| self.product_of(*v))
                .flatten();
            self.products.extend(found.map(|summed| (*v, summed)));
        }
    }

    fn product_of(&self, v: ValueId) -> Option<Summed> {
        let ty = self.b.ty(v);
        let maker = self.b.graph.def_node(v)?;
        let node = &self.work.nodes[&maker];
        let wide = compute_type(ty.dtype);
        if let Some(attrs) = bare_product(node) {
            let is_matrix = ty.rank() == 2 && ty.static_dims().is_some();
            return is_matrix.then(|| Summed {
                term: Term::Product(attrs),
                ty: Ty::new(wide, ty.dims.clone()),
            });
        }
        if !is_plain_sum(node.op) || wide == ty.dtype {
            return None;
        }
        let Some(Rows::Lead(k)) = self.region.fits[&maker].ins[0] else {
            return None;
        };
        let row = Dim::product(&self.b.ty(node.ins[0]?).dims[k..]).as_const()?;
        let elements = ty.elements().as_const()?;
        (row == elements && row > 1).then(|| Summed {
            term: Term::Rows(row),
            ty: Ty::new(wide, vec![Dim::ONE, Dim::from(row)]),
        })
    }

    /// Adds a product to its sum. The first one is the sum where its type is wide enough.
    pub(super) fn add_product(
        &mut self,
        v: ValueId,
        ins: &[Option<ValueId>],
        count: ValueId,
    ) -> Result<bool> {
        let Some(Summed { term, ty }) = self.products.get(&v).cloned() else {
            return Ok(false);
        };
        let missing = || Error::bug("tile", "a product lacks an operand");
        let first = ins[0].ok_or_else(missing)?;
        let (a, b, attrs) = match term {
            Term::Product(attrs) => (first, ins[1].ok_or_else(missing)?, attrs),
            Term::Rows(row) => {
                let rows = match self.b.rank(first) {
                    2 => first,
                    _ => {
                        let matrix = self.b.ints(&[-1, row]);
                        self.b.emit(&RESHAPE, &[first, matrix], Attrs::new())?
                    }
                };
                let one = self.b.scalar(self.b.ty(first).dtype, 1.0);
                let width = self.b.ints(&[1]);
                let axis = Attrs::new().with("axis", 0);
                let dims = self.b.emit(&CONCAT, &[count, width], axis)?;
                let ones = self.b.emit(&EXPAND, &[one, dims], Attrs::new())?;
                (ones, rows, Attrs::new().with("transA", 1))
            }
        };
        let sum = match self.sums.get(&v) {
            Some(sum) => *sum,
            None if self.b.ty(a).dtype == ty.dtype => {
                let product = self.b.emit(&GEMM, &[a, b], attrs)?;
                self.sums.insert(v, product);
                return Ok(true);
            }
            None => {
                let dims = self.b.ints(&ty.static_dims().unwrap_or_default());
                let zero = self.b.emit(&CONSTANT_OF_SHAPE, &[dims], Attrs::new())?;
                self.b.cast(zero, ty.dtype)?
            }
        };
        let sum = self.b.emit(&ADD_PRODUCT, &[sum, a, b], attrs)?;
        self.sums.insert(v, sum);
        Ok(true)
    }

    /// What a loss over classes gives for some of the rows: the sum of the losses, or each of them; and where asked for, the
    /// log-probabilities. `None` for other ops.
    pub(super) fn losses(
        &mut self,
        node: &Node,
        ins: &[Option<ValueId>],
    ) -> Result<Option<Vec<ValueId>>> {
        let Some(attrs) = each_loss(node) else {
            return Ok(None);
        };
        let each = self.b.emit_n(&CLASS_LOSS, ins.to_vec(), attrs, 1)?[0];
        let loss = match node.attrs.str("reduction") {
            "none" => self.b.cast(each, self.b.ty(node.outs[0]).dtype)?,
            _ => {
                let none_kept = Attrs::new().with("keepdims", 0);
                self.b.emit(&REDUCE_SUM, &[each], none_kept)?
            }
        };
        let mut outs = vec![loss];
        if let (Some(_), Some(scores)) = (node.outs.get(1), ins[0]) {
            let classes = Attrs::new().with("axis", 1);
            outs.push(self.b.emit(&LOG_SOFTMAX, &[scores], classes)?);
        }
        Ok(Some(outs))
    }

    /// The `Add` that is all that reads a product, and the vector that it adds to every row, where both belong to the region.
    /// In 16 bits the product of such a node is rounded twice, and of one op that adds the vector, once.
    pub(super) fn biased(&self, product: ValueId) -> Option<(NodeId, ValueId)> {
        let graph = &self.b.graph;
        let [only] = graph.value(product).uses() else {
            return None;
        };
        let maker = graph.def_node(product)?;
        let (node, add) = (
            self.work.nodes.get(&maker)?,
            self.work.nodes.get(&only.node)?,
        );
        let Some(Rows::Lead(k)) = self.region.classes.get(&product) else {
            return None;
        };
        let ty = graph.ty(product);
        if add.op != &ADD
            || graph.is_output(product)
            || bare_product(node)?.int("transA") != 0
            || ty.rank() != k + 1
        {
            return None;
        }
        let bias = add.ins.iter().copied().flatten().find(|v| *v != product)?;
        let have = graph.ty(bias);
        let is_whole = !self.region.classes.contains_key(&bias);
        let fits = have.rank() == 1 && have.dims[0].same(&ty.dims[*k]) == Same::Yes;
        (is_whole && fits && have.dtype == ty.dtype).then_some((only.node, bias))
    }

    /// A product and the vector that is added to it as one op, of the node that adds.
    pub(super) fn biased_product(
        &mut self,
        add: &Node,
        now: &FxHashMap<ValueId, ValueId>,
    ) -> Result<Option<Vec<ValueId>>> {
        let mut products = add.ins.iter().copied().flatten();
        let found = products.find_map(|v| Some((v, self.biased(v)?.1)));
        let Some((product, bias)) = found else {
            return Ok(None);
        };
        let maker = self.b.graph.def_node(product);
        let node = &self.work.nodes
            [&maker.ok_or_else(|| Error::bug("tile", "a product without its node"))?];
        let attrs = bare_product(node);
        let (Some(attrs), Some(a), Some(w)) = (attrs, node.ins[0], node.ins[1]) else {
            return Err(Error::bug("tile", "a product lacks an operand"));
        };
        let part = |v: ValueId| now.get(&v).copied();
        let a = part(a).ok_or_else(|| Error::bug("tile", "a product has no rows"))?;
        let (w, bias) = (part(w).unwrap_or_else(|| self.own(w)), self.own(bias));
        Ok(Some(vec![self.b.emit(&GEMM, &[a, w, bias], attrs)?]))
    }

    /// Lets a sum read its first operand in the type that sums are added up in.
    pub(super) fn widen_first(&mut self, ins: &mut [Option<ValueId>]) -> Result<()> {
        if let Some(x) = ins[0] {
            let wide = compute_type(self.b.ty(x).dtype);
            ins[0] = Some(self.b.cast(x, wide)?);
        }
        Ok(())
    }

    /// Adds results of a part to the sums and pieces of the whole.
    pub(super) fn gather(&mut self, part: &Part, outputs: &[ValueId]) -> Result<()> {
        self.b.prefix = "tile".into();
        for v in outputs {
            if self.products.contains_key(v) {
                continue;
            }
            let part = part.values[v];
            if self.region.classes[v] == Rows::Sum {
                let wide = compute_type(self.b.ty(part).dtype);
                let sum = match self.sums.get(v).copied() {
                    None => self.b.cast(part, wide)?,
                    Some(sum) if self.b.ty(part).dtype == wide => self.b.add(sum, part)?,
                    Some(sum) => self.b.emit(&ACCUMULATE, &[sum, part], Attrs::new())?,
                };
                self.sums.insert(*v, sum);
            } else {
                self.pieces.entry(*v).or_default().push(part);
            }
        }
        Ok(())
    }

    /// The cotangent of a sum that is divided by `total` afterwards; 0 where no label counts.
    pub(super) fn share(&mut self, dloss: ValueId, total: ValueId) -> Result<ValueId> {
        let (narrow, wide) = (self.b.ty(dloss).dtype, self.b.ty(total).dtype);
        let dloss = self.b.cast(dloss, wide)?;
        let zero = self.b.scalar(wide, 0.0);
        let share = self.b.div(dloss, total)?;
        let none = emit_plain(&mut self.b, &EQUAL, &[total, zero])?;
        let share = choose(&mut self.b, none, zero, share)?;
        self.b.cast(share, narrow)
    }

    pub(super) fn summed(&mut self, old: ValueId, maker: NodeId) -> Result<ValueId> {
        let ty = self.b.ty(old).clone();
        let mut sum = self.sums[&old];
        if let Some(total) = self.totals.get(&maker).copied() {
            let total = self.b.cast(total, self.b.ty(sum).dtype)?;
            sum = self.b.div(sum, total)?;
        }
        let sum = self.b.cast(sum, ty.dtype)?;
        if self.b.ty(sum).dims == ty.dims {
            return Ok(sum);
        }
        let dims = ty
            .static_dims()
            .ok_or_else(|| Error::bug("tile", "a sum has a size that is not a constant"))?;
        let shape = self.b.ints(&dims);
        self.b.emit(&RESHAPE, &[sum, shape], Attrs::new())
    }
}
