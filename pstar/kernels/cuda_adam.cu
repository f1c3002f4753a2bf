// Adam on CUDA memory: the formula of adam_formula.h, 8 elements a thread in 16-byte loads and stores.
//
// Compiled by NVRTC for each used combination of -DPSTAR_PARAM=, -DPSTAR_GRAD=, -DPSTAR_QUANT=, and by nvcc in a test.
// One launch takes many chunks: their table is a kernel argument (4 KiB), so no copy to the device is needed before it.
#include "adam_formula.h"

#ifndef PSTAR_PARAM
#define PSTAR_PARAM PARAM_FP32
#endif
#ifndef PSTAR_GRAD
#define PSTAR_GRAD GRAD_FP32
#endif
#ifndef PSTAR_QUANT
#define PSTAR_QUANT 0
#endif

enum { THREADS = 256, GROUP = 8, MAX_CHUNKS = 28, MAX_NORMS = 120, NORM_BLOCK = 8192, NORM_LANES = 256, NORM_THREADS = 64 };
// A thread block updates THREADS * GROUP elements, which is also one block of the quantisation.

struct AdamBatch {
    AdamChunk chunks[MAX_CHUNKS];
    const float *codes[4];              // 8-bit moments: see Codes in cpu_adam.cpp
    int first_block[MAX_CHUNKS + 1];    // each chunk's first thread block in the grid, and the number of all blocks
    int num_chunks;
};

struct NormBatch {
    const void *grads[MAX_NORMS];
    pstar_i64 numel[MAX_NORMS];
    pstar_i64 first_block[MAX_NORMS + 1];
    int num_chunks, first_result;
};

static __device__ __forceinline__ bool is_aligned(const void *at) { return ((pstar_u64)at & 15) == 0; }

// 8 numbers in their memory format, loaded and stored in 16-byte pieces.
template <class T> struct alignas(16) Eight { T x[GROUP]; };

template <class T> __device__ __forceinline__ Eight<T> load(const void *from, pstar_i64 i) {
    Eight<T> eight;
    const uint4 *pieces = (const uint4 *)((const T *)from + i);
    for (int k = 0; k < (int)(sizeof(eight) / 16); k++) ((uint4 *)&eight)[k] = pieces[k];
    return eight;
}

template <class T> __device__ __forceinline__ void store(void *to, pstar_i64 i, const Eight<T> &eight) {
    uint4 *pieces = (uint4 *)((T *)to + i);
    for (int k = 0; k < (int)(sizeof(eight) / 16); k++) pieces[k] = ((const uint4 *)&eight)[k];
}

// A thread's values of 8 elements, all in fp32: parameter, gradient, moments.
struct Work { float x[GROUP], g[GROUP], m[GROUP], v[GROUP]; };

static __device__ __forceinline__ bool param_is_16_bit() { return PSTAR_PARAM >= PARAM_SPLIT; }
static __device__ __forceinline__ bool has_copy() {
    return PSTAR_PARAM == PARAM_COPY_BF16 || PSTAR_PARAM == PARAM_COPY_FP16;
}

static __device__ __forceinline__ float grad_of(pstar_u16 bits) {
    return PSTAR_GRAD == GRAD_FP16 ? fp16_to_float(bits) : bf16_to_float(bits);
}
static __device__ __forceinline__ pstar_u16 copy_of(float x) {
    return PSTAR_PARAM == PARAM_COPY_FP16 ? float_to_fp16(x) : float_to_bf16(x);
}
static __device__ __forceinline__ pstar_u16 round_param(const AdamChunk &c, float x, pstar_i64 i) {
    return PSTAR_PARAM == PARAM_BF16 ? float_to_bf16(x)
                                     : float_to_bf16_stochastic(x, random_bits(c.seed, c.first_index + i));
}

