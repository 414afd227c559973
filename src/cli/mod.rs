//! The `ckpt-opt` command. stdout carries results only; errors, warnings and progress go to stderr.
//!
//! [`options`] declares the options of every command, one file per command does the work, [`output`] prints. [`config`]
//! adds options from a file, and [`replaced`] names the new spelling of options that were renamed.

mod config;
mod convert;
mod doctor;
mod explain;
mod inspect;
#[cfg(feature = "torch")]
mod launch;
#[cfg(feature = "torch")]
mod measure;
mod memory;
mod optimize;
mod options;
mod output;
mod plan;
mod progress;
mod replaced;
#[cfg(feature = "torch")]
mod run;
#[cfg(feature = "torch")]
mod steps;
#[cfg(feature = "torch")]
mod train;
#[cfg(feature = "torch")]
mod verify;

use ckpt_opt::place::Place;
use ckpt_passes::error::{Kind, Shortfall};
use ckpt_passes::near::nearest;
use ckpt_passes::{Error, Result};
use clap::{Command, CommandFactory, Parser, Subcommand};
use options::{convert as conversion, plan as plans, runtime, train as train_options};
use output::{Console, print, print_error, print_json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Passes and readers recurse at most as deep as their limits allow, which takes less than this.
const STACK_BYTES: usize = 256 << 20;

const EXAMPLES: &str = "\
`ckpt-opt MODEL -o OUT` is short for `ckpt-opt optimize MODEL -o OUT`.

`--config FILE` adds options from a TOML or JSON file: {\"budget\": \"60%\", \"dim\": [\"batch=8\"]}, long names without dashes.
Options on the command line win, lists of both are added up, and options that the command does not have are skipped.

Examples:
  ckpt-opt model.onnx -o train.onnx --loss causal-lm --dim batch=8 --dim seq=128
  ckpt-opt inspect model.onnx
  ckpt-opt verify model.onnx train.onnx

Exit codes: 0 good, 1 a bug in ckpt-opt, 2 wrong usage or a bad model, 3 no plan fits, 4 verification failed or not finite,
5 the environment (no memory, no disk, no libtorch).";

/// Compiles an exported model into a training graph that fits a memory budget.
#[derive(Parser)]
#[command(name = "ckpt-opt", version, after_help = EXAMPLES, arg_required_else_help = true)]
struct Cli {
    /// Take options that are not given here from this file, TOML (.toml) or JSON: long names without dashes
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Differentiate a model, decide what to recompute, write the training graph
    #[command(after_help = plans::OPTIMIZE_EXAMPLES)]
    Optimize(plans::OptimizeArgs),
    /// Show what a model is: inputs, parameters, layers, ops
    #[command(after_help = plans::INSPECT_EXAMPLES)]
    Inspect(plans::InspectArgs),
    /// Decide what to recompute within a memory budget, for a model or a cost graph, without writing a model
    #[command(after_help = plans::PLAN_EXAMPLES)]
    Plan(plans::PlanArgs),
    /// Plan at many budgets: the overhead of each, with proven bounds and the usual policies
    #[command(after_help = plans::FRONTIER_EXAMPLES)]
    Frontier(plans::FrontierArgs),
    /// Show what a plan does with every value, what the alternative would cost, and why
    #[command(after_help = plans::EXPLAIN_EXAMPLES)]
    Explain(plans::ExplainArgs),
    /// Compare two plans, or the plans of two training graphs
    #[command(after_help = plans::DIFF_EXAMPLES)]
    Diff(plans::DiffArgs),
    /// Train a model on data within a memory budget, and write its weights
    #[command(after_help = train_options::TRAIN_EXAMPLES, mut_arg("budget", |a| a.help_heading("Training").display_order(3)))]
    Train(Box<train_options::TrainArgs>),
    /// Execute a graph and compare its memory with the prediction
    #[command(after_help = runtime::RUN_EXAMPLES)]
    Run(runtime::RunArgs),
    /// Check that two graphs compute the same values, or that a training graph has the right gradients
    #[command(after_help = runtime::VERIFY_EXAMPLES)]
    Verify(runtime::VerifyArgs),
    /// Write trained weights as other tools load them: safetensors, the ONNX model, or a PEFT adapter
    #[command(after_help = conversion::CONVERT_EXAMPLES)]
    Convert(conversion::ConvertArgs),
    /// Measure this machine: writes a device profile for the cost model
    #[command(after_help = runtime::CALIBRATE_EXAMPLES)]
    Calibrate(runtime::CalibrateArgs),
    /// Measure the time of each node of a training step, for plans with measured costs
    #[command(after_help = runtime::PROFILE_EXAMPLES)]
    Profile(runtime::ProfileArgs),
    /// Measure the time that a plan adds: runs planned and unplanned steps in turns
    #[command(after_help = runtime::OVERHEAD_EXAMPLES)]
    Overhead(runtime::OverheadArgs),
    /// Check this machine: what ckpt-opt finds, and what to do where something is missing
    Doctor {
        #[command(flatten)]
        console: Console,
    },
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
    /// Print the manual page, of one command if it is named: ckpt-opt man plan | man -l -
    Man { command: Option<String> },
}

impl Verb {
    fn console(&self) -> Option<Console> {
        Some(match self {
            Verb::Optimize(args) => args.console,
            Verb::Inspect(args) => args.console,
            Verb::Plan(args) => args.console,
            Verb::Frontier(args) => args.console,
            Verb::Explain(args) => args.console,
            Verb::Diff(args) => args.console,
            Verb::Train(args) => args.console,
            Verb::Run(args) => args.console,
            Verb::Verify(args) => args.console,
            Verb::Convert(args) => args.console,
            Verb::Calibrate(args) => args.console,
            Verb::Profile(args) => args.console,
            Verb::Overhead(args) => args.console,
            Verb::Doctor { console } => *console,
            Verb::Completions { .. } | Verb::Man { .. } => return None,
        })
    }

    /// Where the verb runs graphs, if it does.
    fn place(&self) -> Place {
        match self {
            Verb::Train(args) => args.on.device,
            Verb::Run(args) => args.execution.on.device,
            Verb::Verify(args) => args.pair.execution.on.device,
            Verb::Calibrate(args) => args.measuring.on.device,
            Verb::Profile(args) => args.measuring.on.device,
            Verb::Overhead(args) => args.pair.execution.on.device,
            Verb::Doctor { .. } => Place::Cuda(0),
            _ => Place::Cpu,
        }
    }

    /// Runs the verb. Returns the exit code of its success.
    fn run(self) -> Result<u8> {
        let done = match self {
            #[cfg(feature = "torch")]
            Verb::Train(args) => return train::run(&args),
            Verb::Optimize(args) => optimize::run(&args),
            Verb::Inspect(args) => inspect::run(&args),
            Verb::Plan(args) => plan::run(&args),
            Verb::Frontier(args) => plan::frontier(&args),
            Verb::Explain(args) => explain::run(&args),
            Verb::Diff(args) => plan::diff(&args),
            Verb::Convert(args) => convert::run(&args),
            #[cfg(feature = "torch")]
            Verb::Run(args) => run::run(&args),
            #[cfg(feature = "torch")]
            Verb::Verify(args) => verify::run(&args),
            #[cfg(feature = "torch")]
            Verb::Calibrate(args) => return measure::calibrate(&args),
            #[cfg(feature = "torch")]
            Verb::Profile(args) => measure::profile(&args),
            #[cfg(feature = "torch")]
            Verb::Overhead(args) => measure::overhead(&args),
            #[cfg(not(feature = "torch"))]
            Verb::Train(_)
            | Verb::Run(_)
            | Verb::Verify(_)
            | Verb::Calibrate(_)
            | Verb::Profile(_)
            | Verb::Overhead(_) => Err(Error::environment(
                "runtime",
                "this command executes graphs, and this build has no runtime",
            )
            .help(doctor::INSTALL_RUNTIME)),
            Verb::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Cli::command(), "ckpt-opt", &mut script);
                print(&String::from_utf8_lossy(&script))
            }
            Verb::Doctor { console } => doctor::run(console),
            Verb::Man { command } => manual(command.as_deref()),
        };
        done.map(|()| 0)
    }
}

