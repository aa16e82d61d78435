// Tiles (AMX): whether the processor has them, and the instructions that the kernels take.
//
// A tile holds 16 rows of 64 bytes at most. The first operand of a product has rows of numbers, the
// second the same inputs four bytes at a time, [bytes / 4, 16 columns, 4 bytes]; their sums are
// [16, 16] numbers of 32 bits.

#ifndef SPECJAX_AMX_H_
#define SPECJAX_AMX_H_

#include <cstdint>

// GCC before 11 does not know them.
#if defined(__AVX512BW__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11) && \
    !defined(SPECJAX_WITHOUT_TILES)
#define SPECJAX_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr uint32_t kHalfTiles = 1u << 22, kByteTiles = 1u << 25;  // AMX-BF16, AMX-INT8

// Whether this processor multiplies tiles of such numbers, and its operating system lets it.
inline bool HasTilesOf(uint32_t kind) {
  constexpr uint32_t kTiles = 1u << 24;                 // AMX-TILE
  constexpr int64_t kAskFor = 0x1023, kTileData = 18;   // ARCH_REQ_XCOMP_PERM
  uint32_t a, b, c, d, low, high;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kTiles) || !(d & kind)) return false;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) == 3 && syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};

}  // namespace

#define WITH_TILES __attribute__((target("amx-tile,amx-bf16,amx-int8")))
#define TILES_AS(config) asm volatile("ldtilecfg %0" ::"m"(config))
#define TILES_FREE() asm volatile("tilerelease" ::)
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, p, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"(int64_t(stride)) : "memory")
// The same of what is read once: it leaves in the L1 cache what is read again and again.
#define TILE_STREAM(t, p, stride) \
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"(p), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(t, p, stride) \
  asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"(int64_t(stride)) : "memory")
// sum += first second: of pairs of bfloat16, of signed bytes.
#define TILE_HALVES(sum, first, second) \
  asm volatile("tdpbf16ps %%tmm" #second ", %%tmm" #first ", %%tmm" #sum ::)
#define TILE_SIGNED(sum, first, second) \
  asm volatile("tdpbssd %%tmm" #second ", %%tmm" #first ", %%tmm" #sum ::)

#endif

#endif  // SPECJAX_AMX_H_
