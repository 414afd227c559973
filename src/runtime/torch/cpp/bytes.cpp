// Raw bytes in and out of tensors, and the identity of storages.
#include "bytes.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

#include "status.h"

namespace {

struct Owner {
  void* owner;
  void (*drop_owner)(void*);
};

void release_owner(void* context) {
  auto* owner = static_cast<Owner*>(context);
  owner->drop_owner(owner->owner);
  delete owner;
}

const at::Tensor& tensor_of(const void* tensor) { return *static_cast<const at::Tensor*>(tensor); }

at::TensorOptions cpu_options(int32_t scalar_type) {
  return at::TensorOptions().dtype(static_cast<at::ScalarType>(scalar_type)).device(at::kCPU);
}

}  // namespace

namespace ckpt {

bool is_borrowed(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.storage().data_ptr().get_deleter() == &release_owner;
}

}  // namespace ckpt

extern "C" {

// Takes ownership of `owner`, also on failure. The caller has checked that dims and bytes agree.
int32_t ck_tensor_borrow(const void* data, const int64_t* dims, int64_t rank, int32_t scalar_type, void* owner,
                         void (*drop_owner)(void*), void** tensor) {
  auto* context = new (std::nothrow) Owner{owner, drop_owner};
  if (context == nullptr) {
    drop_owner(owner);
    return ckpt::report(CK_OUT_OF_MEMORY, "out of memory");
  }
  return ckpt::guarded([&] {
    // The maker owns `context` and releases it if the tensor cannot be made.
    auto maker = at::for_blob(const_cast<void*>(data), at::IntArrayRef(dims, static_cast<size_t>(rank)));
    maker.context(context, &release_owner).options(cpu_options(scalar_type));
    *tensor = new at::Tensor(maker.make_tensor());
  });
}

int32_t ck_tensor_copy(const void* data, int64_t len, const int64_t* dims, int64_t rank, int32_t scalar_type,
                       void** tensor) {
  return ckpt::guarded([&] {
    at::Tensor fresh = at::empty(at::IntArrayRef(dims, static_cast<size_t>(rank)), cpu_options(scalar_type));
    TORCH_CHECK(static_cast<int64_t>(fresh.nbytes()) == len, "the tensor has ", fresh.nbytes(), " bytes, ", len,
                " were given");
    if (len > 0) std::memcpy(fresh.mutable_data_ptr(), data, static_cast<size_t>(len));
    *tensor = new at::Tensor(std::move(fresh));
  });
}

// Bypasses the dispatcher, whose overhead would dominate here. In a small step most calls are this one and ck_tensor_view.
int32_t ck_tensor_empty(const int64_t* dims, int64_t rank, int32_t scalar_type, void** tensor) {
  return ckpt::guarded([&] {
    const auto kind = static_cast<at::ScalarType>(scalar_type);
    *tensor = new at::Tensor(at::detail::empty_cpu(at::IntArrayRef(dims, static_cast<size_t>(rank)), kind));
  });
}

// Makes a view that begins where the tensor begins; libtorch checks that it stays within the storage.
int32_t ck_tensor_view(const void* handle, const int64_t* dims, const int64_t* strides, int64_t rank, void** view) {
  return ckpt::guarded([&] {
    const at::IntArrayRef size(dims, static_cast<size_t>(rank)), stride(strides, static_cast<size_t>(rank));
    *view = new at::Tensor(at::native::as_strided_tensorimpl(tensor_of(handle), size, stride));
  });
}

int32_t ck_tensor_bytes(const void* handle, int32_t for_writing, void** data, int64_t* len) {
  return ckpt::guarded([&] {
    const at::Tensor& tensor = tensor_of(handle);
    TORCH_CHECK(tensor.defined(), "the tensor is undefined");
    TORCH_CHECK(tensor.device().is_cpu(), "the tensor is on ", tensor.device(), ", not on the CPU");
    TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_quantized(), "the tensor is not a plain strided one");
    TORCH_CHECK(tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj(), "the tensor is not contiguous");
    TORCH_CHECK(!for_writing || !ckpt::is_borrowed(tensor), "the tensor's bytes are lent and must not be written");
    *len = static_cast<int64_t>(tensor.nbytes());
    *data = for_writing ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
  });
}

int32_t ck_tensor_storage(const void* handle, int64_t* id) {
  return ckpt::guarded([&] {
    const at::Tensor& tensor = tensor_of(handle);
    TORCH_CHECK(tensor.defined() && tensor.has_storage(), "the tensor has no storage");
    *id = static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.storage().unsafeGetStorageImpl()));
  });
}
}