/// Parses the command line, runs the command, and turns its result into an exit code.
pub fn main() -> ! {
    let code = exit_code();
    // Where stdout is closed, its readers have what they wanted.
    let _ = std::io::stdout().flush();
    // The destructors of libtorch would take a quarter of the time of a short command, to free what the system takes back.
    // SAFETY: all of our own values are dropped, no thread is left that writes anything, and what C code printed is flushed.
    unsafe {
        libc::fflush(std::ptr::null_mut());
        libc::_exit(code.into())
    }
}

fn exit_code() -> u8 {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    let cli = match parsed(&mut words) {
        Ok(cli) => cli,
        Err(Unparsed::Told(error)) if !error.use_stderr() => return told(&error),
        Err(unparsed) => {
            let error = unparsed.error();
            tell(&error, wants_json(&words));
            return match unparsed {
                Unparsed::Refused(error) => failed(&error),
                Unparsed::Told(error) => told(&error),
            };
        }
    };
    set_up_cuda(cli.verb.place());
    let console = cli.verb.console();
    progress::set_quiet(console.is_some_and(|c| c.quiet));
    match guarded(move || cli.verb.run()) {
        Ok(code) => code,
        Err(error) => {
            // A verification that fails has printed its certificate.
            let has_printed = error.kind() == Kind::Verification;
            tell(
                &error,
                console.is_some_and(Console::is_json) && !has_printed,
            );
            failed(&error)
        }
    }
}

