//! A schedule whose repeats can be taken out one by one, with the peak known after each.
//!
//! Steps keep their slots. For each value the ledger holds its events in order: where it is made and where it is used. Live bytes
//! are a [`RangeMax`] over slots. Taking out a repeat moves the readers of its results to
//! the instance before and shortens the life of what it read. Each is one range, so a removal costs O(operands · log
//! steps). Every change is logged and can be undone.

use super::compact::{Dag, NONE};
use super::simulate::{Simulation, first_runs};
use crate::range_max::RangeMax;

/// Something that happens to a value at a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub slot: u32,
    pub made: bool,
}

/// The events of all values, each value's in one stretch of a list; a stretch can shrink and grow back.
pub(super) struct Events {
    start: Vec<u32>,
    count: Vec<u32>,
    items: Vec<Event>,
}

impl Events {
    pub fn new(dag: &Dag, schedule: &[u32]) -> Events {
        let mut count = vec![0u32; dag.values()];
        for o in schedule {
            for v in dag.ins(*o).iter().chain(dag.outs(*o)) {
                count[*v as usize] += 1;
            }
        }
        for v in &dag.outputs {
            count[*v as usize] += 1;
        }
        let mut start = Vec::with_capacity(count.len());
        let mut total = 0;
        for n in &mut count {
            start.push(total);
            total += std::mem::take(n);
        }
        let nothing = Event {
            slot: 0,
            made: false,
        };
        let mut events = Events {
            start,
            count,
            items: vec![nothing; total as usize],
        };
        for (slot, o) in schedule.iter().enumerate() {
            for v in dag.ins(*o) {
                events.push(*v, slot as u32, false);
            }
            for v in dag.outs(*o) {
                events.push(*v, slot as u32, true);
            }
        }
        for v in &dag.outputs {
            events.push(*v, schedule.len() as u32, false);
        }
        events
    }

    fn push(&mut self, value: u32, slot: u32, made: bool) {
        let v = value as usize;
        self.items[(self.start[v] + self.count[v]) as usize] = Event { slot, made };
        self.count[v] += 1;
    }

    pub fn of(&self, value: u32) -> &[Event] {
        let from = self.start[value as usize] as usize;
        &self.items[from..from + self.count[value as usize] as usize]
    }

    fn take(&mut self, value: u32, at: usize) -> Event {
        let from = self.start[value as usize] as usize;
        let to = from + self.count[value as usize] as usize;
        let event = self.items[from + at];
        self.items.copy_within(from + at + 1..to, from + at);
        self.count[value as usize] -= 1;
        event
    }

    fn put_back(&mut self, value: u32, at: usize, event: Event) {
        let from = self.start[value as usize] as usize;
        let to = from + self.count[value as usize] as usize;
        self.items.copy_within(from + at..to, from + at + 1);
        self.items[from + at] = event;
        self.count[value as usize] += 1;
    }
}

enum Change {
    /// Bytes added to slots `from..to`.
    Bytes {
        from: u32,
        to: u32,
        amount: i64,
    },
    /// An event taken out of the list of a value.
    Event {
        value: u32,
        at: u32,
        event: Event,
    },
    Slot(u32),
    /// Whether a slot writes over an operand turned.
    Taken(u32),
}

/// A schedule and its live bytes, from which repeats can be taken out.
pub struct Ledger<'a> {
    dag: &'a Dag,
    ops: Vec<u32>,
    /// Whether a slot still runs.
    alive: Vec<bool>,
    first: Vec<bool>,
    /// Whether each slot writes over an operand.
    taken: Vec<bool>,
    events: Events,
    peaks: RangeMax,
    log: Vec<Change>,
    /// Removals and their parts so far, a measure of work.
    pub touched: u64,
}

/// Enough to take a dead slot out of every maximum.
const GONE: i64 = i64::MIN / 8;

