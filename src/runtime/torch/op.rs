//! ATen operators by name, with arguments checked against the operator's own schema.

use crate::error::{TorchError, check};
use crate::handle;
use crate::rng::Generator;
use crate::sys::{self, Payload, Value};
use rustc_hash::FxBuildHasher;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::ptr;
use std::slice;
use std::sync::{PoisonError, RwLock};
use tch::{Device, Kind, Tensor};

/// An argument of an operator; [`args!`](crate::args) converts plain values. The operator's schema decides what fits. An `Int`
/// also fits `float` and `Scalar`, and stands for all elements of a list of fixed length (`int[2]`). A `Double` or `Bool` also
/// fits `Scalar`. `None` needs an optional type.
#[derive(Debug, Clone, Copy)]
pub enum Arg<'a> {
    /// The absent value of an optional argument.
    None,
    /// A tensor, lent for the call.
    Tensor(&'a Tensor),
    /// A tensor, or `None` for an argument of type `Tensor?`.
    OptTensor(Option<&'a Tensor>),
    /// For `int`, and wherever an integer stands for another type.
    Int(i64),
    /// For `float` or `Scalar`.
    Double(f64),
    /// For `bool` or `Scalar`.
    Bool(bool),
    /// For `int[]` and `SymInt[]`, such as sizes and axes.
    Ints(&'a [i64]),
    /// For `float[]`.
    Doubles(&'a [f64]),
    /// For `bool[]`, such as an output mask.
    Bools(&'a [bool]),
    /// For `str`, such as a rounding mode.
    Str(&'a str),
    /// For `Tensor[]`; the tensors are lent for the call.
    Tensors(&'a [&'a Tensor]),
    /// For `Tensor?[]`, such as the indices of `aten::index.Tensor`.
    OptTensors(&'a [Option<&'a Tensor>]),
    /// For a `ScalarType` argument.
    Dtype(Kind),
    /// CPU or CUDA.
    Device(Device),
    /// For `Generator?`: the state that a random operator draws from and advances.
    Generator(&'a Generator),
    /// An undefined tensor for a required parameter. Some forward operators return undefined tensors that their backward takes.
    NoTensor,
}

/// Makes the arguments of an operator from tensors, numbers, lists, texts and [`Arg`]s.
#[macro_export]
macro_rules! args {
    ($($arg:expr),* $(,)?) => {
        &[$($crate::Arg::from($arg)),*]
    };
}

macro_rules! from {
    ($($variant:ident($of:ty)),* $(,)?) => {
        $(impl<'a> From<$of> for Arg<'a> {
            fn from(value: $of) -> Arg<'a> {
                Arg::$variant(value)
            }
        })*
    };
}

from! {
    Tensor(&'a Tensor),
    OptTensor(Option<&'a Tensor>),
    Int(i64),
    Double(f64),
    Bool(bool),
    Ints(&'a [i64]),
    Doubles(&'a [f64]),
    Bools(&'a [bool]),
    Str(&'a str),
    Tensors(&'a [&'a Tensor]),
    OptTensors(&'a [Option<&'a Tensor>]),
    Dtype(Kind),
    Device(Device),
    Generator(&'a Generator),
}

impl<'a, T, const N: usize> From<&'a [T; N]> for Arg<'a>
where
    Arg<'a>: From<&'a [T]>,
{
    fn from(list: &'a [T; N]) -> Arg<'a> {
        Arg::from(list.as_slice())
    }
}

impl<'a, T> From<&'a Vec<T>> for Arg<'a>
where
    Arg<'a>: From<&'a [T]>,
{
    fn from(list: &'a Vec<T>) -> Arg<'a> {
        Arg::from(list.as_slice())
    }
}

/// A result. An undefined tensor is `None`, for example a gradient that an output mask excludes.
#[derive(Debug)]
pub enum Ret {
    /// An undefined tensor, or no value.
    None,
    /// A tensor, which may be a view of an argument.
    Tensor(Tensor),
    /// A result of type `int`.
    Int(i64),
    /// A result of type `float`.
    Double(f64),
    /// A result of type `bool`.
    Bool(bool),
    /// A result of type `Tensor[]`, such as the parts of a split.
    Tensors(Vec<Tensor>),
}

impl Ret {
    /// Returns the tensor, or an error that names the actual result.
    pub fn into_tensor(self) -> Result<Tensor, TorchError> {
        match self {
            Ret::Tensor(tensor) => Ok(tensor),
            other => Err(TorchError::refused(format!(
                "expected a tensor as result, found {other:?}"
            ))),
        }
    }
}

/// An operator of libtorch. Cheap to copy; looked up once per name and overload and kept for the life of the process.
#[derive(Clone, Copy)]
pub struct Op(&'static Entry);

struct Entry {
    handle: *const sys::CkOp,
    name: String,
    schema: String,
    returns: usize,
}

// SAFETY: the C++ operator is not changed after it is made, and the dispatcher may be called from any thread.
unsafe impl Send for Entry {}
unsafe impl Sync for Entry {}

const NOTHING: Value = Value {
    tag: sys::NONE,
    len: 0,
    payload: Payload { i: 0 },
};

/// Calls with at most this many arguments allocate nothing for them.
const FEW_ARGUMENTS: usize = 10;

/// All operators looked up so far, by full name. They are never freed; a program uses a few hundred at most.
static FOUND: RwLock<HashMap<String, &'static Entry, FxBuildHasher>> =
    RwLock::new(HashMap::with_hasher(FxBuildHasher));

impl Op {
    /// Finds an operator by its name and overload: `Op::find("aten::add.Tensor")`, `Op::find("aten::relu")`.
    ///
    /// # Errors
    /// `Refused` if libtorch has no such operator, or if it takes or returns a variable number of values.
    pub fn find(full_name: &str) -> Result<Op, TorchError> {
        let found = FOUND.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = found.get(full_name) {
            return Ok(Op(entry));
        }
        drop(found);
        let (name, overload) = full_name.split_once('.').unwrap_or((full_name, ""));
        let c_string = |text: &str| {
            CString::new(text).map_err(|_| {
                TorchError::refused(format!("the operator name {text:?} contains a NUL"))
            })
        };
        let (c_name, c_overload) = (c_string(name)?, c_string(overload)?);
        let mut handle = ptr::null_mut();
        let mut schema = ptr::null_mut();
        let mut returns = 0;
        // SAFETY: the strings are NUL-terminated and the three places are valid for writing.
        check(unsafe {
            sys::ck_op_find(
                c_name.as_ptr(),
                c_overload.as_ptr(),
                &mut handle,
                &mut schema,
                &mut returns,
            )
        })
        .map_err(|error| error.within(full_name))?;
        let entry = Entry {
            handle,
            name: full_name.to_owned(),
            // SAFETY: on success `schema` is a string of ours to free.
            schema: unsafe { handle::take_string(schema) },
            returns: usize::try_from(returns).unwrap_or(0),
        };
        let mut found = FOUND.write().unwrap_or_else(PoisonError::into_inner);
        let leak = || -> &'static Entry { Box::leak(Box::new(entry)) };
        Ok(Op(found.entry(full_name.to_owned()).or_insert_with(leak)))
    }

    /// Returns the full name, such as `aten::add.Tensor`.
    pub fn name(&self) -> &'static str {
        &self.0.name
    }

    /// Returns the schema as libtorch prints it, with alias marks and defaults:
    /// `aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor`.
    pub fn schema(&self) -> &'static str {
        &self.0.schema
    }

    /// Calls the operator. Arguments are in the order of the schema; missing ones at the end take their defaults.
    ///
    /// # Errors
    /// `Refused` for arguments that do not fit the schema or that libtorch refuses, for a write to a tensor whose bytes are lent
    /// ([`crate::bytes::from_bytes`]), and for a result of a type that [`Ret`] lacks (a complex number, a dictionary);
    /// `OutOfMemory`.
    pub fn call(&self, args: &[Arg<'_>]) -> Result<Vec<Ret>, TorchError> {
        let mut results = vec![NOTHING; self.0.returns];
        let mut count = 0;
        self.dispatch(args, &mut results, &mut count)?;
        results.truncate(usize::try_from(count).unwrap_or(0));
        // SAFETY: the call succeeded, so we own each result once.
        Ok(results
            .into_iter()
            .map(|value| unsafe { take(value) })
            .collect())
    }

    /// Calls the operator and drops its results, for an operator that writes into its arguments.
    ///
    /// # Errors
    /// As [`Op::call`], except errors about results.
    pub fn run(&self, args: &[Arg<'_>]) -> Result<(), TorchError> {
        self.dispatch(args, &mut [], &mut 0)
    }

    /// Calls the operator. Stores the results in `results` unless that is empty.
    fn dispatch(
        &self,
        args: &[Arg<'_>],
        results: &mut [Value],
        count: &mut i64,
    ) -> Result<(), TorchError> {
        let mut handles: Vec<Vec<*const c_void>> = Vec::new();
        let mut few = [NOTHING; FEW_ARGUMENTS];
        let mut many = Vec::new();
        let values = match few.get_mut(..args.len()) {
            Some(values) => values,
            None => {
                many.resize(args.len(), NOTHING);
                &mut many[..]
            }
        };
        for (value, arg) in values.iter_mut().zip(args) {
            *value = value_of(arg, &mut handles).map_err(|error| error.within(self.name()))?;
        }
        let capacity = results.len() as i64;
        let into = match capacity {
            0 => ptr::null_mut(),
            _ => results.as_mut_ptr(),
        };
        // SAFETY: `args` and `handles` keep alive during the call what `values` points to, and `results` has room for
        // `capacity` results.
        check(unsafe {
            sys::ck_op_call(
                self.0.handle,
                values.as_ptr(),
                values.len() as i64,
                into,
                capacity,
                count,
            )
        })
        .map_err(|error| error.within(self.name()))
    }

    /// Calls an operator that returns exactly one tensor.
    ///
    /// # Errors
    /// As [`Op::call`], and `Refused` if the result is anything else.
    pub fn call_one(&self, args: &[Arg<'_>]) -> Result<Tensor, TorchError> {
        let mut results = self.call(args)?;
        match (results.pop(), results.is_empty()) {
            (Some(result), true) => result
                .into_tensor()
                .map_err(|error| error.within(self.name())),
            _ => Err(TorchError::refused(format!(
                "{}: expected one tensor as result",
                self.name()
            ))),
        }
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Op({})", self.0.name)
    }
}

/// Converts an argument for the C interface. Lists of tensors become lists of handles, which `handles` keeps alive.
fn value_of(arg: &Arg<'_>, handles: &mut Vec<Vec<*const c_void>>) -> Result<Value, TorchError> {
    let single = |tag, payload| Value {
        tag,
        len: 0,
        payload,
    };
    let int = |tag, i| single(tag, Payload { i });
    let pointer = |tag, p| single(tag, Payload { p });
    let list = |tag, data: *const c_void, len: usize| Value {
        len: len as i64,
        ..pointer(tag, data)
    };
    let mut tensors = |tag, list_of: Vec<*const c_void>| {
        let value = list(tag, list_of.as_ptr().cast(), list_of.len());
        handles.push(list_of);
        value
    };
    Ok(match *arg {
        Arg::None | Arg::OptTensor(None) => int(sys::NONE, 0),
        Arg::NoTensor => int(sys::NO_TENSOR, 0),
        Arg::Tensor(tensor) | Arg::OptTensor(Some(tensor)) => {
            pointer(sys::TENSOR, handle::lend(tensor))
        }
        Arg::Generator(generator) => pointer(sys::GENERATOR, generator.handle()),
        Arg::Int(i) => int(sys::INT, i),
        Arg::Dtype(kind) => int(sys::INT, scalar_type(kind).into()),
        Arg::Bool(b) => int(sys::BOOL, b.into()),
        Arg::Double(d) => single(sys::DOUBLE, Payload { d }),
        Arg::Ints(items) => list(sys::INTS, items.as_ptr().cast(), items.len()),
        Arg::Doubles(items) => list(sys::DOUBLES, items.as_ptr().cast(), items.len()),
        Arg::Bools(items) => list(sys::BOOLS, items.as_ptr().cast(), items.len()),
        Arg::Str(text) => list(sys::STR, text.as_ptr().cast(), text.len()),
        Arg::Tensors(items) => tensors(
            sys::TENSORS,
            items.iter().map(|&tensor| handle::lend(tensor)).collect(),
        ),
        Arg::OptTensors(items) => tensors(
            sys::OPT_TENSORS,
            items
                .iter()
                .map(|&tensor| handle::lend_opt(tensor))
                .collect(),
        ),
        Arg::Device(device) => {
            // The values of c10::DeviceType.
            let (device_type, index) = match device {
                Device::Cpu => (0, -1),
                Device::Cuda(index) if index <= i8::MAX as usize => (1, index as i64),
                other => {
                    return Err(TorchError::refused(format!(
                        "{other:?} is not a device we run on"
                    )));
                }
            };
            Value {
                len: index,
                ..int(sys::DEVICE, device_type)
            }
        }
    })
}

/// Returns the number of `kind` in c10::ScalarType.
pub(crate) fn scalar_type(kind: Kind) -> i32 {
    match kind {
        Kind::Uint8 => 0,
        Kind::Int8 => 1,
        Kind::Int16 => 2,
        Kind::Int => 3,
        Kind::Int64 => 4,
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::ComplexHalf => 8,
        Kind::ComplexFloat => 9,
        Kind::ComplexDouble => 10,
        Kind::Bool => 11,
        Kind::QInt8 => 12,
        Kind::QUInt8 => 13,
        Kind::QInt32 => 14,
        Kind::BFloat16 => 15,
        Kind::Float8e5m2 => 23,
        Kind::Float8e4m3fn => 24,
        Kind::Float8e5m2fnuz => 25,
        Kind::Float8e4m3fnuz => 26,
    }
}

/// # Safety
/// `value` is a result that nobody has taken yet.
unsafe fn take(value: Value) -> Ret {
    let Value { tag, len, payload } = value;
    let len = usize::try_from(len).unwrap_or(0);
    // SAFETY: the tag says which field of the union is set and what lies behind the pointer.
    unsafe {
        match tag {
            sys::TENSOR => Ret::Tensor(handle::own(payload.p)),
            sys::INT => Ret::Int(payload.i),
            sys::DOUBLE => Ret::Double(payload.d),
            sys::BOOL => Ret::Bool(payload.i != 0),
            sys::TENSORS => {
                let handles = slice::from_raw_parts(payload.p.cast::<*const c_void>(), len);
                let tensors = handles.iter().map(|&handle| handle::own(handle)).collect();
                sys::ck_free(payload.p.cast_mut());
                Ret::Tensors(tensors)
            }
            _ => Ret::None,
        }
    }
}