/// Prints what the command line asks for instead of a command, such as help, or what is wrong with it.
fn told(error: &clap::Error) -> u8 {
    let _ = error.print();
    error.exit_code() as u8
}

/// Prints an error as the one JSON object on stdout.
fn tell(error: &Error, is_json: bool) {
    if is_json {
        // Where stdout is closed or full, stderr and the exit code still report the error.
        let _ = print_json(&Refusal::of(error));
    }
}

fn failed(error: &Error) -> u8 {
    print_error(error);
    error.exit_code() as u8
}

/// Why a command line was not read.
enum Unparsed {
    /// We refuse it.
    Refused(Box<Error>),
    /// The option parser does, or it was asked for help.
    Told(clap::Error),
}

impl From<Box<Error>> for Unparsed {
    fn from(error: Box<Error>) -> Unparsed {
        Unparsed::Refused(error)
    }
}

impl Unparsed {
    fn error(&self) -> Box<Error> {
        match self {
            Unparsed::Refused(error) => error.clone(),
            Unparsed::Told(error) => of_parser(error, "option"),
        }
    }
}

/// Reads the command line. `words` gets the verb, where it is left out, and the options of a file.
fn parsed(words: &mut Vec<OsString>) -> Result<Cli, Unparsed> {
    let cli = Cli::command();
    let at = config::verb_at(words);
    add_verb(words, at, &cli)?;
    let verb = words.get(at).cloned().unwrap_or_default();
    let applied = config::applied(words.clone(), at, &cli)?;
    words.clone_from(&applied.words);
    Cli::try_parse_from(&applied.words).map_err(|error| {
        match replaced::explained(&verb.to_string_lossy(), &error) {
            Some(error) => Unparsed::Refused(error),
            None => match applied.place(&error) {
                Some(file) => {
                    let error = of_parser(&error, "config");
                    Unparsed::Refused(error.at(file.display().to_string()))
                }
                None => Unparsed::Told(error),
            },
        }
    })
}

/// Returns an error of the option parser as one of ours: its first paragraph and its tips.
fn of_parser(error: &clap::Error, code: &'static str) -> Box<Error> {
    let text = error.render().to_string();
    let (what, rest) = text.split_once("\n\n").unwrap_or((&text, ""));
    let what = what.strip_prefix("error: ").unwrap_or(what);
    let tips = rest
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("tip: "));
    tips.fold(Error::usage(code, what.trim_end()), |error, tip| {
        error.help(tip)
    })
}

/// Returns whether the words ask for JSON.
fn wants_json(words: &[OsString]) -> bool {
    let words = words.split(|w| w == "--").next().unwrap_or_default();
    let pairs = words.windows(2);
    words.iter().any(|w| w == "--format=json")
        || pairs
            .into_iter()
            .any(|w| w[0] == "--format" && w[1] == "json")
}

/// Inserts the verb where it is left out: `ckpt-opt MODEL -o OUT`.
///
/// # Errors
/// `error[command]` for a word that can only be a misspelled verb.
fn add_verb(words: &mut Vec<OsString>, at: usize, cli: &Command) -> Result<()> {
    let Some(first) = words.get(at) else {
        return Ok(());
    };
    let word = first.to_string_lossy();
    let is_about_us = matches!(word.as_ref(), "help" | "-h" | "--help" | "-V" | "--version");
    if is_about_us || cli.find_subcommand(word.as_ref()).is_some() {
        return Ok(());
    }
    let is_plain = word.starts_with(|c: char| c.is_ascii_alphabetic())
        && word
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    if is_plain && !Path::new(first).exists() {
        let what = format!("there is no command and no file `{word}`");
        return Err(no_command(what, &word, cli));
    }
    words.insert(at, "optimize".into());
    Ok(())
}

/// Returns the error for a word that is no verb, with the verbs.
fn no_command(what: String, word: &str, cli: &Command) -> Box<Error> {
    let names: Vec<&str> = cli.get_subcommands().map(Command::get_name).collect();
    let error = Error::usage("command", what).expected(names.join(", "));
    match nearest(word, names, 1).first() {
        None => error,
        Some(near) => error.help(format!("did you mean {near}?")),
    }
}

