//! Memory over a schedule: the steps from and to which each storage is held, and what it is used for.
//!
//! The judge of plans computes it, so the sum of all kinds at the peak is the predicted peak, byte for byte. While a step
//! runs, its operands, results and temporaries are all held.

use super::terms::Terms;
use super::words::words;
use crate::planning::labels::Role;
use ckpt_passes::Result;
use ckpt_passes::plan::plan::copies;
use ckpt_passes::plan::schedule::Timeline;
use ckpt_passes::plan::{OpIdx, OpPhase, Schedule, Step, ValueIdx, ValueKind};
use serde::Serialize;

words! {
    /// The use of a storage.
    pub enum Kind {
        /// Initializers.
        Parameters = "parameters",
        /// Inputs of the graph.
        Inputs = "inputs",
        /// Gradients that leave the graph or update a parameter, from the step that adds their last term.
        Gradients = "gradients",
        /// Other outputs of the graph.
        Outputs = "outputs",
        /// Results of the forward pass, computed for the first time.
        Activations = "activations",
        /// Recomputed results.
        Recomputed = "recomputed",
        /// Offloaded results that are back.
        Fetched = "fetched",
        /// Results of the backward pass that no gradient is made of yet.
        Cotangents = "cotangents",
        /// Temporaries inside the kernel that runs.
        Temporaries = "temporaries",
        /// State of an optimizer.
        State = "state",
    }
}

/// The number of kinds.
pub const KINDS: usize = Kind::ALL.len();

/// A storage, and the steps over which it is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// The value that owns it.
    pub value: ValueIdx,
    /// What the storage is used for.
    pub kind: Kind,
    /// The layer that makes it.
    pub layer: Option<usize>,
    /// Size of the storage.
    pub bytes: u64,
    /// The first step at which it is held, and the one after the last.
    pub from: usize,
    /// The step after the last at which it is held.
    pub until: usize,
    /// True if it is never freed: an output, or resident from the start.
    pub stays: bool,
}

/// A storage or temporary that is held at one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Held {
    /// The value, or the op whose kernel takes temporaries.
    pub name: String,
    /// What it is used for.
    pub kind: Kind,
    /// The layer that makes it; `None` outside of layers, for static storages and for temporaries.
    pub layer: Option<usize>,
    /// Size of the storage, or of all temporaries together.
    pub bytes: u64,
}

/// The memory of one schedule.
#[derive(Clone)]
pub struct Memory<'a> {
    /// The problem that the schedule is for, with its labels.
    pub terms: Terms<'a>,
    /// The schedule whose steps all the lists go by.
    pub schedule: Schedule,
    /// By step: true if it recomputes its op.
    pub is_recompute: Vec<bool>,
    /// Static storages first, then in the order of their steps.
    pub tenants: Vec<Tenant>,
    /// By step: temporaries of its kernel.
    pub temp_bytes: Vec<u64>,
    /// By step: all bytes held, static bytes and temporaries included.
    pub live_bytes: Vec<u64>,
    /// Bytes of static storages, which are held throughout.
    pub static_bytes: u64,
    /// The most bytes held at any step, static bytes included.
    pub peak_bytes: u64,
    /// The first step that reaches the peak; `None` where nothing above static is ever held.
    pub peak_step: Option<usize>,
}

