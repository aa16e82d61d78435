// Products, attention and norms of numbers in float16, for CPUs: summed as floats and rounded once.
//
// As in kernels.cc, a column and a node have the same bits, however many others there are.

#include "activation.h"
#include "attention.h"
#include "float16.h"
#include "norm.h"

namespace {

// x [in, columns], weights [out, in] -> results [out, columns] each, or, with `transpose_out`,
// [columns, out].
ffi::Error Products(ffi::ThreadPool pool, ffi::Buffer<ffi::F16> x, ffi::RemainingArgs weights,
                    bool transpose_out, ffi::RemainingRets results) {
  SameParts<Float16> read;
  const ffi::Error problem = read.Read<ffi::F16>(weights, results);
  if (problem.failure()) return problem;
  auto& parts = read.parts;
  const size_t count = weights.size();
  const int64_t in = x.dimensions()[0], columns = x.dimensions()[1], total = read.total;
  const float* packed = PackRows(static_cast<const Float16*>(x.untyped_data()), in, columns, false);
  const int64_t rows = TaskRows(pool, total * in * 2, total);
  const int64_t tasks = DivideParts(parts.data(), count, rows);
  Parallel(pool, tasks, [=](int64_t task) {
    const auto [part, begin, height] = ShareOf(parts.data(), task, rows);
    const Float16* weight = part->weight + begin * in;
    float* sums = Scratch(1, height * columns);
    To across{columns, 1, false};
    for (int64_t k = 0; k < in; k += kLong, across.add = true)
      FewBy(weight + k, packed + k, sums, in, std::min(kLong, in - k), height, columns, across);
    const int64_t down = transpose_out ? 1 : columns, side = transpose_out ? part->out : 1;
    Float16* y = part->result + begin * down;
    for (int64_t r = 0; r < height; ++r)
      for (int64_t m = 0; m < columns; ++m) Put(sums[r * columns + m], y + r * down + m * side);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxProductsFloat16, Products, BindProducts<ffi::F16>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxAttentionFloat16, (Attention<Float16, ffi::F16>),
                              BindAttention<ffi::F16>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxSwigluFloat16, (Swiglu<Float16, ffi::F16>),
                              BindSwiglu<ffi::F16>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxNormFloat16, (Norm<Float16, ffi::F16>), BindNorm<ffi::F16>());
