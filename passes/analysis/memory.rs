//! Which values share storage, when storage dies, and how many bytes are alive at every node.
//!
//! Memory counts storages, not tensors. Each op's `memory` rule says, at known sizes and operand strides, whether a
//! result is new or a view of an operand. One walk over `order` gives every value its storage and strides.
//!
//! A storage dies with the last of its values ([`Liveness`]). While a node runs, its operands, results and temporaries are
//! all alive. The exception is a kernel that writes its result over an operand that dies there. Such an operand is whole
//! (no view of a part), neither static nor a graph output, and of the result's type and layout, and no other operand
//! shares its storage.
//!
//! Offloaded storages (`Place::Outside`) live and die by the same rules and count apart.
//!
//! Inputs and initializers are static: resident throughout. The result of an update
//! ([`crate::ir::OpDef::is_update`]) is its operand one training step later. It lies in the static storage of that operand
//! and takes no bytes, if nothing reads the operand afterwards, graph outputs included. Otherwise it is new and lives to
//! the end.
//!
//! The executor frees by the same [`Liveness`], so that prediction and run cannot drift apart. Linear in nodes and
//! operands.

use crate::analysis::device::round_up;
use crate::analysis::fused_updates::{self, FusedUpdate, UpdateFormula};
use crate::analysis::liveness::Liveness;
use crate::analysis::sizes::Sizes;
use crate::error::{Error, Result};
use crate::ir::op::{DeviceKind, Footprint, MemoryCx, Place, Sized, contiguous_strides};
use crate::ir::{DType, Def, Graph, NodeId, SecondaryMap, ValueId};
use crate::ops::collective::reads_contents;

/// A block of memory that one or more values live in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StorageId(pub u32);

/// Lifetime and size of one storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Storage {
    /// Size in bytes, rounded up to the profile's granularity unless the storage is outside.
    pub bytes: u64,
    /// The value that was made with it; others are views.
    pub first: ValueId,
    /// An input or initializer: never freed.
    pub is_static: bool,
    /// Not in the device's memory.
    pub is_outside: bool,
    /// Position in `order` where it is made; 0 for static ones.
    pub born: usize,
    /// Position after which it is freed; `None` if it lives to the end.
    pub dies: Option<usize>,
    /// The storage that is written over this one where it dies, and goes on in its place.
    pub taken_by: Option<StorageId>,
    /// The static storage that this one is a later state of: it lies there, without bytes of its own, if nothing reads the
    /// earlier state once this one is made.
    pub renews: Option<StorageId>,
}

/// Where a value lives and how it is laid out there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The storage that holds the elements; a view shares that of its operand.
    pub storage: StorageId,
    /// In elements; row-major for what is not a view.
    pub strides: Vec<i64>,
    /// For a view: the operand slot it looks into.
    pub view_of: Option<usize>,
}

/// How a storage comes to be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lasting {
    Static,
    Made,
    Outside,
}

/// The memory of one run.
#[derive(Clone, Debug)]
pub struct MemoryProfile {
    /// All storages of the run, indexed by [`StorageId`].
    pub storages: Vec<Storage>,
    /// The kind of device that kernels run on.
    pub device: DeviceKind,
    /// Blocks are multiples of this.
    pub granularity_bytes: u64,
    layouts: SecondaryMap<ValueId, Option<Layout>>,
    /// Bytes of inputs and initializers.
    pub static_bytes: u64,
    /// Static bytes plus the largest entry of the timeline.
    pub peak_bytes: u64,
    /// The first node at which the peak is reached; `None` where nothing above static is ever alive.
    pub at: Option<NodeId>,
    /// Bytes above static while the node at each position of `order` runs, its temporaries included.
    pub timeline_bytes: Vec<u64>,
    /// Temporaries of the node at each position.
    pub temp_bytes: Vec<u64>,
    /// The most bytes that are outside the device's memory at once.
    pub outside_peak_bytes: u64,
    /// Storages that die right after the node at each position.
    pub frees: Vec<Vec<StorageId>>,
    /// Operand slots that the node at each position can write its first result over, if they die there.
    pub in_place_operands: Vec<Vec<usize>>,
    /// The one of them that it does write over.
    pub taken: Vec<Option<usize>>,
    /// Updates that the device computes in one call each.
    pub fused_updates: Vec<FusedUpdate>,
    /// By storage: the last position that makes or reads it, whether it dies there or not; `usize::MAX` for one that is
    /// needed at the end.
    last_read: Vec<usize>,
}

