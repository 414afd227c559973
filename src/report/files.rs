//! Writes views of a plan to files; the name of a file selects the viewer.

use super::account::Account;
use super::explain::Explanation;
use super::{dot, overlay, page, snapshot, trace};
use crate::emit::file::Batch;
use ckpt_passes::{Error, Result};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A kind of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// An HTML page.
    Page,
    /// A timeline for Perfetto or `chrome://tracing`.
    Trace,
    /// A memory snapshot for `torch.cuda._memory_viz`.
    Snapshot,
    /// Node data for Model Explorer.
    Overlay,
    /// Layers for Graphviz.
    Dot,
    /// What `explain --format json` prints.
    Explanation,
}

/// Ends of names; the first match counts.
const ENDS: [(&str, Form); 7] = [
    (".html", Form::Page),
    (".trace.json", Form::Trace),
    (".pickle", Form::Snapshot),
    (".pkl", Form::Snapshot),
    (".overlay.json", Form::Overlay),
    (".dot", Form::Dot),
    (".json", Form::Explanation),
];

/// A file to write, and its viewer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Where to write the view, as the user named it.
    pub path: PathBuf,
    /// Viewer that the end of the file name selects.
    pub form: Form,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Target, String> {
        let lower = text.to_lowercase();
        let found = ENDS.iter().find(|(end, _)| lower.ends_with(end));
        match found {
            Some((_, form)) => Ok(Target {
                path: text.into(),
                form: *form,
            }),
            None => Err(format!(
                "the file's name selects the viewer, by its end: {}",
                ENDS.map(|(end, _)| end).join(", ")
            )),
        }
    }
}

/// Writes one file; it appears whole or not at all. `title` names the model.
///
/// # Errors
/// A file that cannot be written; for a page, a frontier that cannot be planned.
pub fn write(account: &Account, title: &str, target: &Target) -> Result<()> {
    let json = |e: serde_json::Error| Error::bug("json", e.to_string());
    let text = match target.form {
        Form::Page => page::page(account, title)?,
        Form::Overlay => serde_json::to_string(&overlay::overlay(account)).map_err(json)? + "\n",
        Form::Dot => dot::dot(account, title),
        Form::Explanation => {
            serde_json::to_string_pretty(&Explanation::new(account, None)?).map_err(json)? + "\n"
        }
        Form::Trace => {
            let trace = trace::predicted(account);
            let about = serde_json::json!({
                "model": title, "policy": account.plan.policy, "device": account.step.device.name,
                "ckpt-opt": env!("CARGO_PKG_VERSION"),
            });
            return one(&target.path, |out| trace.write(&about, out));
        }
        Form::Snapshot => return one(&target.path, |out| snapshot::write(account, out)),
    };
    one(&target.path, |out| out.write_all(text.as_bytes()))
}

fn one(path: &Path, content: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<()> {
    let mut batch = Batch::new();
    batch.add(path, content)?;
    batch.publish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_says_the_viewer() {
        let form = |name: &str| name.parse::<Target>().map(|t| t.form);
        assert_eq!(form("a.HTML"), Ok(Form::Page));
        assert_eq!(form("a.trace.json"), Ok(Form::Trace));
        assert_eq!(form("dir/a.json"), Ok(Form::Explanation));
        assert_eq!(form("a.overlay.json"), Ok(Form::Overlay));
        assert!(form("a.txt").unwrap_err().contains(".html, .trace.json"));
    }
}
