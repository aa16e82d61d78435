// Products of the rows of a task by tiles of bytes (AMX): weights in eight bits are taken as they lie
// in memory, and weights in four bits as bytes (amx_bytes.h) or as 16 bits (amx_words.h).

#ifndef SPECJAX_AMX_PRODUCTS_H_
#define SPECJAX_AMX_PRODUCTS_H_

#include "amx_bytes.h"
#include "amx_words.h"

namespace {

#if defined(SPECJAX_BYTE_DOTS) && defined(SPECJAX_TILES)

enum class Form { kEight, kFour, kWord };

// Rows that are opened once for all columns: four bits as bytes, or as high bytes and then low ones with
// scales of their own.
template <Form kForm>
void Open(const TallRows& w, int64_t k, int64_t deep, int8_t* opened, float* scales) {
  if constexpr (kForm == Form::kFour) {
    OpenNibbles(w, k, deep, w.rows, opened);
  } else if constexpr (kForm == Form::kWord) {
    for (int64_t r = 0; r < w.rows; ++r)
      scales[r] = OpenRow(w, r, k, deep, opened + r * kDeep, opened + (kAmxRows + r) * kDeep);
  }
}

// The products of the rows of a task with all columns; to.down or to.across is 1.
template <Form kForm>
WITH_TILES void TileProducts(const TallRows& w, const ManyColumns& x, float* y, To to) {
  constexpr auto pick = [](bool two, [[maybe_unused]] bool halves) {
    if constexpr (kForm == Form::kWord)
      return two ? &WordRows<true> : &WordRows<false>;
    else if constexpr (kForm == Form::kFour)
      return two ? halves ? &FourRows<true, true> : &FourRows<true, false>
                 : halves ? &FourRows<false, true> : &FourRows<false, false>;
    else
      return two ? halves ? &EightRows<true, true> : &EightRows<true, false>
                 : halves ? &EightRows<false, true> : &EightRows<false, false>;
  };
  constexpr int64_t kPlanes = kForm == Form::kEight ? 0 : kForm == Form::kFour ? 1 : 2;  // of bytes
  alignas(64) float made[kAmxRows * kLanes], scales[kAmxRows];
  int8_t* opened = reinterpret_cast<int8_t*>(Scratch(1, kPlanes * kAmxRows * kDeep / 4));
  int64_t configured = 0;
  for (int64_t begin = 0; begin < w.rows; begin += kAmxRows) {
    const int64_t rows = std::min(kAmxRows, w.rows - begin);
    if (rows != configured) {
      const TileConfig config = ByteConfig(rows, kForm == Form::kFour ? kTile : kBytes);
      TILES_AS(config);
      configured = rows;
    }
    const TallRows some = w.From(begin, rows);
    const auto run = pick(rows > kLanes, x.halves);
    To where = to;
    for (int64_t k = 0; k < x.in; k += kDeep, where.add = true) {
      const int64_t deep = std::min(x.in - k, kDeep);
      Open<kForm>(some, k, deep, opened, scales);
      for (int64_t group = 0; group < x.Groups(); ++group) {
        const int64_t first = group * x.Width(), few = std::min(x.Width(), x.columns - first);
        const int32_t* high = x.Words(group, k);
        Meeting at{opened, kDeep, rows, k, deep, high, high + ManyColumns::Steps(deep) * kLanes,
                   some.scales, w.groups, w.group, Load(x.Scales(group, k)), false};
        if constexpr (kForm == Form::kWord) at.scales = scales;
        if constexpr (kForm == Form::kEight) {
          at.values = reinterpret_cast<const int8_t*>(some.values) + k, at.stride = w.bytes;
          at.fetch = group == 0 && begin + 2 * kAmxRows <= w.rows;
        }
        run(at, made);
        PutLow(made, rows, few, y + begin * to.down + first * to.across, where);
      }
    }
  }
  TILES_FREE();
}

#endif

}  // namespace

#endif  // SPECJAX_AMX_PRODUCTS_H_
