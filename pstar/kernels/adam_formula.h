// The update of ONE element by Adam or AdamW, and its number formats: the formula is written here only.
// Included by cpu_adam.cpp (g++, clang++) and cuda_adam.cu (nvcc, NVRTC).
//
// Kingma and Ba 2015 (Adam), Loshchilov and Hutter 2019 (AdamW), Dettmers et al. 2022 (8-bit moments).
//
// Every rounding is explicit: fmaf fuses, and compiler flags forbid any other fusing (-ffp-contract=off, --fmad=false). So
// each code path of the CPU and each GPU gives the same bits, and so do torch's operations in adam.py. The sign and payload
// of a NaN are not defined.
//
// The order of operations is not torch.optim's: its factors 1 - lr * weight_decay and beta2, rounded to fp32, are wrong in
// the same direction at every step, by 2e-5 after 1,000 steps. Here the change is computed separately, from small factors,
// and added: errors stay below two units in the last place a step, and do not add up.
#pragma once

#if defined(__CUDACC__)
#define PSTAR_FN __host__ __device__ __forceinline__
#else
#include <math.h>
#include <string.h>
#define PSTAR_FN static inline __attribute__((always_inline))
#endif

typedef unsigned char pstar_u8;
typedef unsigned short pstar_u16;
typedef short pstar_i16;
typedef unsigned int pstar_u32;
typedef long long pstar_i64;
typedef unsigned long long pstar_u64;

// The parameter's format, and the place of its fp32 master.
enum ParamKind {
    PARAM_FP32 = 0,       // fp32 parameter, which is the master
    PARAM_COPY_BF16 = 1,  // fp32 master, and a bf16 copy written in the same pass
    PARAM_COPY_FP16 = 2,  // fp32 master, and an fp16 copy written in the same pass
    PARAM_SPLIT = 3,      // bf16 parameter = nearest bf16 of the master; 16 more bits hold the rest
    PARAM_BF16 = 4,       // bf16 parameter without a master, rounded to nearest even
    PARAM_BF16_SR = 5,    // the same, rounded stochastically
};
enum GradKind { GRAD_FP32 = 0, GRAD_FP16 = 1, GRAD_BF16 = 2 };

// 8-bit moments: one fp32 scale (largest magnitude) a block of this many elements.
enum { PSTAR_QUANT_BLOCK = 2048 };

// The hyper-parameters of one step, as adam_element takes them; computed in float64 by the caller, rounded once.
struct AdamScalars {
    float neg_decay;         // AdamW: -lr * weight_decay; Adam: 0
    float l2;                // Adam: weight_decay; AdamW: 0
    float lerp;              // w = 1 - beta1 if that is below 1/2, else w - 1: interpolate from the end with
    float lerp_from_grad;    // 0 if w < 1/2, else 1                            the smaller rounding error
    float lerp_sq;           // the same for 1 - beta2
    float lerp_sq_from_grad;
    float inv_bias2_sqrt;    // 1 / sqrt(1 - beta2^step)
    float eps;
    float neg_step_size;     // -lr / (1 - beta1^step)
    float grad_scale;        // clip factor / loss scale
};

// One flat run of elements. Pointers that its formats do not need are null.
struct AdamChunk {
    void *param;            // float* or bf16*, see ParamKind
    void *extra;            // PARAM_COPY_*: the 16-bit copy, maybe grad itself (shared slot); PARAM_SPLIT: int16 low half
    const void *grad;
    void *exp_avg;          // float*, or u8* codes
    void *exp_avg_sq;
    float *exp_avg_scale;   // 8-bit moments: one a block
    float *exp_avg_sq_scale;
    pstar_i64 numel;
    pstar_i64 first_index;  // PARAM_BF16_SR: number of the first element: cutting a run does not change its random numbers
    const float *grad_scale;    // if not null, used instead of scalars.grad_scale
    const float *skip;          // if not null and not 0, no array is written. Kernels read both when they run: clipping and
                                // overflow are decided on the device, and the host does not wait for them
    AdamScalars scalars;
    pstar_u32 seed;         // PARAM_BF16_SR: differs from step to step
    pstar_u32 unused;
};

// ---- bits

PSTAR_FN pstar_u32 float_bits(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    pstar_u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
#endif
}

PSTAR_FN float bits_float(pstar_u32 bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, 4);
    return x;
#endif
}

// ---- 16-bit formats, in integer operations that every compiler turns into the same vectors

PSTAR_FN float bf16_to_float(pstar_u16 h) { return bits_float((pstar_u32)h << 16); }

