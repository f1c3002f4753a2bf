// 8-bit moments on the CPU: codes to numbers and back, one function for each instruction set, all with the same bits.
//
// A code is the number of boundaries below a number (nearest_code in adam_formula.h). Vectors search no table: inside
// a decade the values of quantize.py are equally spaced, so the number of boundaries below y is the integer part of a linear
// function of y. Rounding makes that wrong next to a boundary, so nearest_code decides there: for one number in 4,000.
#pragma once

#include "adam_formula.h"

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"    // GCC's own intrinsics begin with undefined registers (bug 105593)
#endif
#include <immintrin.h>
#endif

namespace {

// 8-bit moments: ascending values, the boundaries between neighbours, and for each upper half of an fp32 number the least
// code of a number with that upper half; see quantize.py.
struct Codes {
    const float *exp_avg, *exp_avg_bounds, *exp_avg_sq, *exp_avg_sq_bounds;
    const pstar_u8 *exp_avg_least, *exp_avg_sq_least;
};

const int DECADES = 7;                 // NUM_DECADES of quantize.py
// How close to a boundary nearest_code decides. The linear function is wrong by less than 3e-5 codes: slope, start, y and
// the result, up to 256, are each rounded to 24 bits. The beginning of a region is compared with a y that is wrong by 2^-23.
const int SHIFT = 13;         // counts are fixed-point numbers with so many binary digits: 1 more or less is close
const int NEAR_BEGIN = 8;     // units in the last place of y

// The positive values of one moment as linear functions. Region 0 is below the first boundary, regions 1 to 7 are the
// decades, region 8 is above the last boundary. In region r the number of positive boundaries below y is the integer part of
// min(slope[r] * y + start[r], last[r]), all in units of 2^-SHIFT. start is 1 unit too large: fractions 0 and 1 are close.
struct Regions {
    float begin[DECADES + 1];                     // region r begins above begin[r - 1], a boundary
    alignas(64) float slope[16], start[16], last[16];
    alignas(64) pstar_u32 begin_in[32];           // bits of the begin with the same binary exponent, modulo 32, less
                                                  // NEAR_BEGIN; if there is none, of infinity
    alignas(64) int region_in[32];                // the region at the least number with that exponent
    alignas(64) pstar_u16 low[256], high[256];    // the halves of the values' bits
    const float *values, *bounds;
    const pstar_u8 *least;
    bool is_signed;
};

Regions regions_of(const float *values, const float *bounds, const pstar_u8 *least, bool is_signed) {
    Regions r = {};
    r.values = values, r.bounds = bounds, r.least = least, r.is_signed = is_signed;
    for (int k = 0; k < 256; k++) {
        r.low[k] = (pstar_u16)float_bits(values[k]);
        r.high[k] = (pstar_u16)(float_bits(values[k]) >> 16);
    }
    const float *positive = bounds + (is_signed ? 127 : 0);
    int steps = is_signed ? 1 : 2, first = 0;
    double top = 1e-6;
    const float unit = 1 << SHIFT;
    r.start[0] = r.last[0] = 0.5f * unit;
    for (int k = 0; k < DECADES; k++, first += steps, steps *= 2, top *= 10) {
        r.begin[k] = positive[first];
        r.slope[k + 1] = (float)(steps / (0.9 * top)) * unit;
        r.start[k + 1] = (float)((first + 1 - steps / 9.0) * unit + 1);
        r.last[k + 1] = (first + steps + 0.5f) * unit;
    }
    r.begin[DECADES] = positive[first];
    r.start[DECADES + 1] = r.last[DECADES + 1] = (first + 1.5f) * unit;
    for (int e = 96; e < 128; e++) {
        const float lower = bits_float((pstar_u32)e << 23), upper = bits_float((pstar_u32)(e + 1) << 23);
        r.begin_in[e & 31] = 0x7f800000u;
        for (int k = 0; k <= DECADES; k++) {
            if (r.begin[k] < lower) r.region_in[e & 31]++;
            else if (r.begin[k] < upper) r.begin_in[e & 31] = float_bits(r.begin[k]) - NEAR_BEGIN;
        }
    }
    return r;
}

// ---- plain

PSTAR_FN void decode_any(const Regions &r, const pstar_u8 *codes, float scale, float *to, int n) {
    _Pragma("omp simd") for (int i = 0; i < n; i++) to[i] = r.values[codes[i]] * scale;
}

// The bits of the largest magnitude, at least `largest`. Magnitudes are compared as integers, where NaN > infinity >
// numbers: a NaN is found in any order of comparisons.
PSTAR_FN pstar_u32 largest_magnitude(const float *from, int n, pstar_u32 largest) {
    _Pragma("omp simd reduction(max : largest)") for (int i = 0; i < n; i++) {
        pstar_u32 magnitude = float_bits(from[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// Writes the codes of numbers divided by the scale, the largest magnitude of their block; overwrites the numbers.
PSTAR_FN void encode_any(const Regions &r, float *from, float scale, pstar_u8 *codes, int n) {
    _Pragma("omp simd") for (int i = 0; i < n; i++) from[i] = scale > 0.0f ? from[i] / scale : 0.0f;
    // nearest_code in two steps instead of eight: no cell of the table holds more than one boundary.
    for (int i = 0; i < n; i++) {
        const pstar_u8 code = r.least[float_bits(from[i]) >> 16];
        codes[i] = (pstar_u8)(code + (from[i] > r.bounds[code] ? 1 : 0));
    }
}

// Whether vectors can encode: not if an element is not finite, or all are 0, or the scale or its reciprocal is denormal.
PSTAR_FN bool is_usual(float scale) { return scale > 1e-30f && scale < 1e30f; }

void decode_plain(const Regions &r, const pstar_u8 *codes, float scale, float *to, int n) {
    decode_any(r, codes, scale, to, n);
}

void encode_plain(const Regions &r, float *from, float scale, pstar_u8 *codes, int n) {
    encode_any(r, from, scale, codes, n);
}

#if defined(__x86_64__)

// ---- AVX-512: 16 numbers at once

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))

// The table is in 16 registers, the halves of the values apart: four permutations choose among 64 halves each, by six low
// bits of 32 codes.
AVX512 void decode_avx512(const Regions &r, const pstar_u8 *codes, float scale, float *to, int n) {
    __m512i low[8], high[8];
    for (int k = 0; k < 8; k++) low[k] = _mm512_load_si512(r.low + 32 * k), high[k] = _mm512_load_si512(r.high + 32 * k);
    const __m512 by = _mm512_set1_ps(scale);
    const __m512i six = _mm512_set1_epi16(64), seven = _mm512_set1_epi16(128);
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);    // such that the halves are joined in order
    int i = 0;
    for (; i + 32 <= n; i += 32) {
        __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + i)));
        code = _mm512_permutexvar_epi64(order, code);
        const __mmask32 bit6 = _mm512_test_epi16_mask(code, six), bit7 = _mm512_test_epi16_mask(code, seven);
        __m512i l[4], h[4];
        for (int k = 0; k < 4; k++) {
            l[k] = _mm512_permutex2var_epi16(low[2 * k], code, low[2 * k + 1]);
            h[k] = _mm512_permutex2var_epi16(high[2 * k], code, high[2 * k + 1]);
        }
        for (int k = 0; k < 4; k += 2) {
            l[k] = _mm512_mask_mov_epi16(l[k], bit6, l[k + 1]);
            h[k] = _mm512_mask_mov_epi16(h[k], bit6, h[k + 1]);
        }
        const __m512i l_all = _mm512_mask_mov_epi16(l[0], bit7, l[2]), h_all = _mm512_mask_mov_epi16(h[0], bit7, h[2]);
        const __m512 first = _mm512_castsi512_ps(_mm512_unpacklo_epi16(l_all, h_all));
        const __m512 second = _mm512_castsi512_ps(_mm512_unpackhi_epi16(l_all, h_all));
        _mm512_storeu_ps(to + i, _mm512_mul_ps(first, by));
        _mm512_storeu_ps(to + i + 16, _mm512_mul_ps(second, by));
    }
    for (; i < n; i++) to[i] = r.values[codes[i]] * scale;
}

