// Top-k of index scores, one thread-block cluster per row, in one launch without workspace or host knowledge of lengths.
//
// A row that one block has to itself is read once: the boundary is guessed from a sample, a little low, and what lies
// above the guess is listed in shared memory; if the list holds enough and did not overflow, the answer is in it. Rows
// shared by several blocks, and rows that defeat the guess, go through radix selection on the scores' ordered bits
// (11 + 11 + 10): count all scores, list those in the bin that holds the boundary, search the list; where the bin is too
// full for a list (plateaus) the later rounds read the row again. What is selected is a set of bits, one a position, so
// output order is the order of positions whatever the order in which threads ran, and ties are settled by position,
// lowest first. Both ways are exact and give the same slots.

#include "topk_bins.cuh"

namespace {

constexpr int kBlocks = 3;  // on a multiprocessor at once
constexpr int kCopies = 4;  // of the histogram of a whole row, by lane, so that fewer lanes of a warp meet in one word
constexpr int kListed = 18;  // candidates of a thread: keys, and the turns in which it met them
constexpr int kListWords = kThreads * (kListed + 1) * 3 / 2;  // the last row takes what does not fit
static_assert(kListWords >= kBins * kCopies);  // the list takes the place of the copies
constexpr int kSampleFrom = 12288;  // shorter rows are counted faster than sampled
template <int kCluster>
constexpr int kSums = kCluster > 1 ? kBins / kCluster : 0;
constexpr int kSamples = 2048;
constexpr int kBytesForTwo = 84 << 10;  // of shared memory a block, where a multiprocessor has 228 KiB
constexpr int kUnroll = 8;
constexpr int kPageShift = 6;

struct Args {
    const float* scores;
    int64_t row_stride;
    const int* starts;
    const int* lengths;
    const int* page_tables;
    int64_t table_stride;
    const int* table_rows;
    int* out;
    int topk;
};

struct Totals {
    uint32_t chosen, ties;
};

__device__ __forceinline__ int slot_of(const Args& a, const int* table, int position) {
    return table ? (table[position >> kPageShift] << kPageShift) + (position & ((1 << kPageShift) - 1)) : position;
}

template <int kCluster>
__global__ void __launch_bounds__(kThreads, kBlocks) select_slots(const Args a) {
    extern __shared__ uint32_t shared[];
    uint32_t* copies = shared;  // while a whole row is counted
    float* listed_scores = reinterpret_cast<float*>(shared) + threadIdx.x;  // afterwards; every kThreads-th is its own
    uint16_t* listed_turns = reinterpret_cast<uint16_t*>(shared + kThreads * (kListed + 1)) + threadIdx.x;
    uint32_t* bins = shared + kListWords;
    uint32_t* sums = bins + kBins;
    uint32_t* chosen = sums + kSums<kCluster>;  // a bit a position: selected for certain
    __shared__ uint32_t warp_sums[kWarps];
    __shared__ uint64_t wide_sums[kWarps];
    __shared__ Boundary found;
    __shared__ Totals totals;

    const int row = blockIdx.x / kCluster, rank = blockIdx.x % kCluster;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int length = a.lengths[row];
    const int table_row = a.table_rows ? a.table_rows[row] : row;
    const int* table = a.page_tables ? a.page_tables + table_row * a.table_stride : nullptr;
    int* out = a.out + static_cast<int64_t>(row) * a.topk;

    if (length <= a.topk) {
        for (int i = rank * kThreads + thread; i < a.topk; i += kCluster * kThreads)
            out[i] = i < length ? slot_of(a, table, i) : -1;
        return;
    }

    // Each block of the cluster takes a stretch of whole 32-bit words of positions.
    const int words = ((length + 31) / 32 + kCluster - 1) / kCluster;
    const int first_position = min(rank * words * 32, length);
    const int end_position = min(first_position + words * 32, length);
    const int size = end_position - first_position, used = (size + 31) / 32;
    uint32_t* ties = chosen + words;
    const float* scores = a.scores + row * a.row_stride + (a.starts ? a.starts[row] : 0) + first_position;

    // Keys are larger, equal or smaller than the boundary by their bits above `shift`; all are undecided at 32.
    uint32_t need = a.topk, prefix = 0;
    int shift = 32, round = 0;
    bool take_all = false, listed = false;
    int count = 0;  // candidates that this thread met

    // Calls visit(turn, valid, score) for every score: position turn * kThreads + thread.
    const int turns = (size + kThreads - 1) / kThreads;
    auto walk = [&](auto visit) {
        int turn = 0;
        for (; (turn + kUnroll) * kThreads <= size; turn += kUnroll) {
            float values[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) values[u] = __ldg(scores + (turn + u) * kThreads + thread);
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) visit(turn + u, true, values[u]);
        }
        for (; turn < turns; ++turn) {
            const int i = turn * kThreads + thread;
            visit(turn, i < size, i < size ? __ldg(scores + i) : 0.f);
        }
    };
    // Adds to the thread's list; what does not fit is counted and lost.
    auto list = [&](int turn, float score) {
        const int place = min(count, kListed) * kThreads;
        listed_scores[place] = score;
        listed_turns[place] = turn;
        ++count;
    };
    // Marks what is above the boundary's bin; of the bin itself, either all, or ties, or a list to search.
    auto mark = [&](bool to_list) {
        walk([&](int turn, bool valid, float score) {
            const uint32_t key = key_of(score), part = key >> shift;
            const unsigned larger = __ballot_sync(kAll, valid && part > prefix);
            const unsigned equal = __ballot_sync(kAll, valid && part == prefix);
            if (to_list && valid && part == prefix) list(turn, score);
            const int word = turn * kWarps + warp;
            if (lane == 0 && word < used) {
                chosen[word] = take_all ? larger | equal : larger;
                ties[word] = to_list || take_all ? 0 : equal;
            }
        });
    };

