// Any ATen operator by name, through the dispatcher's boxed calling convention.
//
// The boxed convention does not check the number of arguments, nor all of their types, and a wrong stack is undefined
// behaviour. So each operator's schema is read once, at its lookup, and every call is checked and converted against it.
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "bytes.h"
#include "status.h"

namespace {

// The kind of value that a parameter's declared type accepts.
enum class Accepts { Tensor, Int, Double, Bool, Number, Str, Device, Generator, Ints, Doubles, Bools, Numbers, Tensors, OptTensors, Nothing };

struct Parameter {
  std::string name;
  std::string type;
  Accepts accepts = Accepts::Nothing;
  bool optional = false;
  bool written = false;
  std::optional<int64_t> fixed_len;  // `int[2]`: one number stands for all
  std::optional<c10::IValue> fallback;
};

Accepts accepted_list(const c10::TypePtr& element) {
  switch (element->kind()) {
    case c10::TypeKind::TensorType: return Accepts::Tensors;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return Accepts::Ints;
    case c10::TypeKind::FloatType: return Accepts::Doubles;
    case c10::TypeKind::BoolType: return Accepts::Bools;
    case c10::TypeKind::NumberType: return Accepts::Numbers;
    case c10::TypeKind::OptionalType:
      return element->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::TensorType
                 ? Accepts::OptTensors
                 : Accepts::Nothing;
    default: return Accepts::Nothing;
  }
}

Accepts accepted(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return Accepts::Tensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return Accepts::Int;
    case c10::TypeKind::FloatType: return Accepts::Double;
    case c10::TypeKind::BoolType: return Accepts::Bool;
    case c10::TypeKind::NumberType: return Accepts::Number;
    case c10::TypeKind::StringType: return Accepts::Str;
    case c10::TypeKind::DeviceObjType: return Accepts::Device;
    case c10::TypeKind::GeneratorType: return Accepts::Generator;
    case c10::TypeKind::ListType: return accepted_list(type->castRaw<c10::ListType>()->getElementType());
    default: return Accepts::Nothing;
  }
}

bool is_written(const c10::AliasInfo* alias) {
  if (alias == nullptr) return false;
  if (alias->isWrite()) return true;
  for (const auto& contained : alias->containedTypes())
    if (contained.isWrite()) return true;
  return false;
}

Parameter parameter(const c10::Argument& argument) {
  Parameter out;
  out.name = argument.name();
  out.type = argument.type()->str();
  c10::TypePtr type = argument.type();
  if (type->kind() == c10::TypeKind::OptionalType) {
    out.optional = true;
    type = type->castRaw<c10::OptionalType>()->getElementType();
  }
  out.accepts = accepted(type);
  out.written = is_written(argument.alias_info());
  if (argument.N()) out.fixed_len = *argument.N();
  out.fallback = argument.default_value();
  return out;
}

const char* tag_name(int32_t tag) {
  static const char* const names[] = {"None",  "Tensor", "Int",     "Double",     "Bool",   "Ints",     "Doubles",
                                      "Bools", "Str",    "Tensors", "OptTensors", "Device", "Generator", "NoTensor"};
  return tag >= 0 && tag < 14 ? names[tag] : "an unknown tag";
}

template <class T>
c10::ArrayRef<T> slice(const CkValue& value) {
  return {static_cast<const T*>(value.p), static_cast<size_t>(value.len)};
}

template <class To, class From>
c10::IValue list(const CkValue& value) {
  c10::List<To> list;
  for (From element : slice<From>(value)) list.push_back(To(element));
  return c10::IValue(std::move(list));
}

void check_writable(const Parameter& parameter, const at::Tensor& tensor) {
  TORCH_CHECK(!parameter.written || !ckpt::is_borrowed(tensor), "argument `", parameter.name,
              "` is written, but its bytes are lent and must not be");
}