template <bool SIGNED>
AVX512 void encode_usual_avx512(const Regions &r, const float *from, float scale, pstar_u8 *codes, int n) {
    const __m512 by = _mm512_set1_ps(1.0f / scale);
    const __m512 slope = _mm512_load_ps(r.slope), start = _mm512_load_ps(r.start), last = _mm512_load_ps(r.last);
    const __m512i begin0 = _mm512_load_si512(r.begin_in), begin1 = _mm512_load_si512(r.begin_in + 16);
    const __m512i region0 = _mm512_load_si512(r.region_in), region1 = _mm512_load_si512(r.region_in + 16);
    const __m512i one = _mm512_set1_epi32(1), minus_one = _mm512_set1_epi32(-1);
    const __m512i near_begin = _mm512_set1_epi32(NEAR_BEGIN), near_both = _mm512_set1_epi32(2 * NEAR_BEGIN);
    const __m512i fraction = _mm512_set1_epi32((1 << SHIFT) - 2);
    const __m512 least = _mm512_castsi512_ps(_mm512_set1_epi32(96 << 23));    // smaller exponents are not in the tables
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(from + i), by);
        const __m512 y = SIGNED ? _mm512_range_ps(x, least, 0xb) : _mm512_max_ps(x, least);    // 0xb: the larger magnitude
        const __m512i bits = _mm512_castps_si512(y), exponent = _mm512_srli_epi32(bits, 23);
        const __m512i beyond = _mm512_sub_epi32(bits, _mm512_permutex2var_epi32(begin0, exponent, begin1));
        __m512i region = _mm512_permutex2var_epi32(region0, exponent, region1);
        region = _mm512_mask_add_epi32(region, _mm512_cmpgt_epi32_mask(beyond, near_begin), region, one);
        __m512 count = _mm512_fmadd_ps(_mm512_permutexvar_ps(region, slope), y, _mm512_permutexvar_ps(region, start));
        count = _mm512_min_ps(count, _mm512_permutexvar_ps(region, last));
        const __m512i units = _mm512_cvttps_epi32(count), whole = _mm512_srli_epi32(units, SHIFT);
        __m128i code;
        if (SIGNED) {    // code - 128: whole - 1, or -whole - 1, of which the least would be -129
            const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
            const __m512i centred = _mm512_mask_sub_epi32(_mm512_add_epi32(whole, minus_one), negative, minus_one, whole);
            code = _mm_xor_si128(_mm512_cvtsepi32_epi8(centred), _mm_set1_epi8((char)0x80));
        } else {
            code = _mm512_cvtepi32_epi8(whole);
        }
        _mm_storeu_si128((__m128i *)(codes + i), code);
        unsigned close = _mm512_testn_epi32_mask(units, fraction) | _mm512_cmple_epu32_mask(beyond, near_both);
        for (; __builtin_expect(close != 0, 0); close &= close - 1) {
            const int k = i + __builtin_ctz(close);
            codes[k] = nearest_code(from[k] / scale, r.bounds);
        }
    }
    for (; i < n; i++) codes[i] = nearest_code(from[i] / scale, r.bounds);
}

