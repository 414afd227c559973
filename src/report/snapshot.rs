//! The memory of a plan as PyTorch's memory snapshot, for `torch.cuda._memory_viz` and the viewer at
//! pytorch.org/memory_viz.
//!
//! A snapshot is a pickle of `{"segments": […], "device_traces": [[…]], …}`. Every storage is a segment of its own with
//! one block; the trace allocates and frees them in the order of the schedule. Frames carry what we know: the node, its
//! layer, the decision. The viewer orders by event, not by time, so the x axis is the schedule. Addresses are ours, below
//! 2^53, because the viewer counts in floats.

use super::account::Account;
use super::memory::{Kind, Memory};
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
    // At each step: what is gone is freed, what is made there is allocated, the kernel's temporaries come and go.
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
    let mut p = Pickle::new(out)?;
    p.dict(|p| {
        p.key("segments")?;
        p.list(|p| {
            for (i, (piece, _)) in pieces.iter().enumerate() {
                if at_peak(i) && piece.bytes > 0 {
                    segment(p, piece)?;
                }
            }
            Ok(())
        })?;
        p.key("device_traces")?;
        p.list(|p| {
            p.list(|p| {
                for (_, order, i) in &events {
                    let piece = &pieces[*i].0;
                    if piece.bytes > 0 {
                        let action = if matches!(order, 1 | 2) {
                            "alloc"
                        } else {
                            "free_completed"
                        };
                        event(p, action, piece)?;
                    }
                }
                Ok(())
            })
        })?;
        p.key("allocator_settings")?;
        p.dict(|_| Ok(()))
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
        let node = node.map_or(String::new(), |o| {
            format!(" by {}", account.terms().node(o).name)
        });
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
        let op = &problem.ops[memory.schedule[step]];
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

fn frames(p: &mut Pickle, piece: &Piece) -> Result<()> {
    p.key("frames")?;
    p.list(|p| {
        for (name, file) in [
            (piece.name, "ckpt-opt"),
            (piece.what.as_str(), piece.kind.word()),
        ] {
            p.dict(|p| {
                p.key("filename")?;
                p.text(file)?;
                p.key("line")?;
                p.number(0)?;
                p.key("name")?;
                p.text(name)
            })?;
        }
        Ok(())
    })
}

fn event(p: &mut Pickle, action: &str, piece: &Piece) -> Result<()> {
    p.dict(|p| {
        p.key("action")?;
        p.text(action)?;
        p.key("addr")?;
        p.number(piece.address)?;
        p.key("size")?;
        p.number(piece.bytes)?;
        p.key("stream")?;
        p.number(0)?;
        frames(p, piece)
    })
}

fn segment(p: &mut Pickle, piece: &Piece) -> Result<()> {
    let sizes = [
        "total_size",
        "allocated_size",
        "active_size",
        "requested_size",
    ];
    p.dict(|p| {
        p.key("device")?;
        p.number(0)?;
        p.key("address")?;
        p.number(piece.address)?;
        for key in sizes {
            p.key(key)?;
            p.number(piece.bytes)?;
        }
        p.key("stream")?;
        p.number(0)?;
        p.key("segment_type")?;
        p.text(if piece.bytes < 1 << 20 {
            "small"
        } else {
            "large"
        })?;
        p.key("segment_pool_id")?;
        p.pair(0, 0)?;
        p.key("is_expandable")?;
        p.truth(false)?;
        frames(p, piece)?;
        p.key("blocks")?;
        p.list(|p| {
            p.dict(|p| {
                p.key("address")?;
                p.number(piece.address)?;
                for key in ["size", "requested_size"] {
                    p.key(key)?;
                    p.number(piece.bytes)?;
                }
                p.key("state")?;
                p.text("active_allocated")?;
                frames(p, piece)
            })
        })
    })
}
