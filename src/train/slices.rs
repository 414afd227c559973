//! Optimizer states that a run starts from: masters of a new one, and what a rank reads of a checkpoint that any number of
//! ranks wrote. Parts of parameters ([`OwnPart`]) are states too; a checkpoint has them whole.

use crate::runtime::ranks::Coordinates;
use crate::tensors::Tensors;
use crate::tensors::feed::widened;
use ckpt_passes::analysis::gradients::{Start, start, states};
use ckpt_passes::ir::{Graph, Tensor};
use ckpt_passes::ops::collective::{ALL_GATHER, GATHER_SLICES, OwnPart, slice_of, slice_size};
use ckpt_passes::transform::optimizer::{STATES, parts_by_name};
use ckpt_passes::{Error, Result};

/// Returns whether each rank keeps a slice of the states of a graph.
pub fn has_slices(graph: &Graph) -> bool {
    let mut nodes = graph.nodes();
    nodes.any(|(_, node)| [&GATHER_SLICES, &ALL_GATHER].contains(&node.op))
}

/// Returns the states of a graph on one of some ranks, from the files of all ranks that wrote them.
///
/// # Errors
/// A state that is of another size than the graph's.
pub fn own_states(files: &[Tensors], graph: &Graph, at: Coordinates) -> Result<Tensors> {
    let (rank, ranks) = (at.dp.0 as u64, at.dp.1 as u64);
    let by_name = parts_by_name(graph);
    let mut own = Tensors::new();
    for id in states(graph) {
        let name = &graph.value(id).name;
        let parts: Vec<&Tensor> = files.iter().filter_map(|file| file.get(name)).collect();
        let (Some(first), Some(dims)) = (parts.first(), graph.ty(id).static_dims()) else {
            continue;
        };
        let wanted: Vec<u64> = dims.iter().map(|d| *d as u64).collect();
        let part = by_name.get(name).map(|(_, part)| part);
        let is_alone = files.len() == 1 && ranks == 1 && part.is_none();
        let elements = parameter_elements(graph, name).filter(|_| !is_alone);
        let Some(elements) = elements else {
            own.insert(name.clone(), (*first).clone());
            continue;
        };
        let is_slice =
            |tensor: &[u64], of: i64| of > 1 && tensor == [slice_size(elements, of) as u64];
        let was_sliced = is_slice(&first.dims, files.len() as i64);
        let is_sliced = has_slices(graph) && is_slice(&wanted, ranks as i64);
        if was_sliced && is_sliced && files.len() as u64 == ranks {
            own.insert(name.clone(), parts[rank as usize].clone());
            continue;
        }
        let width = first.dtype.size_bytes() as usize;
        let mut bytes: Vec<u8> = Vec::new();
        let wrote = if was_sliced { &parts[..] } else { &parts[..1] };
        for part in wrote {
            bytes.extend(part.bytes().map_or(&[][..], AsRef::as_ref));
        }
        bytes.truncate(elements as usize * width);
        if bytes.len() != elements as usize * width {
            return Err(Error::usage("resume", format!("`{name}` has another size"))
                .expected(format!("{elements} elements"))
                .found(format!("{} bytes in {} files", bytes.len(), files.len())));
        }
        let whole = Tensor::new(first.dtype, [elements as u64], bytes);
        let tensor = match part {
            Some(of) => own_part(&whole, graph, of, at),
            None if is_sliced => slice(&whole, (rank, ranks)),
            None => Tensor {
                dims: wanted,
                ..whole
            },
        };
        own.insert(name.clone(), tensor);
    }
    Ok(own)
}

/// Returns the states of a run on one of some ranks that begin as its parameters, those of a checkpoint or of the model: masters of
/// 16-bit parameters, and a rank's slices of parameters.
pub fn first_masters(graph: &Graph, parameters: &Tensors, at: Coordinates) -> Tensors {
    let parts = parts_by_name(graph);
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
        let is_whole = graph.ty(id).dims == graph.ty(parameter).dims;
        let master = match parts.get(name) {
            Some((_, of)) => own_part(&whole, graph, of, at),
            None if is_whole && !has_slices(graph) => whole,
            None => slice(&whole, (at.dp.0 as u64, at.dp.1 as u64)),
        };
        masters.insert(name.clone(), master);
    }
    masters
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
    let mut bytes = Vec::with_capacity(all.len() / at.tp.1);
    for block in 0..outer {
        let begin = block * of.part.size() as usize;
        for (from, len) in of.part.stretches(ranks, rank) {
            let (from, len) = (begin + from as usize, len as usize);
            bytes.extend(all.get(from * row..(from + len) * row).unwrap_or_default());
        }
    }
    let mut own: Vec<u64> = dims.iter().map(|d| *d as u64).collect();
    own[axis] = (of.part.size() / ranks) as u64;
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

/// Returns the number of elements of the parameter that a state belongs to.
fn parameter_elements(graph: &Graph, state: &str) -> Option<i64> {
    let name = STATES.iter().find_map(|end| state.strip_suffix(end))?;
    let parameter = graph.find_value(name)?;
    graph.ty(parameter).elements().as_const()
}
