//! Matrix products by the fastest that the processor has: ours or the library's, chosen by processor, element
//! type and layout alone, so that a node and its copy always take the same.

use super::write;
use crate::runtime::convert::torch_error;
use ckpt_passes::Result;
use ckpt_torch::{Arg, memory, product};
use tch::{Device, Kind, Tensor};

/// Calls a matrix product that writes into one of its arguments. Operands are such that libtorch copies none (see
/// `ops::matmul::plan`); what the library below it packs comes from its workspace.
pub fn write_product(name: &str, overload: &str, args: &[Arg]) -> Result<()> {
    if let Some(product) = Product::of(name, args)
        && product.is_ours()
    {
        return product.write();
    }
    let _scratch = memory::Scratch::begin();
    write(name, overload, args)
}

/// out = alpha a b + beta c, of matrices or of batches of them.
struct Product<'a> {
    a: &'a Tensor,
    b: &'a Tensor,
    c: Option<&'a Tensor>,
    alpha: f64,
    beta: f64,
    out: &'a Tensor,
}

impl<'a> Product<'a> {
    /// What a call of libtorch's computes, if it is a product.
    fn of(name: &str, args: &[Arg<'a>]) -> Option<Product<'a>> {
        let (a, b, c, alpha, beta, out) = match (name, args) {
            ("aten::mm" | "aten::bmm", [Arg::Tensor(a), Arg::Tensor(b), Arg::Tensor(out)]) => {
                (*a, *b, None, 1.0, 0.0, *out)
            }
            (
                "aten::addmm",
                [
                    Arg::Tensor(c),
                    Arg::Tensor(a),
                    Arg::Tensor(b),
                    Arg::Double(beta),
                    Arg::Double(alpha),
                    Arg::Tensor(out),
                ],
            ) => (*a, *b, Some(*c), *alpha, *beta, *out),
            (
                "aten::addmm_" | "aten::baddbmm_",
                [
                    Arg::Tensor(out),
                    Arg::Tensor(a),
                    Arg::Tensor(b),
                    Arg::Double(beta),
                    Arg::Double(alpha),
                ],
            ) => (*a, *b, Some(*out), *alpha, *beta, *out),
            _ => return None,
        };
        Some(Product {
            a,
            b,
            c,
            alpha,
            beta,
            out,
        })
    }

    fn is_ours(&self) -> bool {
        let is_read = |x: &Tensor| x.kind() == Kind::Float && x.device() == Device::Cpu;
        let last = self.out.dim() - 1;
        product::is_ours()
            && is_read(self.a)
            && is_read(self.b)
            && is_read(self.out)
            && self.a.size()[last] > 0
            && (self.out.stride()[last] == 1 || self.out.size()[last] <= 1)
    }

    fn write(&self) -> Result<()> {
        let dims = self.out.size();
        // Broadcast, which makes a view.
        let c = (self.c.filter(|_| self.beta != 0.0))
            .map(|c| {
                super::call(
                    "aten::expand",
                    "",
                    &[Arg::Tensor(c), Arg::Ints(&dims), Arg::Bool(false)],
                )
            })
            .transpose()?;
        product::write(self.a, self.b, c.as_ref(), self.alpha, self.beta, self.out)
            .map_err(torch_error)
    }
}
