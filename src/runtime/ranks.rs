//! Several processes that train one model: who they are, how they meet, and the groups in which they exchange tensors.
//!
//! [`RankOptions::from_environment`] reads what `torchrun` or `train --ranks` says. [`Ranks::join`] meets the others in a
//! store, [`Ranks::agree`] compares what must be equal, and [`Ranks::open`] makes the group that the collectives of a
//! graph name. Whatever waits for another rank ends within the time limit, with an error that names the rank where that is
//! known.
//!
//! A process can also play one rank of many [alone]: its collectives copy and wait for nobody, in the memory that
//! they take among others.

use super::convert::tch_error;
use super::device;
use crate::place::Place;
use ckpt_passes::ir::Graph;
use ckpt_passes::ops::collective::{ANY_RANKS, groups as groups_of, slice_of};
use ckpt_passes::{Error, Result};
use ckpt_torch::TorchError;
use ckpt_torch::ranks::{self, Gather};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tch::Tensor;

/// The variable that names the file of the store, which `train --ranks` sets.
pub const STORE_FILE: &str = "CKPT_OPT_STORE";
pub use ckpt_passes::ops::collective::{DATA_PARALLEL, TENSOR_PARALLEL};
/// How long rank 0 sleeps between looks at whether the others have read what it serves.
const LOOK: Duration = Duration::from_millis(2);
/// Stands between texts that are told at once.
const BETWEEN: &str = "\u{1f}";
/// How long rank 0 serves others what is wrong.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Meeting {
    Tcp {
        host: String,
        port: u16,
        is_served: bool,
    },
    File(PathBuf),
}

/// Which rank this process is, and where the others are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankOptions {
    /// The number of this rank, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub ranks: usize,
    /// How long to wait for another rank.
    pub limit: Duration,
    /// The number of this rank among those on its machine.
    local: usize,
    meeting: Meeting,
    /// How often all ranks were started again: an earlier attempt has left its words in the store.
    attempt: String,
}

fn fail(what: impl Into<String>) -> Box<Error> {
    Error::environment("rank", what)
}

impl RankOptions {
    /// Reads `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_RESTART_COUNT` and
    /// `TORCHELASTIC_USE_AGENT_STORE` as `torchrun` sets them. `None` for a process by itself.
    ///
    /// # Errors
    /// Variables that contradict each other or are no numbers.
    pub fn from_environment(limit: Duration) -> Result<Option<RankOptions>> {
        RankOptions::read(&|name| std::env::var(name).ok(), limit)
    }

    fn read(
        variable: &dyn Fn(&str) -> Option<String>,
        limit: Duration,
    ) -> Result<Option<RankOptions>> {
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(text) = variable(name) else {
                return Ok(None);
            };
            let number = text.parse().map(Some);
            number.map_err(|_| fail(format!("{name} is not a number")).found(text))
        };
        let (Some(ranks), Some(rank)) = (number("WORLD_SIZE")?, number("RANK")?) else {
            return Ok(None);
        };
        if ranks < 2 {
            return Ok(None);
        }
        if rank >= ranks {
            return Err(fail("RANK is none of the ranks")
                .expected(format!("0 to {}", ranks - 1))
                .found(rank.to_string()));
        }
        let meeting = match variable(STORE_FILE) {
            Some(file) => Meeting::File(file.into()),
            None => {
                let missing = |name: &str| {
                    fail(format!("{name} is not set, so the ranks cannot meet"))
                        .help("start them with `ckpt-opt train --ranks N` or `torchrun`")
                };
                let port = number("MASTER_PORT")?.ok_or_else(|| missing("MASTER_PORT"))?;
                // The agent of torchrun serves the store itself.
                let has_agent = variable("TORCHELASTIC_USE_AGENT_STORE");
                Meeting::Tcp {
                    host: variable("MASTER_ADDR").ok_or_else(|| missing("MASTER_ADDR"))?,
                    port: u16::try_from(port)
                        .map_err(|_| fail("MASTER_PORT is no port").found(port.to_string()))?,
                    is_served: has_agent.is_some_and(|word| word.eq_ignore_ascii_case("true")),
                }
            }
        };
        Ok(Some(RankOptions {
            rank,
            ranks,
            limit,
            local: number("LOCAL_RANK")?.unwrap_or(rank),
            meeting,
            attempt: variable("TORCHELASTIC_RESTART_COUNT").unwrap_or("0".into()),
        }))
    }
}

