// Adam on host memory: a plain C interface, without torch's headers, so that it builds in seconds.
//
// The loops are plain. The compiler vectorises them once for each instruction set (enum Path), and the best one that the
// processor supports is chosen at run time. On aarch64 the plain path uses NEON. Memory bandwidth is the limit: almost every
// array that is written was read before, so its cache lines are there. Streaming stores (for the 16-bit copy, which is only
// written) had no measurable effect, and prefetch instructions made it slower.
#include "adam_formula.h"
#include "cpu_codes.h"

#include <stdlib.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

#define SIMD _Pragma("omp simd")

namespace {

const pstar_i64 TILE = 16384;         // elements; threads share whole tiles
const pstar_i64 SMALL = 4 * TILE;     // below this number of elements a second thread costs more time than it saves
const int BLOCK = 128;                // elements that pass all steps together: few enough that the loads of the next block
                                      // overlap with the arithmetic of this one (2048: a fifth slower)
const int NORM_BLOCK = 8192;          // elements; the same on CUDA, so that both give the same sum
const int NORM_LANES = 256;

enum Path { PATH_AUTO = 0, PATH_PLAIN = 1, PATH_AVX2 = 2, PATH_AVX512 = 3 };

// The place to which gradients are copied or added while their squares are summed; null: they are not stored.
struct Store {
    void *place;
    int add;     // add to the place, which is fp32
    int wide;    // the place is fp32, whatever the gradients' format
};

// ---- the steps of a block. fp32 arrays are updated in place; other formats are unpacked into fp32 buffers that stay in L1.
// ---- So there is one loop for the formula and one short loop for each format, not one for each combination

PSTAR_FN const float *unpack(const pstar_u16 *from, int kind, float *to, int n) {
    if (kind == GRAD_FP16) { SIMD for (int i = 0; i < n; i++) to[i] = fp16_to_float(from[i]); }
    else { SIMD for (int i = 0; i < n; i++) to[i] = bf16_to_float(from[i]); }
    return to;
}

PSTAR_FN void join(const pstar_u16 *high, const pstar_i16 *low, float *to, int n) {
    SIMD for (int i = 0; i < n; i++) to[i] = join_master(high[i], low[i]);
}

PSTAR_FN void split(const float *from, pstar_u16 *high, pstar_i16 *low, int n) {
    SIMD for (int i = 0; i < n; i++) {
        high[i] = split_high(from[i]);
        low[i] = split_low(from[i], high[i]);
    }
}

PSTAR_FN void pack(const float *from, int kind, pstar_u16 *to, int n) {
    if (kind == PARAM_COPY_FP16) { SIMD for (int i = 0; i < n; i++) to[i] = float_to_fp16(from[i]); }
    else { SIMD for (int i = 0; i < n; i++) to[i] = float_to_bf16(from[i]); }
}

PSTAR_FN void pack_stochastic(const float *from, pstar_u16 *to, int n, pstar_u32 seed, pstar_i64 index) {
    SIMD for (int i = 0; i < n; i++) to[i] = float_to_bf16_stochastic(from[i], random_bits(seed, index + i));
}

PSTAR_FN void formula(float *param, const float *grad, float *exp_avg, float *exp_avg_sq, int n, const AdamScalars &h) {
    SIMD for (int i = 0; i < n; i++) {
        float x = param[i], m = exp_avg[i], v = exp_avg_sq[i];    // each is read once: several reads of a cache line
        adam_element(x, grad[i], m, v, h);                        // that is still being loaded cost more than one
        param[i] = x, exp_avg[i] = m, exp_avg_sq[i] = v;
    }
}

// At most BLOCK elements from `first` on; m and v are their moments.
PSTAR_FN void update_block(const AdamChunk &c, const AdamScalars &h, int param, int grad, pstar_i64 first, int n, float *m,
                           float *v) {
    alignas(64) float x_buffer[BLOCK], g_buffer[BLOCK];
    pstar_u16 *x16 = (pstar_u16 *)c.param + first;

    const float *g = grad == GRAD_FP32 ? (const float *)c.grad + first
                                       : unpack((const pstar_u16 *)c.grad + first, grad, g_buffer, n);
    float *x = x_buffer;
    if (param == PARAM_SPLIT) join(x16, (const pstar_i16 *)c.extra + first, x, n);
    else if (param == PARAM_BF16 || param == PARAM_BF16_SR) unpack(x16, GRAD_BF16, x, n);
    else x = (float *)c.param + first;

    formula(x, g, m, v, n, h);

    if (param == PARAM_SPLIT) split(x, x16, (pstar_i16 *)c.extra + first, n);
    else if (param == PARAM_BF16) pack(x, PARAM_COPY_BF16, x16, n);
    else if (param == PARAM_BF16_SR) pack_stochastic(x, x16, n, c.seed, c.first_index + first);
    else if (param == PARAM_COPY_BF16 || param == PARAM_COPY_FP16) pack(x, param, (pstar_u16 *)c.extra + first, n);
}

typedef void (*Decode)(const Regions &, const pstar_u8 *, float, float *, int);
typedef void (*Encode)(const Regions &, float *, float, pstar_u8 *, int);

// Elements [begin, end) of a chunk with 8-bit moments; begin is a multiple of the quantisation block. A block can be encoded
// when all of it is updated. While one block is updated, the one before it is encoded, a few elements of each in turn:
// division and root keep one unit of the processor busy, codes the others.
PSTAR_FN void update_quantised(const AdamChunk &c, const AdamScalars &h, int param, int grad, const Regions *codes,
                               pstar_i64 begin, pstar_i64 end, Decode decode, Encode encode) {
    alignas(64) float m_buffers[2][PSTAR_QUANT_BLOCK], v_buffers[2][PSTAR_QUANT_BLOCK];
    pstar_u8 *all_m = (pstar_u8 *)c.exp_avg, *all_v = (pstar_u8 *)c.exp_avg_sq;
    int n_before = 0;    // elements of the block that is encoded, from `before` on
    for (pstar_i64 start = begin, before = begin; start < end || n_before; before = start, start += PSTAR_QUANT_BLOCK) {
        const int n = start >= end ? 0 : end - start < PSTAR_QUANT_BLOCK ? (int)(end - start) : PSTAR_QUANT_BLOCK;
        const pstar_i64 block = start / PSTAR_QUANT_BLOCK, last = before / PSTAR_QUANT_BLOCK;
        float *m = m_buffers[block & 1], *v = v_buffers[block & 1];
        float *m_last = m_buffers[last & 1], *v_last = v_buffers[last & 1];
        pstar_u32 largest_m = 0, largest_v = 0;
        for (int k = 0; k < n || k < n_before; k += BLOCK) {
            if (k < n) {
                const int some = n - k < BLOCK ? n - k : BLOCK;
                decode(codes[0], all_m + start + k, c.exp_avg_scale[block], m + k, some);
                decode(codes[1], all_v + start + k, c.exp_avg_sq_scale[block], v + k, some);
                update_block(c, h, param, grad, start + k, some, m + k, v + k);
                largest_m = largest_magnitude(m + k, some, largest_m);
                largest_v = largest_magnitude(v + k, some, largest_v);
            }
            if (k < n_before) {
                const int some = n_before - k < BLOCK ? n_before - k : BLOCK;
                encode(codes[0], m_last + k, c.exp_avg_scale[last], all_m + before + k, some);
                encode(codes[1], v_last + k, c.exp_avg_sq_scale[last], all_v + before + k, some);
            }
        }
        if (n) c.exp_avg_scale[block] = bits_float(largest_m), c.exp_avg_sq_scale[block] = bits_float(largest_v);
        n_before = n;
    }
}

// Elements [begin, end) of a chunk. codes: of both moments; null: fp32 moments.
PSTAR_FN void update_range(const AdamChunk &c, int param, int grad, const Regions *codes, pstar_i64 begin, pstar_i64 end,
                           Decode decode, Encode encode) {
    const AdamScalars h = scalars_of(c);
    if (c.skip && *c.skip != 0.0f) return;
    if (codes) return update_quantised(c, h, param, grad, codes, begin, end, decode, encode);
    float *m = (float *)c.exp_avg, *v = (float *)c.exp_avg_sq;
    for (pstar_i64 first = begin; first < end; first += BLOCK)
        update_block(c, h, param, grad, first, end - first < BLOCK ? (int)(end - first) : BLOCK, m + first, v + first);
}

// Stores n elements of the gradients, from `first` on. Returns the stored values in fp32: the place itself, or the buffer.
PSTAR_FN const float *store(const void *grads, const Store &to, int grad, pstar_i64 first, int n, float *buffer) {
    const pstar_u16 *from16 = (const pstar_u16 *)grads + first;
    const float *from = grad == GRAD_FP32 ? (const float *)grads + first : unpack(from16, grad, buffer, n);
    if (grad != GRAD_FP32 && !to.wide) {
        pstar_u16 *place = (pstar_u16 *)to.place + first;
        SIMD for (int j = 0; j < n; j++) place[j] = from16[j];
        return from;
    }
    float *place = (float *)to.place + first;
    if (to.add) { SIMD for (int j = 0; j < n; j++) place[j] += from[j]; }
    else { SIMD for (int j = 0; j < n; j++) place[j] = from[j]; }
    return place;
}

// Sum of squares of one block: lane j adds elements j, j + 256, ...; then one half of the lanes is added to the other, until
// one lane is left. In float64 the square of an fp32 number is exact, so only the order of the additions matters, which is
// fixed here. Not finite exactly if an element is not finite. With a place, gradients are stored there first, and the
// squares are those of the place: 256 elements are in L1 then, so squaring has no measurable cost next to the copy.
PSTAR_FN double block_norm(const void *grads, const Store &to, int grad, pstar_i64 begin, pstar_i64 end) {
    double lanes[NORM_LANES] = {};
    float buffer[NORM_LANES];
    for (; begin < end; begin += NORM_LANES) {
        const int n = end - begin < NORM_LANES ? (int)(end - begin) : NORM_LANES;
        const float *g = to.place ? store(grads, to, grad, begin, n, buffer)
                         : grad == GRAD_FP32 ? (const float *)grads + begin
                                             : unpack((const pstar_u16 *)grads + begin, grad, buffer, n);
        SIMD for (int j = 0; j < n; j++) lanes[j] += (double)g[j] * (double)g[j];
    }
    for (int half = NORM_LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
    return lanes[0];
}

double sum_lanes(const double *values, pstar_i64 count) {
    double lanes[NORM_LANES] = {};
    for (pstar_i64 i = 0; i < count; i++) lanes[i % NORM_LANES] += values[i];
    for (int half = NORM_LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
    return lanes[0];
}

// ---- one copy of the loops for each instruction set

typedef void (*Update)(const AdamChunk &, int, int, const Regions *, pstar_i64, pstar_i64);
typedef double (*Norm)(const void *, const Store &, int, pstar_i64, pstar_i64);

#define PSTAR_PATH(NAME, TARGET)                                                                                    \
    TARGET void update_##NAME(const AdamChunk &c, int param, int grad, const Regions *codes, pstar_i64 begin,       \
                              pstar_i64 end) {                                                                      \
        update_range(c, param, grad, codes, begin, end, decode_##NAME, encode_##NAME);                              \
    }                                                                                                               \
    TARGET double norm_##NAME(const void *grads, const Store &to, int grad, pstar_i64 begin, pstar_i64 end) {       \
        return block_norm(grads, to, grad, begin, end);                                                             \
    }

PSTAR_PATH(plain, )
#if defined(__x86_64__)
PSTAR_PATH(avx2, AVX2)
PSTAR_PATH(avx512, AVX512)
#else
const Update update_avx2 = 0, update_avx512 = 0;
const Norm norm_avx2 = 0, norm_avx512 = 0;
#endif
const Update UPDATES[] = {0, update_plain, update_avx2, update_avx512};
const Norm NORMS[] = {0, norm_plain, norm_avx2, norm_avx512};

bool has(int path) {
    if (path == PATH_PLAIN) return true;
#if defined(__x86_64__)
    if (path == PATH_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (path == PATH_AVX512)
        return has(PATH_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return false;
}

int best_path() { return has(PATH_AVX512) ? PATH_AVX512 : has(PATH_AVX2) ? PATH_AVX2 : PATH_PLAIN; }

}  // namespace

// ---- the C interface; returns 0, or 1 for a path this processor lacks, 2 for an unknown kind, 3 for lack of memory

extern "C" int pstar_has_path(int path) { return has(path); }

extern "C" int pstar_has_threads() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

extern "C" int pstar_adam(const AdamChunk *chunks, int num_chunks, int param, int grad, const Codes *codes,
                          int num_threads, int path) {
    if (path == PATH_AUTO) path = best_path();
    if (!has(path)) return 1;
    if (param < PARAM_FP32 || param > PARAM_BF16_SR || grad < GRAD_FP32 || grad > GRAD_BF16) return 2;
    const Update update = UPDATES[path];
    Regions regions[2];
    if (codes) {
        regions[0] = regions_of(codes->exp_avg, codes->exp_avg_bounds, codes->exp_avg_least, true);
        regions[1] = regions_of(codes->exp_avg_sq, codes->exp_avg_sq_bounds, codes->exp_avg_sq_least, false);
    }
    pstar_i64 num_tiles = 0, total = 0;
    for (int k = 0; k < num_chunks; k++) {
        num_tiles += (chunks[k].numel + TILE - 1) / TILE;
        total += chunks[k].numel;
    }
    if (total < SMALL || num_threads < 1) num_threads = 1;
#pragma omp parallel for num_threads(num_threads) schedule(static, 1) if (num_threads > 1)
    for (int thread = 0; thread < num_threads; thread++) {
        // This thread's share is a run of tiles, which may span several chunks.
        const pstar_i64 first = num_tiles * thread / num_threads, last = num_tiles * (thread + 1) / num_threads;
        pstar_i64 before = 0;
        for (int k = 0; k < num_chunks && before < last; k++) {
            const pstar_i64 tiles = (chunks[k].numel + TILE - 1) / TILE;
            const pstar_i64 from = first > before ? first - before : 0, to = last - before < tiles ? last - before : tiles;
            if (from < to) {
                const pstar_i64 end = to * TILE < chunks[k].numel ? to * TILE : chunks[k].numel;
                update(chunks[k], param, grad, codes ? regions : 0, from * TILE, end);
            }
            before += tiles;
        }
    }
    return 0;
}

// The sums of squares of each block of NORM_BLOCK elements in float64, the last block perhaps shorter.
// place: null, or the place where the gradients are stored (see Store); the sums are then those of the place.
extern "C" int pstar_norm_blocks(const void *grads, void *place, int add, int wide, pstar_i64 numel, int grad, double *sums,
                                 int num_threads, int path) {
    if (path == PATH_AUTO) path = best_path();
    if (!has(path)) return 1;
    if (grad < GRAD_FP32 || grad > GRAD_BF16 || (add && grad != GRAD_FP32 && !wide)) return 2;
    const Norm norm = NORMS[path];
    const Store to = {place, add, wide};
    const pstar_i64 num_blocks = (numel + NORM_BLOCK - 1) / NORM_BLOCK;
    if (numel < SMALL || num_threads < 1) num_threads = 1;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
    for (pstar_i64 block = 0; block < num_blocks; block++) {
        const pstar_i64 begin = block * NORM_BLOCK, end = begin + NORM_BLOCK < numel ? begin + NORM_BLOCK : numel;
        sums[block] = norm(grads, to, grad, begin, end);
    }
    return 0;
}

// The sum of squares of `numel` elements in float64: the same for any number of threads and any path.
extern "C" int pstar_squared_norm(const void *grads, void *place, int add, int wide, pstar_i64 numel, int grad,
                                  double *result, int num_threads, int path) {
    const pstar_i64 num_blocks = (numel + NORM_BLOCK - 1) / NORM_BLOCK;
    double *sums = (double *)malloc((num_blocks + 1) * sizeof(double));
    if (!sums) return 3;
    const int status = pstar_norm_blocks(grads, place, add, wide, numel, grad, sums, num_threads, path);
    if (!status) *result = sum_lanes(sums, num_blocks);
    free(sums);
    return status;
}
