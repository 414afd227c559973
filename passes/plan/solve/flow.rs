//! Maximum flow by Dinic's blocking flows, for a sweep over rising prices.
//!
//! Distances are counted from the sink, so a search never enters a dead end of an earlier phase. Arcs keep their place. A flow
//! stays feasible when capacities grow, so a higher price starts from the flow of a lower one ([`Network::grow`]) and
//! pays only for the difference.

/// Arcs before they are sorted by source.
#[derive(Default)]
pub struct Builder {
    arcs: Vec<(u32, u32, i64)>,
}

/// More than any sum of finite capacities here.
pub const UNLIMITED: i64 = i64::MAX / 16;

impl Builder {
    /// Adds an arc and returns its number.
    pub fn arc(&mut self, from: u32, to: u32, capacity: i64) -> usize {
        self.arcs.push((from, to, capacity));
        self.arcs.len() - 1
    }

    /// Returns the network over `nodes` nodes. Its flow is zero.
    pub fn finish(self, nodes: usize) -> Network {
        let mut start = vec![0u32; nodes + 1];
        for (from, to, _) in &self.arcs {
            start[*from as usize + 1] += 1;
            start[*to as usize + 1] += 1;
        }
        for i in 0..nodes {
            start[i + 1] += start[i];
        }
        let mut next = start.clone();
        let total = 2 * self.arcs.len();
        let mut network = Network {
            start,
            arcs: vec![Arc::default(); total],
            place: Vec::with_capacity(self.arcs.len()),
            level: vec![0; nodes],
            at: vec![0; nodes],
            queue: Vec::with_capacity(nodes),
            path: Vec::new(),
            visits: 0,
        };
        for (from, to, capacity) in self.arcs {
            let a = next[from as usize];
            next[from as usize] += 1;
            let b = next[to as usize];
            next[to as usize] += 1;
            network.arcs[a as usize] = Arc {
                left: capacity,
                to,
                twin: b,
            };
            network.arcs[b as usize] = Arc {
                left: 0,
                to: from,
                twin: a,
            };
            network.place.push(a);
        }
        network
    }
}

/// An arc or the reverse of one. What a search reads of it lies together.
#[derive(Clone, Copy, Default)]
struct Arc {
    /// Residual capacity.
    left: i64,
    to: u32,
    /// Its reverse.
    twin: u32,
}

/// A network with the flow found so far.
pub struct Network {
    start: Vec<u32>,
    arcs: Vec<Arc>,
    /// Where the arc of a number is.
    place: Vec<u32>,
    level: Vec<u32>,
    at: Vec<u32>,
    queue: Vec<u32>,
    path: Vec<u32>,
    /// Arcs looked at, a measure of work.
    pub visits: u64,
}

const FAR: u32 = u32::MAX;

impl Network {
    /// Returns the number of nodes.
    pub fn nodes(&self) -> usize {
        self.level.len()
    }

    /// Gives an arc more capacity.
    pub fn grow(&mut self, arc: usize, more: i64) {
        self.arcs[self.place[arc] as usize].left += more;
    }

    /// Returns the residual capacities, to come back to with [`Network::restore`].
    pub fn state(&self) -> Vec<i64> {
        let mut state = Vec::new();
        self.save(&mut state);
        state
    }

    /// Saves the residual capacities into `state`.
    pub fn save(&self, state: &mut Vec<i64>) {
        state.clear();
        state.extend(self.arcs.iter().map(|arc| arc.left));
    }

    /// Sets the residual capacities to those that [`Network::save`] or [`Network::state`] took.
    pub fn restore(&mut self, state: &[i64]) {
        for (arc, left) in self.arcs.iter_mut().zip(state) {
            arc.left = *left;
        }
    }

    /// Measures distances to the sink over arcs with room; returns whether the source has one.
    fn measure(&mut self, source: u32, sink: u32) -> bool {
        self.level.fill(FAR);
        self.queue.clear();
        self.level[sink as usize] = 0;
        self.queue.push(sink);
        let mut head = 0;
        while let Some(&x) = self.queue.get(head) {
            head += 1;
            if self.level[x as usize] >= self.level[source as usize] {
                break;
            }
            let (from, to) = (self.start[x as usize], self.start[x as usize + 1]);
            self.visits += u64::from(to - from);
            for a in from..to {
                let Arc { to: y, twin, .. } = self.arcs[a as usize];
                if self.level[y as usize] == FAR && self.arcs[twin as usize].left > 0 {
                    self.level[y as usize] = self.level[x as usize] + 1;
                    self.queue.push(y);
                }
            }
        }
        self.level[source as usize] != FAR
    }

    /// Pushes flow until no more fits.
    pub fn push(&mut self, source: u32, sink: u32) {
        while self.measure(source, sink) {
            self.at.copy_from_slice(&self.start[..self.level.len()]);
            self.path.clear();
            let mut x = source;
            loop {
                if x == sink {
                    x = self.augment(source);
                    continue;
                }
                let end = self.start[x as usize + 1];
                let mut a = self.at[x as usize];
                let wanted = self.level[x as usize].wrapping_sub(1);
                self.visits += 1;
                while a < end
                    && (self.arcs[a as usize].left <= 0
                        || self.level[self.arcs[a as usize].to as usize] != wanted)
                {
                    a += 1;
                    self.visits += 1;
                }
                self.at[x as usize] = a;
                if a < end {
                    self.path.push(a);
                    x = self.arcs[a as usize].to;
                } else if x == source {
                    break;
                } else if let Some(a) = self.path.pop() {
                    x = self.arcs[self.arcs[a as usize].twin as usize].to;
                    self.at[x as usize] += 1;
                }
            }
        }
    }

    /// Pushes what the path to the sink can take; returns the node before its first full arc.
    fn augment(&mut self, source: u32) -> u32 {
        let amount = self
            .path
            .iter()
            .map(|a| self.arcs[*a as usize].left)
            .min()
            .unwrap_or(0);
        let mut full = 0;
        for (i, a) in self.path.iter().enumerate().rev() {
            let arc = &mut self.arcs[*a as usize];
            arc.left -= amount;
            if arc.left == 0 {
                full = i;
            }
            let twin = arc.twin;
            self.arcs[twin as usize].left += amount;
        }
        self.visits += self.path.len() as u64;
        self.path.truncate(full);
        self.path
            .last()
            .map_or(source, |a| self.arcs[*a as usize].to)
    }

    /// Returns the nodes that the source still reaches: its side of the smallest minimum cut.
    pub fn side(&mut self, source: u32) -> Vec<bool> {
        let mut reached = vec![false; self.level.len()];
        reached[source as usize] = true;
        self.queue.clear();
        self.queue.push(source);
        while let Some(x) = self.queue.pop() {
            let (from, to) = (self.start[x as usize], self.start[x as usize + 1]);
            self.visits += u64::from(to - from);
            for a in from..to {
                let Arc { to: y, left, .. } = self.arcs[a as usize];
                if left > 0 && !std::mem::replace(&mut reached[y as usize], true) {
                    self.queue.push(y);
                }
            }
        }
        reached
    }
}
