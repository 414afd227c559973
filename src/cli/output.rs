//! What commands print and write: results on stdout, warnings on stderr, JSON files, and views of a plan.

use super::progress;
use ckpt_opt::emit::file::write_whole;
use ckpt_opt::planning::step::TrainingStep;
use ckpt_opt::report::account::Account;
use ckpt_opt::report::files::{self, Target};
use ckpt_passes::plan::PlanOutcome;
use ckpt_passes::{Error, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::io::Write;
use std::path::Path;

/// The form of a result on stdout.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Human,
    Json,
}

/// Options of every command that reports.
#[derive(Args, Clone, Copy)]
#[command(next_help_heading = "Output")]
pub struct Console {
    /// How to report on stdout
    #[arg(long, value_enum, default_value = "human")]
    pub format: Format,
    /// Print more on stderr, such as the time of each pass
    #[arg(short, long, conflicts_with = "quiet")]
    pub verbose: bool,
    /// Print only errors on stderr, and no table where the command writes a file
    #[arg(short, long)]
    pub quiet: bool,
}

impl Console {
    pub fn is_json(self) -> bool {
        self.format == Format::Json
    }

    /// Prints a result: as JSON, or as text with warnings on stderr.
    pub fn print(
        self,
        value: &impl Serialize,
        warnings: &[String],
        human: impl FnOnce() -> String,
    ) -> Result<()> {
        if self.is_json() {
            return print_json(value);
        }
        warn(warnings);
        print(&human())
    }
}

/// Writes text to stdout. A reader that has gone away is not an error.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::environment(
            "stdout",
            format!("cannot write the result: {e}"),
        )),
        _ => Ok(()),
    }
}

fn json(value: &impl Serialize) -> Result<String> {
    let text =
        serde_json::to_string_pretty(value).map_err(|e| Error::bug("json", e.to_string()))?;
    Ok(text + "\n")
}

/// Writes a value to stdout as one JSON object.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    print(&json(value)?)
}

/// Writes a value to a file as JSON; the file appears whole or not at all.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    write_whole(path, json(value)?.as_bytes())
}

/// Returns the line that names a written file, if there is one.
pub fn wrote(file: Option<&Path>) -> String {
    file.map_or(String::new(), |f| format!("\nwrote {}\n", f.display()))
}

/// Prints warnings on stderr.
pub fn warn(warnings: &[String]) {
    if progress::is_quiet() {
        return;
    }
    for warning in warnings {
        anstream::eprintln!("\x1b[1;33mwarning\x1b[0m: {warning}");
    }
}

/// Prints an error on stderr, its first words in red. `anstream` drops the colour where `NO_COLOR` is set or stderr is no
/// terminal.
pub fn print_error(error: &Error) {
    let text = error.to_string();
    match text.split_once(": ") {
        Some((head, rest)) => anstream::eprintln!("\x1b[1;31m{head}\x1b[0m: {rest}"),
        None => anstream::eprintln!("{text}"),
    }
}

/// Files that show a plan.
#[derive(Args)]
#[command(next_help_heading = "Output")]
pub struct Views {
    /// Show the plan in a file. The name selects the viewer: .html (one page for a browser), .trace.json (Perfetto), .pickle
    /// (torch.cuda._memory_viz), .overlay.json (Model Explorer), .dot (Graphviz, layers) or .json. May be repeated
    #[arg(long = "report", value_name = "FILE")]
    pub files: Vec<Target>,
}

impl Views {
    /// Writes the files. `source` names the model in their titles.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, source: &Path, account: &Account) -> Result<()> {
        if self.files.is_empty() {
            return Ok(());
        }
        let _progress = progress::step("writing reports");
        let title = source.file_name().unwrap_or_default().to_string_lossy();
        self.files
            .iter()
            .try_for_each(|target| files::write(account, &title, target))
    }

    /// Writes the files of a plan that has no account yet.
    ///
    /// # Errors
    /// As for [`Views::write`]; a plan that does not fit its task.
    pub fn write_plan(
        &self,
        source: &Path,
        step: &TrainingStep,
        outcome: &PlanOutcome,
    ) -> Result<()> {
        match self.files.is_empty() {
            true => Ok(()),
            false => self.write(source, &Account::new(step, outcome)?),
        }
    }
}
