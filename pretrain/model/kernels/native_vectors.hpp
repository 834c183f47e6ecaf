// Vectors of fp32, bf16, dropout, exp and small products, for the loops of native.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
constexpr long LANES = 16;
#else
constexpr long LANES = 8;
#endif
constexpr long TILE = 32; // number of queries whose scores are in memory at a time
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

struct bf16 { uint16_t bits; };

static inline float load(float x) { return x; }
static inline float load(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline void store(float &to, float x) { to = x; }
static inline void store(bf16 &to, float x) { // rounds to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    to.bits = uint16_t(x == x ? rounded : (bits >> 16) | 64);
}

static inline uint32_t hash_bits(uint32_t x) { // as hash_rng.hash_bits
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}
constexpr uint32_t COLUMN_STEP = 0x3C6EF, HEAD_STEP = 0xC2B2AE35u, SITE_STEP = 0x27D4EB2F;

struct Dropout { // returns the dropout factor of entry j of a row
    uint32_t seed, threshold;
    float scale;
    Dropout(uint32_t seed, double dropout)
        : seed(seed), threshold(uint32_t(std::nearbyint(dropout * (1 << 24)))), scale(float(1 / (1 - dropout))) {}
    inline float operator()(long j) const {
        return (hash_bits(seed + uint32_t(j) * COLUMN_STEP) & 0xFFFFFF) >= threshold ? scale : 0.0f;
    }
};

static inline float exponential(float x) { // exp(x) with a relative error below 3e-7
    float clamped = std::min(std::max(x, -87.0f), 88.0f);
    float n = std::nearbyint(clamped * 1.44269504f), r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    int32_t power = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return x < -87.0f ? 0.0f : x > 88.0f ? INFINITY : p * scale;
}

// Operands of products consist of units of 32 bits along the summed axis: an fp32 value or, where the CPU multiplies bf16,
// a pair of bf16 values, the first in the lower half.
template <class E> constexpr long UNIT = 1;
#ifdef __AVX512BF16__
template <> constexpr long UNIT<bf16> = 2;
typedef int64_t Half __attribute__((vector_size(32), aligned(2), may_alias)); // 16 bf16 values
static const __m512i INTERLEAVED = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                                    5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
#endif

template <class E> static inline void load_row(const E *from, long width, float *to) {
#pragma omp simd
    for (long j = 0; j < width; j++) to[j] = load(from[j]);
}
template <class E> static inline void store_row(const float *from, long width, E *to) {
    long start = 0;
#ifdef __AVX512BF16__
    if constexpr (UNIT<E> == 2)
        for (; start + 16 <= width; start += 16)
            *(Half *)(to + start) = (Half)_mm512_cvtneps_pbh(*(const __m512_u *)(from + start));
#endif
#pragma omp simd
    for (long j = start; j < width; j++) store(to[j], from[j]);
}
static inline void add_row(const float *from, long width, float *to) {
#pragma omp simd
    for (long j = 0; j < width; j++) to[j] += from[j];
}

static inline float row_max(const float *x, long width) { // `width` is a multiple of 16
    Vector highest = *(const Vector *)x;
    for (long j = LANES; j < width; j += LANES) {
        Vector next = *(const Vector *)(x + j);
        highest = next > highest ? next : highest;
    }
    float highest_entry = -INFINITY;
    for (long v = 0; v < LANES; v++) highest_entry = std::max(highest_entry, highest[v]);
    return highest_entry;
}

template <class E> static inline Vector multiply_add(Vector sum, float a, Vector b) { // a and b are units
#ifdef __AVX512BF16__
    if constexpr (UNIT<E> == 2) return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(a), (__m512bh)b);
#endif
    return sum + a * b;
}

// Sets `to` to the units of x [rows, columns] along its columns: [rows, columns / UNIT].
template <class E> static void pack_rows(const float *x, long rows, long columns, float *to) {
    if constexpr (UNIT<E> == 1) std::copy(x, x + rows * columns, to);
    else store_row(x, rows * columns, (E *)to);
}

// Sets `to` to the units of x [rows, columns] along its rows: [rows / UNIT, columns]; `rows` is a multiple of UNIT.
template <class E> static void pack_columns(const float *x, long rows, long columns, float *to) {
    if constexpr (UNIT<E> == 1) std::copy(x, x + rows * columns, to);
#ifdef __AVX512BF16__
    else
        for (long r = 0; r < rows; r += 2, x += 2 * columns, to += columns)
            for (long j = 0; j < columns; j += 16) {
                __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(*(const __m512_u *)(x + columns + j), *(const __m512_u *)(x + j));
                *(__m512i_u *)(to + j) = _mm512_permutexvar_epi16(INTERLEAVED, halves);
            }
#endif
}

// product: c [m, n] = a [m, k] b [k, n], or += if `add`; k counts units, n is a multiple of 16. am, ak, bk, cm: strides.
template <class E, int M, int V>
static inline void block(const float *a, long am, long ak, const float *b, long bk, float *c, long cm, long k, bool add) {
    Vector sums[M][V];
    for (int i = 0; i < M; i++)
        for (int v = 0; v < V; v++) sums[i][v] = add ? *(const Vector *)(c + i * cm + v * LANES) : Vector{};
    for (long j = 0; j < k; j++)
        for (int i = 0; i < M; i++)
            for (int v = 0; v < V; v++)
                sums[i][v] = multiply_add<E>(sums[i][v], a[i * am + j * ak], *(const Vector *)(b + j * bk + v * LANES));
    for (int i = 0; i < M; i++)
        for (int v = 0; v < V; v++) *(Vector *)(c + i * cm + v * LANES) = sums[i][v];
}
template <class E, int V>
static inline void rows(const float *a, long am, long ak, const float *b, long bk, float *c, long cm, long m, long k, bool add) {
    long i = 0;
    for (; i + 4 <= m; i += 4) block<E, 4, V>(a + i * am, am, ak, b, bk, c + i * cm, cm, k, add);
    for (; i < m; i++) block<E, 1, V>(a + i * am, am, ak, b, bk, c + i * cm, cm, k, add);
}
template <class E>
static void product(const float *a, long am, long ak, const float *b, long bk, float *c, long cm, long m, long n, long k, bool add) {
    long j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) rows<E, 2>(a, am, ak, b + j, bk, c + j, cm, m, k, add);
    for (; j < n; j += LANES) rows<E, 1>(a, am, ak, b + j, bk, c + j, cm, m, k, add);
}