// Converts `value` to the IValue that `parameter` wants. Returns none if the types do not fit.
std::optional<c10::IValue> convert(const Parameter& parameter, const CkValue& value) {
  const Accepts accepts = parameter.accepts;
  switch (value.tag) {
    case CK_NONE:
      if (parameter.optional) return c10::IValue();
      break;
    case CK_TENSOR:
      if (accepts == Accepts::Tensor) {
        const auto& tensor = *static_cast<const at::Tensor*>(value.p);
        check_writable(parameter, tensor);
        return c10::IValue(tensor);
      }
      break;
    case CK_NO_TENSOR:
      if (accepts == Accepts::Tensor && !parameter.optional && !parameter.written) return c10::IValue(at::Tensor());
      break;
    case CK_INT:
      if (accepts == Accepts::Int || accepts == Accepts::Number) return c10::IValue(value.i);
      if (accepts == Accepts::Double) return c10::IValue(static_cast<double>(value.i));
      if (accepts == Accepts::Ints && parameter.fixed_len)
        return c10::IValue(c10::List<int64_t>(std::vector<int64_t>(*parameter.fixed_len, value.i)));
      break;
    case CK_DOUBLE:
      if (accepts == Accepts::Double || accepts == Accepts::Number) return c10::IValue(value.d);
      if (accepts == Accepts::Doubles && parameter.fixed_len)
        return c10::IValue(c10::List<double>(std::vector<double>(*parameter.fixed_len, value.d)));
      break;
    case CK_BOOL:
      if (accepts == Accepts::Bool || accepts == Accepts::Number) return c10::IValue(value.i != 0);
      break;
    case CK_INTS:
      if (accepts == Accepts::Ints) return c10::IValue(c10::List<int64_t>(slice<int64_t>(value)));
      if (accepts == Accepts::Numbers) return list<at::Scalar, int64_t>(value);
      break;
    case CK_DOUBLES:
      if (accepts == Accepts::Doubles) return c10::IValue(c10::List<double>(slice<double>(value)));
      if (accepts == Accepts::Numbers) return list<at::Scalar, double>(value);
      break;
    case CK_BOOLS:
      if (accepts == Accepts::Bools) return list<bool, uint8_t>(value);
      break;
    case CK_STR:
      if (accepts == Accepts::Str)
        return c10::IValue(std::string(static_cast<const char*>(value.p), static_cast<size_t>(value.len)));
      break;
    case CK_TENSORS:
    case CK_OPT_TENSORS:
      if (accepts == Accepts::Tensors && value.tag == CK_TENSORS) {
        c10::List<at::Tensor> list;
        for (const at::Tensor* tensor : slice<const at::Tensor*>(value)) {
          check_writable(parameter, *tensor);
          list.push_back(*tensor);
        }
        return c10::IValue(std::move(list));
      }
      if (accepts == Accepts::OptTensors) {
        c10::List<std::optional<at::Tensor>> list;
        for (const at::Tensor* tensor : slice<const at::Tensor*>(value)) {
          if (tensor != nullptr) check_writable(parameter, *tensor);
          list.push_back(tensor != nullptr ? std::optional<at::Tensor>(*tensor) : std::nullopt);
        }
        return c10::IValue(std::move(list));
      }
      break;
    case CK_DEVICE:
      if (accepts == Accepts::Device)
        return c10::IValue(
            c10::Device(static_cast<c10::DeviceType>(value.i), static_cast<c10::DeviceIndex>(value.len)));
      break;
    case CK_GENERATOR:
      if (accepts == Accepts::Generator) return c10::IValue(*static_cast<const at::Generator*>(value.p));
      break;
  }
  return std::nullopt;
}

void free_tensors(const at::Tensor* const* tensors, size_t count) noexcept {
  for (size_t k = 0; k < count; k++) delete tensors[k];
}

// Stores owned handles to `tensors` in `out`.
void own_tensors(const std::vector<at::Tensor>& tensors, CkValue& out) {
  auto* handles = static_cast<const at::Tensor**>(std::malloc(tensors.size() * sizeof(void*) + 1));
  if (handles == nullptr) throw std::bad_alloc();
  size_t made = 0;
  try {
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK(tensor.defined(), "it returns a list with an undefined tensor in it");
      handles[made] = new at::Tensor(tensor);
      made++;
    }
  } catch (...) {
    free_tensors(handles, made);
    std::free(handles);
    throw;
  }
  out.tag = CK_TENSORS;
  out.len = static_cast<int64_t>(made);
  out.p = handles;
}