impl MemoryProfile {
    /// Memory in requested bytes, as CPU allocators are counted.
    ///
    /// # Errors
    /// A `bug` where a rule describes results that its node does not have.
    pub fn new(graph: &Graph, sizes: &Sizes) -> Result<MemoryProfile> {
        MemoryProfile::of_device(graph, sizes, DeviceKind::Cpu, 1)
    }

    /// Memory on a kind of device, in blocks that its allocator rounds up to a multiple of `granularity_bytes`. How many
    /// blocks the temporaries of a kernel are is not known: they are rounded as one.
    ///
    /// # Errors
    /// See [`MemoryProfile::new`].
    pub fn of_device(
        graph: &Graph,
        sizes: &Sizes,
        device: DeviceKind,
        granularity_bytes: u64,
    ) -> Result<MemoryProfile> {
        let mut profile = MemoryProfile {
            device,
            granularity_bytes,
            storages: Vec::new(),
            layouts: SecondaryMap::new(graph.value_bound(), None),
            static_bytes: 0,
            peak_bytes: 0,
            at: None,
            outside_peak_bytes: 0,
            timeline_bytes: Vec::with_capacity(graph.order().len()),
            temp_bytes: Vec::with_capacity(graph.order().len()),
            frees: vec![Vec::new(); graph.order().len()],
            in_place_operands: Vec::with_capacity(graph.order().len()),
            taken: vec![None; graph.order().len()],
            fused_updates: Vec::new(),
            last_read: Vec::new(),
        };
        for (value, v) in graph.values() {
            if !matches!(v.def, Def::Node { .. }) {
                profile.make(value, sizes.of(value), Lasting::Static, 0);
            }
            // A run leaves in its file what nothing reads.
            if matches!(v.def, Def::Init(_)) && !reads_contents(graph, value) {
                let storage = profile.layout(value).storage;
                profile.storages[storage.0 as usize].bytes = 0;
            }
        }
        for (position, id) in graph.order().iter().enumerate() {
            profile.place(graph, *id, sizes, position)?;
        }
        if device == DeviceKind::Cuda {
            profile.fuse_updates(graph, sizes);
        }
        profile.end_lives(graph);
        profile.take_over(graph);
        profile.count(graph);
        Ok(profile)
    }

    fn make(&mut self, value: ValueId, sized: &Sized, lasting: Lasting, born: usize) {
        let storage = StorageId(self.storages.len() as u32);
        let is_static = lasting == Lasting::Static;
        let is_outside = lasting == Lasting::Outside;
        self.last_read.push(born);
        self.storages.push(Storage {
            bytes: match is_outside {
                true => sized.bytes(),
                false => round_up(sized.bytes(), self.granularity_bytes),
            },
            first: value,
            is_static,
            is_outside,
            born,
            dies: None,
            taken_by: None,
            renews: None,
        });
        self.layouts[value] = Some(Layout {
            storage,
            strides: contiguous_strides(&sized.dims),
            view_of: None,
        });
    }