    for (int i = thread; i < kBins / 4; i += kThreads) reinterpret_cast<uint4*>(bins)[i] = {};
    __syncthreads();

    if (kCluster == 1 && length >= kSampleFrom) {
        // The sample's rank that corresponds to k, lowered by three standard deviations.
        const float share = static_cast<float>(a.topk) / length;
        const uint32_t rank_in_sample =
            static_cast<uint32_t>(share * kSamples + 3.f * sqrtf(share * (1.f - share) * kSamples)) + 2;
        if (rank_in_sample < kSamples) {
            uint32_t keys[kSamples / kThreads];
#pragma unroll
            for (int i = 0; i < kSamples / kThreads; ++i) {
                const int64_t sample = i * kThreads + thread;
                keys[i] = key_of(__ldg(scores + sample * length / kSamples));
                atomicAdd(&bins[keys[i] >> 21], 1u);
            }
            Boundary guess = find_boundary<1>(bins, sums, rank_in_sample, warp_sums, &found);
            const uint32_t top = guess.bin;
#pragma unroll
            for (int i = 0; i < kSamples / kThreads; ++i)
                if (keys[i] >> 21 == top) atomicAdd(&bins[keys[i] >> 10 & (kBins - 1)], 1u);
            guess = find_boundary<1>(bins, sums, rank_in_sample - guess.above, warp_sums, &found);
            const uint32_t pivot = (top << 11 | guess.bin) << 10;
            // As a number, which compares in one instruction; NaN fails every comparison and so is listed.
            const float least = __uint_as_float(pivot ^ (pivot >> 31 ? 0x80000000u : 0xffffffffu));
            for (int i = thread; i < words; i += kThreads) chosen[i] = ties[i] = 0;
            walk([&](int turn, bool valid, float score) {
                if (valid && !(score < least)) list(turn, score);
            });
            uint32_t listed_in_all;
            scan(static_cast<uint32_t>(count), warp_sums, listed_in_all);
            listed = !__syncthreads_or(count > kListed) && listed_in_all >= need;
            if (listed) {
                // The boundary is not far above the guess: one round over the keys' distance from it often finds 22 bits.
                for (int i = 0; i < count; ++i)
                    atomicAdd(&bins[min((key_of(listed_scores[i * kThreads]) - pivot) >> 10, kBins - 1u)], 1u);
                const Boundary boundary = find_boundary<1>(bins, sums, need, warp_sums, &found);
                if (boundary.bin < kBins - 1) {
                    need -= boundary.above;
                    prefix = (pivot >> 10) + boundary.bin;
                    shift = 10;
                    round = 2;
                    take_all = need == boundary.inside;
                }
            }
        }
    }
    if (!listed) {
        count = 0;
        for (int i = thread; i < kBins * kCopies / 4; i += kThreads) reinterpret_cast<uint4*>(copies)[i] = {};
        __syncthreads();
        walk([&](int, bool valid, float score) {
            if (valid) atomicAdd(&copies[(key_of(score) >> 21) * kCopies + (lane & (kCopies - 1))], 1u);
        });
        __syncthreads();
        for (int i = thread; i < kBins; i += kThreads) {
            const uint4 c = reinterpret_cast<const uint4*>(copies)[i];
            bins[i] = c.x + c.y + c.z + c.w;
        }
        const Boundary boundary = find_boundary<kCluster>(bins, sums, need, warp_sums, &found);
        need -= boundary.above;
        prefix = boundary.bin;
        shift = 21;
        round = 1;
        take_all = need == boundary.inside;
        if (!take_all && boundary.inside <= kCluster * kThreads * kListed / 2) {
            mark(true);
            listed = !__syncthreads_or(count > kListed);
        }
    }
#pragma unroll 1
    for (; round < 3 && !take_all; ++round) {
        const int next = round == 0 ? 21 : round == 1 ? 10 : 0, width = shift - next;
        auto is_open = [&](uint32_t key) { return shift == 32 || key >> shift == prefix; };
        auto bin_of = [&](uint32_t key) { return key >> next & ((1u << width) - 1); };
        if (listed) {
            for (int i = 0; i < count; ++i) {
                const uint32_t key = key_of(listed_scores[i * kThreads]);
                if (is_open(key)) atomicAdd(&bins[bin_of(key)], 1u);
            }
        } else {
            walk([&](int, bool valid, float score) {
                const uint32_t key = key_of(score);
                add(bins, bin_of(key), valid && is_open(key));
            });
        }
        const Boundary boundary = find_boundary<kCluster>(bins, sums, need, warp_sums, &found);
        need -= boundary.above;
        prefix = round == 0 ? boundary.bin : prefix << width | boundary.bin;
        shift = next;
        take_all = need == boundary.inside;
    }
    if (listed) {
        for (int i = 0; i < count; ++i) {
            const uint32_t part = key_of(listed_scores[i * kThreads]) >> shift;
            const int word = listed_turns[i * kThreads] * kWarps + warp;
            if (part > prefix || (take_all && part == prefix))
                atomicOr(&chosen[word], 1u << lane);
            else if (part == prefix)
                atomicOr(&ties[word], 1u << lane);
        }
    } else {
        mark(false);
    }
    __syncthreads();

