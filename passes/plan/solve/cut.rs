//! Decides by minimum cuts what to keep and what to drop at one step of a schedule.
//!
//! At a step τ every value that is read later must be resident, or be recomputed after τ. With two booleans,
//! `A(v)`: value v is there when it is needed after τ, and `R(o)`: op o runs again after τ, a plan pays
//!
//! - `λ · bytes(v)` where `A(v)` and not `R(maker of v)`: v is resident at τ, an arc `A(v) → R(maker)`;
//! - `weight(o)` where `R(o)`, an arc `R(o) → sink`;
//! - and `R(o)` needs `A(u)` of every operand u, an unlimited arc `R(o) → A(u)`.
//!
//! So the best choice for a price λ of a byte is one minimum cut, in which chains of recomputation and shared operands are priced
//! exactly. The price is found by interpolation on the convex hull of (bytes kept, weight recomputed); the cuts are its points.
//! The same cut decides whether to keep a value longer whose last use lies before τ.
//!
//! Where results may be offloaded, a value may be fetched instead, if that costs less. It takes no bytes at τ then.
//!
//! The cut pays each op at most once and looks at one step. The search makes up for both: [`repair`](super::repair)
//! cuts again wherever the new schedule still does not fit.

mod pack;

use super::compact::{Dag, NONE};
use super::flow::{Builder, Network, UNLIMITED};

/// How a cut is bent, so that a search sees more than one answer.
pub struct Bend<'a> {
    /// How much more a byte costs that stays for long: breaks ties between equal layers, in favour of keeping what is
    /// read soon.
    pub distance: f64,
    /// Whether a value that is dead at the step may be kept although earlier steps have no room for it.
    pub extend: bool,
    /// Extra weight, by op; empty for none.
    pub penalty: &'a [i64],
    /// Factors on the sizes, by value; empty for none.
    pub jitter: &'a [f64],
    /// The share of its weight by which the answer may miss the hull.
    pub slack: f64,
    /// The weight of offloading a value, by value; empty where none may.
    pub elsewhere: &'a [Option<i64>],
}

/// A value that may stay for a price.
struct Keep {
    arc: usize,
    value: u32,
    /// Bent.
    size: f64,
    /// The weight of offloading it.
    elsewhere: Option<i64>,
}

/// What is known at a step τ about every value.
pub struct Scene {
    /// Read after τ before it is recomputed.
    pub needed: Vec<bool>,
    /// The first such use; [`NONE`] without one.
    first_use: Vec<u32>,
    /// The last use or making up to τ; [`NONE`] for what was never there.
    last_touch: Vec<u32>,
    /// Operand or result of the step itself: resident whatever is decided, but for one that the step may write over.
    pinned: Vec<bool>,
    step: usize,
    steps: usize,
    /// Bytes that the step itself takes.
    pub own_bytes: i64,
}

impl Scene {
    /// Builds the scene of the step at position `step` of `schedule`, which is τ.
    pub fn new(dag: &Dag, schedule: &[u32], step: usize) -> Scene {
        let values = dag.values();
        let mut last_touch = vec![NONE; values];
        for v in &dag.placeholders {
            last_touch[*v as usize] = 0;
        }
        for (t, o) in schedule[..=step].iter().enumerate() {
            for v in dag.ins(*o).iter().chain(dag.outs(*o)) {
                last_touch[*v as usize] = t as u32;
            }
        }
        // Whether the next event of a value after τ is a use: walked backwards, so that the earliest event wins.
        let mut first_use = vec![NONE; values];
        for v in &dag.outputs {
            first_use[*v as usize] = schedule.len() as u32;
        }
        for (t, o) in schedule.iter().enumerate().skip(step + 1).rev() {
            for v in dag.outs(*o) {
                first_use[*v as usize] = NONE;
            }
            for v in dag.ins(*o) {
                first_use[*v as usize] = t as u32;
            }
        }
        let mut pinned = vec![false; values];
        let op = schedule[step];
        for v in dag.ins(op).iter().chain(dag.outs(op)) {
            pinned[*v as usize] = true;
        }
        // What the step can write over goes by itself if nothing reads it again; else one such operand may be given up
        // and recomputed, as what lies beside the step may.
        let over = dag.in_place_operands(op);
        let is_read_again = |v: &u32| first_use[*v as usize] != NONE;
        let mut own_bytes = dag.least_bytes(op);
        if over.iter().all(is_read_again) {
            match over.iter().find(|v| dag.remaker(**v).is_some()) {
                Some(v) => pinned[*v as usize] = false,
                None => own_bytes = dag.working_set_bytes(op),
            }
        }
        Scene {
            needed: first_use.iter().map(|t| *t != NONE).collect(),
            first_use,
            last_touch,
            pinned,
            step,
            steps: schedule.len(),
            own_bytes,
        }
    }

