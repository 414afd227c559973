//! `inspect`: shows what a model is, without running it and without its weights.

use super::options::plan::InspectArgs;
use super::progress;
use ckpt_opt::frontend::load;
use ckpt_opt::report::inspection::Inspection;
use ckpt_passes::Result;
use ckpt_passes::analysis::gradients::has_backward;
use ckpt_passes::ir::verify::verify;
use ckpt_passes::transform::infer::infer;
use ckpt_passes::transform::joint::joint;
use ckpt_passes::transform::lora::add_adapters;
use ckpt_passes::transform::tie::tie;

pub fn run(args: &InspectArgs) -> Result<()> {
    let progress = progress::step("reading the model");
    let mut model = load(&args.model, &args.source.given()?)?;
    let mut selection = args.trained.selection();
    infer(&mut model.graph).map_err(|e| e.at(args.model.display().to_string()))?;
    if has_backward(&model.graph) {
        joint(&mut model.graph)?;
    } else {
        let tied = tie(&mut model.graph, &selection, &args.trained.ties())?;
        model.warnings.extend(tied.lines);
    }
    if let Some(lora) = &args.trained.lora {
        let adapters = add_adapters(&mut model.graph, lora)?;
        selection = adapters.selection(&selection);
        model.warnings.extend(adapters.warnings);
    }
    verify(&model.graph)?;
    let report = Inspection::new(&model.graph, &selection, model.warnings)?;
    drop(progress);
    args.console
        .print(&report, &report.warnings, || report.human())
}
