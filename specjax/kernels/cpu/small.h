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

// x -> x, in the same memory where that may be.
ffi::Error Copy(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  if (x.untyped_data() != out->untyped_data())
    std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}

}  // namespace

#endif  // SPECJAX_SMALL_H_
