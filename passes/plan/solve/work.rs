//! Work counted in units, and random numbers from a fixed seed: the same request does the same steps on every machine.

/// The share of the whole cost above which a gap is worth more work.
pub const WIDE_GAP: f64 = 0.003;

/// How much work a plan may take. One unit is about one operand looked at; 100 million are about half a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Effort {
    /// As little as a first good plan takes.
    First,
    /// Takes a fraction of a second on a few thousand ops, or up to a second while the gap is above [`WIDE_GAP`]. If it stays far above,
    /// the plan is annealed in rounds until a round gains little. A round takes up to a second on two cores.
    #[default]
    Normal,
    /// About ten times that.
    Thorough,
    /// This many units.
    Units(u64),
}

impl Effort {
    /// Returns the work that a plan of so many ops may take.
    pub fn work(self, ops: usize) -> Work {
        let ops = ops as u64;
        // Small problems are settled sooner.
        let normal = (300_000 * ops).min(45_000_000) + 8_000 * ops;
        // While the gap is wide; the same for all sizes until a unit more or less for each op matters.
        let wide = (1_000_000 * ops).min(300_000_000 * 2000 / ops.max(2000));
        let (limit, stretched) = match self {
            Effort::First => (0, 0),
            Effort::Normal => (normal, normal + wide),
            Effort::Thorough => (10 * normal, 10 * (normal + wide)),
            Effort::Units(n) => (n, n),
        };
        Work {
            stretched,
            ..Work::new(limit)
        }
    }
}

/// A bound of one position tries networks of this many ops together, and at most 8 positions.
pub const BOUND_OPS: usize = 1_000_000;

/// Units of work: about one arc, operand or tree node looked at each.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Units spent so far.
    pub done: u64,
    /// Units after which the work is spent.
    pub limit: u64,
    /// The limit while the plan may still be far from the best.
    pub stretched: u64,
    /// The price of a byte that the last cut ended at: where the next one starts.
    pub price: f64,
}

impl Work {
    /// Returns work of `limit` units, none of which is done.
    pub fn new(limit: u64) -> Work {
        Work {
            done: 0,
            limit,
            stretched: limit,
            price: 0.0,
        }
    }

    /// Adds units to those done.
    pub fn spend(&mut self, units: u64) {
        self.done += units;
    }

    /// Returns whether the limit is reached.
    pub fn spent(&self) -> bool {
        self.done >= self.limit
    }
}

/// A xorshift generator (Marsaglia, "Xorshift RNGs", 2003).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// Returns a generator with a state from the seed; the state is never 0.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next 64 random bits.
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// At least 0, below 1.
    pub fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Below `n`, which is at least 1.
    pub fn below(&mut self, n: usize) -> usize {
        (self.draw() % n.max(1) as u64) as usize
    }
}