    /// Gives the results of a node their storages and strides.
    fn place(&mut self, graph: &Graph, id: NodeId, sizes: &Sizes, position: usize) -> Result<()> {
        let node = graph.node(id);
        let ins: Vec<Option<Sized>> = node
            .ins
            .iter()
            .map(|v| v.map(|v| self.operand(sizes, v)))
            .collect();
        let outs: Vec<Sized> = node.outs.iter().map(|v| sizes.of(*v).clone()).collect();
        let footprint: Footprint = (node.op.memory)(&MemoryCx {
            attrs: &node.attrs,
            ins: &ins,
            outs: &outs,
            device: self.device,
        });
        let bug = |what: &str| {
            Err(Error::bug(
                "memory",
                format!("the memory rule of {} {what}", node.op.name),
            )
            .at(graph.describe(id)))
        };
        if footprint.outs.len() != outs.len() {
            return bug("does not describe every result");
        }
        for (i, place) in footprint.outs.into_iter().enumerate() {
            let value = node.outs[i];
            match place {
                Place::Fresh => self.make(value, &outs[i], Lasting::Made, position),
                Place::Outside => self.make(value, &outs[i], Lasting::Outside, position),
                Place::View { of, strides } => {
                    let Some(operand) = node.ins.get(of).copied().flatten() else {
                        return bug("makes a view of an operand that is not given");
                    };
                    if strides.len() != outs[i].dims.len() {
                        return bug("gives a view the wrong number of strides");
                    }
                    let storage = self.layout(operand).storage;
                    let cut = cut_by_data(graph, sizes, (operand, value));
                    let strides = strides.into_iter().enumerate();
                    let with_gaps = |(axis, stride)| match cut.is_some_and(|cut| axis < cut) {
                        true => 2 * stride,
                        false => stride,
                    };
                    self.layouts[value] = Some(Layout {
                        storage,
                        strides: strides.map(with_gaps).collect(),
                        view_of: Some(of),
                    });
                }
            }
        }
        let temp_bytes = round_up(footprint.temp_bytes, self.granularity_bytes);
        self.temp_bytes.push(temp_bytes);
        let mut over = footprint.in_place_operands;
        over.retain(|slot| match self.renews(graph, id, *slot) {
            true => true,
            // What a size that depends on data leaves of a storage is not known beforehand.
            false => sizes.bounded.is_empty() && self.may_take(graph, id, *slot),
        });
        if let (Some(slot), Some(out)) = (over.first(), node.outs.first())
            && self.renews(graph, id, *slot)
        {
            let old = node.ins[*slot].map(|v| self.layout(v).storage);
            let new = self.layout(*out).storage;
            self.storages[new.0 as usize].renews = old;
        }
        self.in_place_operands.push(over);
        Ok(())
    }

    /// Whether the result of a node is a later state of a static operand, whole and read there only once.
    fn renews(&self, graph: &Graph, id: NodeId, slot: usize) -> bool {
        let node = graph.node(id);
        let (Some(Some(operand)), Some(out)) = (node.ins.get(slot), node.outs.first()) else {
            return false;
        };
        let (old, new) = (self.layout(*operand).storage, self.storage(*out));
        let reads_it =
            |other: &&Option<ValueId>| other.is_some_and(|v| self.layout(v).storage == old);
        node.op.is_update()
            && self.storages[old.0 as usize].is_static
            && self.storages[old.0 as usize].first == *operand
            && self.storages[old.0 as usize].bytes == new.bytes
            && new.first == *out
            && node.ins.iter().filter(reads_it).count() == 1
    }

    /// Whether the first result of a node may be written over an operand, if that dies there.
    fn may_take(&self, graph: &Graph, id: NodeId, slot: usize) -> bool {
        let node = graph.node(id);
        let (Some(Some(operand)), Some(out)) = (node.ins.get(slot), node.outs.first()) else {
            return false;
        };
        let (from, to) = (self.layout(*operand), self.layout(*out));
        let (old, new) = (self.storage(*operand), self.storage(*out));
        // Copies count as what they are copies of, as a plan that was made before there were copies sees them.
        let root = graph.origin(old.first);
        let reads_it = |other: &Option<ValueId>| {
            other.is_some_and(|v| graph.origin(self.storage(v).first) == root)
        };
        !old.is_static
            && old.renews.is_none()
            && new.first == *out
            && old.bytes > 0
            && old.bytes == new.bytes
            && from.strides == to.strides
            && node.ins.iter().filter(|v| reads_it(v)).count() == 1
    }

