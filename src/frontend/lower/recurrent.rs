//! `LSTM`, `GRU` and `RNN` (ONNX operator specifications), unrolled: one cell for each time step.
//!
//! The input is multiplied by its weights once, for all time steps. Refused: a sequence whose length is not fixed, sequences of
//! different lengths, clipping, and other activations than the usual ones.

use super::call::{Call, Lowered, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::ValueId;
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::activation::{RELU, SIGMOID, TANH};
use ckpt_passes::ops::matmul::MATMUL;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Cell {
    Lstm,
    /// The state is reset before the product with its weights, or after it.
    Gru {
        resets_after: bool,
    },
    Rnn {
        is_relu: bool,
    },
}

/// The state after a place, with the cell state of an LSTM.
#[derive(Clone, Copy)]
struct State {
    h: ValueId,
    c: Option<ValueId>,
}

/// One direction.
struct Weights {
    /// [hidden, gates]
    of_state: ValueId,
    /// The bias of the state's product, where it cannot be added to that of the input's.
    state_bias: Option<ValueId>,
    /// Peephole weights of the input, output and forget gates of an LSTM.
    peepholes: Option<Vec<ValueId>>,
    hidden: i64,
}

/// ONNX LSTM-22.
pub fn lstm(call: &mut Call) -> Lowered {
    usual(call, &[&["Sigmoid", "Tanh", "Tanh"]])?;
    call.refuse_attr("input_forget")?;
    layer(call, Cell::Lstm)
}

/// ONNX GRU-22.
pub fn gru(call: &mut Call) -> Lowered {
    usual(call, &[&["Sigmoid", "Tanh"]])?;
    let resets_after = call.attr_flag("linear_before_reset")?;
    layer(call, Cell::Gru { resets_after })
}

/// ONNX RNN-22.
pub fn rnn(call: &mut Call) -> Lowered {
    let which = usual(call, &[&["Tanh"], &["Relu"]])?;
    layer(
        call,
        Cell::Rnn {
            is_relu: which == 1,
        },
    )
}

/// Returns which of these lists of activations each direction has.
fn usual(call: &mut Call, known: &[&[&str]]) -> Result<usize> {
    for name in ["clip", "activation_alpha", "activation_beta"] {
        call.refuse_attr(name)?;
    }
    let Some(given) = call.attr_texts("activations")? else {
        return Ok(0);
    };
    let is_list = |list: &&&[&str]| {
        !given.is_empty()
            && given.len() % list.len() == 0
            && given.chunks(list.len()).all(|of| of == **list)
    };
    match known.iter().position(|list| is_list(&list)) {
        Some(which) => Ok(which),
        None => Err(call.unsupported(format!("activations {}", given.join(", ")))),
    }
}

fn layer(call: &mut Call, cell: Cell) -> Lowered {
    let [mut x, w, r] = call.operands(["X", "W", "R"])?;
    let bias = call.opt(3);
    let lengths = call.opt(4);
    let first = [
        call.opt(5),
        if cell == Cell::Lstm {
            call.opt(6)
        } else {
            None
        },
    ];
    let peepholes = if cell == Cell::Lstm {
        call.opt(7)
    } else {
        None
    };
    let direction = call.attr_text("direction", "forward")?;
    let is_batch_first = call.attr_flag("layout")?;
    call.ignore_attr("hidden_size");
    call.want_rank(x, &[3], "X")?;
    call.want_rank(w, &[3], "W")?;
    call.want_rank(r, &[3], "R")?;
    if is_batch_first {
        x = call.transpose(x, &[1, 0, 2])?;
    }
    let places = call.size(x, 0, "the length of the sequence")?;
    if let Some(lengths) = lengths {
        let known = call.known_ints(lengths);
        if known.is_none_or(|all| all.iter().any(|n| *n != places)) {
            return Err(call.unsupported("sequences of different lengths (`sequence_lens`)"));
        }
    }
    let (directions, hidden) = (
        call.size(w, 0, "the number of directions")?,
        call.size(r, 2, "the hidden size")?,
    );
    let is_known = matches!(
        (direction.as_str(), directions),
        ("forward" | "reverse", 1) | ("bidirectional", 2)
    );
    if !is_known || places < 1 {
        return Err(call
            .fail(
                "shape",
                format!("{directions} directions of {places} places"),
            )
            .expected(format!("`direction` = {direction}")));
    }
    let (mut sides, mut last) = (Vec::new(), Vec::new());
    for side in 0..directions {
        let (weights, input) = direction_of(call, cell, side, (x, w, r, bias, peepholes), hidden)?;
        let is_backward = direction == "reverse" || side == 1;
        let mut steps = call.split(input, &vec![1; places as usize], 0)?;
        if is_backward {
            steps.reverse();
        }
        let like = steps[0];
        let mut state = State {
            h: start(call, first[0], side, like, hidden)?,
            c: match cell {
                Cell::Lstm => Some(start(call, first[1], side, like, hidden)?),
                _ => None,
            },
        };
        let mut outs = Vec::new();
        for step in steps {
            state = next(call, cell, &weights, step, state)?;
            // [1, 1, batch, hidden]: place and direction.
            outs.push(call.unsqueeze(state.h, &[0])?);
        }
        if is_backward {
            outs.reverse();
        }
        sides.push(joined(call, &outs, 0)?);
        last.push(state);
    }
    let mut y = joined(call, &sides, 1)?;
    let all: Vec<ValueId> = last.iter().map(|s| s.h).collect();
    let mut results = vec![joined(call, &all, 0)?];
    if cell == Cell::Lstm {
        let all: Vec<ValueId> = last.iter().filter_map(|s| s.c).collect();
        results.push(joined(call, &all, 0)?);
    }
    if is_batch_first {
        y = call.transpose(y, &[2, 0, 1, 3])?;
        for result in &mut results {
            *result = call.transpose(*result, &[1, 0, 2])?;
        }
    }
    results.insert(0, y);
    Ok(Some(results.into_iter().map(Out::Value).collect()))
}

/// Returns the weights of a direction, and the product of the input with its own: [places, batch, gates].
fn direction_of(
    call: &mut Call,
    cell: Cell,
    side: i64,
    (x, w, r, bias, peepholes): (ValueId, ValueId, ValueId, Option<ValueId>, Option<ValueId>),
    hidden: i64,
) -> Result<(Weights, ValueId)> {
    let weight = |call: &mut Call, v: ValueId| {
        let own = one_of(call, v, side)?;
        let matrix = call.squeeze(own, &[0])?;
        call.transpose(matrix, &[1, 0])
    };
    let (w, of_state) = (weight(call, w)?, weight(call, r)?);
    let mut input = call.op(&MATMUL, &[x, w])?;
    let mut state_bias = None;
    if let Some(bias) = bias {
        let own = one_of(call, bias, side)?;
        let own = call.squeeze(own, &[0])?;
        let gates = call.size(input, 2, "the number of gates")?;
        let both = call.split(own, &[gates, gates], 0)?;
        let [of_input, of_the_state] = both.as_slice() else {
            return Err(call.fail("shape", "`B` has the wrong size"));
        };
        input = call.add(input, *of_input)?;
        match cell {
            // The candidate's bias is reset with the state.
            Cell::Gru { .. } => state_bias = Some(*of_the_state),
            _ => input = call.add(input, *of_the_state)?,
        }
    }
    let peepholes = match peepholes {
        Some(all) => {
            let own = one_of(call, all, side)?;
            let own = call.squeeze(own, &[0])?;
            Some(call.split(own, &[hidden; 3], 0)?)
        }
        None => None,
    };
    Ok((
        Weights {
            peepholes,
            of_state,
            state_bias,
            hidden,
        },
        input,
    ))
}

/// Returns the state before the first place: [1, batch, hidden].
fn start(
    call: &mut Call,
    given: Option<ValueId>,
    side: i64,
    like: ValueId,
    hidden: i64,
) -> Result<ValueId> {
    match given {
        Some(states) => one_of(call, states, side),
        None => {
            let narrow = range(call, like, 2, 0, hidden)?;
            call.filled_like(narrow, 0.0)
        }
    }
}

/// Returns the state after a place. `x` is [1, batch, gates].
fn next(call: &mut Call, cell: Cell, weights: &Weights, x: ValueId, state: State) -> Result<State> {
    let hidden = weights.hidden;
    let State { h, c } = state;
    if let Cell::Gru { resets_after } = cell {
        let h = gru_step(call, weights, x, h, resets_after)?;
        return Ok(State { h, c });
    }
    let past = call.op(&MATMUL, &[h, weights.of_state])?;
    let sum = call.add(x, past)?;
    let Some(c) = c else {
        let op = if cell == (Cell::Rnn { is_relu: true }) {
            &RELU
        } else {
            &TANH
        };
        return Ok(State {
            h: call.op(op, &[sum])?,
            c: None,
        });
    };
    let gates = call.split(sum, &[hidden; 4], 2)?;
    let gate = |call: &mut Call, i: usize, seen: ValueId| {
        let mut sum = gates[i];
        if let Some(peepholes) = &weights.peepholes {
            let of_cell = call.mul(seen, peepholes[i])?;
            sum = call.add(sum, of_cell)?;
        }
        call.op(&SIGMOID, &[sum])
    };
    let (input, forget) = (gate(call, 0, c)?, gate(call, 2, c)?);
    let candidate = call.op(&TANH, &[gates[3]])?;
    let kept = call.mul(forget, c)?;
    let added = call.mul(input, candidate)?;
    let c = call.add(kept, added)?;
    let output = gate(call, 1, c)?;
    let shown = call.op(&TANH, &[c])?;
    Ok(State {
        h: call.mul(output, shown)?,
        c: Some(c),
    })
}

fn gru_step(
    call: &mut Call,
    weights: &Weights,
    x: ValueId,
    h: ValueId,
    resets_after: bool,
) -> Result<ValueId> {
    let hidden = weights.hidden;
    let of_input = call.split(x, &[2 * hidden, hidden], 2)?;
    let of_state = call.split(weights.of_state, &[2 * hidden, hidden], 1)?;
    let biases = match weights.state_bias {
        Some(bias) => Some(call.split(bias, &[2 * hidden, hidden], 0)?),
        None => None,
    };
    let product = |call: &mut Call, h: ValueId, part: usize| {
        let y = call.op(&MATMUL, &[h, of_state[part]])?;
        match &biases {
            Some(of) => call.add(y, of[part]),
            None => Ok(y),
        }
    };
    let past = product(call, h, 0)?;
    let sum = call.add(of_input[0], past)?;
    let gates = call.op(&SIGMOID, &[sum])?;
    let gates = call.split(gates, &[hidden, hidden], 2)?;
    let (update, reset) = (gates[0], gates[1]);
    let past = match resets_after {
        true => {
            let y = product(call, h, 1)?;
            call.mul(reset, y)?
        }
        false => {
            let kept = call.mul(reset, h)?;
            product(call, kept, 1)?
        }
    };
    let sum = call.add(of_input[1], past)?;
    let candidate = call.op(&TANH, &[sum])?;
    let change = call.sub(h, candidate)?;
    let kept = call.mul(update, change)?;
    call.add(candidate, kept)
}

fn one_of(call: &mut Call, v: ValueId, at: i64) -> Result<ValueId> {
    range(call, v, 0, at, at + 1)
}

fn range(call: &mut Call, v: ValueId, axis: usize, from: i64, to: i64) -> Result<ValueId> {
    let ends = [call.ints(&[from]), call.ints(&[to])];
    call.b.slice(v, ends, axis)
}

fn joined(call: &mut Call, parts: &[ValueId], axis: i64) -> Result<ValueId> {
    match parts {
        [one] => Ok(*one),
        _ => call.concat(parts, axis),
    }
}
