//! The operands of a step, by slot. Most nodes have few, which need no allocation.

use tch::Tensor;

/// The operands of a node, in the order of their slots.
pub enum Operands<'a> {
    Few([Option<&'a Tensor>; Operands::FEW], usize),
    Many(Vec<Option<&'a Tensor>>),
}

impl<'a> Operands<'a> {
    const FEW: usize = 8;

    pub fn new(slots: &[Option<usize>], from: &'a [Option<Tensor>]) -> Operands<'a> {
        let find = |slot: &Option<usize>| slot.and_then(|s| from[s].as_ref());
        if slots.len() > Operands::FEW {
            return Operands::Many(slots.iter().map(find).collect());
        }
        let mut few = [None; Operands::FEW];
        for (to, slot) in few.iter_mut().zip(slots) {
            *to = find(slot);
        }
        Operands::Few(few, slots.len())
    }

    pub fn list(&self) -> &[Option<&'a Tensor>] {
        match self {
            Operands::Few(few, n) => &few[..*n],
            Operands::Many(many) => many,
        }
    }
}
