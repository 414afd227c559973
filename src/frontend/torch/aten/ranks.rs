//! Collectives of PyTorch's functional interface (`_c10d_functional`).
//!
//! A program names a group, and says nowhere which ranks are in it. So all collectives of a program must be of one group, which
//! is taken for all ranks. `all_reduce` does not even say how many they are; another collective of the program may.

use super::super::value::{Group, Value};
use super::lowering::Lowering;
use super::signature::{Call, Formula, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, Dim};
use ckpt_passes::ops::collective::{
    ALL_REDUCE, ANY_RANKS, CONCAT_RANKS, DATA_PARALLEL, REDUCE_SCATTER, SHARED, of_group, set_ranks,
};

/// Results are complete at once, so that nothing is to be waited for.
pub const FORMULAS: &[Formula] = &["_c10d_functional::wait_tensor(tensor: t) => tensor"];

pub const OPS: &[Op] = &[
    (
        "_c10d_functional::all_reduce(input: t, reduce_op: S, group_name: S)",
        all_reduce,
    ),
    (
        "{_c10d_functional,_c10d_functional_autograd}::all_gather_into_tensor(input: t, group_size: i, group_name: S)",
        all_gather,
    ),
    (
        "{_c10d_functional,_c10d_functional_autograd}::reduce_scatter_tensor(input: t, reduce_op: S, group_size: i, group_name: S)",
        reduce_scatter,
    ),
];

impl Lowering<'_> {
    /// Sets the number of ranks of collectives that do not state it, and warns of the group.
    pub(super) fn settle_group(&mut self) {
        if let Some(Group { name, ranks }) = self.group.take() {
            set_ranks(self.b.graph, DATA_PARALLEL, ranks);
            self.warn_once(&format!(
                "the program has collectives: their group `{name}` is taken for all ranks"
            ));
        }
    }
}

/// Returns the attributes of a collective over so many ranks.
fn named_group(c: &mut Call, ranks: i64) -> Result<Attrs> {
    let name = c.str("group_name", "")?.to_string();
    let group = c.low.group.get_or_insert_with(|| Group {
        name: name.clone(),
        ranks: ANY_RANKS,
    });
    if group.name != name {
        let first = group.name.clone();
        return Err(c
            .fail("ranks", "collectives of several groups are not supported: a program does not say which ranks are in a group")
            .expected(format!("the group `{first}`, as in the collectives before"))
            .found(format!("the group `{name}`"))
            .help("use one group of all ranks"));
    }
    let known = group.ranks;
    if known != ANY_RANKS && ranks != ANY_RANKS && known != ranks {
        return Err(c
            .fail("ranks", format!("the group `{name}` has two sizes"))
            .expected(format!("{known} ranks, as in the collectives before"))
            .found(format!("{ranks} ranks")));
    }
    group.ranks = ranks.max(known);
    Ok(of_group(DATA_PARALLEL, ranks))
}

/// Returns the number of ranks that a collective states.
fn group_size(c: &Call) -> Result<i64> {
    let ranks = c.int("group_size", 1)?;
    match ranks > 0 {
        true => Ok(ranks),
        false => Err(c
            .fail("ranks", "there is no such number of ranks")
            .expected("at least 1")
            .found(ranks.to_string())),
    }
}

/// Checks that a reduction is a sum.
fn summed(c: &Call) -> Result<()> {
    match c.str("reduce_op", "")? {
        "sum" => Ok(()),
        other => Err(c
            .unsupported(format!("`reduce_op` {other}"))
            .expected("sum")
            .help("ranks can only add up tensors; for a mean, divide before the sum")),
    }
}

fn all_reduce(c: &mut Call) -> Result<Value> {
    summed(c)?;
    let attrs = named_group(c, ANY_RANKS)?;
    let x = c.value("input")?;
    let sum = c.emit_with(&ALL_REDUCE, &[x], attrs.clone())?;
    // Each rank has a loss of its own, in which the sum counts.
    c.result_with(&SHARED, &[sum], attrs)
}

fn all_gather(c: &mut Call) -> Result<Value> {
    let ranks = group_size(c)?;
    let attrs = named_group(c, ranks)?;
    let x = c.value("input")?;
    c.result_with(&CONCAT_RANKS, &[x], attrs)
}

fn reduce_scatter(c: &mut Call) -> Result<Value> {
    summed(c)?;
    let ranks = group_size(c)?;
    let attrs = named_group(c, ranks)?;
    let x = c.value("input")?;
    let mut dims = c.shape_of(x);
    let size = c.size_in(&dims, 0)?;
    let Some(own) = size.exact_div(&Dim::from(ranks)) else {
        return Err(c
            .fail("ranks", "the ranks cannot share the first axis evenly")
            .expected(format!("a multiple of {ranks}"))
            .found(size.to_string()));
    };
    dims[0] = own;
    let slice = c.emit_with(&REDUCE_SCATTER, &[x], attrs)?;
    let own = c.reshape(slice, &dims)?;
    c.made(own)
}
