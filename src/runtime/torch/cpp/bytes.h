// Tensors over memory that is not libtorch's.
#pragma once
#include <ATen/core/Tensor.h>

namespace ckpt {

// Whether the tensor's storage is lent by a Rust owner, and therefore must not be written.
bool is_borrowed(const at::Tensor& tensor);

}  // namespace ckpt