    // From bits to slots. `need` ties are still to be taken, lowest positions first.
    const int per_thread = (used + kThreads - 1) / kThreads;
    const int first_word = min(thread * per_thread, used), end_word = min(first_word + per_thread, used);
    uint64_t mine = 0;
    for (int word = first_word; word < end_word; ++word)
        mine += static_cast<uint64_t>(__popc(ties[word])) << 32 | __popc(chosen[word]);
    uint64_t total;
    uint64_t before = scan(mine, wide_sums, total);
    if constexpr (kCluster > 1) {
        cg::cluster_group cluster = cg::this_cluster();
        if (thread == 0) totals = {static_cast<uint32_t>(total), static_cast<uint32_t>(total >> 32)};
        cluster.sync();
        for (int other = 0; other < rank; ++other) {
            const Totals* theirs = cluster.map_shared_rank(&totals, other);
            before += static_cast<uint64_t>(theirs->ties) << 32 | theirs->chosen;
        }
        cluster.sync();
    }
    uint32_t num_chosen = static_cast<uint32_t>(before), num_ties = static_cast<uint32_t>(before >> 32);
    if (take_all) need = 0;
    for (int word = first_word; word < end_word; ++word) {
        uint32_t bits = chosen[word], equal = ties[word];
        int place = num_chosen + min(num_ties, need);
        num_chosen += __popc(bits);
        const uint32_t room = need > num_ties ? need - num_ties : 0;
        num_ties += __popc(equal);
        for (uint32_t taken = 0; equal && taken < room; ++taken) {
            bits |= equal & -equal;
            equal &= equal - 1;
        }
        if (!bits) continue;
        const int slot = slot_of(a, table, first_position + word * 32);  // its 32 positions share a page
        for (; bits; bits &= bits - 1) out[place++] = slot + __ffs(bits) - 1;
    }
}

template <int kCluster>
cudaError_t launch(const Args& args, int rows, int width, cudaStream_t stream) {
    const int words = ((width + 31) / 32 + kCluster - 1) / kCluster;
    int bytes = 4 * (kListWords + kBins + kSums<kCluster> + 2 * words);
    // Two rows a multiprocessor at once: a third would push those that are read for the second time out of the L2 cache.
    if (kCluster == 1 && width >= kSampleFrom && bytes < kBytesForTwo) bytes = kBytesForTwo;
    cudaError_t error = cudaFuncSetAttribute(select_slots<kCluster>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    if (kCluster > 8) {
        error = cudaFuncSetAttribute(select_slots<kCluster>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(rows * kCluster);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = kCluster > 1 ? 1 : 0;
    return cudaLaunchKernelEx(&config, select_slots<kCluster>, args);
}

}  // namespace

// Returns a cudaError_t. `cluster`: blocks per row, a power of two up to 16.
extern "C" int baleen_topk_slots(const float* scores, int64_t row_stride, const int* starts, const int* lengths,
                                 const int* page_tables, int64_t table_stride, const int* table_rows, int* out,
                                 int rows, int width, int topk, int cluster, void* stream) {
    const Args args = {scores, row_stride, starts, lengths, page_tables, table_stride, table_rows, out, topk};
    cudaStream_t s = static_cast<cudaStream_t>(stream);
    switch (cluster) {
        case 1: return launch<1>(args, rows, width, s);
        case 2: return launch<2>(args, rows, width, s);
        case 4: return launch<4>(args, rows, width, s);
        case 8: return launch<8>(args, rows, width, s);
        case 16: return launch<16>(args, rows, width, s);
        default: return cudaErrorInvalidValue;
    }
}
