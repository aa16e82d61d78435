// Products of weight matrices with a few columns.

#ifndef SPECJAX_PRODUCTS_H_
#define SPECJAX_PRODUCTS_H_

#include "bfloat16.h"
#include "few_columns.h"
#include "tasks.h"
#include "vectors.h"

namespace {

// x [in, columns], weights [out, in] -> results [out, columns] each, or, with `transpose_out`,
// [columns, out].
// Weights are float32 or bfloat16, whose products are those of the floats that they stand for.
// One call for all weights that meet the same x: a small product costs little more than its call.
ffi::Error Products(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                    bool transpose_out, ffi::RemainingRets results) {
  struct Part {
    const void* weight;
    bool half;
    float* result;
    int64_t out, tasks;
  };
  constexpr size_t kMost = 8;
  std::array<Part, kMost> parts;
  const size_t count = weights.size();
  size_t halves = 0;
  if (count > kMost) return ffi::Error::InvalidArgument("products: at most 8 weights");
  const int64_t in = x.dimensions()[0], columns = x.dimensions()[1];
  int64_t total = 0, total_bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    auto weight = weights.get<ffi::AnyBuffer>(i);
    auto result = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!weight || !result) return ffi::Error::InvalidArgument("products: buffers");
    const int64_t out = weight->dimensions()[0];
    const bool half = weight->element_type() == ffi::BF16;
    halves += half;
    parts[i] = Part{weight->untyped_data(), half, (*result)->typed_data(), out, 0};
    total += out;
    total_bytes += out * in * (half ? 2 : 4);
  }
  const float* from = x.typed_data();
  const bool pairs = halves == count;
  const float* packed = PackRows(from, in, columns, pairs);
  const int64_t rows = TaskRows(pool, total_bytes, total);
  const int64_t tasks = DivideParts(parts.data(), count, rows);
  Parallel(pool, tasks, [=](int64_t task) {
    const auto [part, begin, height] = ShareOf(parts.data(), task, rows);
    To to{transpose_out ? 1 : columns, transpose_out ? part->out : 1, false};
    float* y = part->result + begin * to.down;
    for (int64_t k = 0; k < in; k += kDeep, to.add = true) {
      const int64_t d = std::min(kDeep, in - k), at = begin * in + k;
      const float* x = packed + k;
      if (pairs) {
        FewBy(static_cast<const Pair*>(part->weight) + at, x, y, in, d, height, columns, to);
      } else if (part->half) {
        const Half* weight = static_cast<const Half*>(part->weight);
        FewBy(weight + at, x, y, in, d, height, columns, to);
      } else {
        const float* weight = static_cast<const float*>(part->weight);
        FewBy(weight + at, x, y, in, d, height, columns, to);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

#endif  // SPECJAX_PRODUCTS_H_
