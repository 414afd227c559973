//! The command line: one file a verb. stdout carries results only; errors, warnings and progress go to stderr.

mod args;
mod config;
mod doctor;
mod explain;
mod inspect;
mod measure;
mod memory;
mod optimize;
mod plan;
mod progress;
mod refinement;
mod run;
mod verify;

use args::{Cli, Format, Verb};
use ckpt_opt::place::Place;
use ckpt_opt::planning::task::{Planned, Task};
use ckpt_opt::report::account::Account;
use ckpt_opt::report::files;
use ckpt_passes::error::{Kind, Shortfall};
use ckpt_passes::{Error, Result};
use clap::{CommandFactory, Parser};
use std::io::Write;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Passes and readers recurse at most as deep as their limits allow; this is ample for them.
const STACK_BYTES: usize = 256 << 20;

/// Whether only errors are said on stderr.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Parses, runs a verb, and turns what came of it into an exit code.
pub fn main() -> ExitCode {
    let cli = match config::applied(args::with_verb(std::env::args_os().collect())) {
        Ok(words) => Cli::parse_from(words),
        Err(error) => {
            anstream::eprintln!("{}", painted(&error));
            return ExitCode::from(error.exit_code() as u8);
        }
    };
    prepare(&cli.verb);
    let report = cli.verb.report();
    let is_json = report.is_some_and(|r| r.format == Format::Json);
    QUIET.store(report.is_some_and(|r| r.quiet), Ordering::Relaxed);
    match guarded(move || dispatch(cli.verb)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if is_json && error.kind() == Kind::Budget {
                // Whoever reads stdout has gone or is out of room: stderr and the exit code still say it.
                let _ = result_json(&Refusal::of(&error));
            }
            anstream::eprintln!("{}", painted(&error));
            ExitCode::from(error.exit_code() as u8)
        }
    }
}

/// A budget that nothing fits into, as the one JSON object on stdout.
#[derive(serde::Serialize)]
struct Refusal<'a> {
    error: &'static str,
    message: &'a str,
    #[serde(flatten)]
    shortfall: Option<&'a Shortfall>,
}

impl Refusal<'_> {
    fn of(error: &Error) -> Refusal<'_> {
        Refusal {
            error: error.code(),
            message: error.message(),
            shortfall: error.shortfall(),
        }
    }
}

/// Sets what the CUDA libraries read from the environment when they are first used, unless the user has set it.
fn prepare(verb: &Verb) {
    let place = match verb {
        Verb::Run(args) => args.device,
        Verb::Verify(args) => args.pair.device,
        Verb::Calibrate(args) => args.measuring.device,
        Verb::Profile(args) => args.measuring.device,
        Verb::Overhead(args) => args.pair.device,
        Verb::Doctor(_) => Place::Cuda(0),
        _ => return,
    };
    let (name, value) = Place::CUBLAS_SETTING;
    if place != Place::Cpu && std::env::var_os(name).is_none() {
        // SAFETY: this is the only thread so far.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Runs `work` on a thread with room to recurse. A panic, in it or in a thread it started, is a bug of ours and comes
/// back as one.
fn guarded(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    static FIRST: Mutex<Option<String>> = Mutex::new(None);
    std::panic::set_hook(Box::new(|info| {
        let place = info
            .location()
            .map_or(String::new(), |l| format!("{}:{}", l.file(), l.line()));
        let what = info.payload();
        let what = what
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| what.downcast_ref::<String>().map(String::as_str));
        if std::env::var_os("RUST_BACKTRACE").is_some_and(|v| v != "0") {
            eprintln!("{}", std::backtrace::Backtrace::force_capture());
        }
        if let Ok(mut first) = FIRST.lock() {
            first.get_or_insert(format!("{} ({place})", what.unwrap_or("no message")));
        }
    }));
    let thread = std::thread::Builder::new()
        .stack_size(STACK_BYTES)
        .spawn(work)
        .map_err(|e| Error::environment("thread", format!("cannot start a thread: {e}")))?;
    thread.join().unwrap_or_else(|_| {
        let first = FIRST.lock().ok().and_then(|mut p| p.take());
        // tch's constructors of tensors panic where memory runs out; the first words are a device's, the others ours.
        let words = ["out of memory", "cannot allocate"];
        let is_memory = |w: &&String| words.iter().any(|part| w.contains(part));
        if let Some(what) = first.as_ref().filter(is_memory) {
            return Err(Error::environment("memory", what.clone()));
        }
        Err(Error::bug("panic", first.unwrap_or_default())
            .help("this is our fault: please report it, with the command and the model"))
    })
}

fn dispatch(verb: Verb) -> Result<()> {
    match verb {
        Verb::Optimize(args) => optimize::run(&args),
        Verb::Inspect(args) => inspect::run(&args),
        Verb::Plan(args) => plan::run(&args),
        Verb::Frontier(args) => plan::frontier(&args),
        Verb::Explain(args) => explain::run(&args),
        Verb::Diff(args) => plan::diff(&args),
        Verb::Run(args) => run::run(&args),
        Verb::Verify(args) => verify::run(&args),
        Verb::Calibrate(args) => measure::calibrate(&args),
        Verb::Profile(args) => measure::profile(&args),
        Verb::Overhead(args) => measure::overhead(&args),
        Verb::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "ckpt-opt", &mut script);
            result(&String::from_utf8_lossy(&script))
        }
        Verb::Doctor(args) => doctor::run(&args),
        Verb::Man { command } => manual(command.as_deref()),
    }
}

