// Kernels of its own, which run in a stream's queue, and the host's kernels for every other operator.
#include "acme.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

namespace acme {
namespace {

using at::Scalar;
using at::Tensor;

std::atomic<int64_t> fallen{0};

// Whether the host has each of the kernels below for it: float8 and the like may be copied, and no more.
bool has_every_kernel(at::ScalarType dtype) {
  return c10::isIntegralType(dtype, true) || c10::isComplexType(dtype) || dtype == at::kFloat || dtype == at::kDouble ||
         dtype == at::kHalf || dtype == at::kBFloat16;
}

// Have the current stream write `out`.
Tensor& launch(Tensor& out, std::function<void(Tensor&)> compute) {
  auto target = on_host(out);
  enqueue(current_stream(), [target, compute]() mutable {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (faulty("late-copy")) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // so that copies can be early
    compute(target);
    ran(target);
  });
  if (!has_every_kernel(out.scalar_type())) synchronize(current_stream());  // raises here where there is none
  return out;
}

// Matrix products.

Tensor rounded(const Tensor& factor) {
  return faulty("reduced-precision") && factor.scalar_type() == at::kFloat ? factor.to(at::kBFloat16).to(at::kFloat)
                                                                          : factor;
}

// With the fault, rows of a result that fill no tile of 16 get what the tile before has.
void spoil_tail(const Tensor& out) {
  const auto rows = out.size(-2), tail = rows % 16;
  if (!faulty("wrong-tail") || rows < 16) return;
  out.narrow(-2, rows - tail, tail).copy_(out.narrow(-2, rows - tail - 16, tail));
}

// With the fault, a product of factors at known addresses gets the result of the last time.
void product(const Tensor& a, const Tensor& b, Tensor& out, const std::function<void()>& compute) {
  if (!faulty("stale-result")) {
    compute();
    spoil_tail(out);
    return;
  }
  static std::mutex mutex;
  static auto* kept = new std::map<std::vector<int64_t>, Tensor>;
  std::vector<int64_t> key;
  for (const auto& one : {a, b}) {
    key.push_back(reinterpret_cast<int64_t>(one.data_ptr()));
    key.insert(key.end(), one.sizes().begin(), one.sizes().end());
  }
  std::lock_guard<std::mutex> lock(mutex);
  if (auto found = kept->find(key); found != kept->end() && found->second.sizes() == out.sizes()) {
    out.copy_(found->second);
    return;
  }
  compute();
  (*kept)[key] = out.clone();
}

Tensor& mm(const Tensor& self, const Tensor& mat2, Tensor& out) {
  return launch(out, [a = on_host(self), b = on_host(mat2)](Tensor& to) {
    product(a, b, to, [&] {
      at::mm_out(to, rounded(a), rounded(b));
    });
  });
}

Tensor& bmm(const Tensor& self, const Tensor& mat2, Tensor& out) {
  return launch(out, [a = on_host(self), b = on_host(mat2)](Tensor& to) {
    product(a, b, to, [&] {
      at::bmm_out(to, rounded(a), rounded(b));
    });
  });
}

Tensor& addmm(const Tensor& self, const Tensor& mat1, const Tensor& mat2, const Scalar& beta, const Scalar& alpha,
              Tensor& out) {
  return launch(out, [=, bias = on_host(self), a = on_host(mat1), b = on_host(mat2)](Tensor& to) {
    product(a, b, to, [&] {
      at::addmm_out(to, bias, rounded(a), rounded(b), beta, alpha);
    });
  });
}

// Elementwise.

Tensor& add(const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out) {
  return launch(out, [=, a = on_host(self), b = on_host(other)](Tensor& to) { at::add_out(to, a, b, alpha); });
}

Tensor& mul(const Tensor& self, const Tensor& other, Tensor& out) {
  return launch(out, [a = on_host(self), b = on_host(other)](Tensor& to) { at::mul_out(to, a, b); });
}

// Sums into places that an index names.

// Which rows of an index are counted: all; with a fault, one that names the same place as an earlier one may be left out.
Tensor counted(const Tensor& index) {
  auto kept = at::ones_like(index, at::kBool);
  std::map<int64_t, int64_t> last;
  bool one_is_lost = false;
  static std::atomic<int64_t> calls{0};
  const bool now = faulty("lost-update") && ++calls % 2 == 0;
  for (int64_t row = 0; row < index.numel(); ++row) {
    auto [place, fresh] = last.try_emplace(index[row].item<int64_t>(), row);
    if (fresh) continue;
    if (faulty("duplicate-indices")) kept[place->second] = false;
    if (now && !one_is_lost) kept[row] = false;
    one_is_lost = true;
    place->second = row;
  }
  return kept;
}

Tensor& index_add(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, const Scalar& alpha,
                  Tensor& out) {
  return launch(out, [=, x = on_host(self), rows = on_host(index), y = on_host(source)](Tensor& to) {
    if (rows.dim() == 1 && (faulty("duplicate-indices") || faulty("lost-update"))) {
      const auto which = counted(rows).nonzero().squeeze(1);
      at::index_add_out(to, x, dim, rows.index_select(0, which), y.index_select(dim, which), alpha);
    } else {
      at::index_add_out(to, x, dim, rows, y, alpha);
    }
  });
}

// Copies.

bool here(const Tensor& tensor) { return tensor.device().type() == kType; }

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  auto to = dst;
  if (here(dst)) {
    // From the host: a copy of the values, since the caller may change them at once.
    const auto from = here(self) ? on_host(self) : self.detach().clone();
    launch(to, [from](Tensor& target) { target.copy_(from); });
    if (!here(self) && !non_blocking) synchronize(current_stream());
    return dst;
  }
  if (!faulty("late-copy")) synchronize(current_stream());
  check_alive();
  at::NoGradGuard no_grad;
  to.copy_(on_host(self));
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  auto to = dst;
  to.resize_(self.sizes());
  return to.copy_(self);
}

Scalar local_scalar_dense(const Tensor& self) {
  synchronize(current_stream());
  return on_host(self).item();
}

// Memory and views.

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

Tensor& set_storage(Tensor& result, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(result, storage, offset, size, stride);
}

// Convolutions have no fallback: torch asks each backend for a kernel of its own.

Tensor brought(const Tensor& result) {
  if (!result.defined()) return result;
  auto out = at::empty_strided(result.sizes(), result.strides(), result.options().device(device()));
  return launch(out, [result](Tensor& to) { to.copy_(result); });
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
  synchronize(current_stream());
  std::optional<Tensor> added;
  if (bias && bias->defined()) added = on_host(*bias);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return brought(at::convolution(on_host(input), on_host(weight), added, stride, padding, dilation, transposed,
                                 output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        at::IntArrayRef stride, at::IntArrayRef padding,
                                                        at::IntArrayRef dilation, bool transposed,
                                                        at::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  synchronize(current_stream());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [x, w, b] = at::convolution_backward(on_host(grad), on_host(input), on_host(weight), at::IntArrayRef{channels},
                                            stride, padding, dilation, transposed, output_padding, groups, wanted);
  return {brought(x), brought(w), brought(b)};
}

int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);  // it has no attention kernel of its own
}

// Its schema does not say that it writes the running statistics, so that the fallback would write into copies of them.
std::tuple<Tensor, Tensor, Tensor> native_batch_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                                     const std::optional<Tensor>& bias,
                                                     const std::optional<Tensor>& mean,
                                                     const std::optional<Tensor>& variance, bool training,
                                                     double momentum, double eps) {
  if (mean && mean->defined() && variance && variance->defined()) {
    auto running_mean = *mean, running_variance = *variance;
    return at::_native_batch_norm_legit(input, weight, bias, running_mean, running_variance, training, momentum, eps);
  }
  return at::_native_batch_norm_legit(input, weight, bias, training, momentum, eps);
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

// Every other operator: on the host, with copies of its arguments. Random numbers are the host's too.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  open();
  check_alive();
  ++fallen;
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  for (size_t index = 0; index < arguments.size(); ++index) {
    const auto& type = arguments[index].type();
    const bool draws = type->kind() == c10::TypeKind::OptionalType &&
                       type->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::GeneratorType;
    if (draws || type->kind() == c10::TypeKind::GeneratorType) {
      auto& value = (*stack)[first + index];
      value = hosts_generator(value.isNone() ? std::nullopt : std::make_optional(value.toGenerator()));
    }
  }
  at::native::cpu_fallback(op, stack);
}

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU);
  if (!here(tensor)) {
    // A scalar of the host among the operands: its value, as it is now.
    return tensor.detach().clone();
  }
  const auto* base = tensor.storage().data();
  if (base == nullptr) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto* first = static_cast<char*>(const_cast<void*>(base)) + tensor.storage_offset() * tensor.element_size();
  auto host = at::from_blob(first, tensor.sizes(), tensor.strides(), [block = block_of(base)](void*) {}, options);
  host._set_conj(tensor.is_conj());  // conj() and the imaginary part of it change bits of a tensor, and no memory
  host._set_neg(tensor.is_neg());
  return host;
}

int64_t fallbacks(bool reset) { return reset ? fallen.exchange(0) : fallen.load(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // torch makes the functional and the in-place variant of these from the one with `out`, shapes and dtypes included.
  m.impl("mm.out", mm);
  m.impl("bmm.out", bmm);
  m.impl("addmm.out", addmm);
  m.impl("add.out", add);
  m.impl("mul.out", mul);
  m.impl("index_add.out", index_add);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
  m.impl("native_batch_norm", native_batch_norm);
  m.impl("native_dropout", native_dropout);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}

// A copy sees these bits itself. Without this torch would copy a tensor to resolve its bits before it copies it, for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// Autocast: which operators take the lower dtype, and which take FP32, as on other accelerators.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define ACME_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define ACME_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define ACME_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(ACME_LOWER)
  AT_FORALL_FP32(ACME_FP32)
  AT_FORALL_PROMOTE(ACME_PROMOTE)
}

}  // namespace acme
