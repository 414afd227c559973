//! The C interface of `cpp/`. `cpp/abi.h` has the types and the rules of ownership.

use std::ffi::{c_char, c_void};
use std::marker::PhantomData;
use std::ptr::NonNull;
use tch::Tensor;

pub const OK: i32 = 0;
pub const OUT_OF_MEMORY: i32 = 2;

pub const NONE: i32 = 0;
pub const TENSOR: i32 = 1;
pub const INT: i32 = 2;
pub const DOUBLE: i32 = 3;
pub const BOOL: i32 = 4;
pub const INTS: i32 = 5;
pub const DOUBLES: i32 = 6;
pub const BOOLS: i32 = 7;
pub const STR: i32 = 8;
pub const TENSORS: i32 = 9;
pub const OPT_TENSORS: i32 = 10;
pub const DEVICE: i32 = 11;
pub const GENERATOR: i32 = 12;
pub const NO_TENSOR: i32 = 13;

#[repr(C)]
#[derive(Clone, Copy)]
pub union Payload {
    pub i: i64,
    pub d: f64,
    pub p: *const c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Value {
    pub tag: i32,
    pub len: i64,
    pub payload: Payload,
}

/// An operator on the C++ side, used only through a pointer.
#[repr(C)]
pub struct CkOp {
    _opaque: [u8; 0],
}

/// An arena on the C++ side, used only through a pointer.
#[repr(C)]
pub struct CkArena {
    _opaque: [u8; 0],
}

/// A range `from..to` of an arena in bytes, for one block of `bytes` (its header not counted). A negative `bytes` admits any
/// block of at least `-bytes`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// First byte, from the start of the arena.
    pub from: i64,
    /// End of the range, exclusive.
    pub to: i64,
    /// Size of the block without its header; if negative, any block of at least `-bytes` fits.
    pub bytes: i64,
}

/// A tensor that is lent to a C call; `None` of an option is null.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Lent<'a>(NonNull<c_void>, PhantomData<&'a Tensor>);

impl<'a> From<&'a Tensor> for Lent<'a> {
    fn from(tensor: &'a Tensor) -> Lent<'a> {
        // SAFETY: tch's handles are never null.
        let handle = unsafe { NonNull::new_unchecked(tensor.as_ptr().cast_mut().cast()) };
        Lent(handle, PhantomData)
    }
}

/// `r` queries of `h` heads, and the `n` keys that any of them may see. `CkTile` of `cpp/abi.h`.
#[repr(C)]
pub struct Tile<'a> {
    /// [h, r, d], in float32 or a 16-bit type.
    pub q: Lent<'a>,
    /// [h, n, d], float32.
    pub k: Lent<'a>,
    /// [h, n, e], float32; a gradient reads it for `dq` and `dk` only.
    pub v: Lent<'a>,
    /// [h, r, n], added to the scores; a boolean bias hides the keys for which it is false.
    pub bias: Option<Lent<'a>>,
    /// Buffer of float32, [h, r, n].
    pub scores: Lent<'a>,
    /// Buffer of float32, [h, r, 1]; required for the result, unused by a gradient.
    pub sums: Option<Lent<'a>>,
    /// Buffer of float32, [h, r, e], or [h, r, d] for a gradient.
    pub result: Option<Lent<'a>>,
    /// Buffer of float32, [h, r, d]; required if `q` has another type.
    pub q_copy: Option<Lent<'a>>,
    /// Scores are softcap·tanh(scale/softcap·q·k), or scale·q·k if `softcap` is 0.
    pub scale: f64,
    /// The largest magnitude of a score before the bias; 0 for no cap.
    pub softcap: f64,
    /// Row `i` sees the keys from `first + i`; `i64::MIN` for all.
    pub first: i64,
    /// Row `i` sees the keys below `end + i`; `i64::MAX` for all.
    pub end: i64,
    /// Whether a query that sees no key gives NaN; otherwise it gives zeros.
    pub empty_is_nan: i32,
}

