//! CUDA kernels that are generated from the scalar arithmetic of a chain of nodes.
//!
//! A kernel computes one element per thread, or one row per block if rows are summed. Each thread of a block then adds every
//! 256th element in order, and the threads' sums are added in a fixed tree. So the bits of a result depend on the arithmetic
//! and the sizes alone. Products and sums are never contracted (`--fmad=false`).

use super::convert::{dtype, torch_error};
use super::device;
use crate::place::Place;
use ckpt_passes::ir::arithmetic::{LIBRARY, Program, Step};
use ckpt_passes::ir::{DType, Graph};
use ckpt_passes::transform::chains::{self, fuse_chains};
use ckpt_passes::{Error, Result};
use ckpt_torch::kernel::{self, Kernel};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use tch::Tensor;

/// Threads of a block.
const THREADS: i64 = 256;
/// The most blocks of a launch; each computes several rows or elements where there are more.
const MOST_BLOCKS: i64 = 1 << 16;

/// How an operand is read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Operand {
    /// Its element type.
    pub dtype: DType,
    /// Whether it has the sizes of the results and is row-major.
    pub is_dense: bool,
}

/// What a kernel's source depends on beside the program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    /// The operands.
    pub operands: Vec<Operand>,
    /// The number of axes; at least 1.
    pub rank: usize,
    /// Whether an index takes 64 bits.
    pub is_large: bool,
}

