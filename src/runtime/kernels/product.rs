//! Matrix products by the fastest code for the processor: ours or the library's.
//!
//! The choice depends only on processor, element type and layout, so a node and its recomputation run the same code.

use super::context::*;
use ckpt_torch::{memory, product};

/// `out` = `alpha`·`a`·`b` + beta·c, of matrices or of batches of matrices.
pub struct Product<'a> {
    pub a: &'a Tensor,
    pub b: &'a Tensor,
    pub alpha: f64,
    /// The summand c, which may be `out` itself, and beta. If beta is 0, c is not read.
    pub sum: Option<(&'a Tensor, f64)>,
    pub out: &'a Tensor,
}

impl<'a> Product<'a> {
    /// `out` = `a`·`b`.
    pub fn plain(a: &'a Tensor, b: &'a Tensor, out: &'a Tensor) -> Product<'a> {
        Product {
            a,
            b,
            alpha: 1.0,
            sum: None,
            out,
        }
    }

    /// `out` = `alpha`·`a`·`b`, added to `out` if `add`.
    pub fn onto(out: &'a Tensor, a: &'a Tensor, b: &'a Tensor, alpha: f64, add: bool) -> Self {
        Product {
            alpha,
            sum: Some((out, f64::from(u8::from(add)))),
            ..Product::plain(a, b, out)
        }
    }

    /// Computes the product. libtorch copies no operand (see `ops::matmul::plan`), and the library below it packs operands in
    /// its workspace.
    pub fn write(&self) -> Result<()> {
        if self.is_ours() {
            return self.write_ours();
        }
        let Product {
            a, b, alpha, out, ..
        } = *self;
        let is_batch = out.dim() == 3;
        let _scratch = memory::Scratch::begin();
        match self.sum {
            None if is_batch => write("aten::bmm.out", args![a, b, out]),
            None => write("aten::mm.out", args![a, b, out]),
            Some((c, beta)) if std::ptr::eq(c, out) => {
                let name = if is_batch {
                    "aten::baddbmm_"
                } else {
                    "aten::addmm_"
                };
                write(name, args![out, a, b, beta, alpha])
            }
            Some((c, beta)) => write("aten::addmm.out", args![c, a, b, beta, alpha, out]),
        }
    }

    fn is_ours(&self) -> bool {
        let is_read = |x: &Tensor| x.kind() == Kind::Float && backend(x).is_host();
        let last = self.out.dim() - 1;
        backend(self.out).has_own_products()
            && is_read(self.a)
            && is_read(self.b)
            && is_read(self.out)
            && self.a.size()[last] > 0
            && (self.out.stride()[last] == 1 || self.out.size()[last] <= 1)
    }

    fn write_ours(&self) -> Result<()> {
        let dims = self.out.size();
        let (c, beta) = self.sum.filter(|(_, beta)| *beta != 0.0).unzip();
        let c = c.map(|c| call("aten::expand", args![c, &dims, false]));
        let (c, beta) = (c.transpose()?, beta.unwrap_or(0.0));
        product::write(self.a, self.b, c.as_ref(), self.alpha, beta, self.out).map_err(torch_error)
    }
}