/// The manual page as roff, of everything or of one verb.
fn manual(verb: Option<&str>) -> Result<()> {
    let mut command = Cli::command();
    if let Some(name) = verb {
        let named = command.get_subcommands().find(|c| c.get_name() == name);
        let page = format!("ckpt-opt-{name}");
        command = match named {
            Some(found) => found.clone().display_name(page),
            None => {
                return Err(
                    Error::usage("command", format!("there is no command `{name}`"))
                        .expected(args::VERBS.join(", ")),
                );
            }
        };
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .render(&mut page)
        .map_err(|e| Error::bug("man", e.to_string()))?;
    result(&String::from_utf8_lossy(&page))
}

/// The first line's head in red; `anstream` drops the colour where nobody sees it or `NO_COLOR` is set.
fn painted(error: &Error) -> String {
    let text = error.to_string();
    match text.split_once(": ") {
        Some((head, rest)) => format!("\x1b[1;31m{head}\x1b[0m: {rest}"),
        None => text,
    }
}

/// Writes a result to stdout. A reader that has gone away is not an error.
fn result(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::environment(
            "stdout",
            format!("cannot write the result: {e}"),
        )),
        _ => Ok(()),
    }
}

/// Writes a result to stdout as one JSON object.
fn result_json(value: &impl serde::Serialize) -> Result<()> {
    let text =
        serde_json::to_string_pretty(value).map_err(|e| Error::bug("json", e.to_string()))?;
    result(&(text + "\n"))
}

/// Writes a value to a file as JSON; the file appears whole or not at all.
fn write_json(path: &std::path::Path, value: &impl serde::Serialize) -> Result<()> {
    let text =
        serde_json::to_string_pretty(value).map_err(|e| Error::bug("json", e.to_string()))?;
    ckpt_opt::emit::file::write_whole(path, (text + "\n").as_bytes())
}

/// Writes the files that show a plan, if any are wanted.
fn show(
    wanted: &args::showing::Show,
    source: &std::path::Path,
    task: &Task,
    planned: &Planned,
) -> Result<()> {
    match wanted.files.is_empty() {
        true => Ok(()),
        false => write_reports(wanted, source, &Account::new(task, planned)?),
    }
}

/// The same of a plan whose account is there already.
fn write_reports(
    wanted: &args::showing::Show,
    source: &std::path::Path,
    account: &Account,
) -> Result<()> {
    if wanted.files.is_empty() {
        return Ok(());
    }
    let _progress = progress::step("writing reports");
    let title = source.file_name().unwrap_or_default().to_string_lossy();
    for target in &wanted.files {
        files::write(account, &title, target)?;
    }
    Ok(())
}

/// Shows warnings on stderr.
fn warn(warnings: &[String]) {
    if QUIET.load(Ordering::Relaxed) {
        return;
    }
    for warning in warnings {
        anstream::eprintln!("\x1b[1;33mwarning\x1b[0m: {warning}");
    }
}

/// The error of a verb that executes graphs, in a build that cannot.
#[cfg(not(feature = "torch"))]
fn no_runtime(verb: &str) -> Box<Error> {
    Error::environment(
        "runtime",
        format!("`{verb}` executes graphs, and this build has no runtime"),
    )
    .help("in the repository: tools/get-libtorch && cargo build --release --features torch")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_bug_of_ours() {
        let e = guarded(|| panic!("index {} of {}", 3, 2)).unwrap_err();
        assert_eq!((e.code(), e.exit_code()), ("panic", 1));
        assert!(
            e.to_string()
                .starts_with("bug[panic]: index 3 of 2 (src/cli/mod.rs:"),
            "{e}"
        );
        let other = guarded(|| Err(Error::budget("too small"))).unwrap_err();
        assert_eq!(other.exit_code(), 3);
        guarded(|| Ok(())).unwrap();
        let _ = std::panic::take_hook();
    }
}
