// Choice of experts for at most 16 tokens and the tiles of their picks, one block: a warp chooses for a token, then
// every pick has a thread that finds its tile and its row there. Expert e is register e / 32 of lane e % 32.
//
// One block leaves the device free, so the kernel after it is placed while it runs, and it while the one before it ends.

#include <cstdint>
#include <cuda_runtime.h>

namespace {

constexpr int kMostTokens = 16, kMostPicks = 8, kRows = 16;
constexpr int kMostGroups = 8;
constexpr unsigned kAll = 0xffffffffu;

struct Args {
    const float *logits, *bias;
    float* weights;
    int *tile_expert, *tile_picks;
    int64_t row_stride;
    float scaling_factor;
    int num_tokens, num_tiles, groups, topk_groups, topk, normalize;
};

// Larger numbers have larger keys.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(x);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float number_of(uint32_t key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

template <int kPer>  // experts of a lane
__global__ void __launch_bounds__(kMostTokens * 32) choose(const Args a) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    constexpr int kExperts = 32 * kPer;
    __shared__ int ids[kMostTokens * kMostPicks];
    __shared__ bool is_first[kMostTokens * kMostPicks];
    const int lane = threadIdx.x & 31, token = threadIdx.x >> 5;
    for (int i = threadIdx.x; i < a.num_tiles * kRows; i += blockDim.x) a.tile_picks[i] = -1;
    for (int i = threadIdx.x; i < a.num_tiles; i += blockDim.x) a.tile_expert[i] = -1;

    float score[kPer];
    uint32_t key[kPer];
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
        const int expert = 32 * j + lane;
        score[j] = 1.f / (1.f + __expf(-a.logits[token * a.row_stride + expert]));
        key[j] = key_of(score[j] + a.bias[expert]);
    }
    // A group's score is the sum of its two largest; of equal ones, one counts twice.
    const int per_group = kPer / a.groups;
    float group_score[kMostGroups];
#pragma unroll
    for (int g = 0; g < kMostGroups; ++g) {
        uint32_t best = 0, second = 0;
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
            if (j / per_group != g) continue;
            second = max(second, min(best, key[j]));
            best = max(best, key[j]);
        }
        const uint32_t largest = __reduce_max_sync(kAll, best);
        const bool is_owner = lane == __ffs(__ballot_sync(kAll, best == largest)) - 1;
        const uint32_t next = __reduce_max_sync(kAll, is_owner ? second : best);
        group_score[g] = g < a.groups ? number_of(largest) + number_of(next) : 0.f;
    }
    unsigned kept = 0;
    for (int round = 0; round < a.topk_groups; ++round) {
        int winner = -1;
        float most = 0.f;
#pragma unroll
        for (int g = 0; g < kMostGroups; ++g)
            if (g < a.groups && !(kept >> g & 1) && (winner < 0 || group_score[g] > most)) winner = g, most = group_score[g];
        kept |= 1u << winner;
    }
#pragma unroll
    for (int j = 0; j < kPer; ++j)
        if (!(kept >> (j / per_group) & 1)) key[j] = 0;

    float total = 0.f, mine = 0.f;
    for (int k = 0; k < a.topk; ++k) {
        uint32_t best = key[0];
        int place = 0;
#pragma unroll
        for (int j = 1; j < kPer; ++j)
            if (key[j] > best) best = key[j], place = j;
        const uint32_t largest = __reduce_max_sync(kAll, best);
        const int winner = __reduce_min_sync(kAll, best == largest ? 32 * place + lane : kExperts);
        float won = 0.f;
#pragma unroll
        for (int j = 0; j < kPer; ++j)
            if (32 * j + lane == winner) won = score[j], key[j] = 0;
        won = __shfl_sync(kAll, won, winner & 31);
        total += won;
        if (lane == k) mine = won;
        if (lane == 0) ids[token * a.topk + k] = winner;
    }
    float* weights = a.weights + token * (a.topk + 1);
    if (lane < a.topk) weights[lane] = (a.normalize ? __fdiv_rn(mine, total + 1e-20f) : mine) * a.scaling_factor;
    if (lane == a.topk) weights[lane] = 1.f;
    __syncthreads();

    // An expert has no more picks than a tile has rows.
    const int pick = threadIdx.x, num_picks = a.num_tokens * a.topk;
    const bool valid = pick < num_picks;
    const int expert = valid ? ids[pick] : kExperts;
    int rank = 0, tile = 0;
    for (int other = 0; other < num_picks; ++other) rank += other < pick && ids[other] == expert;
    if (valid) is_first[pick] = rank == 0;
    const int used = __syncthreads_count(valid && rank == 0);
    for (int other = 0; other < num_picks; ++other) tile += is_first[other] && ids[other] < expert;
    if (valid) {
        if (rank == 0) a.tile_expert[tile] = expert;
        a.tile_picks[tile * kRows + rank] = pick / a.topk * (a.topk + 1) + pick % a.topk;
    }
    // The shared expert, which all tokens pick.
    if (threadIdx.x == 0) a.tile_expert[used] = kExperts;
    if (threadIdx.x < a.num_tokens) a.tile_picks[used * kRows + threadIdx.x] = threadIdx.x * (a.topk + 1) + a.topk;
}

template <int kPer>
cudaError_t launch(const Args& args, cudaStream_t stream) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1);
    config.blockDim = dim3(32 * args.num_tokens);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, choose<kPer>, args);
}

}  // namespace

// Returns a cudaError_t. `experts`: 32, 64, 128 or 256, of which every group has a multiple of 32.
extern "C" int baleen_moe_choose(const float* logits, const float* bias, float* weights, int* tile_expert,
                                 int* tile_picks, int64_t row_stride, float scaling_factor, int num_tokens,
                                 int num_tiles, int experts, int groups, int topk_groups, int topk, int normalize,
                                 void* stream) {
    const Args args = {logits,     bias,       weights,   tile_expert, tile_picks,  row_stride,
                       scaling_factor, num_tokens, num_tiles, groups,      topk_groups, topk,       normalize};
    cudaStream_t s = static_cast<cudaStream_t>(stream);
    switch (experts) {
        case 32: return launch<1>(args, s);
        case 64: return launch<2>(args, s);
        case 128: return launch<4>(args, s);
        case 256: return launch<8>(args, s);
        default: return cudaErrorInvalidValue;
    }
}