const HELPERS: &str = "
__device__ float load(float x) { return x; }
__device__ float load(bool x) { return x ? 1.0f : 0.0f; }
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
__device__ float load(bf16 x) { return __int_as_float(int(x.bits) << 16); }
__device__ float load(f16 x) { float y; asm(\"cvt.f32.f16 %0, %1;\" : \"=f\"(y) : \"h\"(x.bits)); return y; }
__device__ void store(float& to, float x) { to = x; }
__device__ void store(bool& to, float x) { to = x != 0.0f; }
__device__ void store(bf16& to, float x) {
  const unsigned bits = __float_as_int(x);
  to.bits = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
__device__ void store(f16& to, float x) { asm(\"cvt.rn.f16.f32 %0, %1;\" : \"=h\"(to.bits) : \"f\"(x)); }
template <class T> __device__ float rounded(float x) { T to; store(to, x); return load(to); }
";

/// Sums within a block. All threads get the sum.
const ROW_TOTAL: &str = "
__device__ float row_total(float part) {
  __shared__ float parts[THREADS];
  __syncthreads();
  parts[threadIdx.x] = part;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  __syncthreads();
  return parts[0];
}
";

/// The place of an element of an operand that is broadcast or has strides. Its last axis may be a part of the row.
const PLACE: &str = "
__device__ long long place(const Space& s, int operand, index row, index column) {
  const long long* of = s.operands[operand];
  long long at = (column % index(of[RANK])) * of[RANK - 1];
  for (int axis = RANK - 2; axis >= 0; --axis) {
    at += (row % index(s.dims[axis])) * of[axis];
    row /= index(s.dims[axis]);
  }
  return at;
}
";

fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::Bool => "bool",
        _ => "float",
    }
}

/// Returns the CUDA C++ source of a program's kernel, `fused`. Its parameters are the operands, the results and the sizes.
pub fn source(program: &Program, shape: &Shape) -> String {
    let count = shape.operands.len().max(1);
    let index = if shape.is_large {
        "unsigned long long"
    } else {
        "unsigned"
    };
    let mut text = format!(
        "typedef {index} index;\nconstexpr int RANK = {};\nconstexpr int THREADS = {THREADS};\n\
         struct Space {{ long long rows, width, dims[RANK], operands[{count}][RANK + 1]; }};\n{HELPERS}{PLACE}",
        shape.rank
    );
    if program.sums_rows() {
        text.push_str(ROW_TOTAL);
    }
    let operands = shape.operands.iter().enumerate();
    let operands = operands.map(|(i, of)| format!("const {}* x{i}", type_name(of.dtype)));
    let results = program.results.iter().enumerate();
    let results = results.map(|(i, (_, dtype))| format!("{}* y{i}", type_name(*dtype)));
    let parameters: Vec<String> = operands.chain(results).collect();
    text.push_str("extern \"C\" __global__ void __launch_bounds__(THREADS) fused(");
    text.push_str(&parameters.join(", "));
    text.push_str(", const Space s) {\n  const index rows = s.rows, width = s.width;\n");
    text.push_str(match program.sums_rows() {
        true => "  for (index row = blockIdx.x; row < rows; row += gridDim.x) {\n",
        false => {
            "  const index elements = rows * width, stride = gridDim.x * index(THREADS);\n  \
             for (index at = blockIdx.x * index(THREADS) + threadIdx.x; at < elements; at += stride) {\n    \
             const index row = at / width, column = at % width;\n"
        }
    });
    let columns = "    for (index column = threadIdx.x; column < width; column += THREADS) {\n      \
                   const index at = row * width + column;\n";
    let mut body = Body {
        program,
        shape,
        text,
    };
    for (i, step) in program.steps.iter().enumerate() {
        if let Step::RowSum(of) = step {
            body.text += &format!("    float v{i} = 0.0f;\n{columns}");
            body.steps(&[*of]);
            body.text += &format!("      v{i} += v{of};\n    }}\n    v{i} = row_total(v{i});\n");
        }
    }
    if program.sums_rows() {
        body.text += columns;
    }
    let steps: Vec<usize> = program.results.iter().map(|(step, _)| *step).collect();
    body.steps(&steps);
    for (i, step) in steps.iter().enumerate() {
        body.text += &format!("      store(y{i}[at], v{step});\n");
    }
    body.text += if program.sums_rows() {
        "    }\n  }\n}\n"
    } else {
        "  }\n}\n"
    };
    body.text
}

struct Body<'a> {
    program: &'a Program,
    shape: &'a Shape,
    text: String,
}

impl Body<'_> {
    /// Writes the steps that `wanted` need, each once.
    fn steps(&mut self, wanted: &[usize]) {
        let mut needed = vec![false; self.program.steps.len()];
        for step in wanted {
            needed[*step] = true;
        }
        for (i, step) in self.program.steps.iter().enumerate().rev() {
            if needed[i] {
                self.reads(step).for_each(|of| needed[of] = true);
            }
        }
        for (i, step) in self.program.steps.iter().enumerate() {
            if needed[i] && !matches!(step, Step::RowSum(_)) {
                let value = self.value(step);
                let _ = writeln!(self.text, "      const float v{i} = {value};");
            }
        }
    }

    /// The steps that a step reads where it is computed: a sum over a row was computed before.
    fn reads<'s>(&self, step: &'s Step) -> Box<dyn Iterator<Item = usize> + 's> {
        match step {
            Step::RowSum(_) => Box::new(std::iter::empty()),
            Step::Call {
                arithmetic: Some(step),
                ..
            } => Box::new(std::iter::once(*step)),
            _ => Box::new(step.operands().iter().copied()),
        }
    }

    fn value(&self, step: &Step) -> String {
        match step {
            Step::Load { input, partner } => {
                let dense = self.shape.operands[*input].is_dense;
                let place = match (partner, dense) {
                    (false, true) => "at".into(),
                    (true, true) => "row * width + (column + width / 2) % width".into(),
                    (false, false) => format!("place(s, {input}, row, column)"),
                    (true, false) => {
                        format!("place(s, {input}, row, (column + width / 2) % width)")
                    }
                };
                format!("load(x{input}[{place}])")
            }
            Step::FirstHalf => "column < width / 2 ? 1.0f : 0.0f".into(),
            Step::RowLength => "float(width)".into(),
            Step::Number(n) => format!("__int_as_float(0x{:08x}) /* {n} */", n.to_bits()),
            Step::Apply(op, operands) => {
                let row = op.row();
                let put = |text: String, (i, of): (usize, &usize)| {
                    text.replace(&format!("${i}"), &format!("v{of}"))
                };
                operands.iter().enumerate().fold(row.cuda.to_string(), put)
            }
            Step::Round(dtype, of) => format!("rounded<{}>(v{of})", type_name(*dtype)),
            Step::RowSum(_) => unreachable!("declared before its loop"),
            Step::Call {
                arithmetic: Some(step),
                ..
            } => format!("v{step}"),
            Step::Call { name, operands, .. } => {
                let known = LIBRARY.iter().find(|(known, _)| known == name);
                let function = known.map_or(name.as_str(), |(_, cuda)| cuda);
                let operands: Vec<String> = operands.iter().map(|of| format!("v{of}")).collect();
                format!("{function}({})", operands.join(", "))
            }
        }
    }
}

/// A kernel by the text of its program, its shape and its device.
type Kernels = BTreeMap<(String, Shape, usize), Arc<Kernel>>;

static KERNELS: Mutex<Kernels> = Mutex::new(BTreeMap::new());

/// Replaces chains of nodes by fused ones on a place that computes them with generated kernels: a CUDA device. On the CPU the
/// graph stays as it is.
///
/// # Errors
/// `error[nvrtc]` if NVRTC cannot be loaded.
pub fn fuse_for(place: Place, graph: &mut Graph) -> Result<()> {
    if !device::of(place).is_host() {
        check_compiler()?;
        fuse_chains(graph);
    }
    Ok(())
}

