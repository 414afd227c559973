//! `metrics.jsonl`: one object for each step.

use crate::frontend::file::io_error;
use ckpt_passes::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

/// Name of the file in the folder of a run.
pub const FILE: &str = "metrics.jsonl";

/// What a step did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The step, from 1.
    pub step: u64,
    /// Its loss before the update; the mean where gradients are accumulated.
    pub loss: f64,
    /// Its learning rate.
    pub lr: f64,
    /// Its tokens that count in the loss; examples, where the graph takes no labels.
    pub tokens: u64,
    /// Its elapsed time, reading of data included, evaluation and checkpoints not.
    pub seconds: f64,
    /// The measured peak of memory, static bytes included.
    pub peak_bytes: u64,
    /// The predicted one.
    pub predicted_peak_bytes: u64,
    /// Of `seconds`, the time that the step waited for data.
    pub data_seconds: f64,
    /// The norm of all gradients before clipping, where the graph computes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// The scale of the loss, where the graph takes one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// True where gradients overflowed, so that the step left the parameters alone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_skipped: bool,
    /// The loss on the evaluation data after the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    /// e to the power of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
}

/// The open file.
pub struct MetricsFile {
    path: PathBuf,
    file: File,
}

/// Reads the metrics of a run.
///
/// # Errors
/// A file that cannot be read, or a line that is no such object; the last line may be cut off.
pub fn read(path: &Path) -> Result<Vec<StepMetrics>> {
    let file = File::open(path).map_err(|e| io_error("open the metrics", path, &e))?;
    let lines: std::io::Result<Vec<String>> = BufReader::new(file).lines().collect();
    let lines = lines.map_err(|e| io_error("read the metrics", path, &e))?;
    let mut metrics = Vec::with_capacity(lines.len());
    for (n, line) in lines.iter().enumerate() {
        match serde_json::from_str(line) {
            Ok(step) => metrics.push(step),
            Err(_) if n + 1 == lines.len() => {}
            Err(e) => {
                let what = format!("line {} is no step: {e}", n + 1);
                return Err(Error::usage("metrics", what).at(path.display().to_string()));
            }
        }
    }
    Ok(metrics)
}

impl MetricsFile {
    /// Opens the file in `folder` for the steps after `step`. Lines of later steps, which a run that was killed wrote, are
    /// removed.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn after(folder: &Path, step: u64) -> Result<MetricsFile> {
        let path = folder.join(FILE);
        let mut earlier = String::new();
        if step > 0 && path.exists() {
            for metrics in read(&path)?.iter().filter(|m| m.step <= step) {
                earlier += &line(metrics)?;
            }
        }
        crate::emit::file::write_whole(&path, earlier.as_bytes())?;
        let file = File::options().append(true).open(&path);
        let file = file.map_err(|e| write_error(&path, &e))?;
        Ok(MetricsFile { path, file })
    }

    /// Appends a step.
    ///
    /// # Errors
    /// A disk that refuses.
    pub fn add(&mut self, metrics: &StepMetrics) -> Result<()> {
        let line = line(metrics)?;
        let written = self.file.write_all(line.as_bytes());
        written.map_err(|e| write_error(&self.path, &e))
    }
}

fn line(metrics: &StepMetrics) -> Result<String> {
    let text = serde_json::to_string(metrics).map_err(|e| Error::bug("json", e.to_string()))?;
    Ok(text + "\n")
}

fn write_error(path: &Path, e: &std::io::Error) -> Box<Error> {
    crate::emit::file::write_error(path, e)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_after_the_checkpoint_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let step = |step: u64| StepMetrics {
            step,
            loss: 1.0 / step as f64,
            ..StepMetrics::default()
        };
        let mut file = MetricsFile::after(dir.path(), 0).unwrap();
        (1..=3).for_each(|n| file.add(&step(n)).unwrap());
        let path = dir.path().join(FILE);
        // A line that a killed process left.
        File::options()
            .append(true)
            .open(&path)
            .unwrap()
            .write_all(b"{\"step\": 4")
            .unwrap();
        assert_eq!(read(&path).unwrap().len(), 3);
        let mut file = MetricsFile::after(dir.path(), 2).unwrap();
        file.add(&step(3)).unwrap();
        assert_eq!(read(&path).unwrap(), [step(1), step(2), step(3)]);
        std::fs::write(&path, "x\n{}\n").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("line 1"));
    }
}