impl<'a> Ledger<'a> {
    /// Builds the ledger of `schedule`; its slots are the positions in that schedule, and all of them run.
    pub fn new(dag: &'a Dag, schedule: &[u32]) -> Ledger<'a> {
        let mut simulation = Simulation::default();
        simulation.run(dag, schedule);
        let events = Events::new(dag, schedule);
        Ledger {
            dag,
            ops: schedule.to_vec(),
            alive: vec![true; schedule.len()],
            first: first_runs(dag, schedule),
            taken: simulation.taken,
            events,
            peaks: RangeMax::new(&simulation.live),
            log: Vec::new(),
            touched: 0,
        }
    }

    /// Returns the peak of the slots that still run, in bytes above static.
    pub fn peak(&self) -> i64 {
        self.peaks.largest()
    }

    /// Returns the slots of repeats that still run.
    pub fn repeats(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.ops.len()).filter(|t| self.alive[*t] && !self.first[*t])
    }

    /// Returns the op of a slot, whether or not the slot still runs.
    pub fn op(&self, slot: usize) -> u32 {
        self.ops[slot]
    }

    /// Returns true if a slot still runs.
    pub fn is_alive(&self, slot: usize) -> bool {
        self.alive[slot]
    }

    /// Returns the ops of the slots that still run, in order.
    pub fn schedule(&self) -> Vec<u32> {
        (0..self.ops.len())
            .filter(|t| self.alive[*t])
            .map(|t| self.ops[t])
            .collect()
    }

    /// Returns whether a slot is the second run of an op of which a second is demanded, as things stand.
    fn is_demanded(&self, slot: usize) -> bool {
        let op = self.ops[slot];
        let before = |v: &u32| {
            let events = self.events.of(*v).iter();
            let earlier = events.take_while(|e| (e.slot as usize) < slot);
            earlier.filter(|e| e.made).count() < 2
        };
        self.dag.must_repeat(op) && self.dag.outs(op).iter().any(before)
    }

    /// Takes out the repeat at `slot` and every repeat that only it read. Returns the weight saved.
    ///
    /// The slot must run and be a repeat.
    pub fn remove(&mut self, slot: usize) -> i64 {
        let mut saved = 0;
        let mut stack = vec![slot];
        while let Some(slot) = stack.pop() {
            if !std::mem::replace(&mut self.alive[slot], false) {
                continue;
            }
            self.log.push(Change::Slot(slot as u32));
            self.bytes(slot, slot + 1, GONE);
            let op = self.ops[slot];
            saved += self.dag.weight[op as usize];
            for v in self.dag.outs(op) {
                self.unmake(*v, slot as u32);
            }
            for v in self.dag.ins(op) {
                if let Some(maker) = self.unread(*v, slot as u32)
                    && !self.first[maker]
                    && self.idle(maker)
                {
                    stack.push(maker);
                }
            }
        }
        saved
    }

    /// Returns whether nothing reads what a slot makes.
    fn idle(&self, slot: usize) -> bool {
        self.dag.outs(self.ops[slot]).iter().all(|v| {
            let events = self.events.of(*v);
            let at = events.partition_point(|e| e.slot < slot as u32);
            events.get(at + 1).is_none_or(|e| e.made)
        })
    }

    /// Forgets that `slot` makes `v`: its readers read the instance before.
    fn unmake(&mut self, v: u32, slot: u32) {
        let events = self.events.of(v);
        let at = events.partition_point(|e| e.slot < slot);
        let read = events.get(at + 1).is_some_and(|e| !e.made);
        if read && at > 0 {
            let from = events[at - 1].slot + 1;
            self.bytes(from as usize, slot as usize, self.dag.size[v as usize]);
        }
        self.take(v, at);
        self.settle_before(v, at);
    }

    /// Forgets that `slot` reads `v`; gives the slot that made the instance if `slot` was its last reader.
    fn unread(&mut self, v: u32, slot: u32) -> Option<usize> {
        let events = self.events.of(v);
        let at = events.partition_point(|e| e.slot < slot);
        let last = events.get(at + 1).is_none_or(|e| e.made);
        let mut maker = None;
        if last {
            let from = if at > 0 { events[at - 1].slot + 1 } else { 0 };
            if at > 0 && events[at - 1].made {
                maker = Some(events[at - 1].slot as usize);
            }
            self.bytes(from as usize, slot as usize + 1, -self.dag.size[v as usize]);
        }
        self.take(v, at);
        self.settle_before(v, at);
        maker
    }

