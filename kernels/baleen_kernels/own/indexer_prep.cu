// Rotation, Hadamard transform and rounding of index queries, and the same with a LayerNorm for index keys, one launch.
//
// Four lanes hold a head: lane c has channels 32 j + 8 c .. + 8 for j = 0 .. 3, so that both channels of a rotated pair
// are one lane's, loads of the four are adjacent, and five of the seven steps of the transform need no neighbour. A warp
// takes eight heads of a token at a time, or the keys of eight tokens.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

namespace {

constexpr int kWidth = 128, kRope = 64, kPage = 64;
constexpr int kWarps = 4;
constexpr int kHeads = 8;  // of a warp at a time
constexpr int kMine = 32;  // channels of a lane
constexpr unsigned kAll = 0xffffffffu;

struct Args {
    const __nv_bfloat16 *q, *k;
    const float *head_weights, *norm_weight, *norm_bias, *cos_sin;
    const int64_t *positions, *slots;
    uint8_t* pages;
    uint8_t* q_values;
    float* weights;
    int64_t q_stride, k_stride, weight_stride;
    float factor, eps;
    int num_tokens, heads, turns, ue8m0;
};

struct Chunks {
    uint4 of[4];
};

__device__ __forceinline__ Chunks load(const __nv_bfloat16* head, int c) {
    Chunks x;
#pragma unroll
    for (int j = 0; j < 4; ++j) x.of[j] = __ldcs(reinterpret_cast<const uint4*>(head + 32 * j + 8 * c));
    return x;
}

__device__ __forceinline__ void widen(const Chunks& x, float* v) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint32_t words[4] = {x.of[j].x, x.of[j].y, x.of[j].z, x.of[j].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[8 * j + 2 * i] = __uint_as_float(words[i] << 16);
            v[8 * j + 2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
}

__device__ __forceinline__ void load_floats(const float* from, float* v) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(from)), b = __ldg(reinterpret_cast<const float4*>(from) + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// Rounds pairs of floats to bfloat16: a word holds two.
__device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
}

__device__ __forceinline__ float low_of(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_of(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

// a * b + c * d, each product rounded: what is rounded to bfloat16 next shall not depend on a fused addition.
__device__ __forceinline__ float sum_of_products(float a, float b, float c, float d) {
    return __fadd_rn(__fmul_rn(a, b), __fmul_rn(c, d));
}

// Rotates, transforms and rounds a head to FP8; 8 bytes of each of the four chunks in `out`. Returns its scale.
__device__ __forceinline__ float transform(float* v, const float* cos, const float* sin, int c, bool ue8m0, uint2* out) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float x = v[i], y = v[8 + i];
        v[i] = sum_of_products(x, cos[i], -y, sin[i]);
        v[8 + i] = sum_of_products(x, sin[i], y, cos[i]);
    }
    // The first two steps are those between lanes: of numbers rounded to bfloat16, two to a word, and then of floats.
#pragma unroll
    for (int i = 0; i < kMine; i += 2) {
        const uint32_t mine = pack(v[i], v[i + 1]), other = __shfl_xor_sync(kAll, mine, 1);
        const float sign = c & 1 ? -1.f : 1.f;
        v[i] = fmaf(sign, low_of(mine), low_of(other));
        v[i + 1] = fmaf(sign, high_of(mine), high_of(other));
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
        const float other = __shfl_xor_sync(kAll, v[i], 2);
        v[i] = c & 2 ? other - v[i] : other + v[i];
    }
#pragma unroll
    for (int step = 1; step < kMine; step <<= 1) {
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            if (i & step) continue;
            const float a = v[i], b = v[i + step];
            v[i] = a + b;
            v[i + step] = a - b;
        }
    }
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kMine; i += 2) {
        const uint32_t word = pack(v[i] * 0.08838834764831845f, v[i + 1] * 0.08838834764831845f);
        v[i] = low_of(word);
        v[i + 1] = high_of(word);
        largest = fmaxf(largest, fmaxf(fabsf(v[i]), fabsf(v[i + 1])));
    }
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
    float scale = fmaxf(largest, 1e-4f) * 0.002232142857142857f;
    if (ue8m0) scale = __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u);
    const float inverse = ue8m0 ? __uint_as_float(0x7f000000u - __float_as_uint(scale)) : 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint32_t words[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t pairs[2];
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                const int i = 8 * j + 4 * half + 2 * p;
                const float2 scaled = ue8m0 ? make_float2(v[i] * inverse, v[i + 1] * inverse)
                                            : make_float2(__fdiv_rn(v[i], scale), __fdiv_rn(v[i + 1], scale));
                pairs[p] = __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
            }
            words[half] = pairs[0] | pairs[1] << 16;
        }
        out[j] = make_uint2(words[0], words[1]);
    }
    return scale;
}

// `kStreamed`: what is written here gives way first in the cache, as what is read by `load` does. With both, queries of
// 4096 tokens take 5 % less time.
template <bool kStreamed>
__device__ __forceinline__ void store(uint8_t* head, int c, const uint2* values) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint2* const to = reinterpret_cast<uint2*>(head + 32 * j + 8 * c);
        if constexpr (kStreamed) __stcs(to, values[j]);
        else *to = values[j];
    }
}

