//! The sizes that a written graph was planned for: the defaults of its runs.

use crate::ir::Graph;
use crate::{Error, Result};
use std::collections::BTreeMap;

/// The metadata key; the value is a JSON object of numbers by name.
pub const KEY: &str = "ckpt.dims";

/// Writes sizes into the metadata of a graph. Leaves out data-dependent sizes (`?name`).
pub fn record<'a>(graph: &mut Graph, sizes: impl Iterator<Item = (&'a str, i64)>) {
    let named: BTreeMap<&str, i64> = sizes.filter(|(name, _)| !name.starts_with('?')).collect();
    graph.meta.remove(KEY);
    if !named.is_empty() {
        let text = serde_json::to_string(&named).unwrap_or_default();
        graph.meta.insert(KEY.into(), text);
    }
}

/// Returns the sizes that a graph records; none where it was never planned.
///
/// # Errors
/// Metadata that [`record`] did not write.
pub fn of(graph: &Graph) -> Result<BTreeMap<String, i64>> {
    let Some(text) = graph.meta.get(KEY) else {
        return Ok(BTreeMap::new());
    };
    let sizes: Option<BTreeMap<String, i64>> = serde_json::from_str(text).ok();
    let sizes = sizes.filter(|sizes| sizes.values().all(|n| *n >= 1));
    sizes.ok_or_else(|| {
        Error::model("metadata", format!("`{KEY}` is damaged"))
            .expected("{\"name\": number, …}, numbers from 1")
            .found(text.as_str())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str =
        "graph @g typed (%x: f32[batch, seq]) -> (%y) {\n  %y = Tanh %x : f32[batch, seq]\n}\n";

    #[test]
    fn they_are_read_as_they_were_written() {
        let mut graph = crate::text::parse(SOURCE).unwrap();
        assert!(of(&graph).unwrap().is_empty());
        let sizes = [("batch", 4), ("seq", 9), ("?nonzero.0", 3)];
        record(&mut graph, sizes.into_iter());
        assert_eq!(graph.meta[KEY], r#"{"batch":4,"seq":9}"#);
        let read = of(&graph).unwrap();
        assert_eq!((read["batch"], read["seq"], read.len()), (4, 9, 2));
        record(&mut graph, std::iter::empty());
        assert!(!graph.meta.contains_key(KEY));
    }

    #[test]
    fn damaged_ones_are_refused() {
        for text in ["", "batch=4", "[4]", r#"{"batch":"4"}"#, r#"{"batch":0}"#] {
            let mut graph = crate::text::parse(SOURCE).unwrap();
            graph.meta.insert(KEY.into(), text.into());
            assert_eq!(of(&graph).unwrap_err().code(), "metadata", "{text}");
        }
    }
}
