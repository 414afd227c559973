//! The counting allocator is exact. The counters are process-wide, so that this file's tests take turns.

use crate::support::torch::alone;
use ckpt_torch::arena::{Arena, Place};
use ckpt_torch::memory::{self, live_bytes, peak_bytes, reset_peak};
use ckpt_torch::tch::{Device, Kind, Tensor};
use ckpt_torch::{ErrorKind, Op, args, bytes, storage_id};

fn empty(bytes: i64) -> Tensor {
    Op::find("aten::empty.memory_format")
        .unwrap()
        .call_one(args![&[bytes], Kind::Uint8])
        .unwrap()
}

#[test]
fn peak_is_exact_for_a_sequence_of_allocations() {
    alone();
    let base = live_bytes();
    let before = memory::stats().allocations;
    reset_peak();
    assert_eq!(peak_bytes(), base);
    let a = empty(1000);
    let b = empty(1);
    assert_eq!(live_bytes() - base, 1001);
    drop(a);
    assert_eq!((live_bytes() - base, peak_bytes() - base), (1, 1001));
    let c = empty(999);
    assert_eq!((live_bytes() - base, peak_bytes() - base), (1000, 1001));
    let d = empty(2);
    assert_eq!(peak_bytes() - base, 1002);
    assert_eq!(memory::stats().allocations - before, 4);
    drop((b, c, d));
    assert_eq!((live_bytes() - base, peak_bytes() - base), (0, 1002));
    reset_peak();
    assert_eq!(peak_bytes(), base);
}

#[test]
fn zero_bytes_cost_nothing() {
    alone();
    let stats = memory::stats();
    let nothing = empty(0);
    assert_eq!(nothing.size(), [0]);
    assert_eq!(memory::stats(), stats);
}

#[test]
fn an_operators_results_and_views_count_by_storage() {
    alone();
    let base = live_bytes();
    let x = Tensor::ones([16, 16], (Kind::Float, Device::Cpu));
    assert_eq!(live_bytes() - base, 1024);
    let add = Op::find("aten::add.Tensor").unwrap();
    reset_peak();
    let y = add.call_one(args![&x, &x]).unwrap();
    assert_eq!((live_bytes() - base, peak_bytes() - base), (2048, 2048));
    let view = Op::find("aten::select.int").unwrap();
    let row = view.call_one(args![&y, 0, 3]).unwrap();
    assert_eq!(storage_id(&row).unwrap(), storage_id(&y).unwrap());
    assert_ne!(storage_id(&row).unwrap(), storage_id(&x).unwrap());
    drop(y);
    assert_eq!(live_bytes() - base, 2048, "the view keeps the storage");
    drop(row);
    assert_eq!(live_bytes() - base, 1024);
    let in_place = Op::find("aten::mul_.Tensor").unwrap();
    reset_peak();
    let same = in_place.call_one(args![&x, &x]).unwrap();
    assert_eq!(peak_bytes() - base, 1024);
    assert_eq!(storage_id(&same).unwrap(), storage_id(&x).unwrap());
    drop((x, same));
    assert_eq!(live_bytes(), base);
}

#[test]
fn calls_do_not_leak_whether_they_succeed_or_fail() {
    alone();
    let base = live_bytes();
    let x = Tensor::ones([4, 4], (Kind::Float, Device::Cpu));
    let complex = Tensor::ones([2], (Kind::ComplexFloat, Device::Cpu)).select(0, 0);
    let with_inputs = live_bytes();
    for _ in 0..100 {
        drop(
            Op::find("aten::unsafe_split.Tensor")
                .unwrap()
                .call(args![&x, 1])
                .unwrap(),
        );
        drop(
            Op::find("aten::max.dim")
                .unwrap()
                .call(args![&x, 0])
                .unwrap(),
        );
        Op::find("aten::mm")
            .unwrap()
            .call(args![&x, &complex])
            .unwrap_err();
        Op::find("aten::cat")
            .unwrap()
            .call(args![&[&x, &x], 9])
            .unwrap_err();
        Op::find("aten::_local_scalar_dense")
            .unwrap()
            .call(args![&complex])
            .unwrap_err();
    }
    assert_eq!(live_bytes(), with_inputs);
    drop((x, complex));
    assert_eq!(live_bytes(), base);
}

#[test]
fn blocks_may_die_on_another_thread() {
    alone();
    let base = live_bytes();
    let tensors: Vec<Tensor> = (1..=8).map(|k| empty(k * 100)).collect();
    assert_eq!(live_bytes() - base, 3600);
    std::thread::scope(|scope| {
        for tensor in tensors {
            scope.spawn(move || drop(tensor));
        }
    });
    assert_eq!(live_bytes(), base);
}

