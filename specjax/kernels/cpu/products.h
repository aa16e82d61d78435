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
    const auto sum = [&](const auto* weight, const auto& run) {
      run(weight, packed, y, part->out, in, begin, height, columns, to);
    };
    if (half) {
      sum(static_cast<const Pair*>(part->weight), TaskBy<Pair>);
    } else {
      sum(static_cast<const float*>(part->weight), waiting ? TaskBy<float, true> : TaskBy<float>);
    }
  });
  return nullptr;
}

}  // namespace

#endif  // SPECJAX_PRODUCTS_H_
