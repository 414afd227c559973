//! The named sizes of a program: their values from the user, equalities that the program asserts, and ranges.

use super::super::scalars::checked;
use super::schema::{Argument, Graph, Range, Size, SymArgument};
use super::sympy;
use ckpt_passes::analysis::ranges::{self, Ranges};
use ckpt_passes::ir::name::is_word;
use ckpt_passes::ir::{Dim, Same, Ty};
use ckpt_passes::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};

/// The largest number of named sizes that stand for others. A program has a handful of names.
const MAX_KNOWN: usize = 4096;

/// The expressions that named sizes stand for. No expression here contains a name that stands for something.
pub struct Sizes<'p> {
    known: BTreeMap<String, Dim>,
    ranges: &'p BTreeMap<String, Range>,
}

impl<'p> Sizes<'p> {
    pub fn new(ranges: &'p BTreeMap<String, Range>) -> Sizes<'p> {
        Sizes {
            known: BTreeMap::new(),
            ranges,
        }
    }

    /// Returns a size of the file.
    ///
    /// # Errors
    /// An expression that cannot be read.
    pub fn read(&self, size: &Size) -> Result<Dim> {
        match size {
            Size::AsInt(n) => Ok(Dim::from(*n)),
            Size::AsExpr(e) => sympy::size(&e.expr_str, &|name| self.known.get(name).cloned()),
        }
    }

    /// Learns which named sizes are numbers, from their ranges, and which are equal, from `_assert_scalar` of
    /// `_operator.eq`.
    ///
    /// # Errors
    /// A size that cannot be read.
    pub fn learn(&mut self, graph: &Graph) -> Result<()> {
        let ranges = self.ranges;
        for (name, range) in ranges {
            if let (Some(least), Some(most)) = (range.min_val, range.max_val)
                && least == most
            {
                self.set(name, &Dim::from(least))?;
            }
        }
        let mut compared: BTreeMap<&str, [&str; 2]> = BTreeMap::new();
        for node in &graph.nodes {
            match (
                node.target.as_str(),
                node.inputs.as_slice(),
                node.outputs.as_slice(),
            ) {
                ("_operator.eq", [a, b], [Argument::AsSymBool(SymArgument::AsName(out))]) => {
                    if let (
                        Argument::AsSymInt(SymArgument::AsName(a)),
                        Argument::AsSymInt(SymArgument::AsName(b)),
                    ) = (&a.arg, &b.arg)
                    {
                        compared.insert(out, [a, b]);
                    }
                }
                ("torch.ops.aten._assert_scalar.default", [a, ..], _) => {
                    let Argument::AsSymBool(SymArgument::AsName(name)) = &a.arg else {
                        continue;
                    };
                    let Some(sides) = compared.get(name.as_str()) else {
                        continue;
                    };
                    let [Some(a), Some(b)] = sides.map(|s| graph.sym_int_values.get(s)) else {
                        continue;
                    };
                    let (a, b) = (self.read(a)?, self.read(b)?);
                    self.unite(&a, &b)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Gives named sizes other names.
    ///
    /// # Errors
    /// A name that is none, or that another size has.
    pub fn rename(&mut self, names: &BTreeMap<String, String>) -> Result<()> {
        let mut taken: BTreeSet<&str> = self.ranges.keys().map(String::as_str).collect();
        for (own, name) in names {
            if !is_word(name) || !taken.insert(name) {
                return Err(Error::model(
                    "pt2",
                    format!("`{name}` cannot be the name of the size {own}"),
                )
                .expected("letters, digits and underscores, and another name for each size"));
            }
            if !self.known.contains_key(own) {
                self.set(own, &Dim::symbol(name))?;
            }
        }
        Ok(())
    }

    /// Notes that two sizes are equal: the later name stands for the other one.
    fn unite(&mut self, a: &Dim, b: &Dim) -> Result<()> {
        let (from, to) = match (a.as_symbol(), b.as_symbol()) {
            (Some(x), Some(y)) if x < y => (y, a),
            (Some(x), _) => (x, b),
            (None, Some(y)) => (y, a),
            (None, None) => return Ok(()),
        };
        let mut within = false;
        to.for_each_leaf(&mut |leaf| {
            within |= Dim::from_atom(leaf.clone()).as_symbol() == Some(from);
        });
        match within {
            true => Ok(()),
            false => self.set(from, to),
        }
    }

    fn set(&mut self, name: &str, to: &Dim) -> Result<()> {
        if self.known.len() >= MAX_KNOWN {
            bail!("pt2", "the program has too many named sizes");
        }
        for known in self.known.values_mut() {
            *known = replaced(known, name, to)?;
        }
        self.known.insert(name.to_string(), to.clone());
        Ok(())
    }

    /// Learns the sizes of inputs that the user gives. Sizes that are a single name come first, because they determine the
    /// others.
    ///
    /// # Errors
    /// A number outside the name's range, or one that no number of the name gives.
    pub fn say(&mut self, said: &[(&str, &[Size], &Ty)]) -> Result<()> {
        for names_only in [true, false] {
            for (input, sizes, ty) in said {
                for (size, to) in sizes.iter().zip(&ty.dims) {
                    let own = self.read(size)?;
                    if own.as_symbol().is_some() != names_only || own.as_const().is_some() {
                        continue;
                    }
                    self.solve(&own, to)
                        .map_err(|e| e.at(format!("the input `{input}`")))?;
                }
            }
        }
        Ok(())
    }

    /// Solves `own = said` for its name, if `own` is a name times a number plus a number.
    fn solve(&mut self, own: &Dim, said: &Dim) -> Result<()> {
        let mut factor = None;
        let mut rest = 0i64;
        for (product, times) in own.terms() {
            match product.as_slice() {
                [] => rest = times,
                [atom] if factor.is_none() => factor = Some((Dim::from_atom(atom.clone()), times)),
                _ => return Ok(()),
            }
        }
        let Some((symbol, times)) = factor else {
            return Ok(());
        };
        let Some(name) = symbol.as_symbol() else {
            return Ok(());
        };
        let to = said.sub(&Dim::from(rest)).exact_div(&Dim::from(times));
        let Some(to) = to else {
            return Err(Error::usage("input", "no size of this name gives that")
                .expected(own.to_string())
                .found(said.to_string()));
        };
        if let Some(n) = to.as_const()
            && let Some((least, most)) = self.ranges.get(name).map(bounds)
            && !(least..=most).contains(&n)
        {
            return Err(ranges::outside(name, (least, most), n));
        }
        if to.as_const().is_some_and(|n| n < 1) {
            return Err(Error::usage("input", "a named size is at least 1")
                .expected(own.to_string())
                .found(said.to_string()));
        }
        if to == symbol {
            return Ok(());
        }
        self.set(name, &to)
    }

    /// Returns the ranges of the names that stand for nothing else.
    pub fn left(&self) -> Ranges {
        let mut left = Ranges::new();
        for (name, range) in self.ranges {
            let stands_for = self.known.get(name).map(Dim::as_symbol);
            let Some(own) = stands_for.unwrap_or(Some(name.as_str())) else {
                continue;
            };
            let (least, most) = bounds(range);
            let all = left.entry(own.to_string()).or_insert((1, i64::MAX));
            *all = (all.0.max(least), all.1.min(most));
        }
        left
    }

    /// Fails unless the type of an input is the one that the user gives, now that all names are settled.
    ///
    /// # Errors
    /// Sizes that cannot be told to be equal.
    pub fn agree(input: &str, own: &Ty, said: &Ty) -> Result<()> {
        let equal = own.dtype == said.dtype
            && own.rank() == said.rank()
            && own
                .dims
                .iter()
                .zip(&said.dims)
                .all(|(a, b)| a.same(b) == Same::Yes);
        match equal {
            true => Ok(()),
            false => Err(Error::usage(
                "input",
                format!("the input `{input}` cannot be of type {said}"),
            )
            .expected(own.to_string())),
        }
    }
}

/// Returns the range of a size. PyTorch specialises programs to sizes above 1, but they also run with 1. So a lower bound
/// of 2 has no meaning.
fn bounds(range: &Range) -> (i64, i64) {
    let least = range.min_val.filter(|n| *n > 2).unwrap_or(1);
    (least, range.max_val.unwrap_or(i64::MAX))
}

/// Returns `dim` with `to` for the name `from`, unless that grows too large.
fn replaced(dim: &Dim, from: &str, to: &Dim) -> Result<Dim> {
    let is_it = |leaf: Dim| leaf.as_symbol() == Some(from);
    let mut times = 0u32;
    dim.for_each_leaf(&mut |leaf| times += u32::from(is_it(Dim::from_atom(leaf.clone()))));
    if times == 0 {
        return Ok(dim.clone());
    }
    // A power of a sum has as many terms as the sum to that power.
    let terms = to.terms().len().checked_pow(times);
    if terms.is_none_or(|n| n > 1 << 12) {
        bail!("size", "an expression over sizes is too large");
    }
    checked(dim.substitute(&|atom| is_it(Dim::from_atom(atom.clone())).then(|| to.clone())))
}