impl RankOptions {
    /// Returns the place of this rank: of the CUDA devices from `first` on, each rank of a machine has one.
    pub fn place(&self, first: Place) -> Place {
        match first {
            Place::Cpu => Place::Cpu,
            Place::Cuda(n) => Place::Cuda((n + self.local).min(device::MOST_DEVICES - 1)),
        }
    }
}

/// This process among the others.
pub struct Ranks {
    /// The number of this rank, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub ranks: usize,
    limit: Duration,
    place: Place,
    store: ranks::Store,
    /// The address to listen at, where all ranks are on one machine.
    host: Option<&'static str>,
}

impl Ranks {
    /// Meets the others in a store. Tensors at `place` are exchanged by Gloo on the CPU, by NCCL on a CUDA device.
    ///
    /// # Errors
    /// Nobody serves the store within the time limit; no such device, or no NCCL.
    pub fn join(options: &RankOptions, place: Place) -> Result<Ranks> {
        if place != Place::Cpu {
            device::of(place).open()?;
            nccl_version()?;
        }
        let prefix = format!("ckpt-opt/{}", options.attempt);
        let (ranks, limit) = (options.ranks, options.limit);
        let (store, is_local) = match &options.meeting {
            Meeting::File(path) => {
                let path = path.display().to_string();
                (ranks::Store::file(&path, ranks, limit, &prefix), true)
            }
            Meeting::Tcp {
                host,
                port,
                is_served,
            } => {
                let serve = !is_served && options.rank == 0;
                let is_local = ["localhost", "127.0.0.1"].contains(&host.as_str());
                let at = (host.as_str(), *port);
                (
                    ranks::Store::tcp(at, ranks, serve, limit, &prefix),
                    is_local,
                )
            }
        };
        let store = store.map_err(|e| {
            fail(format!("rank {} cannot meet the others: {e}", options.rank))
                .help("check MASTER_ADDR and MASTER_PORT, and that rank 0 runs")
        })?;
        let is_named = std::env::var_os("GLOO_SOCKET_IFNAME").is_some();
        Ok(Ranks {
            rank: options.rank,
            ranks,
            limit,
            place,
            store,
            host: (is_local && !is_named).then_some("127.0.0.1"),
        })
    }

    fn lost(&self, e: &TorchError) -> Box<Error> {
        lost(self.rank, self.ranks, e)
    }

    /// Leaves a text for the others under a key.
    ///
    /// # Errors
    /// Whoever serves the store is gone.
    pub fn tell(&self, key: &str, text: &str) -> Result<()> {
        let key = format!("{key}/{}", self.rank);
        self.store.set(&key, text).map_err(|e| self.lost(&e))
    }

    /// Waits for the text that a rank leaves under a key.
    ///
    /// # Errors
    /// It leaves none within the time limit.
    pub fn hear(&self, key: &str, rank: usize) -> Result<String> {
        let text = self.store.get(&format!("{key}/{rank}"), self.limit);
        text.map_err(|e| {
            fail(format!("rank {rank} has not come to `{key}` in time: {e}"))
                .expected(format!("within {} s", self.limit.as_secs_f64()))
                .help("see the output of that rank; --rank-timeout sets the time limit")
        })
    }

    /// Compares a text with those of all ranks. Returns once all have it, so it is a barrier as well.
    ///
    /// # Errors
    /// A rank that has another text, or none within the time limit.
    pub fn agree(&self, key: &str, text: &str) -> Result<()> {
        self.agree_on(key, &[(key, text)])
    }