    /// Returns the same for a bound: what later steps read may have been recomputed by then, so that nothing keeps the step from
    /// writing over an operand.
    pub fn of_bound(dag: &Dag, schedule: &[u32], step: usize) -> Scene {
        let mut scene = Scene::new(dag, schedule, step);
        let op = schedule[step];
        for v in dag.in_place_operands(op) {
            scene.pinned[*v as usize] = true;
        }
        scene.own_bytes = dag.least_bytes(op);
        scene
    }

    /// Returns what is there before each step, and at the end, of what later steps than τ make.
    fn made_later(&self, dag: &Dag, schedule: &[u32]) -> Vec<i64> {
        let mut change = vec![0i64; schedule.len() + 2];
        let mut last = vec![0usize; dag.values()];
        for v in &dag.outputs {
            last[*v as usize] = schedule.len();
        }
        for t in (self.step + 1..schedule.len()).rev() {
            for v in dag.outs(schedule[t]) {
                let until = std::mem::take(&mut last[*v as usize]);
                if until > t {
                    change[t + 1] += dag.size[*v as usize];
                    change[until + 1] -= dag.size[*v as usize];
                }
            }
            for v in dag.ins(schedule[t]) {
                last[*v as usize] = last[*v as usize].max(t);
            }
        }
        let mut now = 0;
        for bytes in &mut change {
            now += *bytes;
            *bytes = now;
        }
        change
    }

    /// Returns whether a value is read after τ and is neither operand nor result of the step.
    pub fn is_wanted(&self, v: u32) -> bool {
        let v = v as usize;
        self.needed[v] && self.last_touch[v] != NONE && !self.pinned[v]
    }

    /// Returns whether a value is resident whatever is decided: the step's own, and what must stay and cannot be recomputed.
    pub fn is_free(&self, dag: &Dag, v: u32) -> bool {
        self.pinned[v as usize] || (self.needed[v as usize] && dag.remaker(v).is_none())
    }

    /// Returns which values may be resident at τ: those whose way from their last touch has room, if `live` says how full it is.
    fn keepable(&self, dag: &Dag, live: Option<(&[i64], i64)>) -> Vec<bool> {
        let mut ok: Vec<bool> = self.last_touch.iter().map(|t| *t != NONE).collect();
        for (v, ok) in ok.iter_mut().enumerate() {
            *ok &= !dag.dropped[v] || self.needed[v];
        }
        let Some((live, cap)) = live else { return ok };
        // fullest[t]: the fullest step after t and before τ.
        let mut fullest = vec![0i64; self.step + 1];
        let mut most = 0;
        for t in (0..self.step).rev() {
            fullest[t] = most;
            most = most.max(live[t]);
        }
        for (v, ok) in ok.iter_mut().enumerate() {
            if *ok && !self.needed[v] && !self.pinned[v] {
                *ok = fullest[self.last_touch[v] as usize] + dag.size[v] <= cap;
            }
        }
        ok
    }
}

/// A keep-or-drop network at one step, at any price.
pub struct Cut<'a> {
    dag: &'a Dag,
    network: Network,
    keeps: Vec<Keep>,
    /// Weight of every op that may run again.
    ops: Vec<(u32, i64)>,
    op_arcs: Vec<usize>,
    /// Without any flow.
    fresh: Vec<i64>,
    value_node: Vec<u32>,
    op_node: Vec<u32>,
    /// Price that the present capacities are for.
    price: f64,
    pinned: Vec<bool>,
    /// Bytes that are left for what is decided, once the step itself and what cannot be recomputed are in.
    pub room: i64,
    /// Bytes of what may stay.
    choice_bytes: f64,
    slack: f64,
    /// What the budget lacks at this step, once [`Cut::around`] found that nothing fits.
    pub missing_bytes: i64,
}

