// Products of weight matrices with a few columns.

#ifndef SPECJAX_PRODUCTS_H_
#define SPECJAX_PRODUCTS_H_

#include "activation.h"
#include "bfloat16.h"
#include "few_columns.h"
#include "tasks.h"
#include "vectors.h"

namespace {

// The rows begin ... begin + height - 1 of a weight [out, in], of float32 or bfloat16, by columns of
// PackRows. `waiting`: whether the call mostly waits for memory, see kWaiting.
inline void FloatRows(const void* weight, bool half, bool waiting, const float* packed, float* y,
                      int64_t out, int64_t in, int64_t begin, int64_t height, int64_t columns,
                      To to) {
  const auto sum = [&](const auto* rows, const auto& run) {
    run(rows, packed, y, out, in, begin, height, columns, to);
  };
  if (half) {
    sum(static_cast<const Pair*>(weight), TaskBy<Pair>);
  } else {
    sum(static_cast<const float*>(weight), waiting ? TaskBy<float, true> : TaskBy<float>);
  }
}

// x [in, columns], weights [out, in] -> results [out, columns] each, or, with `transpose_out`,
// [columns, out].
// Weights are all float32, or all bfloat16, whose products are those of the floats that they stand
// for.
// One call for all weights that meet the same x: a small product costs little more than its call.
Problem Products(ThreadPool pool, In<kF32> x, Ins weights, bool transpose_out, Outs results) {
  const int64_t in = x.dims[0], columns = x.dims[1];
  FloatParts read;
  if (const Problem problem = read.Read(weights, results)) return problem;
  auto& parts = read.parts;
  const int64_t count = weights.size;
  const float* from = x.data<const float>();
  const bool half = read.half;
  const float* packed = PackRows(from, in, columns, half);
  const int64_t rows = TaskRows(pool, read.rows * in * (half ? 2 : 4), read.rows);
  const int64_t tasks = DivideParts(parts.data(), count, rows);
  const bool waiting = read.rows * in >= kWaiting;
  Parallel(pool, tasks, [=](int64_t task) {
    const auto [part, begin, height] = ShareOf(parts.data(), task, rows);
    const To to{transpose_out ? 1 : columns, transpose_out ? part->out : 1, false};
    float* y = part->result + begin * to.down;
    FloatRows(part->weight, half, waiting, packed, y, part->out, in, begin, height, columns, to);
  });
  return nullptr;
}

// x [in, columns], gate and up [out, in], both float32 or both bfloat16 -> silu(gate x) (up x)
// [out, columns], with the bits of the products and the activation one after the other. Here a thread
// has the products that it needs in its own cache.
Problem SwigluProducts(ThreadPool pool, In<kF32> x, In<> gate, In<> up, Out<kF32> result) {
  const bool half = gate.type == kBF16;
  if (up.type != gate.type || !(half || gate.type == kF32))
    return "swiglu products: weights that are both float32 or both bfloat16";
  const int64_t in = x.dims[0], columns = x.dims[1], out = gate.dims[0];
  if (gate.count() == 0 || gate.count() != out * in || up.count() != out * in)
    return "swiglu products: weights of one size, which has rows and the inputs of x";
  const float* packed = PackRows(x.data<const float>(), in, columns, half);
  const int64_t rows = TaskRows(pool, gate.bytes() + up.bytes(), out);
  const bool waiting = 2 * out * in >= kWaiting;
  float* to = result.data<float>();
  Parallel(pool, (out + rows - 1) / rows, [=](int64_t task) {
    const int64_t end = std::min(out, (task + 1) * rows);
    float* second = Scratch(2, kBlock * columns);
    // a block of each weight in turn, so that what was fetched for the next block is not lost meanwhile
    for (int64_t begin = task * rows; begin < end; begin += kBlock) {
      const int64_t height = std::min(kBlock, end - begin);
      float* first = to + begin * columns;
      const auto sum = [&](const Buffer& weight, float* y) {
        FloatRows(weight.memory, half, waiting, packed, y, out, in, begin, height, columns,
                  To{columns, 1, false});
      };
      sum(gate, first);
      sum(up, second);
      Gated(first, second, first, height * columns);
    }
  });
  return nullptr;
}

}  // namespace

#endif  // SPECJAX_PRODUCTS_H_
