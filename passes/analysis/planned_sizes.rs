//! The sizes that a written graph was planned for. Whoever runs, verifies or plans the file again gets them as defaults.

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
    use crate::analysis::Binding;

    const SOURCE: &str =
        "graph @g typed (%x: f32[batch, seq]) -> (%y) {\n  %y = Tanh %x : f32[batch, seq]\n}\n";

    #[test]
    fn they_are_defaults_and_give_way() {
        let mut graph = crate::text::parse(SOURCE).unwrap();
        assert!(of(&graph).unwrap().is_empty());
        record(
            &mut graph,
            [("batch", 4), ("seq", 9), ("?nonzero.0", 3)].into_iter(),
        );
        assert_eq!(graph.meta[KEY], r#"{"batch":4,"seq":9}"#);
        let binding = |given: &[(String, i64)]| {
            let binding = Binding::new(&graph, given).unwrap();
            (binding.get("batch"), binding.get("seq"))
        };
        assert_eq!(binding(&[]), (Some(4), Some(9)));
        assert_eq!(binding(&[("seq".into(), 5)]), (Some(4), Some(5)));
        let mut ranged = graph.clone();
        let ranges = [("seq".to_string(), (1, 6))].into_iter().collect();
        crate::analysis::ranges::record(&mut ranged, &ranges).unwrap();
        assert_eq!(Binding::new(&ranged, &[]).unwrap().get("seq"), Some(6));
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
