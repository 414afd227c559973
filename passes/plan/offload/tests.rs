//! Which results are moved.

use super::*;
use crate::plan::problem::{Op, Phase, Transfer, Value};
use crate::plan::{Basis, Choices, problem};

/// Forward ops of one result each, and a backward op for each that reads it.
fn chain(result_bytes: &[u64]) -> Problem {
    let mut p = Problem {
        transfer: Some(Transfer {
            us_per_megabyte: 40.0,
            start_us: 1.0,
        }),
        ..Problem::default()
    };
    let n = result_bytes.len();
    for o in 0..2 * n {
        let (is_forward, at) = (o < n, if o < n { o } else { 2 * n - 1 - o });
        let mut ins: Vec<usize> = o.checked_sub(1).into_iter().collect();
        ins.extend((!is_forward && o > n).then_some(at));
        p.values.push(Value {
            bytes: if is_forward { result_bytes[at] } else { 1 },
            kind: problem::Kind::Activation,
            producer: Some(o),
            view_of: None,
            integral: false,
        });
        p.ops.push(Op {
            name: format!("op{o}"),
            kind: String::new(),
            ins,
            outs: vec![o],
            phase: [Phase::Backward, Phase::Forward][usize::from(is_forward)],
            cost: 100.0,
            flops: 1,
            bytes: 1,
            temp_bytes: 0,
            over: Vec::new(),
            may_repeat: true,
            in_turn: false,
        });
    }
    p.outputs = vec![2 * n - 1];
    p.check().unwrap();
    p
}

fn planned(p: &Problem, structure: &Structure, wish: Offloading) -> Result<Plan> {
    let choices = Choices::none(structure);
    let setting = Setting {
        problem: p,
        structure,
        choices: &choices,
        wishes: "",
        basis: Basis::Peak,
        usable_bytes: None,
    };
    wish.plan(&setting, By::Policy(Policy::None))
}

#[test]
fn only_results_of_enough_bytes_are_moved() {
    let p = chain(&[1023, 1024, 1025, 1]);
    let structure = Structure::unknown(p.ops.len());
    let all = Offloading {
        what: What::All,
        ..Offloading::default()
    };
    assert_eq!(planned(&p, &structure, all).unwrap().offloaded, [1, 2]);
    let less = Offloading {
        min_bytes: 1023,
        ..all
    };
    assert_eq!(planned(&p, &structure, less).unwrap().offloaded, [0, 1, 2]);
    let more = Offloading {
        min_bytes: 1025,
        ..all
    };
    assert_eq!(planned(&p, &structure, more).unwrap().offloaded, [2]);
}

#[test]
fn the_host_has_room_for_all_of_it_or_it_is_refused() {
    let p = chain(&[2000, 3000, 1]);
    let structure = Structure::unknown(p.ops.len());
    let wish = |bytes| Offloading {
        what: What::All,
        outside_bytes: Some(bytes),
        ..Offloading::default()
    };
    let plan = planned(&p, &structure, wish(5000)).unwrap();
    assert_eq!(plan.offloaded, [0, 1]);
    let error = planned(&p, &structure, wish(4999)).unwrap_err();
    assert_eq!((error.code(), error.exit_code()), ("offload", 2));
}

#[test]
fn what_feeds_the_head_stays_and_no_head_is_told() {
    let p = chain(&[2000, 3000, 1]);
    let mut structure = Structure::unknown(p.ops.len());
    let all = Offloading {
        what: What::All,
        ..Offloading::default()
    };
    assert!(all.warning(&structure).is_some());
    assert_eq!(Offloading::default().warning(&structure), None);
    structure.feeds_scores[1] = true;
    assert_eq!(all.warning(&structure), None);
    assert_eq!(planned(&p, &structure, all).unwrap().offloaded, [0]);
}
