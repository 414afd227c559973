//! Starts the ranks of `--ranks N` as processes like this one, on this machine.

use ckpt_opt::runtime::ranks::STORE_FILE;
use ckpt_passes::{Error, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long ranks may live on after one of them has failed.
const GRACE: Duration = Duration::from_secs(10);
/// How often ranks are looked at.
const LOOK: Duration = Duration::from_millis(20);
/// The exit code of a rank that a signal ended.
const LOST: u8 = 5;

/// Ranks that are running. None outlives this.
struct Started(Vec<Child>);

impl Drop for Started {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // One that has ended cannot be ended again.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Checks that as many ranks run as were asked for.
///
/// # Errors
/// Another number, of `torchrun` for example.
pub fn check_count(wanted: Option<usize>, ranks: usize) -> Result<()> {
    match wanted.filter(|n| *n != ranks) {
        None => Ok(()),
        Some(wanted) => Err(
            Error::usage("ranks", "another number of ranks runs already")
                .expected(format!("--ranks {wanted}"))
                .found(format!("WORLD_SIZE={ranks}"))
                .help("leave --ranks out under torchrun"),
        ),
    }
}

/// Runs this command line as so many ranks. Returns the exit code of the first that failed, or of all.
///
/// # Errors
/// A process that cannot be started.
pub fn launch(ranks: usize) -> Result<u8> {
    let failed =
        |what: &str, e: &std::io::Error| Error::environment("rank", format!("cannot {what}: {e}"));
    let program = std::env::current_exe().map_err(|e| failed("find this program", &e))?;
    let folder = tempfile::tempdir().map_err(|e| failed("make a temporary folder", &e))?;
    let store = folder.path().join("store");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (cores / ranks).max(1).to_string();
    let mut started = Started(Vec::with_capacity(ranks));
    for rank in 0..ranks {
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env(STORE_FILE, &store)
            // Signals of the terminal come to this process, which hands them on.
            .process_group(0);
        for (name, value) in [
            ("OMP_NUM_THREADS", &*threads),
            ("TORCH_CPP_LOG_LEVEL", "ERROR"),
        ] {
            if std::env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        if rank > 0 {
            command.stdin(Stdio::null()).stdout(Stdio::null());
        }
        let child = command.spawn();
        started
            .0
            .push(child.map_err(|e| failed("start a rank", &e))?);
    }
    watch(&mut started.0)
}

/// Waits for all ranks. Once one has failed, the others get some time to end by themselves.
fn watch(children: &mut [Child]) -> Result<u8> {
    let signals = [SIGINT, SIGTERM].map(|signal| (signal, Arc::new(AtomicBool::new(false))));
    for (signal, flag) in &signals {
        flag::register(*signal, flag.clone())
            .map_err(|e| Error::environment("signal", format!("no handler for signals: {e}")))?;
    }
    let mut ended: Vec<Option<ExitStatus>> = vec![None; children.len()];
    let mut first: Option<(u8, Instant)> = None;
    loop {
        for (child, ended) in children.iter_mut().zip(&mut ended) {
            if ended.is_some() {
                continue;
            }
            *ended = child
                .try_wait()
                .map_err(|e| Error::environment("rank", format!("cannot wait for a rank: {e}")))?;
            if let Some(status) = ended.filter(|status| !status.success()) {
                first.get_or_insert((code(status), Instant::now()));
            }
        }
        if ended.iter().all(Option::is_some) {
            return Ok(first.map_or(0, |(code, _)| code));
        }
        for (signal, flag) in &signals {
            if flag.swap(false, Ordering::Relaxed) {
                let alive = children.iter().zip(&ended).filter(|(_, e)| e.is_none());
                for (child, _) in alive {
                    let id = rustix::process::Pid::from_child(child);
                    let signal = match *signal {
                        SIGINT => rustix::process::Signal::INT,
                        _ => rustix::process::Signal::TERM,
                    };
                    // A rank that has just ended needs no signal.
                    let _ = rustix::process::kill_process(id, signal);
                }
            }
        }
        if let Some((code, since)) = first
            && since.elapsed() > GRACE
        {
            return Ok(code);
        }
        std::thread::sleep(LOOK);
    }
}

fn code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(1),
        (None, _) => LOST,
    }
}