/// One point of the hull.
pub struct Point {
    /// Bytes kept, as they are.
    pub kept: i64,
    /// The same bytes, with the distance and jitter of [`Bend`].
    pub bent: f64,
    /// Weight of the ops that run again and of the values that are offloaded.
    pub weight: i64,
    /// What the cut at its price is worth: a lower bound of weight + λ·bytes.
    pub worth: f64,
    /// The price λ of a resident byte, in weight per byte.
    pub price: f64,
    side: Vec<bool>,
    state: Vec<i64>,
}

const SOURCE: u32 = 0;
const SINK: u32 = 1;

impl Keep {
    fn capacity(&self, price: f64) -> i64 {
        let staying = (price * self.size) as i64;
        self.elsewhere.map_or(staying, |less| staying.min(less))
    }

    /// Returns whether it is offloaded at a price.
    fn is_elsewhere(&self, price: f64) -> bool {
        self.elsewhere
            .is_some_and(|less| less <= (price * self.size) as i64)
    }
}

impl<'a> Cut<'a> {
    /// `weight` is what an op costs; `live` limits which dead values may be kept, with the budget.
    pub fn new(
        dag: &'a Dag,
        scene: &Scene,
        cap: i64,
        weight: &[i64],
        bend: &Bend,
        live: Option<&[i64]>,
    ) -> Cut<'a> {
        let live = live.filter(|_| !bend.extend).map(|live| (live, cap));
        let keepable = scene.keepable(dag, live);
        let mut value_node = vec![NONE; dag.values()];
        let mut op_node = vec![NONE; dag.ops()];
        let mut nodes = 2u32;
        let mut room = cap - scene.own_bytes;
        let mut stack: Vec<u32> = Vec::new();
        let mut builder = Builder::default();
        let elsewhere = |v: u32| bend.elsewhere.get(v as usize).copied().flatten();
        for v in 0..dag.values() as u32 {
            if !scene.is_wanted(v) {
                continue;
            }
            if dag.remaker(v).is_none() && elsewhere(v).is_none() {
                room -= dag.size[v as usize];
                continue;
            }
            // `A(v)` is settled, so it is the source itself.
            value_node[v as usize] = SOURCE;
            stack.push(v);
        }
        let (mut keeps, mut ops, mut op_arcs) = (Vec::new(), Vec::new(), Vec::new());
        let mut choice_bytes = 0.0;
        let span = (scene.steps - scene.step) as f64;
        while let Some(v) = stack.pop() {
            let at = v as usize;
            let target = match dag.remaker(v) {
                None => SINK,
                Some(o) if op_node[o as usize] != NONE => op_node[o as usize],
                Some(o) => {
                    let node = nodes;
                    op_node[o as usize] = node;
                    nodes += 1;
                    let extra = bend.penalty.get(o as usize).copied().unwrap_or(0);
                    op_arcs.push(builder.arc(node, SINK, weight[o as usize] + extra));
                    ops.push((o, weight[o as usize] + extra));
                    for u in dag.ins(o) {
                        let i = *u as usize;
                        // What is there anyway is free to use; what cannot be recomputed and must stay, too.
                        if scene.is_free(dag, *u) {
                            continue;
                        }
                        if value_node[i] == SOURCE {
                            continue;
                        }
                        if value_node[i] == NONE {
                            value_node[i] = nodes;
                            nodes += 1;
                            stack.push(*u);
                        }
                        builder.arc(node, value_node[i], UNLIMITED);
                    }
                    node
                }
            };
            if keepable[at] {
                let distance = match scene.first_use[at] {
                    NONE => 0.5,
                    t => (t as usize - scene.step) as f64 / span,
                };
                let jitter = bend.jitter.get(at).copied().unwrap_or(1.0);
                let size = dag.size[at] as f64 * (1.0 + bend.distance * distance) * jitter;
                choice_bytes += size;
                keeps.push(Keep {
                    arc: builder.arc(value_node[at], target, 0),
                    value: v,
                    size,
                    elsewhere: elsewhere(v),
                });
            } else {
                builder.arc(value_node[at], target, UNLIMITED);
            }
        }
        let network = builder.finish(nodes as usize);
        Cut {
            dag,
            fresh: network.state(),
            network,
            keeps,
            ops,
            op_arcs,
            value_node,
            op_node,
            price: 0.0,
            pinned: scene.pinned.clone(),
            room,
            choice_bytes,
            missing_bytes: 0,
            slack: bend.slack,
        }
    }

    /// Returns the best choice at a price, which must not be lower than the price of the state the network is in.
    pub(super) fn solve(&mut self, price: f64) -> Point {
        for keep in &self.keeps {
            let more = keep.capacity(price) - keep.capacity(self.price);
            if more > 0 {
                self.network.grow(keep.arc, more);
            }
        }
        self.price = price;
        self.network.push(SOURCE, SINK);
        let side = self.network.side(SOURCE);
        self.point(price, side)
    }

    /// Returns the choice that a side of the network stands for.
    fn point(&self, price: f64, side: Vec<bool>) -> Point {
        let mut point = Point {
            kept: 0,
            bent: 0.0,
            weight: 0,
            worth: 0.0,
            price,
            state: Vec::new(),
            side,
        };
        let mut paid = 0i64;
        for keep in &self.keeps {
            if !self.stays(&point.side, keep.value) {
                continue;
            }
            if keep.is_elsewhere(price) {
                point.weight += keep.capacity(price);
            } else {
                point.kept += self.dag.size[keep.value as usize];
                point.bent += keep.size;
                paid += keep.capacity(price);
            }
        }
        for (o, weight) in &self.ops {
            if point.side[self.op_node[*o as usize] as usize] {
                point.weight += weight;
            }
        }
        point.worth = point.weight as f64 + paid as f64;
        point
    }

    /// Returns whether a choice keeps a value resident.
    fn stays(&self, side: &[bool], v: u32) -> bool {
        let node = self.value_node[v as usize];
        node != NONE
            && side[node as usize]
            && match self.dag.remaker(v) {
                None => true,
                Some(o) => {
                    let node = self.op_node[o as usize];
                    node == NONE || !side[node as usize]
                }
            }
    }

    /// Returns the number of arcs looked at so far.
    pub fn visits(&self) -> u64 {
        self.network.visits
    }

    /// Follows the hull to the two points around `room`: the last that keeps too much, the first that fits. Without the
    /// first, everything fits for nothing; without the second, nothing does. Starts at the price `hint`, if it is not 0.
    pub fn around(
        &mut self,
        hint: f64,
        each: &mut dyn FnMut(&Point),
    ) -> (Option<Point>, Option<Point>) {
        let mut low = self.solve(0.0);
        each(&low);
        if low.kept <= self.room {
            return (None, Some(low));
        }
        low.state = self.saved(Vec::new());
        let average =
            (self.ops.iter().map(|o| o.1).sum::<i64>() as f64 + 1.0) / self.choice_bytes.max(1.0);
        let top = 1e3 * average;
        let mut price = if hint > 0.0 { hint } else { average }.min(top);
        let mut high = loop {
            let mut point = self.solve(price);
            each(&point);
            if point.kept <= self.room {
                break point;
            }
            point.state = self.saved(std::mem::take(&mut low.state));
            low = point;
            if price >= top {
                let least = self.least(&low);
                if least.kept > self.room {
                    self.missing_bytes = least.kept - self.room;
                    return (Some(low), None);
                }
                break least;
            }
            price = (4.0 * price).min(top);
        };
        for _ in 0..40 {
            let (bytes, weight) = (low.bent - high.bent, (high.weight - low.weight) as f64);
            if bytes <= 0.0 || weight <= self.slack * high.weight as f64 {
                break;
            }
            let price = weight / bytes;
            self.network.restore(&low.state);
            self.price = low.price;
            if price <= low.price {
                break;
            }
            let mut middle = self.solve(price);
            each(&middle);
            let line = low.weight as f64 + price * low.bent;
            let value = middle.weight as f64 + price * middle.bent;
            let same = |p: &Point| (p.kept, p.weight) == (middle.kept, middle.weight);
            if value >= line * (1.0 - 1e-7) - 4.0 || same(&low) || same(&high) {
                break;
            }
            if middle.kept <= self.room {
                high = middle;
            } else {
                middle.state = self.saved(std::mem::take(&mut low.state));
                low = middle;
            }
        }
        (Some(low), Some(high))
    }

    /// Returns the flow as it is, in memory that is not needed any more.
    fn saved(&self, mut memory: Vec<i64>) -> Vec<i64> {
        self.network.save(&mut memory);
        memory
    }

    /// Returns the choice that keeps the fewest bytes, whatever it costs; `low` is the one at price 0.
    fn least(&mut self, low: &Point) -> Point {
        self.network.restore(&self.fresh);
        for (arc, weight) in self.op_arcs.iter().zip(&self.ops) {
            self.network.grow(*arc, -weight.1);
        }
        self.price = 0.0;
        let weighed: Vec<Option<i64>> = self.keeps.iter().map(|k| k.elsewhere).collect();
        for keep in &mut self.keeps {
            keep.elsewhere = keep.elsewhere.map(|_| 0);
        }
        let mut point = self.solve(1.0);
        for (at, weighed) in weighed.into_iter().enumerate() {
            if self.stays(&point.side, self.keeps[at].value) {
                point.weight += weighed.unwrap_or(0);
            }
            self.keeps[at].elsewhere = weighed;
        }
        self.network.restore(&low.state);
        self.price = low.price;
        point
    }

    /// Returns what is resident at the step under a choice.
    pub fn resident(&self, point: &Point, scene: &Scene) -> Vec<bool> {
        (0..self.dag.values())
            .map(|v| {
                let fixed = scene.needed[v] && self.dag.remaker(v as u32).is_none();
                self.pinned[v]
                    || (fixed && scene.last_touch[v] != NONE)
                    || self.stays(&point.side, v as u32)
            })
            .collect()
    }

    /// Returns the ops that a choice runs again where they lack room, each with the bytes that it lacks: it runs right before what
    /// it is for, beside all that the choice keeps for then or later and what `schedule` makes until then.
    pub fn crowded(
        &self,
        point: &Point,
        scene: &Scene,
        schedule: &[u32],
        cap: i64,
    ) -> Vec<(u32, i64)> {
        let dag = self.dag;
        let resident = self.resident(point, scene);
        let is_kept = |v: u32| resident[v as usize] && scene.first_use[v as usize] != NONE;
        let mut kept: Vec<(u32, i64)> = (0..dag.values() as u32)
            .filter(|v| is_kept(*v))
            .map(|v| (scene.first_use[v as usize], dag.size[v as usize]))
            .collect();
        kept.sort_unstable_by_key(|k| std::cmp::Reverse(k.0));
        // Bytes of this and all that is read later.
        let mut sum = 0;
        for (_, bytes) in &mut kept {
            sum += *bytes;
            *bytes = sum;
        }
        let made = scene.made_later(dag, schedule);
        let mut again: Vec<u32> = self.repeated(point).collect();
        again.sort_unstable_by_key(|o| std::cmp::Reverse(*o));
        let mut wanted = scene.first_use.clone();
        let mut crowded = Vec::new();
        for o in again {
            let ends = dag.outs(o).iter().map(|v| wanted[*v as usize]);
            let Some(end) = ends.min().filter(|end| *end != NONE) else {
                continue;
            };
            let later = kept.partition_point(|k| k.0 >= end);
            let beside = later.checked_sub(1).map_or(0, |last| kept[last].1);
            let own = dag.ins(o).iter().chain(dag.outs(o));
            let own = own.filter(|v| is_kept(**v) && scene.first_use[**v as usize] >= end);
            let own: i64 = own.map(|v| dag.size[*v as usize]).sum();
            let lack = dag.least_bytes(o) + beside + made[end as usize] - own - cap;
            if lack > 0 {
                crowded.push((o, lack));
            }
            for v in dag.ins(o).iter().filter(|v| !resident[**v as usize]) {
                wanted[*v as usize] = wanted[*v as usize].min(end);
            }
        }
        crowded
    }

    /// Returns the ops that a choice runs again.
    pub fn repeated<'p>(&'p self, point: &'p Point) -> impl Iterator<Item = u32> + 'p {
        let runs = |o: &&(u32, i64)| point.side[self.op_node[o.0 as usize] as usize];
        self.ops.iter().filter(runs).map(|(o, _)| *o)
    }
}
