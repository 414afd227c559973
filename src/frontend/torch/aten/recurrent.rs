//! Recurrent layers, unrolled: one cell for each time step.
//!
//! The input is multiplied by its weights once, for all time steps. A sequence whose length is not fixed cannot be unrolled.

use super::super::value::Value;
use super::signature::{Call, Formula, Op};
use ckpt_passes::Result;

/// `lstm_step` and `gru_step` are of other formulas here: a cell whose product with the input is given.
pub const FORMULAS: &[Formula] = &[
    "lstm_step(gates: t, c: t) => \
     parts = chunk(gates, 4, -1); after = sigmoid(parts[1]) * c + sigmoid(parts[0]) * tanh(parts[2]); \
     (sigmoid(parts[3]) * tanh(after), after)",
    "gru_step(x: t, h: t, w_hh: t, b_hh: t?) => \
     own = chunk(x, 3, -1); past = chunk(linear(h, w_hh, b_hh), 3, -1); z = sigmoid(own[1] + past[1]); \
     n = tanh(own[2] + sigmoid(own[0] + past[0]) * past[2]); n + z * (h - n)",
    "lstm_cell(input: t, hx: l, w_ih: t, w_hh: t, b_ih: t?, b_hh: t?) => \
     lstm_step(linear(input, w_ih, b_ih) + linear(hx[0], w_hh, b_hh), hx[1])",
    "gru_cell(input: t, hx: t, w_ih: t, w_hh: t, b_ih: t?, b_hh: t?) => \
     gru_step(linear(input, w_ih, b_ih), hx, w_hh, b_hh)",
    "rnn_tanh_cell(input: t, hx: t, w_ih: t, w_hh: t, b_ih: t?, b_hh: t?) => \
     tanh(linear(input, w_ih, b_ih) + linear(hx, w_hh, b_hh))",
    "rnn_relu_cell(input: t, hx: t, w_ih: t, w_hh: t, b_ih: t?, b_hh: t?) => \
     relu(linear(input, w_ih, b_ih) + linear(hx, w_hh, b_hh))",
];

pub const OPS: &[Op] = &[(
    "lstm(input: t, hx: l, params: l, has_biases: b, num_layers: i, dropout: f, train: b, bidirectional: b, batch_first: b); \
     {gru,rnn_tanh,rnn_relu}(input: t, hx: t, params: l, has_biases: b, num_layers: i, dropout: f, train: b, \
     bidirectional: b, batch_first: b)",
    recurrent,
)];

/// Weights of one layer and direction; no bias is `None`.
struct Weights {
    of_input: Value,
    of_state: Value,
    input_bias: Value,
    state_bias: Value,
}

/// Lowers layers of `nn.LSTM`, `nn.GRU` or `nn.RNN`: the states of the last layer at each place, and the last states of all.
fn recurrent(c: &mut Call) -> Result<Value> {
    let (layers, directions) = (
        c.int("num_layers", 1)?,
        1 + i64::from(c.bool("bidirectional", false)?),
    );
    let is_first = c.bool("batch_first", false)?;
    let dropout = c.float("dropout", 0.0)?;
    let drops = c.bool("train", false)? && dropout > 0.0;
    let weights = weights(c, layers * directions)?;
    let (first, memory) = match c.need("hx")? {
        Value::List(states) => match states.as_slice() {
            [h, cell] => (h.clone(), Some(cell.clone())),
            _ => return Err(c.unsupported("other than two initial states")),
        },
        h => (h, None),
    };
    let mut x = c.need("input")?;
    if is_first {
        x = c.run("transpose", [x, 0i64.into(), 1i64.into()])?;
    }
    let (mut last, mut last_memory) = (Vec::new(), Vec::new());
    for (layer, of_layer) in weights.chunks(directions as usize).enumerate() {
        let mut sides = Vec::new();
        for (direction, weights) in of_layer.iter().enumerate() {
            let at = (layer * of_layer.len() + direction) as i64;
            let start =
                |c: &mut Call, of: &Value| c.run("select", [of.clone(), 0i64.into(), at.into()]);
            let mut h = start(c, &first)?;
            let mut cell = memory.as_ref().map(|m| start(c, m)).transpose()?;
            let mut places = steps(c, &x, weights)?;
            let is_backward = direction == 1;
            if is_backward {
                places.reverse();
            }
            for place in &mut places {
                (h, cell) = step(c, place, h, cell, weights)?;
                *place = h.clone();
            }
            if is_backward {
                places.reverse();
            }
            sides.push(c.run("stack", [Value::List(places), 0i64.into()])?);
            last.push(h);
            last_memory.extend(cell);
        }
        x = match sides.as_slice() {
            [one] => one.clone(),
            _ => c.run("cat", [Value::List(sides), (-1i64).into()])?,
        };
        if drops && (layer as i64) < layers - 1 {
            x = c.run("dropout", [x, dropout.into(), true.into()])?;
        }
    }
    if is_first {
        x = c.run("transpose", [x, 0i64.into(), 1i64.into()])?;
    }
    let mut results = vec![x];
    for states in [last, last_memory].into_iter().filter(|s| !s.is_empty()) {
        results.push(c.run("stack", [Value::List(states), 0i64.into()])?);
    }
    Ok(Value::Tuple(results))
}

