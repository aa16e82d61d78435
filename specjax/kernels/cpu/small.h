// Small operations that would each be a loop of XLA's over single numbers: rows of a table, copies.

#ifndef SPECJAX_SMALL_H_
#define SPECJAX_SMALL_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "bfloat16.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// table [rows, size], float32 or bfloat16, index [n] -> its rows as columns, float32 [size, n]. An
// index below zero counts from the end; one beyond the table is that of the nearest row.
ffi::Error Columns(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> index,
                   ffi::ResultBuffer<ffi::F32> out) {
  const int64_t rows = table.dimensions()[0], size = table.dimensions()[1];
  const int64_t count = index.element_count();
  float* to = out->typed_data();
  const auto put = [=](const auto* from, int64_t m) {
    for (int64_t i = 0; i < size; ++i) to[i * count + m] = Number(from[i]);
  };
  for (int64_t m = 0; m < count; ++m) {
    int64_t row = index.typed_data()[m];
    row = std::clamp<int64_t>(row < 0 ? row + rows : row, 0, rows - 1);
    if (table.element_type() == ffi::BF16) {
      put(static_cast<const Half*>(table.untyped_data()) + row * size, m);
    } else if (count == 1) {
      std::memcpy(to, static_cast<const float*>(table.untyped_data()) + row * size, size * sizeof(float));
    } else {
      put(static_cast<const float*>(table.untyped_data()) + row * size, m);
    }
  }
  return ffi::Error::Success();
}

// Caches [B, K, S, E] and as many entries [B, K, N, E], of any types -> the caches, in the same memory
// where that may be, in whose slots where[b, t] are the entries of nodes path[b, t]; what is to be in
// no slot has S there.
ffi::Error Write(ffi::Buffer<ffi::S32> path, ffi::Buffer<ffi::S32> where, ffi::RemainingArgs arrays,
                 ffi::RemainingRets results) {
  const int64_t batch = path.dimensions()[0], steps = path.dimensions()[1];
  const size_t count = results.size();
  for (size_t i = 0; i < count; ++i) {
    const auto cache = arrays.get<ffi::AnyBuffer>(i), entries = arrays.get<ffi::AnyBuffer>(count + i);
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!cache || !entries || !result) return ffi::Error::InvalidArgument("write: buffers");
    const auto dims = cache->dimensions();
    const int64_t heads = dims[1], slots = dims[2], nodes = entries->dimensions()[2];
    const int64_t bytes = dims[3] * int64_t(ffi::ByteWidth(cache->element_type()));
    const char* from = static_cast<const char*>(entries->untyped_data());
    char* to = static_cast<char*>((*result)->untyped_data());
    if (to != cache->untyped_data()) std::memcpy(to, cache->untyped_data(), cache->size_bytes());
    for (int64_t row = 0; row < batch * heads; ++row) {
      const int64_t first = row / heads * steps;
      for (int64_t t = first; t < first + steps; ++t) {
        const int64_t slot = where.typed_data()[t], node = path.typed_data()[t];
        if (slot < 0 || slot >= slots || node < 0 || node >= nodes) continue;
        std::memcpy(to + (row * slots + slot) * bytes, from + (row * nodes + node) * bytes, bytes);
      }
    }
  }
  return ffi::Error::Success();
}

// x -> x, in the same memory where that may be.
ffi::Error Copy(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  if (x.untyped_data() != out->untyped_data())
    std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}

}  // namespace

#endif  // SPECJAX_SMALL_H_
