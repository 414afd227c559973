//! Adapters as PEFT saves them: `adapter_model.safetensors` and `adapter_config.json` in a folder.
//!
//! Names are those of `PeftModel.save_pretrained`: `base_model.model.<module>.lora_A.weight`. Modules are listed by their whole
//! paths, so that the adapter matches these and no others.

use super::merge::{Adapter, PEFT_PREFIX};
use crate::emit::file::Batch;
use crate::frontend::file::{io_error, map};
use crate::tensors::{self, Tensors};
use ckpt_passes::ir::Graph;
use ckpt_passes::transform::lora::{A, B, Lora};
use ckpt_passes::{Error, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The file with the settings.
pub const CONFIG: &str = "adapter_config.json";
/// The file with the matrices.
pub const WEIGHTS: &str = "adapter_model.safetensors";

/// Writes the folder, and returns its files.
///
/// # Errors
/// A layer whose name in the framework is not known; a disk that refuses.
pub fn write(
    graph: &Graph,
    adapters: &[Adapter],
    lora: &Lora,
    folder: &Path,
) -> Result<Vec<PathBuf>> {
    let mut tensors = Tensors::new();
    let mut is_in_first = false;
    for adapter in adapters {
        let origin = graph.origins.get(&adapter.weight);
        let origin = origin.filter(|o| !o.names.is_empty());
        let weight = graph.value(adapter.weight);
        // Quantisers put more behind the framework's name of a weight; the module is what stands before.
        let is_named = !weight.ty().dtype.is_float() && weight.name != adapter.module;
        if origin.is_none() && !is_named {
            let what = format!(
                "the file does not tell what the framework calls `{}`",
                adapter.module
            );
            return Err(Error::usage("convert", what).help(
                "export the model with torch.onnx.export(..., dynamo=True), or use --to onnx",
            ));
        }
        is_in_first |= origin.is_some_and(|o| adapter.out_first == o.transposed);
        for (end, tensor) in [(A, &adapter.a), (B, &adapter.b)] {
            tensors.insert(
                format!("{PEFT_PREFIX}{}{end}", adapter.module),
                tensor.clone(),
            );
        }
    }
    let modules: Vec<&str> = adapters.iter().map(|a| a.module.as_str()).collect();
    let alpha = match lora.alpha.fract() == 0.0 {
        true => json!(lora.alpha as i64),
        false => json!(lora.alpha),
    };
    let config = json!({
        "peft_type": "LORA",
        "task_type": null,
        "base_model_name_or_path": null,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": modules,
        "fan_in_fan_out": is_in_first,
        "bias": "none",
        "inference_mode": true,
        "init_lora_weights": true,
        "modules_to_save": null,
    });
    let mut text =
        serde_json::to_vec_pretty(&config).map_err(|e| Error::bug("json", e.to_string()))?;
    text.push(b'\n');
    let meta = [("format".to_string(), "pt".to_string())];
    let bytes = tensors::safetensors::write_with(&tensors, meta.into())?;
    std::fs::create_dir_all(folder).map_err(|e| io_error("create the folder", folder, &e))?;
    let files = [folder.join(WEIGHTS), folder.join(CONFIG)];
    let mut batch = Batch::new();
    batch.add(&files[0], |out| out.write_all(&bytes))?;
    batch.add(&files[1], |out| out.write_all(&text))?;
    batch.publish()?;
    Ok(files.into())
}

/// Reads a folder that PEFT or [`write()`] wrote: the matrices, and the request that adds such adapters.
///
/// # Errors
/// A damaged file, and settings that mean more than `scale·B·A` beside a linear layer.
pub fn read(folder: &Path) -> Result<(Tensors, Lora)> {
    let path = folder.join(CONFIG);
    let refuse = |what: String| Error::usage("peft", what).at(path.display().to_string());
    let config: Value = serde_json::from_slice(&map(&path)?)
        .map_err(|e| refuse(format!("the file is damaged: {e}")))?;
    let word = |key: &str| config.get(key).and_then(Value::as_str).unwrap_or_default();
    if word("peft_type") != "LORA" {
        return Err(refuse("the adapter is no LoRA".into())
            .expected("\"peft_type\": \"LORA\"")
            .found(word("peft_type")));
    }
    let is_set = |key: &&str| match config.get(*key) {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Object(map)) => !map.is_empty(),
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::String(text)) => text != "none",
        Some(_) => true,
    };
    let unlike = [
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "lora_bias",
        "bias",
    ];
    if let Some(key) = unlike.iter().find(|key| is_set(key)) {
        return Err(refuse(format!(
            "the adapter sets `{key}`, which cannot be merged here"
        ))
        .help("merge it in Python: model.merge_and_unload()"));
    }
    let number = |key: &str| config.get(key).and_then(Value::as_f64);
    let (Some(rank), Some(alpha)) = (number("r"), number("lora_alpha")) else {
        return Err(refuse("the file lacks `r` or `lora_alpha`".into()));
    };
    let targets = match config.get("target_modules") {
        Some(Value::Array(list)) => list
            .iter()
            .filter_map(Value::as_str)
            .map(str::to_string)
            .collect(),
        _ => vec!["*".to_string()],
    };
    let text = format!("r={rank},alpha={alpha},targets={}", targets.join(","));
    let lora = Lora {
        rslora: config
            .get("use_rslora")
            .and_then(Value::as_bool)
            .unwrap_or(false),
        dropout: number("lora_dropout").unwrap_or(0.0) as f32,
        ..Lora::parse(&text).map_err(|e| e.at(path.display().to_string()))?
    };
    Ok((tensors::read(&folder.join(WEIGHTS))?, lora))
}