    /// As [`Ranks::agree`], for several texts at once, each with what it is.
    ///
    /// # Errors
    /// As [`Ranks::agree`], for the first text that differs.
    pub fn agree_on(&self, key: &str, facts: &[(&str, &str)]) -> Result<()> {
        let own = facts.iter().map(|(_, text)| *text);
        self.tell(key, &own.collect::<Vec<_>>().join(BETWEEN))?;
        let same = (0..self.ranks).try_for_each(|rank| {
            let heard = self.hear(key, rank)?;
            let mut theirs = heard.split(BETWEEN);
            facts.iter().try_for_each(|(what, text)| {
                let other = theirs.next().unwrap_or_default();
                match other == *text {
                    true => Ok(()),
                    false => Err(fail(format!("the ranks do not have the same {what}"))
                        .expected(format!("that of rank {}: {text}", self.rank))
                        .found(format!("that of rank {rank}: {other}"))
                        .help("start all ranks with the same files, options and version")),
                }
            })
        });
        // Rank 0 may serve the store, so it stays until all have read: also what is wrong.
        let done = format!("{key}/read");
        let read = |n| self.store.add(&done, n).map_err(|e| self.lost(&e));
        let patience = match &same {
            Ok(()) => self.limit,
            Err(_) => self.limit.min(PATIENCE),
        };
        let (all, end) = (self.ranks as i64, Instant::now() + patience);
        let mut count = read(1);
        while self.rank == 0 && Instant::now() < end && count.as_ref().is_ok_and(|n| *n < all) {
            std::thread::sleep(LOOK);
            count = read(0);
        }
        same.and(count.map(drop))
    }

    /// Makes the group of all ranks that the collectives of a graph name.
    ///
    /// # Errors
    /// A rank does not come within the time limit; there is no network.
    pub fn open(&self, name: &str) -> Result<Group> {
        let place = (self.rank, self.ranks);
        self.make(name, place)?;
        Ok(put(name, (name.into(), place), true))
    }

    fn make(&self, name: &str, place: (usize, usize)) -> Result<()> {
        let has_devices = self.place != Place::Cpu;
        ranks::join(&self.store, name, place, self.limit, self.host, has_devices)
            .map_err(|e| self.lost(&e))
    }

    /// Makes the groups of a mesh that this rank is in, where ranks have parts of layers.
    ///
    /// # Errors
    /// As [`Ranks::open`].
    pub fn open_mesh(&self, at: &Coordinates) -> Result<()> {
        for (name, place, number) in at.groups() {
            let own = format!("{name}/{number}");
            self.make(&own, place)?;
            put(name, (own, place), true);
        }
        Ok(())
    }
}

/// The place of a rank in a mesh: its number, and how many there are, among ranks that train on different examples (`dp`) and
/// among those that have different parts of the layers (`tp`), which are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinates {
    /// The place among ranks, or groups of ranks, that have different examples.
    pub dp: (usize, usize),
    /// The place among ranks that have different parts of the layers.
    pub tp: (usize, usize),
}

impl Coordinates {
    /// Returns the place of a rank of so many that train a graph.
    ///
    /// # Errors
    /// A graph for another number of ranks.
    pub fn of(graph: &Graph, (rank, ranks): (usize, usize)) -> Result<Coordinates> {
        let groups: BTreeMap<String, i64> = groups_of(graph).into_iter().collect();
        let among = |name: &str| groups.get(name).map_or(1, |n| *n as usize);
        let tp = among(TENSOR_PARALLEL);
        let expected = tp * among(DATA_PARALLEL);
        if tp > 1 && expected != ranks {
            return Err(another_number(expected, ranks));
        }
        Ok(Coordinates {
            dp: (rank / tp, ranks / tp),
            tp: (rank % tp, tp),
        })
    }

