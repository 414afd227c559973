//! Optimizer states that a run starts from: masters of a new one, and what a rank reads of a checkpoint that any number of
//! ranks wrote. Parts of parameters ([`OwnPart`]) are states too; a checkpoint has them whole.

use crate::runtime::ranks::Coordinates;
use crate::tensors::Tensors;
use crate::tensors::feed::widened;
use ckpt_passes::analysis::gradients::{Start, start, states};
use ckpt_passes::ir::{Graph, Tensor};
use ckpt_passes::ops::collective::{OwnPart, slice_of, slice_size};
use ckpt_passes::transform::optimizer::{Held, held_by_name};
use ckpt_passes::{Error, Result};

/// Returns whether each rank writes the states of which it keeps slices. Where ranks have parts of parameters, they gather all.
pub fn has_own_file(graph: &Graph) -> bool {
    let held = held_by_name(graph);
    let is_slice = held.values().any(|held| held.slices > 1);
    is_slice && held.values().all(|held| held.part.is_none())
}

/// Returns the states of a graph on one of some ranks, from the files of all ranks that wrote them.
///
/// # Errors
/// A state that is of another size than the graph's.
pub fn own_states(files: &[Tensors], graph: &Graph, at: Coordinates) -> Result<Tensors> {
    let by_name = held_by_name(graph);
    let mut own = Tensors::new();
    for id in states(graph) {
        let name = &graph.value(id).name;
        let parts: Vec<&Tensor> = files.iter().filter_map(|file| file.get(name)).collect();
        let Some(first) = parts.first() else {
            continue;
        };
        let held = by_name.get(name);
        let elements = held.and_then(|held| graph.ty(held.parameter).elements().as_const());
        let (Some(held), Some(elements)) = (held, elements) else {
            own.insert(name.clone(), (*first).clone());
            continue;
        };
        let wrote = files.len() as i64;
        let was_sliced = wrote > 1 && first.dims == [slice_size(elements, wrote) as u64];
        let slices = if was_sliced { wrote } else { 1 };
        if held.part.is_none() && held.slices == slices {
            let same = if was_sliced { parts[at.dp.0] } else { first };
            own.insert(name.clone(), same.clone());
            continue;
        }
        let width = first.dtype.size_bytes() as usize;
        let mut bytes: Vec<u8> = Vec::new();
        for part in &parts[..slices as usize] {
            bytes.extend(part.bytes().map_or(&[][..], AsRef::as_ref));
        }
        bytes.truncate(elements as usize * width);
        if bytes.len() != elements as usize * width {
            return Err(Error::usage("resume", format!("`{name}` has another size"))
                .expected(format!("{elements} elements"))
                .found(format!("{} bytes in {} files", bytes.len(), files.len())));
        }
        let dims = graph.ty(held.parameter).static_dims().unwrap_or_default();
        let dims: Vec<u64> = dims.iter().map(|d| *d as u64).collect();
        let whole = Tensor::new(first.dtype, dims, bytes);
        own.insert(name.clone(), own_of(&whole, graph, held, at));
    }
    Ok(own)
}

/// Returns the states of a run on one of some ranks that begin as its parameters, those of a checkpoint or of the model: masters of
/// 16-bit parameters, and a rank's slices and parts of parameters.
pub fn first_masters(graph: &Graph, parameters: &Tensors, at: Coordinates) -> Tensors {
    let by_name = held_by_name(graph);
    let mut masters = Tensors::new();
    for id in states(graph) {
        let Start::Widened(parameter) = start(graph, id) else {
            continue;
        };
        let name = &graph.value(parameter).name;
        let stored = parameters.get(name).or(graph.value(parameter).tensor());
        let is_narrow = stored.is_some_and(|t| t.dtype != graph.ty(id).dtype);
        let whole = match is_narrow {
            true => stored.and_then(widened),
            false => stored.cloned(),
        };
        let Some(whole) = whole else { continue };
        let name = &graph.value(id).name;
        let master = match by_name.get(name) {
            Some(held) => own_of(&whole, graph, held, at),
            None => whole,
        };
        masters.insert(name.clone(), master);
    }
    masters
}

/// Returns what a rank holds of a tensor that has as many elements as its parameter.
fn own_of(whole: &Tensor, graph: &Graph, held: &Held, at: Coordinates) -> Tensor {
    let part = held.part.as_ref();
    let part = part.map_or_else(|| whole.clone(), |of| own_part(whole, graph, of, at));
    match held.slices {
        1 => part,
        ranks => slice(&part, (at.dp.0 as u64, ranks as u64)),
    }
}

/// Returns a rank's part of a tensor that has as many elements as its parameter.
fn own_part(whole: &Tensor, graph: &Graph, of: &OwnPart, at: Coordinates) -> Tensor {
    let (rank, ranks) = (at.tp.0 as i64, at.tp.1 as i64);
    let dims = graph.ty(of.parameter).static_dims().unwrap_or_default();
    let axis = of.part.axis;
    let count = |dims: &[i64]| dims.iter().product::<i64>() as usize;
    let (outer, inner) = (count(&dims[..axis]), count(&dims[axis + 1..]));
    let row = inner * whole.dtype.size_bytes() as usize;
    let all: &[u8] = whole.bytes().map_or(&[], AsRef::as_ref);
    let own_size = of.part.own_size(ranks) as usize;
    let mut bytes = Vec::with_capacity(outer * own_size * row);
    for block in 0..outer {
        let begin = block * of.part.size() as usize;
        for (from, len) in of.part.stretches(ranks, rank) {
            let (from, len) = (begin + from as usize, len as usize);
            bytes.extend(all.get(from * row..(from + len) * row).unwrap_or_default());
        }
        while bytes.len() < (block + 1) * own_size * row {
            bytes.extend_from_within(bytes.len() - row..);
        }
    }
    let mut own: Vec<u64> = dims.iter().map(|d| *d as u64).collect();
    own[axis] = own_size as u64;
    Tensor::new(whole.dtype, own, bytes)
}

/// Returns a rank's slice of a tensor.
fn slice(whole: &Tensor, (rank, ranks): (u64, u64)) -> Tensor {
    let width = whole.dtype.size_bytes() as usize;
    let (elements, ranks) = (whole.elements() as i64, ranks as i64);
    let (from, len) = slice_of(elements, ranks, rank as i64);
    let (from, len) = (from as usize * width, len as usize * width);
    let bytes = whole.bytes().and_then(|bytes| bytes.get(from..from + len));
    let mut bytes = bytes.unwrap_or_default().to_vec();
    let size = slice_size(elements, ranks) as u64;
    bytes.resize(size as usize * width, 0);
    Tensor::new(whole.dtype, [size], bytes)
}