// Reads elements i to i + 7 with vector loads.
static __device__ __forceinline__ void read_eight(const AdamChunk &c, pstar_i64 i, Work &w) {
    if (PSTAR_GRAD == GRAD_FP32) {
        Eight<float> g = load<float>(c.grad, i);
        for (int k = 0; k < GROUP; k++) w.g[k] = g.x[k];
    } else {
        Eight<pstar_u16> g = load<pstar_u16>(c.grad, i);
        for (int k = 0; k < GROUP; k++) w.g[k] = grad_of(g.x[k]);
    }
    if (PSTAR_PARAM == PARAM_SPLIT) {
        Eight<pstar_u16> high = load<pstar_u16>(c.param, i);
        Eight<pstar_i16> low = load<pstar_i16>(c.extra, i);
        for (int k = 0; k < GROUP; k++) w.x[k] = join_master(high.x[k], low.x[k]);
    } else if (param_is_16_bit()) {
        Eight<pstar_u16> x = load<pstar_u16>(c.param, i);
        for (int k = 0; k < GROUP; k++) w.x[k] = bf16_to_float(x.x[k]);
    } else {
        Eight<float> x = load<float>(c.param, i);
        for (int k = 0; k < GROUP; k++) w.x[k] = x.x[k];
    }
    if (!PSTAR_QUANT) {
        Eight<float> m = load<float>(c.exp_avg, i), v = load<float>(c.exp_avg_sq, i);
        for (int k = 0; k < GROUP; k++) w.m[k] = m.x[k], w.v[k] = v.x[k];
    }
}

static __device__ __forceinline__ void write_eight(const AdamChunk &c, pstar_i64 i, const Work &w) {
    Eight<float> x, m, v;
    Eight<pstar_u16> half;
    for (int k = 0; k < GROUP; k++) x.x[k] = w.x[k], m.x[k] = w.m[k], v.x[k] = w.v[k];
    if (PSTAR_PARAM == PARAM_SPLIT) {
        Eight<pstar_i16> low;
        for (int k = 0; k < GROUP; k++) half.x[k] = split_high(w.x[k]), low.x[k] = split_low(w.x[k], half.x[k]);
        store(c.param, i, half);
        store(c.extra, i, low);
    } else if (param_is_16_bit()) {
        for (int k = 0; k < GROUP; k++) half.x[k] = round_param(c, w.x[k], i + k);
        store(c.param, i, half);
    } else {
        store(c.param, i, x);
    }
    if (has_copy()) {
        for (int k = 0; k < GROUP; k++) half.x[k] = copy_of(w.x[k]);
        store(c.extra, i, half);
    }
    if (!PSTAR_QUANT) {
        store(c.exp_avg, i, m);
        store(c.exp_avg_sq, i, v);
    }
}

// Reads element i alone, as number k of the thread: at the ends of a run, and if the arrays are aligned differently.
static __device__ __forceinline__ void read_one(const AdamChunk &c, pstar_i64 i, int k, Work &w) {
    w.g[k] = PSTAR_GRAD == GRAD_FP32 ? ((const float *)c.grad)[i] : grad_of(((const pstar_u16 *)c.grad)[i]);
    if (PSTAR_PARAM == PARAM_SPLIT)
        w.x[k] = join_master(((const pstar_u16 *)c.param)[i], ((const pstar_i16 *)c.extra)[i]);
    else
        w.x[k] = param_is_16_bit() ? bf16_to_float(((const pstar_u16 *)c.param)[i]) : ((const float *)c.param)[i];
    if (!PSTAR_QUANT) w.m[k] = ((const float *)c.exp_avg)[i], w.v[k] = ((const float *)c.exp_avg_sq)[i];
}

static __device__ __forceinline__ void write_one(const AdamChunk &c, pstar_i64 i, int k, const Work &w) {
    if (PSTAR_PARAM == PARAM_SPLIT) {
        pstar_u16 high = split_high(w.x[k]);
        ((pstar_u16 *)c.param)[i] = high;
        ((pstar_i16 *)c.extra)[i] = split_low(w.x[k], high);
    } else if (param_is_16_bit()) {
        ((pstar_u16 *)c.param)[i] = round_param(c, w.x[k], i);
    } else {
        ((float *)c.param)[i] = w.x[k];
    }
    if (has_copy()) ((pstar_u16 *)c.extra)[i] = copy_of(w.x[k]);
    if (!PSTAR_QUANT) ((float *)c.exp_avg)[i] = w.m[k], ((float *)c.exp_avg_sq)[i] = w.v[k];
}