__device__ __forceinline__ float sum_of_lanes(float x) {
    x += __shfl_xor_sync(kAll, x, 1);
    return x + __shfl_xor_sync(kAll, x, 2);
}

__device__ void prepare_keys(const Args& a, int first, int lane) {
    const int c = lane & 3, mine = first + (lane >> 2);
    const bool present = mine < a.num_tokens;
    const int token = present ? mine : a.num_tokens - 1;
    float v[kMine], cos[8], sin[8];
    widen(load(a.k + token * a.k_stride, c), v);
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < kMine; ++i) sum += v[i];
    const float mean = sum_of_lanes(sum) / kWidth;
#pragma unroll
    for (int i = 0; i < kMine; ++i) squares += (v[i] - mean) * (v[i] - mean);
    const float deviation = __fsqrt_rn(sum_of_lanes(squares) / kWidth + a.eps);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float weight[8], bias[8];
        load_floats(a.norm_weight + 32 * j + 8 * c, weight);
        load_floats(a.norm_bias + 32 * j + 8 * c, bias);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float normed = __fadd_rn(__fmul_rn(__fdiv_rn(v[8 * j + i] - mean, deviation), weight[i]), bias[i]);
            v[8 * j + i] = __bfloat162float(__float2bfloat16_rn(normed));
        }
    }
    const float* angle = a.cos_sin + a.positions[token] * kRope + 8 * c;
    load_floats(angle, cos);
    load_floats(angle + kRope / 2, sin);
    uint2 values[4];
    const float scale = transform(v, cos, sin, c, a.ue8m0, values);
    if (!present) return;
    const int64_t slot = a.slots[token];
    uint8_t* page = a.pages + slot / kPage * (kPage * (kWidth + 4));
    const int offset = slot % kPage;
    store<false>(page + offset * kWidth, c, values);
    if (c == 0) *reinterpret_cast<float*>(page + kPage * kWidth + 4 * offset) = scale;
}

__global__ void __launch_bounds__(kWarps * 32, 4) prepare(const Args a) {
    const int lane = threadIdx.x & 31, c = lane & 3;
    const int warp = blockIdx.x * kWarps + (threadIdx.x >> 5);
    const int warps_a_token = a.heads / (kHeads * a.turns), query_warps = a.num_tokens * warps_a_token;
    if (warp >= query_warps) {
        const int first = (warp - query_warps) * 8;
        if (first < a.num_tokens) prepare_keys(a, first, lane);
        return;
    }
    const int64_t token = warp / warps_a_token;
    const int first_head = warp % warps_a_token * (kHeads * a.turns) + (lane >> 2);
    const __nv_bfloat16* heads = a.q + token * a.q_stride + first_head * kWidth;
    Chunks next = load(heads, c);
    float cos[8], sin[8];
    const float* angle = a.cos_sin + a.positions[token] * kRope + 8 * c;
    load_floats(angle, cos);
    load_floats(angle + kRope / 2, sin);
    for (int turn = 0; turn < a.turns; ++turn) {
        float v[kMine];
        widen(next, v);
        if (turn + 1 < a.turns) next = load(heads + (turn + 1) * (kHeads * kWidth), c);
        const int head = first_head + turn * kHeads;
        uint2 values[4];
        const float scale = transform(v, cos, sin, c, a.ue8m0, values);
        store<true>(a.q_values + (token * a.heads + head) * kWidth, c, values);
        if (c == 0)
            a.weights[token * a.heads + head] = a.head_weights[token * a.weight_stride + head] * scale * a.factor;
    }
}

}  // namespace

// Returns a cudaError_t. `turns`: times eight heads of a token that one warp takes; divides heads / 8.
extern "C" int baleen_indexer_prep(const void* q, const void* k, const float* head_weights, const float* norm_weight,
                                   const float* norm_bias, const float* cos_sin, const int64_t* positions,
                                   const int64_t* slots, uint8_t* pages, uint8_t* q_values, float* weights,
                                   int64_t q_stride, int64_t k_stride, int64_t weight_stride, float factor, float eps,
                                   int num_tokens, int heads, int turns, int ue8m0, void* stream) {
    const Args args = {static_cast<const __nv_bfloat16*>(q),
                       static_cast<const __nv_bfloat16*>(k),
                       head_weights,
                       norm_weight,
                       norm_bias,
                       cos_sin,
                       positions,
                       slots,
                       pages,
                       q_values,
                       weights,
                       q_stride,
                       k_stride,
                       weight_stride,
                       factor,
                       eps,
                       num_tokens,
                       heads,
                       turns,
                       ue8m0};
    const int warps = num_tokens * (heads / (kHeads * turns)) + (num_tokens + 7) / 8;
    prepare<<<(warps + kWarps - 1) / kWarps, kWarps * 32, 0, static_cast<cudaStream_t>(stream)>>>(args);
    return cudaGetLastError();
}
