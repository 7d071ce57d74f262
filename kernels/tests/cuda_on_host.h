// As much of CUDA for Hopper as TileLang's code for `mla_slots` uses, on a host: names, numbers, asynchronous work.
//
// A thread of a block is a fiber, and the blocks run one after another; see cuda_on_host.cc. What is asynchronous on a
// GPU happens, as asked, at once or as late as waiting for it allows: copies at any time before their barrier is told,
// matrix products when they are waited for. So whoever reads too early, or overwrites too early, reads or spoils wrong
// numbers. Not modelled: registers, time, and the two views of shared memory that fences keep in step.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

#define __global__
#define __launch_bounds__(threads, blocks)
#define __restrict__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define CUDART_INF_F INFINITY

constexpr int THREADS = 384, SHARED_BYTES = 227 << 10;

struct Place { int x, y, z; };
extern Place *thread_place, blockIdx;
#define threadIdx (*thread_place)

using uchar = unsigned char;
using Work = std::function<void()>;
extern uchar buf_dyn_shmem[SHARED_BYTES];
extern bool late_copies, late_products;

struct Pending {
  std::deque<Work> copies;
  std::vector<Work> open;
  std::deque<std::vector<Work>> products;
};
extern Pending pending[THREADS];

int thread();
void block_until(std::function<bool()> ready);
void meet(int barrier, int threads);
float reduce_of_four(float value, bool largest);
[[noreturn]] void fail(const char *why);

// ---- numbers

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = std::isnan(value) ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
  float wide() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
};

struct __nv_bfloat162 { bfloat16_t x, y; };
struct uint1 { unsigned x; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline unsigned __pack_nv_bfloat162(bfloat16_t low, bfloat16_t high) { return low.bits | unsigned(high.bits) << 16; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) { return {bfloat16_t(pair.x), bfloat16_t(pair.y)}; }
template <class T> T max(T a, T b) { return a > b ? a : b; }

// ---- barriers

inline void __syncthreads() { meet(0, THREADS); }

struct Barrier {
  uint16_t expected, missing;
  uint32_t phase;
  void init(int count) { expected = missing = count, phase = 0; }
  void arrive() {
    if (--missing == 0) ++phase, missing = expected;
  }
  void wait(unsigned parity) {
    block_until([this, parity] { return (*static_cast<volatile uint32_t *>(&phase) & 1) != parity; });
  }
};
static_assert(sizeof(Barrier) == 8, "barriers are laid over 64-bit words");

namespace tl {

template <int> bool tl_shuffle_elect() { return thread() == 0; }
inline void fence_barrier_init() {}
inline void fence_proxy_async() {}
inline void warpgroup_arrive() {}
template <class T> void warpgroup_fence_operand(T *, int) {}
template <int> void warpgroup_reg_alloc() {}
template <int> void warpgroup_reg_dealloc() {}
inline void __sync_thread_partial(int barrier, int threads) { meet(barrier, threads); }

struct MaxOp { static constexpr bool LARGEST = true; };
struct SumOp { static constexpr bool LARGEST = false; };
template <int> struct NamedBarrier {};
template <class Operation, int threads, int step, int, class> struct AllReduce {
  static_assert(threads == 4 && step == 1, "rows of a product lie in four threads");
  static float run(float value) { return reduce_of_four(value, Operation::LARGEST); }
};

// ---- copies

template <int bytes> void cp_async_gs_conditional(void *to, const void *from, bool there) {
  static_assert(bytes == 16, "the widest");
  Work copy = [=] { there ? memcpy(to, from, bytes) : memset(to, 0, bytes); };
  late_copies ? pending[thread()].copies.push_back(copy) : copy();
}

inline void mbarrier_cp_async_arrive_noinc(Barrier &barrier) {
  Work tell = [&barrier] { barrier.arrive(); };
  late_copies ? pending[thread()].copies.push_back(tell) : tell();
}

// ---- matrix products of a group of four warps; operands lie in shared memory in swizzled rows of 128 bytes

enum class DataType { kBFloat16, kFloat32 };

// Units of 16 bytes: where the operand starts, and how far apart its panels of 64 and its groups of eight rows are.
struct GmmaDescriptor {
  uint64_t bits = 0;
  GmmaDescriptor operator+(int units) const { return {bits + units}; }
  explicit operator uint64_t() const { return bits; }
};

template <int swizzle, int panels, int groups> void initialize_wgmma_descriptor(GmmaDescriptor &made, void *start) {
  static_assert(swizzle == 1, "of 128 bytes");
  uint64_t offset = static_cast<uchar *>(start) - buf_dyn_shmem;
  if (offset % 1024) fail("an operand does not start where its swizzle does");
  made.bits = offset >> 4 | uint64_t(panels) << 32 | uint64_t(groups) << 48;
}

// Row (of the left operand) or column (of the right one) `outer`, at `inner` of the 16 that are multiplied.
inline float element(uint64_t operand, bool transposed, int outer, int inner) {
  uint64_t start = (operand & 0xffffffff) << 4, panels = (operand >> 32 & 0xffff) << 4, groups = (operand >> 48) << 4;
  uint64_t place = transposed ? start + outer / 64 * panels + inner / 8 * groups + inner % 8 * 128 + outer % 64 * 2
                              : start + outer / 8 * groups + outer % 8 * 128 + inner * 2;
  place ^= (place >> 7 & 7) << 4;
  return reinterpret_cast<const bfloat16_t *>(buf_dyn_shmem + place)->wide();
}

template <DataType, DataType, DataType, int M, int N, int K, bool left_transposed, bool right_transposed, int, int>
void wgmma_ss(uint64_t left, uint64_t right, uint32_t *registers, int add) {
  static_assert(M == 64 && K == 16, "of bfloat16");
  float *sums = reinterpret_cast<float *>(registers);
  int warp = thread() % 128 / 32, lane = thread() % 32;
  Work multiply = [=] {
    for (int half = 0; half < 2; ++half) {
      float row[K];
      for (int k = 0; k < K; ++k) row[k] = element(left, left_transposed, 16 * warp + 8 * half + lane / 4, k);
      for (int item = 0; item < N / 4; ++item) {
        float sum = 0, &total = sums[item / 2 * 4 + 2 * half + item % 2];
        for (int k = 0; k < K; ++k)
          sum += row[k] * element(right, right_transposed, item / 2 * 8 + lane % 4 * 2 + item % 2, k);
        total = add ? total + sum : sum;
      }
    }
  };
  late_products ? pending[thread()].open.push_back(multiply) : multiply();
}

inline void warpgroup_commit_batch() {
  pending[thread()].products.push_back(std::move(pending[thread()].open));
  pending[thread()].open.clear();
}

template <unsigned left_running> void wait_wgmma() {
  auto &groups = pending[thread()].products;
  for (; groups.size() > left_running; groups.pop_front())
    for (Work &multiply : groups.front()) multiply();
  block_until([] { return true; });
}

}  // namespace tl