// Nearest, ties to even. A NaN is a special case: adding to its bits could give an infinity.
PSTAR_FN pstar_u16 float_to_bf16(float x) {
    pstar_u32 bits = float_bits(x);
    pstar_u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (pstar_u16)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

// Rounds up with a probability equal to the cut-off part. Infinities and NaN do not change.
PSTAR_FN pstar_u16 float_to_bf16_stochastic(float x, pstar_u32 random) {
    pstar_u32 bits = float_bits(x);
    pstar_u32 rounded = (bits + (random >> 16)) >> 16;
    pstar_u32 special = (bits >> 16) | ((bits & 0x7fffffffu) > 0x7f800000u ? 0x40u : 0u);
    return (pstar_u16)((bits & 0x7f800000u) == 0x7f800000u ? special : rounded);
}

// A well mixed function of (seed, index): the same number on every thread, vector path and device.
PSTAR_FN pstar_u32 random_bits(pstar_u32 seed, pstar_i64 index) {
    pstar_u32 x = (pstar_u32)index ^ seed;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) + (pstar_u32)((pstar_u64)index >> 32) * 0x9e3779b9u;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

PSTAR_FN float fp16_to_float(pstar_u16 h) {
    pstar_u32 magnitude = ((pstar_u32)h & 0x7fffu) << 13, sign = ((pstar_u32)h & 0x8000u) << 16;
    pstar_u32 normal = magnitude + (112u << 23);
    // A denormal: put its digits behind the leading digit of 2^-14, and subtract 2^-14.
    float denormal = bits_float(magnitude + (113u << 23)) - bits_float(113u << 23);
    pstar_u32 bits = magnitude < (1u << 23) ? float_bits(denormal) : normal;
    bits = magnitude >= (31u << 23) ? normal + (112u << 23) : bits;    // infinity and NaN
    return bits_float(bits | sign);
}

// Nearest, ties to even; infinity beyond 65519.
PSTAR_FN pstar_u16 float_to_fp16(float x) {
    pstar_u32 bits = float_bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    pstar_u32 normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // A denormal: adding 1/2 makes the adder round to multiples of 2^-24.
    pstar_u32 denormal = float_bits(bits_float(magnitude) + 0.5f) - (126u << 23);
    pstar_u32 half = magnitude < (113u << 23) ? denormal : normal;
    half = magnitude >= (143u << 23) ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return (pstar_u16)(half | sign);
}

// ---- the split master: nearest bf16, ties away from zero, and the signed difference of the bit patterns

PSTAR_FN float join_master(pstar_u16 high, pstar_i16 low) {
    return bits_float(((pstar_u32)high << 16) + (pstar_u32)(int)low);
}

// A NaN is a special case: a GPU makes 0x7fffffff, and adding to its bits would give -0. It becomes the halves 0x7fc0 and 0.
PSTAR_FN pstar_u16 split_high(float master) {
    pstar_u32 bits = float_bits(master), rounded = (bits + 0x8000u) >> 16;
    return (pstar_u16)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

PSTAR_FN pstar_i16 split_low(float master, pstar_u16 high) {
    pstar_u32 rest = float_bits(master) - ((pstar_u32)high << 16);
    return (pstar_i16)(pstar_u16)(high == 0x7fc0u ? 0u : rest);
}

// ---- 8-bit codes: the number of boundaries below x, of 255 ascending ones; a NaN becomes code 0

PSTAR_FN pstar_u8 nearest_code(float x, const float *boundaries) {
    int code = 0;
    code += x > boundaries[code + 127] ? 128 : 0;
    code += x > boundaries[code + 63] ? 64 : 0;
    code += x > boundaries[code + 31] ? 32 : 0;
    code += x > boundaries[code + 15] ? 16 : 0;
    code += x > boundaries[code + 7] ? 8 : 0;
    code += x > boundaries[code + 3] ? 4 : 0;
    code += x > boundaries[code + 1] ? 2 : 0;
    code += x > boundaries[code] ? 1 : 0;
    return (pstar_u8)code;
}

// ---- the formula

PSTAR_FN AdamScalars scalars_of(const AdamChunk &c) {
    AdamScalars h = c.scalars;
    if (c.grad_scale) h.grad_scale = *c.grad_scale;
    return h;
}

PSTAR_FN void adam_element(float &param, float grad, float &exp_avg, float &exp_avg_sq, const AdamScalars &h) {
    grad = grad * h.grad_scale;
    grad = h.l2 != 0.0f ? fmaf(h.l2, param, grad) : grad;
    float square = grad * grad;
    exp_avg = fmaf(h.lerp, grad - exp_avg, h.lerp_from_grad != 0.0f ? grad : exp_avg);
    exp_avg_sq = fmaf(h.lerp_sq, square - exp_avg_sq, h.lerp_sq_from_grad != 0.0f ? square : exp_avg_sq);
    float denominator = fmaf(h.inv_bias2_sqrt, sqrtf(exp_avg_sq), h.eps);
    float change = (h.neg_step_size * exp_avg) / denominator;
    param = param + fmaf(h.neg_decay, param, change);
}