    /// Finds updates whose tensors are all row-major, of static tensors by one that is not. They take no memory but the number of the step in float32.
    fn fuse_updates(&mut self, graph: &Graph, sizes: &Sizes) {
        let mut found = fused_updates::find(graph);
        found.retain(|update| {
            let old = |at: &usize| graph.node(graph.order()[*at]).operand(0);
            let states = update.states.iter().filter_map(old);
            let mut written = states.chain([update.parameter]);
            let is_static = |v: ValueId| self.storage(v).is_static;
            let is_row_major = |v: ValueId| self.operand(sizes, v).is_contiguous();
            sizes.of(update.parameter).elements() > 0
                && is_row_major(update.gradient)
                && !is_static(update.gradient)
                && written.all(|v| is_row_major(v) && is_static(v))
        });
        for update in &found {
            for at in &update.states {
                self.temp_bytes[*at] = 0;
            }
            let step_bytes = match update.formula {
                UpdateFormula::AdamW { .. } => DType::F32.size_bytes(),
                UpdateFormula::Sgd { .. } => 0,
            };
            self.temp_bytes[update.at] = round_up(step_bytes, self.granularity_bytes);
        }
        self.fused_updates = found;
    }

    /// Ends the life of each storage with the last of its values.
    fn end_lives(&mut self, graph: &Graph) {
        let liveness = Liveness::with_updates(graph, &self.fused_updates);
        for (value, _) in graph.values() {
            let Some(layout) = &self.layouts[value] else {
                continue;
            };
            let at = layout.storage.0 as usize;
            let last = match liveness.lives_on(value) {
                true => usize::MAX,
                false => liveness.last_use(value).unwrap_or(0),
            };
            self.last_read[at] = self.last_read[at].max(last);
        }
        for (storage, last) in self.storages.iter_mut().zip(&self.last_read) {
            let dies = !storage.is_static && *last != usize::MAX;
            storage.dies = dies.then_some(*last);
        }
    }

    /// Settles which results overwrite a storage that dies.
    fn take_over(&mut self, graph: &Graph) {
        for (position, id) in graph.order().iter().enumerate() {
            let node = graph.node(*id);
            let dying = self.in_place_operands[position].iter().find_map(|slot| {
                let storage = self.layout(node.ins[*slot]?).storage;
                let old = &self.storages[storage.0 as usize];
                let is_last = match old.is_static {
                    true => self.last_read[storage.0 as usize] == position,
                    false => old.dies == Some(position),
                };
                is_last.then_some((*slot, storage))
            });
            if let (Some((slot, storage)), Some(out)) = (dying, node.outs.first()) {
                let by = self.layout(*out).storage;
                self.taken[position] = Some(slot);
                let new = &mut self.storages[by.0 as usize];
                if new.renews == Some(storage) {
                    (new.bytes, new.is_static, new.dies) = (0, true, None);
                } else {
                    self.storages[storage.0 as usize].taken_by = Some(by);
                }
            }
        }
    }

    fn operand(&self, sizes: &Sizes, value: ValueId) -> Sized {
        let mut sized = sizes.of(value).clone();
        sized.strides = self.layout(value).strides.clone();
        sized
    }

    fn count(&mut self, graph: &Graph) {
        let mut births = vec![0u64; self.frees.len()];
        let mut births_outside = vec![0u64; self.frees.len()];
        for (i, s) in self.storages.iter().enumerate() {
            if s.is_static {
                self.static_bytes += s.bytes;
                continue;
            }
            match s.is_outside {
                true => births_outside[s.born] += s.bytes,
                false => births[s.born] += s.bytes,
            }
            if let Some(dies) = s.dies {
                self.frees[dies].push(StorageId(i as u32));
            }
        }
        let (mut live, mut peak, mut outside) = (0, 0, 0);
        for (position, born) in births.into_iter().enumerate() {
            live += born;
            let freed = self.frees[position].iter();
            let taken = freed.map(|s| &self.storages[s.0 as usize]);
            let taken = taken.filter(|s| s.taken_by.is_some()).map(|s| s.bytes);
            let now = live + self.temp_bytes[position] - taken.sum::<u64>();
            self.timeline_bytes.push(now);
            if now > peak {
                peak = now;
                self.at = Some(graph.order()[position]);
            }
            outside += births_outside[position];
            self.outside_peak_bytes = self.outside_peak_bytes.max(outside);
            for storage in &self.frees[position] {
                let storage = &self.storages[storage.0 as usize];
                match storage.is_outside {
                    true => outside -= storage.bytes,
                    false => live -= storage.bytes,
                }
            }
        }
        self.peak_bytes = self.static_bytes + peak;
    }

