//! Every op of the table can be executed, and every op that a model can bring can be differentiated: there is nothing that
//! would have to be left to the framework's autograd at run time.
use ckpt_opt::runtime::kernels;
use ckpt_passes::ir::op::{Body, Domain, Grad};
use ckpt_passes::ops;

#[test]
fn every_row_has_a_kernel() {
    let without: Vec<&str> = ops::all()
        .filter(|op| **op != ops::opaque::OPAQUE && kernels::find(op).is_none())
        .map(|op| op.name)
        .collect();
    assert!(
        without.is_empty(),
        "src/runtime/kernels has none of {without:?}"
    );
    assert!(kernels::find(&ops::opaque::OPAQUE).is_none());
}

/// Why a row may have no gradient: it changes what was trained, or ranks share it.
const WITHOUT_GRADIENT: [&str; 2] = [
    "a step of an optimizer is not differentiated",
    "ranks are added after differentiation",
];

#[test]
fn every_op_that_a_model_can_bring_has_a_gradient_rule_or_none_by_nature() {
    let mut rules = 0;
    for op in ops::all().filter(|op| **op != ops::opaque::OPAQUE) {
        let why = match op.grad {
            Grad::Rule(_) | Grad::First(_) => {
                rules += 1;
                continue;
            }
            Grad::Zero(why) => {
                assert!(!why.is_empty(), "{}", op.name);
                continue;
            }
            Grad::Body => {
                assert!(matches!(op.body, Body::Function(_)), "{}", op.name);
                WITHOUT_GRADIENT[0]
            }
            Grad::Missing(why) => why,
        };
        assert!(WITHOUT_GRADIENT.contains(&why), "{}", op.name);
        // No standard op and no foreign name means it: only what we write, and read back, has it.
        assert_eq!(op.domain, Domain::Ckpt, "{}", op.name);
        assert!(op.aten.is_empty(), "{}", op.name);
    }
    assert!(rules > 80, "{rules} rules");
}