// The number of elements before the first one that is aligned to 16 bytes in every array; -1 if there is none.
static __device__ __forceinline__ int elements_before_alignment(const AdamChunk &c) {
    for (int skip = 0; skip < GROUP; skip++) {
        bool all = is_aligned((const char *)c.param + skip * (param_is_16_bit() ? 2 : 4));
        all = all && is_aligned((const char *)c.grad + skip * (PSTAR_GRAD == GRAD_FP32 ? 4 : 2));
        if (c.extra) all = all && is_aligned((const char *)c.extra + skip * 2);
        if (!PSTAR_QUANT) {
            all = all && is_aligned((const float *)c.exp_avg + skip);
            all = all && is_aligned((const float *)c.exp_avg_sq + skip);
        } else {
            all = all && (((pstar_u64)c.exp_avg | (pstar_u64)c.exp_avg_sq) & 7) == 0;    // Codes
        }
        if (all) return skip;
    }
    return -1;
}

#if PSTAR_QUANT
// The largest magnitude of the thread block, compared as bits (NaN > infinity > numbers); the result for all its threads.
static __device__ __forceinline__ float largest_magnitude(const float *mine, int valid) {
    __shared__ pstar_u32 shared[THREADS];
    pstar_u32 largest = 0;
    for (int k = 0; k < GROUP; k++)
        if (valid >> k & 1) largest = max(largest, float_bits(mine[k]) & 0x7fffffffu);
    __syncthreads();
    shared[threadIdx.x] = largest;
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) shared[threadIdx.x] = max(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
    __syncthreads();
    return bits_float(shared[0]);
}

// The 8 codes of a thread, read and written in one piece of 8 bytes if `whole`. Those that do not exist have any value.
struct alignas(8) Codes { pstar_u8 x[GROUP]; };

static __device__ __forceinline__ Codes read_codes(const pstar_u8 *from, bool whole, int valid) {
    Codes codes;
    if (whole) *(uint2 *)&codes = *(const uint2 *)from;
    else
        for (int k = 0; k < GROUP; k++) codes.x[k] = valid >> k & 1 ? from[k] : 0;
    return codes;
}

static __device__ __forceinline__ void encode(const float *mine, bool whole, int valid, float scale, const float *bounds,
                                              pstar_u8 *to) {
    Codes codes;
    for (int k = 0; k < GROUP; k++) codes.x[k] = nearest_code(scale > 0.0f ? mine[k] / scale : 0.0f, bounds);
    if (whole) *(uint2 *)to = *(const uint2 *)&codes;
    else
        for (int k = 0; k < GROUP; k++)
            if (valid >> k & 1) to[k] = codes.x[k];
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) pstar_adam(const __grid_constant__ AdamBatch batch) {
    int number = 0;
    while (number + 1 < batch.num_chunks && (int)blockIdx.x >= batch.first_block[number + 1]) number++;
    const AdamChunk &c = batch.chunks[number];
    const pstar_i64 block = blockIdx.x - batch.first_block[number];
    if (c.skip && *c.skip != 0.0f) return;
    const AdamScalars h = scalars_of(c);

    // Groups of 8 begin at the first aligned element; the group before it is incomplete. With 8-bit moments groups begin
    // at element 0 instead, so that they do not cross blocks of the quantisation.
    const int lead = elements_before_alignment(c);
    const bool vectors = PSTAR_QUANT ? lead == 0 : lead >= 0;
    const pstar_i64 base = (vectors && lead > 0 ? lead - GROUP : 0) + (block * THREADS + threadIdx.x) * GROUP;
    const bool whole = vectors && base >= 0 && base + GROUP <= c.numel;
    // Bit k: element base + k exists. A loop's comparisons took registers until some kinds spilled.
    const pstar_i64 rest = c.numel - base;
    const int up_to_end = rest >= GROUP ? 0xff : rest > 0 ? (1 << (int)rest) - 1 : 0;
    const int valid = base < 0 ? up_to_end & (0xff << (int)-base) : up_to_end;

    Work w;
    if (whole) read_eight(c, base, w);
    else
        for (int k = 0; k < GROUP; k++)
            if (valid >> k & 1) read_one(c, base + k, k, w);
#if PSTAR_QUANT
    pstar_u8 *codes_m = (pstar_u8 *)c.exp_avg + base, *codes_v = (pstar_u8 *)c.exp_avg_sq + base;
    const float old_m = c.exp_avg_scale[block], old_v = c.exp_avg_sq_scale[block];
    const Codes old_codes_m = read_codes(codes_m, whole, valid), old_codes_v = read_codes(codes_v, whole, valid);
    for (int k = 0; k < GROUP; k++)
        w.m[k] = batch.codes[0][old_codes_m.x[k]] * old_m, w.v[k] = batch.codes[2][old_codes_v.x[k]] * old_v;
#endif
    for (int k = 0; k < GROUP; k++)
        if (valid >> k & 1) adam_element(w.x[k], w.g[k], w.m[k], w.v[k], h);
    if (whole) write_eight(c, base, w);
    else
        for (int k = 0; k < GROUP; k++)
            if (valid >> k & 1) write_one(c, base + k, k, w);
#if PSTAR_QUANT
    const float new_m = largest_magnitude(w.m, valid), new_v = largest_magnitude(w.v, valid);
    encode(w.m, whole, valid, new_m, batch.codes[1], codes_m);
    encode(w.v, whole, valid, new_v, batch.codes[3], codes_v);
    if (threadIdx.x == 0) c.exp_avg_scale[block] = new_m, c.exp_avg_sq_scale[block] = new_v;
#endif
}