AVX512 void encode_avx512(const Regions &r, float *from, float scale, pstar_u8 *codes, int n) {
    if (!is_usual(scale)) encode_any(r, from, scale, codes, n);
    else if (r.is_signed) encode_usual_avx512<true>(r, from, scale, codes, n);
    else encode_usual_avx512<false>(r, from, scale, codes, n);
}

// ---- AVX2: 8 numbers at once

#define AVX2 __attribute__((target("avx2,fma")))

// Eight single loads are twice as fast as one gather (Zen 5).
AVX2 void decode_avx2(const Regions &r, const pstar_u8 *codes, float scale, float *to, int n) {
    for (int i = 0; i < n; i++) to[i] = r.values[codes[i]];
    _Pragma("omp simd") for (int i = 0; i < n; i++) to[i] *= scale;
}

template <bool SIGNED>
AVX2 void encode_usual_avx2(const Regions &r, const float *from, float scale, pstar_u8 *codes, int n) {
    const __m256 by = _mm256_set1_ps(scale);
    const __m256 slope = _mm256_load_ps(r.slope), start = _mm256_load_ps(r.start), last = _mm256_load_ps(r.last);
    const __m256i half = _mm256_set1_epi32(127);
    __m256 begin[DECADES + 1];
    for (int k = 0; k <= DECADES; k++) begin[k] = _mm256_set1_ps(r.begin[k]);
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 x = _mm256_div_ps(_mm256_loadu_ps(from + i), by);
        __m256i bits = _mm256_castps_si256(x), negative = _mm256_setzero_si256();
        if (SIGNED) {
            negative = _mm256_srai_epi32(bits, 31);
            bits = _mm256_sub_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)), negative);
        }
        const __m256 y = _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_setzero_si256()));
        __m256i region = _mm256_setzero_si256();    // 7 for all above begin[6]; the last boundary is counted below
        for (int k = 0; k < DECADES; k++)
            region = _mm256_sub_epi32(region, _mm256_castps_si256(_mm256_cmp_ps(y, begin[k], _CMP_GT_OQ)));
        __m256 count = _mm256_fmadd_ps(_mm256_permutevar8x32_ps(slope, region), y, _mm256_permutevar8x32_ps(start, region));
        count = _mm256_min_ps(count, _mm256_permutevar8x32_ps(last, region));
        const __m256i units = _mm256_cvttps_epi32(count);
        __m256i code = _mm256_srli_epi32(units, SHIFT);
        code = _mm256_sub_epi32(code, _mm256_castps_si256(_mm256_cmp_ps(y, begin[DECADES], _CMP_GT_OQ)));
        if (SIGNED) {
            const __m256i below = _mm256_sub_epi32(half, _mm256_min_epi32(code, half));
            code = _mm256_blendv_epi8(_mm256_add_epi32(half, code), below, negative);
        }
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
        _mm_storel_epi64((__m128i *)(codes + i), _mm_packus_epi16(words, words));
        const __m256i digits = _mm256_and_si256(units, _mm256_set1_epi32((1 << SHIFT) - 2));
        unsigned close = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(digits, _mm256_setzero_si256())));
        for (; __builtin_expect(close != 0, 0); close &= close - 1) {
            const int k = i + __builtin_ctz(close);
            codes[k] = nearest_code(from[k] / scale, r.bounds);
        }
    }
    for (; i < n; i++) codes[i] = nearest_code(from[i] / scale, r.bounds);
}

AVX2 void encode_avx2(const Regions &r, float *from, float scale, pstar_u8 *codes, int n) {
    if (!is_usual(scale)) encode_any(r, from, scale, codes, n);
    else if (r.is_signed) encode_usual_avx2<true>(r, from, scale, codes, n);
    else encode_usual_avx2<false>(r, from, scale, codes, n);
}

#endif

}  // namespace