    /// Counts again with other temporaries of some nodes, by position: kernels that do not keep to their op's rule.
    pub fn replace_temporaries(&mut self, graph: &Graph, by: &[(usize, u64)]) {
        for (position, bytes) in by {
            let bytes = round_up(*bytes, self.granularity_bytes);
            let before = std::mem::replace(&mut self.temp_bytes[*position], bytes);
            let now = &mut self.timeline_bytes[*position];
            *now = *now - before + bytes;
        }
        let peak = self.timeline_bytes.iter().copied().max().unwrap_or(0);
        let at = self.timeline_bytes.iter().position(|b| *b == peak);
        self.at = at.filter(|_| peak > 0).map(|at| graph.order()[at]);
        self.peak_bytes = self.static_bytes + peak;
    }

    /// Storage and strides of a value.
    ///
    /// # Panics
    /// If the value was added after the profile was made: our bug.
    pub fn layout(&self, value: ValueId) -> &Layout {
        self.layouts[value].as_ref().unwrap_or_else(|| {
            panic!("{value:?} has no layout: the profile is older than the graph")
        })
    }

    /// Returns the storage of a value. Panics like [`MemoryProfile::layout`].
    pub fn storage(&self, value: ValueId) -> &Storage {
        &self.storages[self.layout(value).storage.0 as usize]
    }
}

/// Returns the last axis of which a view takes a part, if data decides how much. At its bound the part is whole, but in a run
/// there are gaps between its rows, and kernels may copy it. So it is given gaps.
fn cut_by_data(graph: &Graph, sizes: &Sizes, (from, to): (ValueId, ValueId)) -> Option<usize> {
    if !sizes.is_bound() {
        return None;
    }
    let (from, to) = (&graph.ty(from).dims, &graph.ty(to).dims);
    let is_cut = |axis: &usize| from[*axis] != to[*axis] && !to[*axis].is_over_names();
    let same_rank = from.len() == to.len();
    (0..to.len()).rev().filter(|_| same_rank).find(is_cut)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Binding;
    use crate::ir::{Attrs, Dim, Ty};
    use crate::ops::{Builder, EmitExt};
    use crate::testing::LOOK;

    #[test]
    fn storages_die_after_the_last_use_of_any_view() {
        let mut g = Graph::new("g");
        let x = g.add_input("x", Some(Ty::new(DType::F32, [Dim::from(10)])));
        let mut b = Builder::new(&mut g);
        let a = b.neg(x).unwrap();
        let view = b.emit(&LOOK, &[a], Attrs::new()).unwrap();
        let unread = b.neg(x).unwrap();
        let beside = b.neg(view).unwrap();
        let over = b.neg(view).unwrap();
        g.set_outputs(vec![beside, over]);
        let sizes = Sizes::new(&g, &Binding::new(&g, &[]).unwrap()).unwrap();
        let m = MemoryProfile::new(&g, &sizes).unwrap();
        assert_eq!(m.static_bytes, 40);
        assert_eq!(m.timeline_bytes, [40, 43, 80, 80, 80]);
        assert_eq!((m.peak_bytes, m.at), (120, Some(g.order()[2])));
        assert_eq!(m.layout(a).storage, m.layout(view).storage);
        assert_eq!(m.frees[2], [m.layout(unread).storage]);
        // The last reader of any view writes over what it reads.
        assert_eq!(m.storage(a).dies, Some(4));
        assert_eq!(m.storage(a).taken_by, Some(m.layout(over).storage));
        assert_eq!(m.storage(beside).dies, None);
    }

    #[test]
    fn no_elements_no_bytes() {
        let mut g = Graph::new("g");
        let x = g.add_input(
            "x",
            Some(Ty::new(DType::F32, [Dim::from(0), Dim::symbol("n")])),
        );
        let mut b = Builder::new(&mut g);
        let y = b.neg(x).unwrap();
        g.set_outputs(vec![y]);
        let sizes = Sizes::new(&g, &Binding::new(&g, &[]).unwrap()).unwrap();
        let m = MemoryProfile::new(&g, &sizes).unwrap();
        assert_eq!((m.peak_bytes, m.at), (0, None));
    }
}
