// The tile instructions of Intel AMX for bfloat16, and their emulation with vectors, which gives the same bits.
//
// A tile has up to 16 rows of 64 bytes. A product multiplies a tile of activations, (rows, pairs of inputs), with a
// tile of weights, (pairs of inputs, 16 outputs), and adds to a tile of float32 sums, (rows, 16 outputs). The products of
// the even inputs are summed by fused multiply-adds, those of the odd inputs as well, and the sum of the two is added to
// the tile. Numbers below the normal range are taken as zero, and results there become zero.
#pragma once

#include "vector.hpp"

// Assemblers that come with GCC 11 may lack the instructions.
#if defined(__AVX512F__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 12)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILE_INSTRUCTIONS 1
#else
#define HAS_TILE_INSTRUCTIONS 0
#endif

namespace logprobe {

constexpr int TILE_LINES = 16, TILE_BYTES = 64;  // rows of a tile, bytes of a row
constexpr int NUM_SUMS = 6;                      // tiles of sums; the other two hold activations and weights

// Flushes numbers below the normal range to zero, as tiles do, while it exists.
class FlushedToZero {
 public:
  FlushedToZero() : mode_(_mm_getcsr()) { _mm_setcsr(mode_ | 0x8040); }  // FTZ and DAZ
  ~FlushedToZero() { _mm_setcsr(mode_); }

 private:
  unsigned mode_;
};

// Emulated tiles: `num_rows` rows of activations, `num_pairs` pairs of inputs. Needs FlushedToZero.
class EmulatedTiles {
 public:
  EmulatedTiles(int num_rows, int num_pairs) : num_rows_(num_rows), num_pairs_(num_pairs) {}

  template <int tile>
  void zero() {
    std::memset(sums_[tile], 0, sizeof sums_[tile]);
  }
  void load_rows(const void* from) { rows_ = static_cast<const char*>(from); }
  void load_weights(const void* from, int64_t stride) {
    weights_ = static_cast<const char*>(from), weights_stride_ = stride;
  }
  template <int tile>
  void multiply() {
    int row = 0;
    for (; row + 4 <= num_rows_; row += 4) multiply_rows<4>(sums_[tile] + row, row);
    for (; row < num_rows_; row++) multiply_rows<1>(sums_[tile] + row, row);
  }
  template <int tile>
  void store(float* to) const {  // lines follow one another
    std::memcpy(to, sums_[tile], sizeof sums_[tile][0] * num_rows_);
  }

 private:
  template <int ROWS>
  ALWAYS_INLINE void multiply_rows(float (*sums)[16], int first) const {
    const Ints high = broadcast(static_cast<int32_t>(0xFFFF0000));
    for (int lane = 0; lane < 16; lane += LANES) {
      Floats even[ROWS] = {}, odd[ROWS] = {};
      for (int pair = 0; pair < num_pairs_; pair++) {
        const Ints weights = load_ints(weights_ + weights_stride_ * pair + 4 * lane);
        for (int row = 0; row < ROWS; row++) {
          int32_t x;
          std::memcpy(&x, rows_ + 4 * (num_pairs_ * (first + row) + pair), sizeof x);
          even[row] = fma(floats_of(broadcast(x) << 16), floats_of(weights << 16), even[row]);
          odd[row] = fma(floats_of(broadcast(x) & high), floats_of(weights & high), odd[row]);
        }
      }
      for (int row = 0; row < ROWS; row++)
        store_at(sums[row] + lane, load(sums[row] + lane) + (even[row] + odd[row]));
    }
  }
  static ALWAYS_INLINE void store_at(float* to, Floats x) { logprobe::store(to, x); }

  alignas(64) float sums_[NUM_SUMS][TILE_LINES][16];
  const char *rows_ = nullptr, *weights_ = nullptr;
  int64_t weights_stride_ = 0;
  int num_rows_, num_pairs_;
};

#if !HAS_TILE_INSTRUCTIONS
inline bool has_tiles() { return false; }
#else
// True if this processor has the instructions and Linux lets this process use them. Linux asks every process to
// request the memory for tiles; children inherit the permission.
inline bool has_tiles() {
  unsigned eax, ebx, ecx, edx, saved, high;
  constexpr unsigned TILES = 1u << 24, BFLOAT16 = 1u << 22, REGISTERS = 3u << 17;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & (TILES | BFLOAT16)) != (TILES | BFLOAT16)) return false;
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (saved & REGISTERS) == REGISTERS && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// The processor's tiles: 0 to 5 hold sums, 6 activations, 7 weights. Compilers do not know that their intrinsics for
// tiles read memory, so the instructions are written here, and each is ordered with all accesses to memory.
class ProcessorTiles {
 public:
  ProcessorTiles(int num_rows, int num_pairs) : row_bytes_(4 * num_pairs) {
    alignas(64) Shape shape = {};
    shape.palette = 1;
    for (int tile = 0; tile < NUM_SUMS; tile++) shape.bytes[tile] = TILE_BYTES, shape.lines[tile] = num_rows;
    shape.bytes[6] = 4 * num_pairs, shape.lines[6] = num_rows;
    shape.bytes[7] = TILE_BYTES, shape.lines[7] = num_pairs;
    asm volatile("ldtilecfg %0" : : "m"(shape) : "memory");
  }
  ~ProcessorTiles() { asm volatile("tilerelease" : : : "memory"); }

  template <int tile>
  ALWAYS_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
  }
  ALWAYS_INLINE void load_rows(const void* from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm6" : : "r"(from), "r"(row_bytes_) : "memory");
  }
  ALWAYS_INLINE void load_weights(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm7" : : "r"(from), "r"(stride) : "memory");
  }
  template <int tile>
  ALWAYS_INLINE void multiply() {
    asm volatile("tdpbf16ps %%tmm7, %%tmm6, %%tmm%c0" : : "i"(tile));
  }
  template <int tile>
  ALWAYS_INLINE void store(float* to) const {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(tile), "r"(to), "r"(int64_t{TILE_BYTES}) : "memory");
  }

 private:
  struct Shape {  // operand of ldtilecfg
    uint8_t palette, start_line, unused[14];
    uint16_t bytes[16];
    uint8_t lines[16];
  };
  int64_t row_bytes_;
};
#endif

}  // namespace logprobe