    /// Returns the groups that this rank is in: their name, its place, and which of the groups of that name it is.
    fn groups(&self) -> [(&'static str, (usize, usize), usize); 2] {
        [
            (DATA_PARALLEL, self.dp, self.tp.0),
            (TENSOR_PARALLEL, self.tp, self.dp.0),
        ]
    }

    /// Has this process play its place in all groups by itself. What it receives is what it sent.
    pub fn play(&self) {
        for (name, place, _) in self.groups() {
            alone(name, place);
        }
    }
}

fn another_number(expected: usize, found: usize) -> Box<Error> {
    Error::usage("ranks", "the graph is for another number of ranks")
        .expected(format!("{expected} ranks"))
        .found(format!("{found} ranks"))
        .help(HOW_TO_START)
}

const HOW_TO_START: &str = "train it with `ckpt-opt train --ranks N` or `torchrun --no-python`; `ckpt-opt run --rank 0/N` plays one rank";

/// Returns the version of NCCL as a number: 22809 is 2.28.9.
///
/// # Errors
/// libtorch's CUDA library has not been loaded, or has another NCCL.
pub fn nccl_version() -> Result<i64> {
    ranks::nccl_version().map_err(|e| {
        Error::environment("rank", "ranks cannot exchange tensors on CUDA devices")
            .expected("NCCL 2 in the CUDA library of libtorch 2.11.0")
            .found(e.message)
            .help("train on CPUs: --device cpu")
    })
}

/// Sums a tensor on a CUDA device over a group of one rank, to try NCCL. Returns its version.
///
/// # Errors
/// There is no NCCL, or it does not work there.
pub fn try_nccl(place: Place) -> Result<i64> {
    let version = nccl_version()?;
    let failed = |e: TorchError| fail("NCCL does not work").found(e.message);
    let folder = tempfile::tempdir().map_err(|e| fail(format!("no temporary folder: {e}")))?;
    let (path, limit) = (folder.path().join("store"), Duration::from_secs(20));
    let store = ranks::Store::file(&path.display().to_string(), 1, limit, "").map_err(failed)?;
    ranks::join(&store, "try", (0, 1), limit, Some("127.0.0.1"), true).map_err(failed)?;
    let one = device::moved(Tensor::from_slice(&[1i64]), place)?;
    let summed = ranks::sum(("try", 0, 1), 0, std::slice::from_ref(&one), None);
    // Threads of the group read the store as long as it is there.
    ranks::leave("try").map_err(failed)?;
    summed.map_err(failed)?;
    match one.f_int64_value(&[0]).map_err(|e| tch_error(&e))? {
        1 => Ok(version),
        sum => Err(fail("NCCL does not work").found(format!("a sum of one number 1 is {sum}"))),
    }
}

/// Returns the bytes of the buffers that exchanges have taken, beside libtorch's allocator.
pub fn exchange_bytes() -> u64 {
    ranks::scratch_bytes()
}

fn lost(rank: usize, ranks: usize, e: &TorchError) -> Box<Error> {
    fail(format!(
        "rank {rank} of {ranks} has lost another rank, or waited too long for it: {}",
        e.message
    ))
    .help("see the output of the other ranks; --rank-timeout sets the time limit")
}

/// Ranks that exchange tensors.
#[derive(Clone, Debug)]
pub struct Group {
    /// The number of this rank, from 0.
    pub rank: i64,
    /// How many ranks there are.
    pub ranks: i64,
    name: String,
    /// Whether the others are there.
    is_joined: bool,
}

static TAG: AtomicI64 = AtomicI64::new(0);
static GROUPS: Mutex<BTreeMap<String, Group>> = Mutex::new(BTreeMap::new());

fn groups() -> MutexGuard<'static, BTreeMap<String, Group>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds the group that a graph calls `name`. Among all groups it has a name of its own.
fn put(name: &str, (own, (rank, ranks)): (String, (usize, usize)), is_joined: bool) -> Group {
    let group = Group {
        rank: rank as i64,
        ranks: ranks as i64,
        name: own,
        is_joined,
    };
    groups().insert(name.into(), group.clone());
    group
}

/// Has this process play one rank of a group by itself. What it receives is what it sent.
pub fn alone(name: &str, place: (usize, usize)) -> Group {
    put(name, (name.into(), place), false)
}

/// Returns the group of a name, which must have that many ranks, or [`ANY_RANKS`]. One rank needs no group.
pub(super) fn group(name: &str, ranks: i64) -> Result<Group> {
    if ranks == 1 {
        return Ok(Group {
            rank: 0,
            ranks,
            name: name.into(),
            is_joined: false,
        });
    }
    match groups().get(name) {
        None => Err(Error::usage(
            "ranks",
            "the graph is for several ranks, and this is one process",
        )
        .expected(match ranks {
            ANY_RANKS => "several ranks".into(),
            ranks => format!("{ranks} ranks"),
        })
        .help(HOW_TO_START)),
        Some(group) if ranks != ANY_RANKS && group.ranks != ranks => {
            Err(another_number(ranks as usize, group.ranks as usize))
        }
        Some(group) => Ok(group.clone()),
    }
}

impl Group {
    /// Takes a number for a sum: all ranks begin the same sums in the same order.
    pub(super) fn next_tag() -> i64 {
        // Tags are 31 bits wide.
        2 * (TAG.fetch_add(1, Ordering::Relaxed) % (1 << 29))
    }

