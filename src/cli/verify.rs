//! `verify`: proves that two graphs compute the same values.

use super::args::VerifyArgs;
use ckpt_passes::Result;

#[cfg(not(feature = "torch"))]
pub fn run(_: &VerifyArgs) -> Result<()> {
    Err(super::no_runtime("verify"))
}

#[cfg(feature = "torch")]
pub fn run(args: &VerifyArgs) -> Result<()> {
    use super::args::Format;
    use super::{progress, result, result_json, warn, write_json};
    use ckpt_opt::tensors::compare::Tolerance;
    use ckpt_opt::verify::verify;

    let step = progress::step("running both graphs");
    let tolerance = (args.rtol.is_some() || args.atol.is_some()).then(|| Tolerance {
        rtol: args.rtol.unwrap_or(0.0),
        atol: args.atol.unwrap_or(0.0),
    });
    let certificate = verify(&args.pair.setting(), tolerance)?;
    drop(step);
    if let Some(path) = &args.certificate {
        write_json(path, &certificate)?;
    }
    match args.report.format {
        Format::Json => result_json(&certificate)?,
        Format::Human => {
            warn(&certificate.warnings);
            if certificate.equal {
                result(&certificate.human())?;
            }
        }
    }
    certificate.judge()
}