/// Returns the weights of each layer and direction.
fn weights(c: &Call, count: i64) -> Result<Vec<Weights>> {
    let Value::List(all) = c.need("params")? else {
        return Err(c.unsupported("these weights"));
    };
    let has_biases = c.bool("has_biases", true)?;
    let each = if has_biases { 4 } else { 2 };
    if count < 1 || all.len() as i64 != count * each {
        return Err(c
            .unsupported("a layer with projections")
            .expected(format!("{} weights", count * each))
            .found(all.len().to_string()));
    }
    let bias = |of: &[Value], at: usize| of.get(at).cloned().unwrap_or(Value::None);
    Ok(all
        .chunks(each as usize)
        .map(|of| Weights {
            of_input: of[0].clone(),
            of_state: of[1].clone(),
            input_bias: bias(of, 2),
            state_bias: bias(of, 3),
        })
        .collect())
}

/// Returns the product of the input with its weights at each place.
fn steps(c: &mut Call, x: &Value, weights: &Weights) -> Result<Vec<Value>> {
    let length = c.low.sizes_of(x).and_then(|dims| dims.first()).cloned();
    if length.as_ref().is_none_or(|n| n.as_const().is_none()) {
        let length = length.map_or_else(|| "?".to_string(), |n| n.to_string());
        return Err(c
            .unsupported("a recurrent layer over a sequence whose length is not fixed")
            .found(length)
            .help("export the model with a fixed length of the sequence"));
    }
    let product = [
        x.clone(),
        weights.of_input.clone(),
        weights.input_bias.clone(),
    ];
    let product = c.run("linear", product)?;
    match c.run("unbind", [product, 0i64.into()])? {
        Value::List(places) | Value::Tuple(places) => Ok(places),
        _ => Err(c.unsupported("an empty sequence")),
    }
}

/// Returns the state, and the cell state of an LSTM, after one place.
fn step(
    c: &mut Call,
    x: &Value,
    h: Value,
    cell: Option<Value>,
    weights: &Weights,
) -> Result<(Value, Option<Value>)> {
    let (w, b) = (weights.of_state.clone(), weights.state_bias.clone());
    if c.name == "gru" {
        return Ok((c.run("gru_step", [x.clone(), h, w, b])?, None));
    }
    let past = c.run("linear", [h, w, b])?;
    let sum = c.run("add", [x.clone(), past])?;
    match (c.name.as_str(), cell) {
        ("lstm", Some(cell)) => match c.run("lstm_step", [sum, cell])? {
            Value::List(both) | Value::Tuple(both) if both.len() == 2 => {
                Ok((both[0].clone(), Some(both[1].clone())))
            }
            _ => Err(c.unsupported("this cell")),
        },
        ("rnn_relu", _) => Ok((c.run("relu", [sum])?, None)),
        _ => Ok((c.run("tanh", [sum])?, None)),
    }
}