/// An error, as the one JSON object on stdout.
#[derive(serde::Serialize)]
struct Refusal<'a> {
    error: &'static str,
    message: &'a str,
    /// The lines below the message, by their labels; none where there are numbers instead.
    #[serde(flatten)]
    notes: BTreeMap<&'static str, String>,
    #[serde(flatten)]
    shortfall: Option<&'a Shortfall>,
}

impl Refusal<'_> {
    fn of(error: &Error) -> Refusal<'_> {
        let mut notes: BTreeMap<&'static str, String> = BTreeMap::new();
        // The notes about a budget are its numbers in words.
        let is_told = error.shortfall().is_some();
        for (label, text) in error.notes().filter(|_| !is_told) {
            let note = notes.entry(label).or_default();
            *note = match note.as_str() {
                "" => text.into(),
                first => format!("{first}\n{text}"),
            };
        }
        Refusal {
            error: error.code(),
            message: error.message(),
            notes,
            shortfall: error.shortfall(),
        }
    }
}

/// Sets what CUDA libraries read from the environment at their first use, unless the user has set it.
fn set_up_cuda(place: Place) {
    if place == Place::Cpu {
        return;
    }
    let is_set = |name: &str| std::env::var_os(name).is_some();
    let mut settings = vec![Place::CUBLAS_SETTING];
    if !is_set(Place::OLD_ALLOCATOR_VARIABLE) {
        settings.push(Place::ALLOCATOR_SETTING);
    }
    for (name, value) in settings.into_iter().filter(|(name, _)| !is_set(name)) {
        // SAFETY: this is the only thread so far.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Runs `work` on a thread with a large stack. A panic, in it or in a thread it started, comes back as a bug of ours.
fn guarded<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
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
        // tch's tensor constructors panic where memory runs out. The first words are the device's, the second ours.
        let words = ["out of memory", "cannot allocate"];
        let is_memory = |w: &&String| words.iter().any(|part| w.contains(part));
        if let Some(what) = first.as_ref().filter(is_memory) {
            return Err(Error::environment("memory", what.clone()));
        }
        Err(Error::bug("panic", first.unwrap_or_default())
            .help("this is our fault: please report it, with the command and the model"))
    })
}

/// Prints the manual page as roff, of everything or of one verb.
fn manual(verb: Option<&str>) -> Result<()> {
    let mut command = Cli::command();
    if let Some(name) = verb {
        let Some(found) = command.find_subcommand(name) else {
            let what = format!("there is no command `{name}`");
            return Err(no_command(what, name, &command));
        };
        command = found.clone().display_name(format!("ckpt-opt-{name}"));
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .render(&mut page)
        .map_err(|e| Error::bug("man", e.to_string()))?;
    print(&String::from_utf8_lossy(&page))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_verb_may_be_left_out() {
        let fill = |words: &[&str]| {
            let words = std::iter::once("ckpt-opt").chain(words.iter().copied());
            let mut words: Vec<OsString> = words.map(Into::into).collect();
            let at = config::verb_at(&words);
            add_verb(&mut words, at, &Cli::command()).unwrap();
            let text = |w: OsString| w.into_string().unwrap();
            words.into_iter().skip(1).map(text).collect::<Vec<_>>()
        };
        assert_eq!(fill(&["m.onnx", "-o", "t.onnx"])[0], "optimize");
        assert_eq!(fill(&["--policy", "full", "m.onnx"])[0], "optimize");
        assert_eq!(fill(&["inspect", "m.onnx"])[0], "inspect");
        assert_eq!(fill(&["--help"]), ["--help"]);
        assert_eq!(
            fill(&["--config", "c.toml", "m.onnx"]),
            ["--config", "c.toml", "optimize", "m.onnx"]
        );
        assert_eq!(fill(&["--config=c.toml", "plan"])[1], "plan");
        assert!(fill(&[]).is_empty());
    }

    #[test]
    fn a_panic_is_a_bug_of_ours() {
        let e = guarded(|| -> Result<()> { panic!("index {} of {}", 3, 2) }).unwrap_err();
        assert_eq!((e.code(), e.exit_code()), ("panic", 1));
        assert!(
            e.to_string()
                .starts_with("bug[panic]: index 3 of 2 (src/cli/mod.rs:"),
            "{e}"
        );
        let other = guarded(|| Err::<(), _>(Error::budget("too small"))).unwrap_err();
        assert_eq!(other.exit_code(), 3);
        guarded(|| Ok(())).unwrap();
        let _ = std::panic::take_hook();
    }
}