impl<'a> Memory<'a> {
    /// Computes the memory of a schedule, in time linear in the operands of its steps.
    ///
    /// # Errors
    /// A schedule that cannot run; see [`ckpt_passes::plan::evaluate`].
    pub fn new(terms: Terms<'a>, schedule: Schedule) -> Result<Memory<'a>> {
        let (problem, labels) = (terms.problem, terms.labels);
        let layer_of = &terms.annotations.layer_of;
        let Timeline {
            live_bytes,
            instances,
            written_over,
        } = Timeline::new(problem, &schedule.steps)?;
        let is_recompute = copies(problem, &schedule.steps);
        let steps = schedule.steps.len();
        // An in-place result takes the storage of an operand, which is gone when the step begins.
        let mut is_taken_over = vec![false; instances.len()];
        for i in written_over.into_iter().flatten() {
            is_taken_over[i] = true;
        }
        // Results that are about to leave count as temporaries of their kernel.
        let leaves = |op: OpIdx| schedule.offloaded.binary_search(&op).is_ok();
        let mut tenants = Vec::new();
        for (v, value) in problem.values.enumerated() {
            if value.kind == ValueKind::Static && value.producer.is_none() {
                tenants.push(Tenant {
                    value: v,
                    kind: match labels.roles[v] {
                        Role::Input => Kind::Inputs,
                        Role::State => Kind::State,
                        _ => Kind::Parameters,
                    },
                    layer: None,
                    bytes: value.bytes,
                    from: 0,
                    until: steps,
                    stays: true,
                });
            }
        }
        for (instance, is_taken_over) in instances.into_iter().zip(is_taken_over) {
            let Some(last) = instance.last else { continue };
            let v = instance.value;
            let op = problem.values[v].producer;
            let kind = match (op, last == steps, labels.roles[v]) {
                (None, ..) => Kind::Inputs,
                (Some(_), _, Role::Gradient) => Kind::Gradients,
                (_, true, _) => Kind::Outputs,
                (Some(_), ..) if is_recompute[instance.born] => match schedule.steps[instance.born]
                {
                    Step::Fetch(_) => Kind::Fetched,
                    _ => Kind::Recomputed,
                },
                (Some(op), ..) if problem.ops[op].phase == OpPhase::Backward => Kind::Cotangents,
                _ => Kind::Activations,
            };
            tenants.push(Tenant {
                value: v,
                kind,
                layer: op.and_then(|op| layer_of[op]),
                bytes: instance.bytes,
                from: match op {
                    Some(op) if leaves(op) && !is_recompute[instance.born] => instance.born + 1,
                    _ => instance.born,
                },
                until: if is_taken_over {
                    last
                } else {
                    (last + 1).min(steps)
                },
                stays: last == steps,
            });
        }
        let static_bytes = problem.static_bytes();
        let live_bytes: Vec<u64> = live_bytes.iter().map(|b| b + static_bytes).collect();
        let temp_bytes = |step: &Step| match *step {
            Step::Run(op) if leaves(op) => problem.ops[op].temp_bytes + problem.result_bytes(op),
            Step::Run(op) => problem.ops[op].temp_bytes,
            Step::Offload(_) | Step::Release(_) | Step::Fetch(_) => 0,
        };
        let temp_bytes = schedule.steps.iter().map(temp_bytes).collect();
        let mut memory = Memory {
            temp_bytes,
            terms,
            schedule,
            is_recompute,
            tenants,
            static_bytes,
            peak_bytes: static_bytes,
            peak_step: None,
            live_bytes,
        };
        for (step, live) in memory.live_bytes.iter().enumerate() {
            if *live > memory.peak_bytes {
                memory.peak_bytes = *live;
                memory.peak_step = Some(step);
            }
        }
        Ok(memory)
    }

    /// Returns the bytes held at a step by kind, in time linear in tenants; without steps, the static bytes.
    pub fn kinds_at(&self, step: usize) -> [u64; KINDS] {
        let mut bytes = [0; KINDS];
        for t in self.tenants_at(step) {
            bytes[t.kind as usize] += t.bytes;
        }
        bytes[Kind::Temporaries as usize] += self.temp_bytes.get(step).copied().unwrap_or(0);
        bytes
    }

    /// Returns the storages held at a step; without steps, the static storages.
    pub fn tenants_at(&self, step: usize) -> impl Iterator<Item = &Tenant> {
        let is_empty = self.schedule.steps.is_empty();
        self.tenants
            .iter()
            .filter(move |t| is_empty || t.from <= step && step < t.until)
    }

    /// Returns the bytes by kind at every step.
    pub fn kinds(&self) -> Vec<[u64; KINDS]> {
        let mut change = vec![[0i64; KINDS]; self.schedule.steps.len() + 1];
        for t in &self.tenants {
            change[t.from][t.kind as usize] += t.bytes as i64;
            change[t.until][t.kind as usize] -= t.bytes as i64;
        }
        let mut now = [0i64; KINDS];
        let mut all = Vec::with_capacity(self.schedule.steps.len());
        for (step, change) in change.iter().take(self.schedule.steps.len()).enumerate() {
            for (now, change) in now.iter_mut().zip(change) {
                *now += change;
            }
            let mut row = now.map(|b| b as u64);
            row[Kind::Temporaries as usize] += self.temp_bytes[step];
            all.push(row);
        }
        all
    }

    /// Returns what is held at the peak, largest first, with the kernel's temporaries.
    pub fn at_peak(&self) -> Vec<Held> {
        let (problem, labels) = (&self.terms.problem, &self.terms.labels);
        let step = self.peak_step.unwrap_or(0);
        let held = |t: &Tenant| Held {
            name: labels.names[t.value].clone(),
            kind: t.kind,
            layer: t.layer,
            bytes: t.bytes,
        };
        let mut all: Vec<Held> = self.tenants_at(step).map(held).collect();
        if let (Some(step), Some(temp)) = (self.peak_step, self.temp_bytes.get(step))
            && *temp > 0
        {
            all.push(Held {
                name: problem.ops[self.schedule.steps[step].op()].name.clone(),
                kind: Kind::Temporaries,
                layer: None,
                bytes: *temp,
            });
        }
        all.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
        all
    }

    /// Returns the name of the node that runs at the peak.
    pub fn peak_node(&self) -> Option<&str> {
        let step = self.peak_step?;
        Some(&self.terms.problem.ops[self.schedule.steps[step].op()].name)
    }
}

/// Finds the largest entry of any range of a list in logarithmic time.
pub struct Highest {
    tree: Vec<u64>,
    leaves: usize,
}

impl Highest {
    /// Builds the search tree of a list, in linear time.
    pub fn new(list: &[u64]) -> Highest {
        let leaves = list.len().max(1);
        let mut tree = vec![0; 2 * leaves];
        tree[leaves..leaves + list.len()].copy_from_slice(list);
        for i in (1..leaves).rev() {
            tree[i] = tree[2 * i].max(tree[2 * i + 1]);
        }
        Highest { tree, leaves }
    }

