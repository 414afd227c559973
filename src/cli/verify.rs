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
    use super::{progress, result, result_json, warn};
    use ckpt_opt::emit::file::write_whole;
    use ckpt_opt::tensors::compare::Tolerance;
    use ckpt_opt::verify::{Request, verify};
    use ckpt_passes::Error;

    let step = progress::step("running both graphs");
    let certificate = verify(&Request {
        a: args.a.clone(),
        b: args.b.clone(),
        inputs: args.inputs.clone(),
        seed: args.seed,
        dims: args.dims.clone(),
        tolerance: (args.rtol.is_some() || args.atol.is_some()).then(|| Tolerance {
            rtol: args.rtol.unwrap_or(0.0),
            atol: args.atol.unwrap_or(0.0),
        }),
        threads: args.threads,
        place: args.device,
    })?;
    drop(step);
    if let Some(path) = &args.certificate {
        let text = serde_json::to_string_pretty(&certificate)
            .map_err(|e| Error::bug("json", e.to_string()))?;
        write_whole(path, (text + "\n").as_bytes())?;
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