// ---- the sum of squares, in the order of cpu_adam.cpp: 256 lanes for a block of 8192 elements, added half to half, and the
// ---- same over the blocks' sums. Infinities and NaN make the sum not finite.

template <int NUM> static __device__ __forceinline__ double fold(double *lanes) {
    for (int half = NORM_LANES / 2; half; half /= 2) {
        __syncthreads();
        for (int j = threadIdx.x; j < half; j += NUM) lanes[j] += lanes[j + half];
    }
    __syncthreads();
    return lanes[0];
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
pstar_norm_blocks(const __grid_constant__ NormBatch batch, double *sums) {
    __shared__ double lanes[NORM_LANES];
    int number = 0;
    while (number + 1 < batch.num_chunks && (pstar_i64)blockIdx.x >= batch.first_block[number + 1]) number++;
    const pstar_i64 begin = (blockIdx.x - batch.first_block[number]) * (pstar_i64)NORM_BLOCK, numel = batch.numel[number];
    const void *grad = batch.grads[number];
    const bool whole = begin + NORM_BLOCK <= numel && is_aligned(grad);
    double mine[4] = {0, 0, 0, 0};    // lanes 4 t to 4 t + 3 of thread t
    for (int row = 0; row < NORM_BLOCK / NORM_LANES; row++) {
        const pstar_i64 at = begin + row * NORM_LANES + threadIdx.x * 4;
        float g[4] = {0, 0, 0, 0};
        if (whole && PSTAR_GRAD == GRAD_FP32) {
            const float4 four = *(const float4 *)((const float *)grad + at);
            g[0] = four.x, g[1] = four.y, g[2] = four.z, g[3] = four.w;
        } else if (whole) {
            const uint2 four = *(const uint2 *)((const pstar_u16 *)grad + at);
            g[0] = grad_of((pstar_u16)four.x), g[1] = grad_of((pstar_u16)(four.x >> 16));
            g[2] = grad_of((pstar_u16)four.y), g[3] = grad_of((pstar_u16)(four.y >> 16));
        } else {
            for (int k = 0; k < 4; k++)
                if (at + k < numel) {
                    const pstar_i64 i = at + k;
                    g[k] = PSTAR_GRAD == GRAD_FP32 ? ((const float *)grad)[i] : grad_of(((const pstar_u16 *)grad)[i]);
                }
        }
        for (int k = 0; k < 4; k++) mine[k] += (double)g[k] * (double)g[k];
    }
    for (int k = 0; k < 4; k++) lanes[threadIdx.x * 4 + k] = mine[k];
    const double sum = fold<NORM_THREADS>(lanes);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(NORM_LANES)
pstar_norm_sum(const __grid_constant__ NormBatch batch, const double *sums, double *results) {
    __shared__ double lanes[NORM_LANES];
    double mine = 0;
    const pstar_i64 end = batch.first_block[blockIdx.x + 1];
    for (pstar_i64 i = batch.first_block[blockIdx.x] + threadIdx.x; i < end; i += NORM_LANES) mine += sums[i];
    lanes[threadIdx.x] = mine;
    const double sum = fold<NORM_LANES>(lanes);
    if (threadIdx.x == 0) results[batch.first_result + blockIdx.x] = sum;
}