    /// Returns the largest of the entries `from..to`; 0 for an empty range.
    pub fn of(&self, from: usize, to: usize) -> u64 {
        let (mut low, mut high) = (from + self.leaves, to + self.leaves);
        let mut most = 0;
        while low < high {
            if low & 1 == 1 {
                most = most.max(self.tree[low]);
                low += 1;
            }
            if high & 1 == 1 {
                high -= 1;
                most = most.max(self.tree[high]);
            }
            (low, high) = (low / 2, high / 2);
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planning::labels::Labels;
    use ckpt_passes::plan::{OpAnnotations, PlanInput, Policy, evaluate, saved_set};
    use ckpt_passes::testing::Random;
    use ckpt_passes::testing::dags::{Shape, random_dag};

    #[test]
    fn kinds_add_up_to_the_peak_that_is_predicted() {
        let mut r = Random(5);
        let mut seen = [0u64; KINDS];
        for n in 0..200 {
            let shape = [Shape::Any, Shape::Training][n % 2];
            let problem = random_dag(&mut r, 4 + n % 30, shape);
            let labels = Labels::unknown(&problem);
            let annotations = OpAnnotations::unknown(problem.ops.len());
            let input = PlanInput::new(problem.clone(), annotations.clone());
            let keep = problem.values.iter().map(|_| r.below(3) == 0).collect();
            let none = Policy::NONE.plan(&input).unwrap();
            let kept = saved_set::schedule(&problem, &keep);
            let kept = Schedule::new(kept.iter().map(Step::from).collect());
            for schedule in [none.schedule, kept] {
                let score = evaluate(&problem, &schedule.steps).unwrap();
                let terms = Terms {
                    problem: &problem,
                    annotations: &annotations,
                    labels: &labels,
                };
                let memory = Memory::new(terms, schedule).unwrap();
                assert_eq!(
                    (memory.peak_bytes, memory.peak_step),
                    (score.peak_bytes, score.at_step)
                );
                for (step, row) in memory.kinds().iter().enumerate() {
                    assert_eq!(row.iter().sum::<u64>(), memory.live_bytes[step]);
                    assert_eq!(*row, memory.kinds_at(step));
                    for (seen, bytes) in seen.iter_mut().zip(row) {
                        *seen += bytes;
                    }
                }
                let held = memory.at_peak();
                let total: u64 = held.iter().map(|h| h.bytes).sum();
                assert_eq!(total, memory.peak_bytes);
                assert!(held.windows(2).all(|w| w[0].bytes >= w[1].bytes));
            }
        }
        for kind in [
            Kind::Parameters,
            Kind::Activations,
            Kind::Recomputed,
            Kind::Cotangents,
            Kind::Outputs,
        ] {
            assert!(seen[kind as usize] > 0, "{}", kind.word());
        }
    }

    #[test]
    fn the_highest_of_a_stretch() {
        let list = [3, 1, 4, 1, 5, 9, 2, 6];
        let highest = Highest::new(&list);
        for from in 0..list.len() {
            for to in from..=list.len() {
                let expected = list[from..to].iter().copied().max().unwrap_or(0);
                assert_eq!(highest.of(from, to), expected);
            }
        }
        assert_eq!(Highest::new(&[]).of(0, 0), 0);
    }
}
