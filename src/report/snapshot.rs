//! The memory of a plan as PyTorch's memory snapshot, for `torch.cuda._memory_viz` and the viewer at
//! pytorch.org/memory_viz.
//!
//! A snapshot is a pickle of `{"segments": […], "device_traces": [[…]], …}`. Every storage is a segment of its own with
//! one block. The trace allocates and frees them in the order of the schedule, which is the viewer's x axis. Frames name
//! the node, its layer and the kind of memory. Addresses are made up and stay below 2^53, because the viewer counts in
//! floats.

use super::account::Account;
use super::memory::{Kind, Memory};
use super::pickle::Item::{self, Dict, List, Number, Pair, Text, Truth};
use super::pickle::Pickle;
use std::io::{Result, Write};

/// Storages start at multiples of this.
const ALIGN_BYTES: u64 = 512;
const FIRST_ADDRESS: u64 = 1 << 20;

/// One entry of the trace, or one block.
struct Piece<'a> {
    name: &'a str,
    what: String,
    kind: Kind,
    address: u64,
    bytes: u64,
}

/// Writes the snapshot of the planned step. The state that `segments` describe is that of the peak.
///
/// # Errors
/// Those of `out`.
pub fn write(account: &Account, out: &mut dyn Write) -> Result<()> {
    let memory = &account.after;
    let pieces = pieces(account, memory);
    let mut events: Vec<(usize, u8, usize)> = Vec::new();
    // At each step storages are freed, then results and temporaries allocated, then temporaries freed.
    for (i, t) in memory
        .tenants
        .iter()
        .enumerate()
        .filter(|(_, t)| t.from < t.until)
    {
        events.push((t.from, 1, i));
        if !t.stays {
            events.push((t.until, 0, i));
        }
    }
    let first_temporary = memory.tenants.len();
    let mut temporary = first_temporary;
    for (step, bytes) in memory.temp_bytes.iter().enumerate() {
        if *bytes > 0 {
            events.push((step, 2, temporary));
            events.push((step, 3, temporary));
            temporary += 1;
        }
    }
    events.sort_unstable();
    let peak = memory.peak_step.unwrap_or(0);
    let at_peak = |i: usize| match memory.tenants.get(i) {
        Some(t) => t.from <= peak && peak < t.until,
        None => pieces[i].1 == Some(peak),
    };
    let held = pieces.iter().enumerate();
    let held = held.filter(|(i, (piece, _))| at_peak(*i) && piece.bytes > 0);
    let events = events.iter().map(|(_, order, i)| (order, &pieces[*i].0));
    let events = events.filter(|(_, piece)| piece.bytes > 0);
    let mut p = Pickle::new(out)?;
    p.dict(|p| {
        p.text("segments")?;
        p.list(held.map(|(_, (piece, _))| segment(piece)))?;
        p.text("device_traces")?;
        // One device.
        p.nested_list(events.map(|(order, piece)| {
            let action = match order {
                1 | 2 => "alloc",
                _ => "free_completed",
            };
            event(action, piece)
        }))?;
        p.text("allocator_settings")?;
        p.item(Dict(Vec::new()))
    })?;
    p.end()
}

/// Every storage, then every kernel's temporaries with their step. Zero bytes are not shown.
fn pieces<'a>(account: &'a Account, memory: &Memory) -> Vec<(Piece<'a>, Option<usize>)> {
    let problem = &account.terms().problem;
    let labels = &account.terms().labels;
    let mut next = FIRST_ADDRESS;
    let mut place = |bytes: u64| {
        let address = next;
        next += bytes.next_multiple_of(ALIGN_BYTES).max(ALIGN_BYTES);
        address
    };
    let mut all = Vec::new();
    for t in &memory.tenants {
        let layer = t.layer.map_or(String::new(), |l| format!(", layer {l}"));
        let node = problem.values[t.value].producer;
        let node = node.map_or(String::new(), |o| format!(" by {}", problem.ops[o].name));
        let piece = Piece {
            name: &labels.names[t.value],
            what: format!("{}{node}{layer}", t.kind.word()),
            kind: t.kind,
            address: place(t.bytes),
            bytes: t.bytes,
        };
        all.push((piece, None));
    }
    for (step, bytes) in memory
        .temp_bytes
        .iter()
        .enumerate()
        .filter(|(_, b)| **b > 0)
    {
        let op = &problem.ops[memory.schedule.steps[step].op()];
        let piece = Piece {
            name: &op.name,
            what: "temporaries inside the kernel".into(),
            kind: Kind::Temporaries,
            address: place(*bytes),
            bytes: *bytes,
        };
        all.push((piece, Some(step)));
    }
    all
}

fn frames<'a>(piece: &'a Piece) -> Item<'a> {
    let frame = |(name, file)| {
        Dict(vec![
            ("filename", Text(file)),
            ("line", Number(0)),
            ("name", Text(name)),
        ])
    };
    let about = [
        (piece.name, "ckpt-opt"),
        (piece.what.as_str(), piece.kind.word()),
    ];
    List(about.map(frame).into())
}

fn event<'a>(action: &'static str, piece: &'a Piece) -> Item<'a> {
    Dict(vec![
        ("action", Text(action)),
        ("addr", Number(piece.address)),
        ("size", Number(piece.bytes)),
        ("stream", Number(0)),
        ("frames", frames(piece)),
    ])
}

fn segment<'a>(piece: &'a Piece) -> Item<'a> {
    let kind = match piece.bytes < 1 << 20 {
        true => "small",
        false => "large",
    };
    let block = Dict(vec![
        ("address", Number(piece.address)),
        ("size", Number(piece.bytes)),
        ("requested_size", Number(piece.bytes)),
        ("state", Text("active_allocated")),
        ("frames", frames(piece)),
    ]);
    Dict(vec![
        ("device", Number(0)),
        ("address", Number(piece.address)),
        ("total_size", Number(piece.bytes)),
        ("allocated_size", Number(piece.bytes)),
        ("active_size", Number(piece.bytes)),
        ("requested_size", Number(piece.bytes)),
        ("stream", Number(0)),
        ("segment_type", Text(kind)),
        ("segment_pool_id", Pair(0, 0)),
        ("is_expandable", Truth(false)),
        ("frames", frames(piece)),
        ("blocks", List(vec![block])),
    ])
}
