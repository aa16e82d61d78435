// Products of the rows of a task by tiles of bytes (AMX): weights in eight bits are taken as they lie
// in memory, and weights in four bits as bytes (amx_bytes.h) or as 16 bits (amx_words.h).

#ifndef SPECJAX_AMX_PRODUCTS_H_
#define SPECJAX_AMX_PRODUCTS_H_

#include "amx_bytes.h"
#include "amx_words.h"

namespace {

#if defined(SPECJAX_BYTE_DOTS) && defined(SPECJAX_TILES)

enum class Form { kEight, kFour };

// The products of the rows of a task with all columns; to.down or to.across is 1.
template <Form kForm>
WITH_TILES void TileProducts(const TallRows& w, const ManyColumns& x, float* y, To to) {
  constexpr auto pick = [](bool two, auto groups) {
    constexpr Groups kGroups = decltype(groups)::value;
    if constexpr (kForm == Form::kFour)
      return two ? &FourRows<true, kGroups> : &FourRows<false, kGroups>;
    else
      return two ? &EightRows<true, kGroups> : &EightRows<false, kGroups>;
  };
  alignas(64) float made[kAmxRows * kLanes];
  int8_t* opened = reinterpret_cast<int8_t*>(Scratch(1, kForm == Form::kFour ? kAmxRows * kDeep / 4 : 0));
  int64_t configured = 0;
  for (int64_t begin = 0; begin < w.rows; begin += kAmxRows) {
    const int64_t rows = std::min(kAmxRows, w.rows - begin);
    if (rows != configured) {
      const TileConfig config = ByteConfig(rows, kForm == Form::kFour ? kTile : kBytes);
      TILES_AS(config);
      configured = rows;
    }
    const TallRows some = w.From(begin, rows);
    const bool two = rows > kLanes;
    const auto run = x.halves         ? pick(two, std::integral_constant<Groups, Groups::kHalf>())
                     : x.Groups() > 1 ? pick(two, std::integral_constant<Groups, Groups::kMany>())
                                      : pick(two, std::integral_constant<Groups, Groups::kOne>());
    To where = to;
    for (int64_t k = 0; k < x.in; k += kDeep, where.add = true) {
      const int64_t deep = std::min(x.in - k, kDeep);
      if constexpr (kForm == Form::kFour) OpenNibbles(some, k, deep, rows, opened);  // once for all columns
      for (int64_t group = 0; group < x.Groups(); ++group) {
        const int64_t first = group * x.Width(), few = std::min(x.Width(), x.columns - first);
        const int32_t* high = x.Words(group, k);
        Meeting at{opened, kDeep, rows, k, deep, high, high + ManyColumns::Steps(deep) * kLanes,
                   some.scales, w.groups, w.group, Load(x.Scales(group, k)), false};
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
