// Counting keys of scores: their order as bits, histograms, prefix sums over a block, and the bin in which the largest k
// end, over all blocks of a cluster. Owns no selection; `topk_slots.cu` says what for.

#pragma once

#include <cooperative_groups.h>
#include <cstdint>
#include <cuda_runtime.h>

namespace cg = cooperative_groups;

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2048;
constexpr int kQuads = kBins / 4;  // a thread owns four adjacent bins
static_assert(kQuads == kThreads);
constexpr unsigned kAll = 0xffffffffu;

// What a round found: the bin that holds the boundary, how many keys lie above it and inside it.
struct Boundary {
    uint32_t bin, above, inside;
};

// Larger scores have larger keys; -0.0 equals 0.0, and NaN is above all numbers.
__device__ __forceinline__ uint32_t key_of(float score) {
    uint32_t bits = __float_as_uint(score);
    if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fffffffu;
    if (bits == 0x80000000u) bits = 0;
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// A warp whose lanes all meet in one bin adds once: long plateaus of equal scores would otherwise queue up.
__device__ __forceinline__ void add(uint32_t* bins, uint32_t bin, bool valid) {
    unsigned active = __ballot_sync(kAll, valid);
    if (!active) return;
    uint32_t first = __shfl_sync(kAll, bin, __ffs(active) - 1);
    if (__all_sync(kAll, !valid || bin == first)) {
        if ((threadIdx.x & 31) == __ffs(active) - 1) atomicAdd(&bins[first], __popc(active));
    } else if (valid) {
        atomicAdd(&bins[bin], 1u);
    }
}

// Exclusive prefix sum over the block's threads; `total` gets the sum. 64 bits carry two counts at once.
template <typename T>
__device__ T scan(T value, T* warp_sums, T& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    T sum = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        const T other = __shfl_up_sync(kAll, sum, offset);
        if (lane >= offset) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    T sums = lane < kWarps ? warp_sums[lane] : 0;
#pragma unroll
    for (int offset = 1; offset < kWarps; offset <<= 1) {
        const T other = __shfl_up_sync(kAll, sums, offset);
        if (lane >= offset) sums += other;
    }
    total = __shfl_sync(kAll, sums, kWarps - 1);
    const T before = __shfl_sync(kAll, sums, warp ? warp - 1 : 0);
    __syncthreads();
    return (warp ? before : 0) + sum - value;
}

// Adds the histograms of all blocks of the cluster and finds the bin in which the `need` largest keys end. `sums` is
// where each block adds up its share of the bins for the others to read. Leaves `bins` free for the next round.
template <int kCluster>
__device__ Boundary find_boundary(uint32_t* bins, uint32_t* sums, uint32_t need, uint32_t* warp_sums, Boundary* found) {
    const int thread = threadIdx.x, quad = kQuads - 1 - thread;  // thread 0 owns the highest bins
    uint4 counts;
    if constexpr (kCluster == 1) {
        __syncthreads();
        counts = reinterpret_cast<const uint4*>(bins)[quad];
    } else {
        constexpr int kShare = kQuads / kCluster;
        cg::cluster_group cluster = cg::this_cluster();
        cluster.sync();  // all histograms are complete, and nobody reads the last round's sums any more
        if (thread < kShare) reinterpret_cast<uint4*>(sums)[thread] = {};
        __syncthreads();
        const int mine = thread % kShare;
        const uint32_t* theirs = cluster.map_shared_rank(bins, thread / kShare);
        const uint4 part = reinterpret_cast<const uint4*>(theirs)[cluster.block_rank() * kShare + mine];
        if (part.x) atomicAdd(&sums[4 * mine], part.x);
        if (part.y) atomicAdd(&sums[4 * mine + 1], part.y);
        if (part.z) atomicAdd(&sums[4 * mine + 2], part.z);
        if (part.w) atomicAdd(&sums[4 * mine + 3], part.w);
        cluster.sync();
        counts = reinterpret_cast<const uint4*>(cluster.map_shared_rank(sums, quad / kShare))[quad % kShare];
    }
    uint32_t total;
    uint32_t above = scan(counts.x + counts.y + counts.z + counts.w, warp_sums, total);
    const uint32_t four[4] = {counts.w, counts.z, counts.y, counts.x};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (above < need && need <= above + four[i]) *found = {static_cast<uint32_t>(4 * quad + 3 - i), above, four[i]};
        above += four[i];
    }
    reinterpret_cast<uint4*>(bins)[quad] = {};
    __syncthreads();
    return *found;
}

}  // namespace