#[test]
fn too_much_is_out_of_memory_and_leaves_no_trace() {
    alone();
    let stats = memory::stats();
    let empty = Op::find("aten::empty.memory_format").unwrap();
    for bytes in [1i64 << 55, i64::MAX - 1] {
        let error = empty.call(args![&[bytes], Kind::Uint8]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::OutOfMemory, "{error}");
        assert!(error.message.contains(&bytes.to_string()), "{error}");
    }
    assert_eq!(memory::stats(), stats);
}

#[test]
fn scratch_comes_from_four_blocks_a_thread_that_stay() {
    alone();
    let (base, kept) = (live_bytes(), memory::workspace_bytes());
    let in_workspaces = || memory::workspace_bytes() - kept;
    reset_peak();
    // A thread of its own has no blocks yet.
    std::thread::scope(|threads| {
        let work = || {
            let scope = memory::Scratch::begin();
            let inner = memory::Scratch::begin();
            let blocks: Vec<Tensor> = [1000, 200, 30, 4].map(empty).into_iter().collect();
            let starts: Vec<_> = blocks.iter().map(Tensor::data_ptr).collect();
            assert!(
                starts
                    .iter()
                    .all(|p| (*p as usize).is_multiple_of(bytes::ALIGNMENT_BYTES))
            );
            assert_eq!((live_bytes() - base, in_workspaces()), (0, 1234));
            // A fifth one at the same time is a tensor like any.
            let fifth = empty(100);
            assert_eq!(live_bytes() - base, 100);
            drop((blocks, fifth, inner));
            let again = empty(10);
            assert_eq!(again.data_ptr(), starts[0]);
            drop(scope);
            let outside = empty(7);
            assert_eq!((live_bytes() - base, peak_bytes() - base), (7, 100));
            // A block may be given back later than the scope ends.
            drop((again, outside));
            let _scope = memory::Scratch::begin();
            let [first, second] = [20, 300].map(empty);
            assert_eq!(first.data_ptr(), starts[0]);
            drop((first, second));
            assert_eq!((live_bytes(), in_workspaces()), (base, 1334));
        };
        threads.spawn(work).join().unwrap();
    });
    // A thread's blocks go with it.
    assert_eq!(memory::workspace_bytes(), kept);
}

#[test]
fn lent_bytes_do_not_count() {
    alone();
    let base = live_bytes();
    let owner = std::sync::Arc::new(vec![0u8; 4096]);
    let start = owner.as_ptr().align_offset(bytes::ALIGNMENT_BYTES);
    struct Part(std::sync::Arc<Vec<u8>>, usize);
    impl AsRef<[u8]> for Part {
        fn as_ref(&self) -> &[u8] {
            &self.0[self.1..self.1 + 1024]
        }
    }
    let lent = bytes::from_bytes(
        std::sync::Arc::new(Part(owner.clone(), start)),
        Kind::Float,
        &[256],
    )
    .unwrap();
    assert_eq!(live_bytes(), base);
    let copied = bytes::from_bytes(
        std::sync::Arc::new(Part(owner, start + 4)),
        Kind::Float,
        &[256],
    )
    .unwrap();
    assert_eq!(live_bytes() - base, 1024);
    drop((lent, copied));
}

#[test]
fn blocks_go_where_they_are_offered_a_place_and_nowhere_twice() {
    alone();
    let base = live_bytes();
    let arena = Arena::new(1 << 20).unwrap();
    let place = |from, to, bytes| Place { from, to, bytes };
    let places = [place(0, 4160, 4096), place(8192, 20480, -100)];
    let data = |t: &Tensor| t.data_ptr() as usize;
    let outside = empty(4096);
    assert_eq!(arena.placed(), 0);
    let offer = arena.offer(&places);
    let mut first = empty(4096);
    let start = data(&first) - 64;
    assert!(start.is_multiple_of(64) && arena.placed() == 1);
    // The place of its size is taken: the stretch for any, then malloc.
    let (second, third) = (empty(4096), empty(4000));
    assert_eq!(
        (data(&second) - start, data(&third) - start),
        (8192 + 64, 8192 + 4160 + 64)
    );
    assert!(empty(4096).numel() == 4096 && arena.placed() == 3);
    drop(second);
    assert_eq!(data(&empty(100)) - start, 8192 + 64);
    // Smaller than what the stretch is for.
    let small = empty(99);
    assert_eq!(arena.placed(), 4);
    drop(small);
    drop(offer);
    let elsewhere = empty(4096);
    assert_eq!(arena.placed(), 4);
    assert_eq!(live_bytes() - base, 3 * 4096 + 4000);
    // Layers outlive the arena.
    drop(arena);
    let _ = first.fill_(7);
    assert_eq!(first.max().int64_value(&[]), 7);
    drop((first, third, outside, elsewhere));
    assert_eq!(live_bytes(), base);
}
