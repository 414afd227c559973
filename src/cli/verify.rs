//! `verify`: checks that two graphs compute the same values.

use super::options::runtime::VerifyArgs;
use super::output::{print, print_json, warn, write_json};
use super::progress;
use ckpt_opt::tensors::compare::Tolerance;
use ckpt_opt::verify::verify;
use ckpt_passes::Result;

pub fn run(args: &VerifyArgs) -> Result<()> {
    let step = progress::step("running both graphs");
    let tolerance = (args.rtol.is_some() || args.atol.is_some()).then(|| Tolerance {
        rtol: args.rtol.unwrap_or(0.0),
        atol: args.atol.unwrap_or(0.0),
    });
    let certificate = verify(&args.pair.request(), tolerance)?;
    drop(step);
    if let Some(path) = &args.certificate {
        write_json(path, &certificate)?;
    }
    if args.console.is_json() {
        print_json(&certificate)?;
    } else {
        warn(&certificate.warnings);
        if certificate.equal {
            print(&certificate.human())?;
        }
    }
    certificate.judge()
}