/// The gradients of a tile. `CkTileGradients` of `cpp/abi.h`.
#[repr(C)]
pub struct Gradients<'a> {
    /// [h, r, e].
    pub dy: Lent<'a>,
    /// Float32, [h, r, 1]: the cotangent of the log-sum-exp.
    pub dlse: Option<Lent<'a>>,
    /// Buffer of float32, [h, r, e]; required if `dy` has another type.
    pub dy_copy: Option<Lent<'a>>,
    /// Buffer of float32, [h, r, n]; required for `dq` and `dk`.
    pub slopes: Option<Lent<'a>>,
    /// Buffer of float32, [h, r, n]; for capped scores, if `softcap` is not 0.
    pub capped: Option<Lent<'a>>,
    /// Written.
    pub dq: Option<Lent<'a>>,
    /// Added to; float32.
    pub dk: Option<Lent<'a>>,
    /// [h, n, e], float32; added to. `None` if it is not wanted.
    pub dv: Option<Lent<'a>>,
}

unsafe extern "C" {
    pub fn ck_last_message() -> *const c_char;
    pub fn ck_free(memory: *mut c_void);
    pub fn ck_version_built_with() -> *const c_char;
    pub fn ck_version_loaded(version: *mut *mut c_char) -> i32;

    pub fn ck_op_find(
        name: *const c_char,
        overload: *const c_char,
        op: *mut *mut CkOp,
        schema: *mut *mut c_char,
        returns: *mut i64,
    ) -> i32;
    pub fn ck_op_call(
        op: *const CkOp,
        args: *const Value,
        arg_count: i64,
        results: *mut Value,
        capacity: i64,
        result_count: *mut i64,
    ) -> i32;

    pub fn ck_gemm_is_ours() -> i32;
    pub fn ck_gemm(
        a: *const c_void,
        b: *const c_void,
        c: *const c_void,
        alpha: f64,
        beta: f64,
        out: *const c_void,
    ) -> i32;

    pub fn ck_attend(tile: &Tile, y: Lent, lse: Option<Lent>) -> i32;
    pub fn ck_attend_back(tile: &Tile, gradients: &Gradients) -> i32;

    pub fn ck_memory_install();
    pub fn ck_memory_stats(live_bytes: *mut i64, peak_bytes: *mut i64, allocations: *mut i64);
    pub fn ck_memory_reset_peak();
    pub fn ck_memory_scratch(begin: i32);
    pub fn ck_memory_workspace_bytes() -> i64;

    pub fn ck_arena_new(bytes: i64, arena: *mut *mut CkArena) -> i32;
    pub fn ck_arena_free(arena: *mut CkArena);
    pub fn ck_arena_placed(arena: *mut CkArena) -> i64;
    pub fn ck_arena_offer(arena: *mut CkArena, places: *const Place, count: i64);
    pub fn ck_arena_withdraw();

    pub fn ck_tensor_borrow(
        data: *const c_void,
        dims: *const i64,
        rank: i64,
        scalar_type: i32,
        owner: *mut c_void,
        drop_owner: extern "C" fn(*mut c_void),
        tensor: *mut *mut c_void,
    ) -> i32;
    pub fn ck_tensor_copy(
        data: *const c_void,
        len: i64,
        dims: *const i64,
        rank: i64,
        scalar_type: i32,
        tensor: *mut *mut c_void,
    ) -> i32;
    pub fn ck_tensor_empty(
        dims: *const i64,
        rank: i64,
        scalar_type: i32,
        tensor: *mut *mut c_void,
    ) -> i32;
    pub fn ck_tensor_view(
        tensor: *const c_void,
        dims: *const i64,
        strides: *const i64,
        rank: i64,
        view: *mut *mut c_void,
    ) -> i32;
    pub fn ck_tensor_bytes(
        tensor: *const c_void,
        for_writing: i32,
        data: *mut *mut c_void,
        len: *mut i64,
    ) -> i32;
    pub fn ck_tensor_storage(tensor: *const c_void, id: *mut i64) -> i32;

    pub fn ck_cuda_pin(data: *mut c_void, len: i64) -> i32;
    pub fn ck_cuda_unpin(data: *mut c_void) -> i32;
    pub fn ck_cuda_copy_stream(device: i64, stream: *mut *mut c_void) -> i32;
    pub fn ck_cuda_copy_stream_drop(stream: *mut c_void);
    pub fn ck_cuda_copy_stream_copy(
        stream: *mut c_void,
        from: *const c_void,
        to: *const c_void,
        done: *mut *mut c_void,
    ) -> i32;
    pub fn ck_cuda_await(done: *const c_void, device: i64) -> i32;
    pub fn ck_cuda_copy_done_drop(done: *mut c_void);

    pub fn ck_cuda_load() -> i32;
    pub fn ck_cuda_count(devices: *mut i64) -> i32;
    pub fn ck_cuda_prepare(device: i64) -> i32;
    pub fn ck_cuda_refuse_nondeterministic(refuse: i32);
    pub fn ck_cuda_synchronize(device: i64) -> i32;
    pub fn ck_cuda_memory_stats(
        device: i64,
        live_bytes: *mut i64,
        peak_bytes: *mut i64,
        requested_live_bytes: *mut i64,
        requested_peak_bytes: *mut i64,
        reserved_peak_bytes: *mut i64,
    ) -> i32;
    pub fn ck_cuda_memory_reset_peak(device: i64) -> i32;
    pub fn ck_cuda_properties(device: i64, capability: *mut i64, processors: *mut i64) -> i32;
    pub fn ck_cuda_memory_info(device: i64, free_bytes: *mut i64, total_bytes: *mut i64) -> i32;

    pub fn ck_graph_find() -> i32;
    pub fn ck_graph_stream(device: i64, stream: *mut *mut c_void) -> i32;
    pub fn ck_graph_stream_drop(stream: *mut c_void);
    pub fn ck_graph_enter(stream: *const c_void, guard: *mut *mut c_void) -> i32;
    pub fn ck_graph_leave(guard: *mut c_void);
    pub fn ck_graph_begin(stream: *const c_void, made: *mut *mut c_void) -> i32;
    pub fn ck_graph_end(made: *mut c_void, nodes: *mut i64) -> i32;
    pub fn ck_graph_replay(made: *mut c_void) -> i32;
    pub fn ck_graph_drop(made: *mut c_void);

    pub fn ck_kernel_compile(
        source: *const c_char,
        capability: i64,
        take: extern "C" fn(*mut c_void, *const c_char, i64),
        to: *mut c_void,
    ) -> i32;
    pub fn ck_kernel_load(binary: *const c_void, kernel: *mut *mut c_void) -> i32;
    pub fn ck_kernel_launch(
        kernel: *mut c_void,
        device: i64,
        tensors: *const *const c_void,
        count: i64,
        space: *const c_void,
        blocks: i64,
        threads: i64,
    ) -> i32;

    pub fn ck_store_tcp(
        host: *const c_char,
        port: i64,
        ranks: i64,
        serve: i32,
        timeout_ms: i64,
        prefix: *const c_char,
        store: *mut *mut c_void,
    ) -> i32;
    pub fn ck_store_file(
        path: *const c_char,
        ranks: i64,
        timeout_ms: i64,
        prefix: *const c_char,
        store: *mut *mut c_void,
    ) -> i32;
    pub fn ck_store_set(store: *const c_void, key: *const c_char, text: *const c_char) -> i32;
    pub fn ck_store_get(
        store: *const c_void,
        key: *const c_char,
        timeout_ms: i64,
        text: *mut *mut c_char,
    ) -> i32;
    pub fn ck_store_add(
        store: *const c_void,
        key: *const c_char,
        number: i64,
        sum: *mut i64,
    ) -> i32;
    pub fn ck_store_drop(store: *mut c_void);
    pub fn ck_group_join(
        store: *const c_void,
        name: *const c_char,
        rank: i64,
        ranks: i64,
        timeout_ms: i64,
        host: *const c_char,
        has_devices: i32,
    ) -> i32;
    pub fn ck_nccl_version(version: *mut i64) -> i32;
    pub fn ck_group_sum_on_device(
        name: *const c_char,
        ranks: i64,
        tensors: *const *const c_void,
        slices: *const *const c_void,
        count: i64,
    ) -> i32;
    pub fn ck_group_leave(name: *const c_char) -> i32;
    pub fn ck_group_sum(
        name: *const c_char,
        rank: i64,
        ranks: i64,
        tag: i64,
        kind: i32,
        data: *const i64,
        counts: *const i64,
        slices: *const i64,
        tensors: i64,
    ) -> i32;
    pub fn ck_group_scratch_bytes() -> i64;
    pub fn ck_group_gather(
        name: *const c_char,
        tensor: *const c_void,
        slice_bytes: *const i64,
        ranks: i64,
        gather: *mut *mut c_void,
    ) -> i32;
    pub fn ck_group_gathered(gather: *mut c_void) -> i32;

    pub fn ck_generator_new(seed: u64, generator: *mut *mut c_void) -> i32;
    pub fn ck_generator_clone(generator: *mut c_void, clone: *mut *mut c_void) -> i32;
    pub fn ck_generator_free(generator: *mut c_void);
}