/// Checks that kernels can be compiled here.
///
/// # Errors
/// `error[nvrtc]` if NVRTC cannot be loaded.
pub fn check_compiler() -> Result<()> {
    let empty = "extern \"C\" __global__ void fused() {}";
    let Err(error) = kernel::compile(empty, 80) else {
        return Ok(());
    };
    Err(
        Error::environment("nvrtc", "NVRTC, which compiles fused kernels, cannot be used")
            .found(error.to_string())
            .help("put the folder of libnvrtc.so on LD_LIBRARY_PATH (PyTorch's CUDA wheels bring it), or leave out --fused-kernels"),
    )
}

/// Returns the program of a text, which is read once.
///
/// # Errors
/// A text that is no program: a bug.
pub fn program(text: &str) -> Result<Arc<Program>> {
    static READ: Mutex<BTreeMap<String, Arc<Program>>> = Mutex::new(BTreeMap::new());
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = read.get(text) {
        return Ok(program.clone());
    }
    let program = chains::program(text)?;
    Ok(read.entry(text.into()).or_insert(Arc::new(program)).clone())
}

/// Computes a program on the device of its operands, on the current stream. The first call for a program and a shape compiles
/// its kernel.
///
/// # Errors
/// No NVRTC, or the driver refuses.
pub fn launch(
    text: &str,
    program: &Program,
    operands: &[&Tensor],
    outs: &[Tensor],
    device: usize,
) -> Result<()> {
    let dims = outs[0].size();
    let elements: i64 = dims.iter().product();
    if elements == 0 {
        return Ok(());
    }
    let width = dims.last().copied().unwrap_or(1);
    let shape = shape_of(operands, &dims)?;
    let mut space = vec![elements / width, width];
    // A tensor of rank 0 has one axis of size 1 here.
    let dims = if dims.is_empty() { vec![1] } else { dims };
    space.extend(&dims);
    for x in operands {
        space.extend(strides_in(x, &dims));
        space.push(x.size().last().copied().unwrap_or(1));
    }
    let key = (text.to_string(), shape, device);
    let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    let kernel = match kernels.get(&key) {
        Some(kernel) => kernel.clone(),
        None => {
            let kernel = Kernel::new(&source(program, &key.1), device).map_err(torch_error)?;
            kernels.entry(key).or_insert(Arc::new(kernel)).clone()
        }
    };
    drop(kernels);
    let blocks = match program.sums_rows() {
        true => elements / width,
        false => (elements + THREADS - 1) / THREADS,
    };
    let tensors: Vec<&Tensor> = operands.iter().copied().chain(outs).collect();
    let grid = blocks.min(MOST_BLOCKS);
    kernel
        .launch(&tensors, &space, (grid, THREADS))
        .map_err(torch_error)
}

/// Returns what the source depends on, for operands that are broadcast to `dims`.
fn shape_of(operands: &[&Tensor], dims: &[i64]) -> Result<Shape> {
    let operand = |x: &&Tensor| {
        let dtype = dtype(x.kind()).ok_or_else(|| Error::bug("fused", "a type without a name"))?;
        Ok(Operand {
            dtype,
            is_dense: x.size() == dims && x.is_contiguous(),
        })
    };
    // Indices run past the end by one stride of the launch.
    let most = i64::from(u32::MAX) - MOST_BLOCKS * THREADS;
    Ok(Shape {
        operands: operands.iter().map(operand).collect::<Result<_>>()?,
        rank: dims.len().max(1),
        is_large: dims.iter().product::<i64>() > most,
    })
}

/// Returns the strides of an operand over the axes of the results; 0 where it is broadcast.
fn strides_in(x: &Tensor, dims: &[i64]) -> Vec<i64> {
    let (size, strides) = (x.size(), x.stride());
    let lead = dims.len() - size.len();
    let own = size.iter().zip(strides);
    let own = own.map(|(n, stride)| if *n == 1 { 0 } else { stride });
    std::iter::repeat_n(0, lead).chain(own).collect()
}

/// Compiles a program's kernel for a compute capability (80, 90, …), and returns the size of the binary.
///
/// # Errors
/// No NVRTC; a source that does not compile, with the compiler's message.
pub fn compiled_bytes(program: &Program, shape: &Shape, capability: i64) -> Result<usize> {
    let binary = kernel::compile(&source(program, shape), capability).map_err(torch_error)?;
    Ok(binary.len())
}
