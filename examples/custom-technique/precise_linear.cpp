// A linear layer whose sums are in double precision, as a kernel for torch's CPU tensors.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace {

// x (N, K), weight (M, K), bias (M): x @ weight.T + bias, (N, M); all float32.
at::Tensor precise_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1), "expected x (N, K) and weight (M, K), got ",
              x.sizes(), " and ", weight.sizes());
  TORCH_CHECK(bias.dim() == 1 && bias.size(0) == weight.size(0), "expected bias (M), got ", bias.sizes());
  for (const auto& one : {x, weight, bias}) {
    TORCH_CHECK(one.scalar_type() == at::kFloat, "expected float32, got ", one.scalar_type());
  }
  const auto rows = x.contiguous(), columns = weight.contiguous(), added = bias.contiguous();
  const int64_t n = x.size(0), m = weight.size(0), k = x.size(1);
  auto out = at::empty({n, m}, x.options());
  const float *a = rows.const_data_ptr<float>(), *b = columns.const_data_ptr<float>(), *c = added.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, n, 16, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      for (int64_t column = 0; column < m; ++column) {
        double sum = c[column];
        for (int64_t term = 0; term < k; ++term) sum += double(a[row * k + term]) * b[column * k + term];
        to[row * m + column] = static_cast<float>(sum);
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(example, m) { m.def("precise_linear(Tensor x, Tensor weight, Tensor bias) -> Tensor"); }
TORCH_LIBRARY_IMPL(example, CPU, m) { m.impl("precise_linear", precise_linear); }