// Stores a result in `out`. Supports every kind of result of ATen's operators except complex numbers, quantisation schemes
// and dictionaries.
void own(const c10::IValue& value, CkValue& out) {
  out.len = 0;
  out.i = 0;
  if (value.isNone()) {
    out.tag = CK_NONE;
  } else if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    out.tag = tensor.defined() ? CK_TENSOR : CK_NONE;
    if (tensor.defined()) out.p = new at::Tensor(tensor);
  } else if (value.isInt() || value.isSymInt()) {
    out.tag = CK_INT;
    out.i = value.toInt();
  } else if (value.isDouble()) {
    out.tag = CK_DOUBLE;
    out.d = value.toDouble();
  } else if (value.isBool()) {
    out.tag = CK_BOOL;
    out.i = value.toBool();
  } else if (value.isTensorList()) {
    own_tensors(value.toTensorVector(), out);
  } else {
    TORCH_CHECK(false, "it returns a ", value.tagKind(), ", which has no counterpart here");
  }
}

void disown(CkValue& value) noexcept {
  if (value.tag == CK_TENSOR) {
    delete static_cast<const at::Tensor*>(value.p);
  } else if (value.tag == CK_TENSORS) {
    free_tensors(static_cast<const at::Tensor* const*>(value.p), static_cast<size_t>(value.len));
    std::free(const_cast<void*>(value.p));
  }
  value.tag = CK_NONE;
}

}  // namespace

struct CkOp {
  c10::OperatorHandle handle;
  std::vector<Parameter> parameters;
};

namespace {

void fill(torch::jit::Stack& stack, const CkOp& op, const CkValue* args, size_t arg_count) {
  const size_t wanted = op.parameters.size();
  TORCH_CHECK(arg_count <= wanted, "takes ", wanted, " arguments, ", arg_count, " were given");
  stack.reserve(wanted);
  for (size_t k = 0; k < wanted; k++) {
    const Parameter& parameter = op.parameters[k];
    if (k >= arg_count) {
      TORCH_CHECK(parameter.fallback, "argument ", k, " `", parameter.name, "` is missing and has no default");
      stack.push_back(*parameter.fallback);
      continue;
    }
    std::optional<c10::IValue> converted = convert(parameter, args[k]);
    TORCH_CHECK(converted, "argument ", k, " `", parameter.name, "` wants ", parameter.type, ", got ",
                tag_name(args[k].tag));
    stack.push_back(std::move(*converted));
  }
}

// The stack of one call, in memory that the thread keeps between calls. It is empty outside calls.
class Call {
 public:
  Call() : stack_(kept()) {}
  ~Call() { stack_.clear(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  torch::jit::Stack& stack() { return stack_; }

 private:
  static torch::jit::Stack& kept() {
    thread_local torch::jit::Stack stack;
    return stack;
  }
  torch::jit::Stack& stack_;
};

}  // namespace

extern "C" {

// The operator is never freed. The Rust side keeps one per name for the life of the process.
int32_t ck_op_find(const char* name, const char* overload, CkOp** op, char** schema, int64_t* returns) {
  return ckpt::guarded([&] {
    std::optional<c10::OperatorHandle> handle = c10::Dispatcher::singleton().findSchema({name, overload});
    TORCH_CHECK(handle, "libtorch has no such operator");
    const c10::FunctionSchema& found = handle->schema();
    TORCH_CHECK(!found.is_vararg() && !found.is_varret(), "it takes or returns any number of values");
    auto made = std::make_unique<CkOp>(CkOp{*handle, {}});
    for (const c10::Argument& argument : found.arguments()) made->parameters.push_back(parameter(argument));
    std::ostringstream text;
    text << found;
    const std::string& line = text.str();
    *schema = strdup(line.c_str());
    if (*schema == nullptr) throw std::bad_alloc();
    *returns = static_cast<int64_t>(found.returns().size());
    *op = made.release();
  });
}

// If `results` is null, the operator's results are dropped and `result_count` is not written.
int32_t ck_op_call(const CkOp* op, const CkValue* args, int64_t arg_count, CkValue* results, int64_t capacity,
                   int64_t* result_count) {
  return ckpt::guarded([&] {
    Call call;
    torch::jit::Stack& stack = call.stack();
    fill(stack, *op, args, static_cast<size_t>(arg_count));
    {
      // The graph is already differentiated, so autograd must not record and need not cost anything.
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      op->handle.callBoxed(stack);
    }
    if (results == nullptr) return;
    TORCH_CHECK(static_cast<int64_t>(stack.size()) <= capacity, "it returned ", stack.size(), " values, ", capacity,
                " were declared");
    int64_t made = 0;
    try {
      for (const c10::IValue& value : stack) {
        own(value, results[made]);
        made++;
      }
    } catch (...) {
      for (int64_t k = 0; k < made; k++) disown(results[k]);
      throw;
    }
    *result_count = made;
  });
}
}