    /// Settles anew whether the slot of the event of `v` before the event `at` writes over an operand: what comes after
    /// it has changed.
    fn settle_before(&mut self, v: u32, at: usize) {
        let Some(event) = at.checked_sub(1).and_then(|i| self.events.of(v).get(i)) else {
            return;
        };
        let slot = event.slot as usize;
        let over = match self.ops.get(slot) {
            Some(op) if self.alive[slot] => self.dag.in_place_operands(*op),
            _ => return,
        };
        let is_last = |v: &u32| {
            let events = self.events.of(*v);
            let next = events.partition_point(|e| e.slot <= slot as u32);
            events.get(next).is_none_or(|e| e.made)
        };
        let takes = over.iter().any(is_last);
        if takes != self.taken[slot] {
            let bytes = self.dag.over_bytes(self.ops[slot]);
            self.taken[slot] = takes;
            self.log.push(Change::Taken(slot as u32));
            self.bytes(slot, slot + 1, if takes { -bytes } else { bytes });
        }
    }

    fn take(&mut self, value: u32, at: usize) {
        self.touched += 4 + (self.events.of(value).len() - at) as u64 / 8;
        let event = self.events.take(value, at);
        self.log.push(Change::Event {
            value,
            at: at as u32,
            event,
        });
    }

    fn bytes(&mut self, from: usize, to: usize, amount: i64) {
        let to = to.min(self.ops.len());
        if from < to {
            self.touched += 8;
            self.peaks.add(from..to, amount);
            self.log.push(Change::Bytes {
                from: from as u32,
                to: to as u32,
                amount,
            });
        }
    }

    /// Accepts every change so far.
    pub fn accept(&mut self) {
        self.log.clear();
    }

    /// Takes back every change since the last [`Ledger::accept`].
    pub fn undo(&mut self) {
        while let Some(change) = self.log.pop() {
            match change {
                Change::Bytes { from, to, amount } => {
                    self.touched += 8;
                    self.peaks.add(from as usize..to as usize, -amount);
                }
                Change::Event { value, at, event } => {
                    self.events.put_back(value, at as usize, event);
                }
                Change::Slot(slot) => self.alive[slot as usize] = true,
                Change::Taken(slot) => self.taken[slot as usize] ^= true,
            }
        }
    }
}

/// Takes out repeats of `schedule` while the peak stays within `cap`, the most valuable first, and returns the work done.
///
/// `by_room` values a repeat by its weight for each byte and step that its removal keeps longer, else by its weight.
pub fn prune(dag: &Dag, schedule: &mut Vec<u32>, cap: i64, by_room: bool) -> u64 {
    let mut ledger = Ledger::new(dag, schedule);
    let mut last_seen = vec![NONE; dag.values()];
    let mut list: Vec<(f64, usize)> = Vec::new();
    let mut runs = vec![0u32; dag.ops()];
    for (t, o) in schedule.iter().enumerate() {
        runs[*o as usize] += 1;
        if runs[*o as usize] > 1 {
            let mut value = dag.weight[*o as usize] as f64;
            if by_room {
                let room: f64 = dag
                    .outs(*o)
                    .iter()
                    .map(|v| {
                        dag.size[*v as usize] as f64
                            * (t as f64 - f64::from(last_seen[*v as usize]))
                    })
                    .sum();
                value /= room.max(1.0);
            }
            list.push((value, t));
        }
        for v in dag.ins(*o).iter().chain(dag.outs(*o)) {
            last_seen[*v as usize] = t as u32;
        }
    }
    list.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    for (_, slot) in list {
        if !ledger.is_alive(slot) || ledger.is_demanded(slot) {
            continue;
        }
        ledger.remove(slot);
        if ledger.peak() <= cap {
            ledger.accept();
        } else {
            ledger.undo();
        }
    }
    *schedule = ledger.schedule();
    ledger.touched + schedule.len() as u64
}