    /// Sums tensors over the ranks: in place, or this rank's slices of the sums into `slices`. Alone, nothing is added.
    ///
    /// # Errors
    /// Another rank is gone or too late.
    pub fn add_up(&self, tag: i64, tensors: &[Tensor], slices: Option<&[Tensor]>) -> Result<()> {
        let place = (&*self.name, self.rank, self.ranks);
        match self.is_joined {
            true => ranks::sum(place, tag, tensors, slices).map_err(|e| self.lost(&e)),
            false => Ok(()),
        }
    }

    /// Returns true if the other ranks are not there: their slices stay as they are.
    pub fn is_alone(&self) -> bool {
        !self.is_joined
    }

    /// Fills the slices of a tensor with those of the ranks. They consist of rows of so many elements.
    ///
    /// # Errors
    /// Another rank is gone or too late.
    pub fn gather(&self, x: &Tensor, row: i64) -> Result<()> {
        match self.begin_gather(x, row)? {
            Some(gather) => self.end_gather(gather),
            None => Ok(()),
        }
    }

    /// Begins to gather. Alone or of nothing, there is nothing to wait for.
    ///
    /// # Errors
    /// Another rank is gone.
    pub(super) fn begin_gather(&self, x: &Tensor, row: i64) -> Result<Option<Gather>> {
        if !self.is_joined || self.ranks == 1 || x.numel() == 0 {
            return Ok(None);
        }
        let begun = Gather::begin(&self.name, x, &self.slice_bytes(x, row));
        begun.map(Some).map_err(|e| self.lost(&e))
    }

    /// Waits for a gather.
    ///
    /// # Errors
    /// Another rank is gone or too late.
    pub(super) fn end_gather(&self, gather: Gather) -> Result<()> {
        gather.wait().map_err(|e| self.lost(&e))
    }

    /// Returns the sum of a number of each rank.
    ///
    /// # Errors
    /// Another rank is gone or too late.
    pub fn sum(&self, number: u64) -> Result<u64> {
        let all = Tensor::from_slice(&[number as i64]);
        self.add_up(Group::next_tag(), std::slice::from_ref(&all), None)?;
        let sum = all.f_int64_value(&[0]).map_err(|e| tch_error(&e))?;
        Ok(sum as u64)
    }

    fn slice_bytes(&self, x: &Tensor, row: i64) -> Vec<i64> {
        let (rows, width) = (x.numel() as i64 / row, x.kind().elt_size_in_bytes() as i64);
        let bytes = |rank| slice_of(rows, self.ranks, rank).1 * row * width;
        (0..self.ranks).map(bytes).collect()
    }

    fn lost(&self, e: &TorchError) -> Box<Error> {
        lost(self.rank as usize, self.ranks as usize, e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<RankOptions>> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, text)| (*text).to_string())
        };
        RankOptions::read(&variable, Duration::from_secs(1))
    }

    #[test]
    fn ranks_are_read_as_torchrun_names_them() {
        let torchrun = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RESTART_COUNT", "3"),
        ];
        let found = read(&torchrun).unwrap().unwrap();
        assert_eq!((found.rank, found.ranks, &*found.attempt), (1, 2, "3"));
        let meeting = Meeting::Tcp {
            host: "localhost".into(),
            port: 29500,
            is_served: true,
        };
        assert_eq!(found.meeting, meeting);
        assert!(read(&[]).unwrap().is_none());
        assert!(
            read(&[("RANK", "0"), ("WORLD_SIZE", "1")])
                .unwrap()
                .is_none()
        );
        for (changed, to) in [(0, "2"), (0, "x"), (3, "70000")] {
            let mut wrong = torchrun;
            wrong[changed].1 = to;
            assert_eq!(read(&wrong).unwrap_err().exit_code(), 5, "{wrong:?}");
        }
        assert_eq!(read(&torchrun[..2]).unwrap_err().exit_code(), 5);
    }
}
