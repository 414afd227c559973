//! Effort that is counted, and chance that is not: the same request does the same steps on every machine.

/// Units of work: about one arc, operand or tree node looked at each.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub done: u64,
    pub limit: u64,
    /// The limit while the plan may still be far from the best.
    pub stretched: u64,
    /// The price of a byte that the last cut ended at: where the next one starts.
    pub price: f64,
}

impl Work {
    pub fn new(limit: u64) -> Work {
        Work {
            done: 0,
            limit,
            stretched: limit,
            price: 0.0,
        }
    }

    pub fn spend(&mut self, units: u64) {
        self.done += units;
    }

    pub fn spent(&self) -> bool {
        self.done >= self.limit
    }
}

/// A xorshift generator (Marsaglia, "Xorshift RNGs", 2003).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

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
