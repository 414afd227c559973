//! ATen's names for the rows of the table. Options that select ops accept them.
//!
//! Each row lists the ATen ops that exporters write as it, alone or with others: `aten.linear` selects the products that
//! it becomes. A node that the file traces to an ATen op is matched by that name as well (see `plan::refine`).

use super::all;
use ckpt_ir::OpDef;
use std::collections::BTreeSet;

/// ATen's names for a whole attention: of a fused op, or of the scores, softmax and product that it was written as.
const ATTENTION: &[&str] = &[
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten.scaled_dot_product_attention",
];

/// The rows that the ATen op of that name (`aten.mm`) is written as; empty for a name that no row has.
pub fn rows(name: &str) -> Vec<&'static OpDef> {
    all().filter(|op| op.aten.contains(&name)).collect()
}

/// Whether the name means a whole attention.
pub fn is_attention(name: &str) -> bool {
    ATTENTION.contains(&name)
}

/// Every ATen name that is known here, sorted.
pub fn names() -> BTreeSet<&'static str> {
    all()
        .flat_map(|op| op.aten)
        .chain(ATTENTION)
        .copied()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_to_rows() {
        for name in names() {
            assert!(is_attention(name) || !rows(name).is_empty(), "{name}");
            assert!(name.starts_with("aten.") && name.matches('.').count() == 1);
        }
        let products: Vec<&str> = rows("aten.mm").iter().map(|r| r.name).collect();
        assert_eq!(products, ["MatMul"]);
        assert!(rows("aten.nothing").is_empty());
    }
}
