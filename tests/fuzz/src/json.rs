//! Mutations of JSON as a tree: values moved, repeated, left out, replaced by what is at the edge of a range.

use crate::mutate::{self, Random};
use serde_json::{Value, json};

/// A mutation of one of the seeds; one in ten is of its bytes.
pub fn mutated(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    if random.below(10) == 0 {
        return mutate::bytes(random, seeds);
    }
    let pick = |random: &mut Random| &seeds[random.below(seeds.len())];
    let Ok(mut tree) = serde_json::from_slice::<Value>(pick(random)) else {
        return mutate::bytes(random, seeds);
    };
    for _ in 0..1 + random.below(3) {
        let donor = match random.below(4) {
            0 => serde_json::from_slice(pick(random)).unwrap_or(Value::Null),
            _ => tree.clone(),
        };
        let count = size(&tree);
        let at = random.below(count);
        let part = nth(&donor, random.below(size(&donor))).clone();
        change(random, nth_mut(&mut tree, at), part);
    }
    tree.to_string().into_bytes()
}

fn children(value: &Value) -> Vec<&Value> {
    match value {
        Value::Array(items) => items.iter().collect(),
        Value::Object(fields) => fields.values().collect(),
        _ => Vec::new(),
    }
}

fn size(value: &Value) -> usize {
    1 + children(value).into_iter().map(size).sum::<usize>()
}

/// The value number `at`, parents before children.
fn nth(value: &Value, at: usize) -> &Value {
    let mut left = at;
    if left == 0 {
        return value;
    }
    left -= 1;
    for child in children(value) {
        let count = size(child);
        if left < count {
            return nth(child, left);
        }
        left -= count;
    }
    value
}

fn nth_mut(value: &mut Value, at: usize) -> &mut Value {
    if at == 0 {
        return value;
    }
    let mut left = at - 1;
    let which = children(value).into_iter().position(|child| {
        let count = size(child);
        if left < count {
            return true;
        }
        left -= count;
        false
    });
    let child = match (value, which) {
        (Value::Array(items), Some(i)) => &mut items[i],
        (Value::Object(fields), Some(i)) => fields.values_mut().nth(i).expect("it was counted"),
        (value, _) => return value,
    };
    nth_mut(child, left)
}

fn change(random: &mut Random, value: &mut Value, part: Value) {
    match (random.below(4), &mut *value) {
        (0, Value::Array(items)) if !items.is_empty() => {
            let at = random.below(items.len());
            items.remove(at);
        }
        (1, Value::Array(items)) if !items.is_empty() => {
            let (from, to) = (random.below(items.len()), random.below(items.len()));
            let item = items[from].clone();
            items.insert(to, item);
        }
        (2, Value::Array(items)) if items.len() > 1 => {
            let (a, b) = (random.below(items.len()), random.below(items.len()));
            items.swap(a, b);
        }
        (0, Value::Object(fields)) if !fields.is_empty() => {
            let at = random.below(fields.len());
            let key = fields.keys().nth(at).cloned().expect("it was counted");
            fields.remove(&key);
        }
        (1, Value::Object(fields)) if !fields.is_empty() => {
            let at = random.below(fields.len());
            let key = fields.keys().nth(at).cloned().expect("it was counted");
            fields.insert(format!("{key}_1"), part);
        }
        (0..=2, Value::Number(n)) => {
            let n = n.as_i64().unwrap_or(0);
            let near = [
                n.wrapping_sub(1),
                n.wrapping_add(1),
                n.wrapping_neg(),
                n.saturating_mul(n),
                0,
                1,
                2,
                64,
                65,
                1 << 31,
                1 << 40,
            ];
            let edge = [i64::MAX, i64::MIN, i64::MAX - 1, -1];
            let all = [near.as_slice(), edge.as_slice()].concat();
            *value = json!(all[random.below(all.len())]);
        }
        (0, Value::String(text)) => *text = expression(random, 0),
        (1, Value::String(text)) => {
            let at = random.below(text.len() + 1);
            if text.is_char_boundary(at) {
                text.truncate(at);
            }
        }
        (_, value) => *value = part,
    }
}

/// A size as sympy writes it.
fn expression(random: &mut Random, depth: usize) -> String {
    let names = [
        "Add",
        "Mul",
        "Min",
        "Max",
        "FloorDiv",
        "Mod",
        "ModularIndexing",
        "Pow",
    ];
    if depth > 4 || random.below(3) == 0 {
        return match random.below(3) {
            0 => format!(
                "Symbol('s{}', positive=True, integer=True)",
                random.below(4)
            ),
            1 => format!("Integer({})", random.next_u64() as i64 >> random.below(64)),
            _ => format!("Integer({})", random.below(8)),
        };
    }
    let name = names[random.below(names.len())];
    let args: Vec<String> = (0..1 + random.below(3))
        .map(|_| expression(random, depth + 1))
        .collect();
    format!("{name}({})", args.join(", "))
}
