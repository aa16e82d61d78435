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
Problem Products(ThreadPool pool, In<kF16> x, Ins weights, bool transpose_out, Outs results) {
  SameParts<Float16> read;
  if (const Problem problem = read.Read(kF16, weights, results)) return problem;
  auto& parts = read.parts;
  const int64_t count = weights.size;
  const int64_t in = x.dims[0], columns = x.dims[1], total = read.total;
  const float* packed = PackRows(x.data<const Float16>(), in, columns, false);
  const int64_t rows = TaskRows(pool, total * in * 2, total);
  const int64_t tasks = DivideParts(parts.data(), count, rows);
  Parallel(pool, tasks, [=](int64_t task) {
    const auto [part, begin, height] = ShareOf(parts.data(), task, rows);
    float* sums = Scratch(1, height * columns);
    const To across{columns, 1, false};
    TaskBy(part->weight, packed, sums, part->out, in, begin, height, columns, across);
    const int64_t down = transpose_out ? 1 : columns, side = transpose_out ? part->out : 1;
    Float16* y = part->result + begin * down;
    for (int64_t r = 0; r < height; ++r)
      for (int64_t m = 0; m < columns; ++m) Put(sums[r * columns + m], y + r * down + m * side);
  });
  return nullptr;
}

}  // namespace

KERNEL(SpecjaxProductsFloat16, Products, "transpose_out")
KERNEL(SpecjaxAttentionFloat16, (Attention<Float16, kF16>), "tiled")
KERNEL(SpecjaxSwigluFloat16, (Swiglu<Float16, kF16>))
KERNEL(SpecjaxNormFloat16, (Norm<Float16, kF16>), "eps", "centered", "plus_one")
