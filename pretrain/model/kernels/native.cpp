// Fused loops of a layer on a CPU, called by native.py: attention of short sequences, bias + GELU, and bias + dropout +
// residual sum + LayerNorm, forward and backward. Tensors are contiguous, bf16 or fp32; arithmetic is fp32.
//
// T tokens, R query positions, S sequences, N heads of width D (a multiple of 16), H = N * D.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

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

// Returns exp(-x^2 / 2) and sets `cdf` to the normal CDF at x (Abramowitz and Stegun 7.1.26, error below 1.5e-7).
static inline float normal_cdf(float x, float &cdf) {
    float z = std::fabs(x) * 0.70710678f, t = 1 / (1 + 0.3275911f * z), density = exponential(-z * z);
    float tail = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    cdf = x < 0 ? 0.5f * tail * density : 1 - 0.5f * tail * density;
    return density;
}

// product: c [m, n] = a [m, k] b [k, n], or += if `add`; n is a multiple of 16. am, ak, bk, cm: strides of a, b and c.
template <int M, int V>
static inline void block(const float *a, long am, long ak, const float *b, long bk, float *c, long cm, long k, bool add) {
    Vector sums[M][V];
    for (int i = 0; i < M; i++)
        for (int v = 0; v < V; v++) sums[i][v] = add ? *(const Vector *)(c + i * cm + v * LANES) : Vector{};
    for (long j = 0; j < k; j++)
        for (int i = 0; i < M; i++)
            for (int v = 0; v < V; v++) sums[i][v] += a[i * am + j * ak] * *(const Vector *)(b + j * bk + v * LANES);
    for (int i = 0; i < M; i++)
        for (int v = 0; v < V; v++) *(Vector *)(c + i * cm + v * LANES) = sums[i][v];
}
template <int V>
static inline void rows(const float *a, long am, long ak, const float *b, long bk, float *c, long cm, long m, long k, bool add) {
    long i = 0;
    for (; i + 4 <= m; i += 4) block<4, V>(a + i * am, am, ak, b, bk, c + i * cm, cm, k, add);
    for (; i < m; i++) block<1, V>(a + i * am, am, ak, b, bk, c + i * cm, cm, k, add);
}
static void product(const float *a, long am, long ak, const float *b, long bk, float *c, long cm, long m, long n, long k, bool add) {
    long j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) rows<2>(a, am, ak, b + j, bk, c + j, cm, m, k, add);
    for (; j < n; j += LANES) rows<1>(a, am, ak, b + j, bk, c + j, cm, m, k, add);
}

struct Sequences {
    const int32_t *offsets;       // [S + 1] into the tokens
    const int64_t *queries;       // [R], the query positions; null if all tokens are queries
    const int32_t *query_offsets; // [S + 1] into the query positions
    const int32_t *seeds;         // [T], dropout seeds
    long count, heads, width;     // S, N, D
    double dropout;
};

template <class E> struct Head { // reads and writes one head of one sequence, and allocates buffers, in fp32
    long begin, length, padded, D, stride;
    const E *qkv;
    const float *bias; // bias of qkv, or null
    std::vector<float> buffer;
    float *next;

    Head(const Sequences &batch, const E *qkv, const float *bias)
        : D(batch.width), stride(3 * batch.heads * batch.width), qkv(qkv), bias(bias) {
        long longest = 0;
        for (long s = 0; s < batch.count; s++) longest = std::max<long>(longest, batch.offsets[s + 1] - batch.offsets[s]);
        padded = (longest + 15) / 16 * 16;
        buffer.resize(7 * padded * D + 3 * TILE * D + 2 * TILE * padded);
        next = buffer.data();
    }
    float *allocate(long entries) { return (next += entries) - entries; }
    void start(long first, long end) {
        begin = first, length = end - first, padded = (length + 15) / 16 * 16, next = buffer.data();
    }
    void read(long token, long column, float factor, float *to) const { // a token's query, key or value
        const E *from = qkv + token * stride + column;
        for (long d = 0; d < D; d++) to[d] = (load(from[d]) + (bias ? bias[column + d] : 0.0f)) * factor;
    }
    float *read_all(long column) { // `read` for all tokens
        float *to = allocate(padded * D);
        for (long l = 0; l < length; l++) read(begin + l, column, 1, to + l * D);
        return to;
    }
    float *transposed(const float *from) {
        float *to = allocate(padded * D);
        for (long d = 0; d < D; d++)
            for (long l = 0; l < padded; l++) to[d * padded + l] = l < length ? from[l * D + d] : 0.0f;
        return to;
    }
    float *zeros(long entries) {
        float *to = allocate(entries);
        std::fill(to, to + entries, 0.0f);
        return to;
    }
    void write(const float *from, E *to, long column) const {
        for (long l = 0; l < length; l++)
            for (long d = 0; d < D; d++) store(to[(begin + l) * stride + column + d], from[l * D + d]);
    }
};

template <class E>
static void attention(const Sequences &batch, const E *qkv, const float *bias, E *context, float *lse) {
    long N = batch.heads, D = batch.width, H = N * D;
    float scale = 1 / std::sqrt(float(D));
#pragma omp parallel
    {
        Head<E> head(batch, qkv, bias);
#pragma omp for schedule(static, 1)
        for (long task = 0; task < batch.count * N; task++) {
            long s = task / N, n = task % N;
            head.start(batch.offsets[s], batch.offsets[s + 1]);
            float *keys = head.transposed(head.read_all(H + n * D)), *values = head.read_all(2 * H + n * D);
            float *q = head.allocate(TILE * D), *sums = head.allocate(TILE * D), *scores = head.allocate(TILE * head.padded);
            long length = head.length, padded = head.padded, end = batch.query_offsets[s + 1];
            for (long r = batch.query_offsets[s]; r < end; r += TILE) {
                long count = std::min(TILE, end - r);
                for (long i = 0; i < count; i++)
                    head.read(batch.queries ? batch.queries[r + i] : r + i, n * D, scale, q + i * D);
                product(q, D, 1, keys, padded, scores, padded, count, padded, D, false);
                for (long i = 0; i < count; i++) {
                    float *x = scores + i * padded, max_score = -INFINITY, total = 0;
#pragma omp simd reduction(max : max_score)
                    for (long l = 0; l < length; l++) max_score = std::max(max_score, x[l]);
#pragma omp simd reduction(+ : total)
                    for (long l = 0; l < length; l++) total += x[l] = exponential(x[l] - max_score);
                    lse[(r + i) * N + n] = max_score + std::log(total);
                    float inverse_total = 1 / total;
                    if (batch.dropout > 0) {
                        long token = batch.queries ? batch.queries[r + i] : r + i;
                        Dropout dropout(hash_bits(uint32_t(batch.seeds[token]) + uint32_t(n) * HEAD_STEP), batch.dropout);
#pragma omp simd
                        for (long l = 0; l < length; l++) x[l] *= inverse_total * dropout(l);
                    } else
                        for (long l = 0; l < length; l++) x[l] *= inverse_total;
                }
                product(scores, padded, 1, values, D, sums, D, count, D, length, false);
                for (long i = 0; i < count; i++)
                    for (long d = 0; d < D; d++) store(context[(r + i) * H + n * D + d], sums[i * D + d]);
            }
        }
    }
}

template <class E>
static void attention_backward(const Sequences &batch, const E *qkv, const float *bias, const E *context, const float *lse,
                               const E *grad_context, E *grad_qkv) {
    long N = batch.heads, D = batch.width, H = N * D;
    float scale = 1 / std::sqrt(float(D));
#pragma omp parallel
    {
        Head<E> head(batch, qkv, bias);
#pragma omp for schedule(static, 1)
        for (long task = 0; task < batch.count * N; task++) {
            long s = task / N, n = task % N;
            head.start(batch.offsets[s], batch.offsets[s + 1]);
            long length = head.length, padded = head.padded, end = batch.query_offsets[s + 1];
            float *keys = head.read_all(H + n * D), *transposed_keys = head.transposed(keys);
            float *scratch = head.next, *transposed_values = head.transposed(head.read_all(2 * H + n * D));
            float *grad_k = scratch; // overwrites the values, of which only the transposed copy is used
            std::fill(grad_k, grad_k + padded * D, 0.0f);
            float *grad_v = head.zeros(padded * D), *grad_q = head.zeros(padded * D);
            float *q = head.allocate(TILE * D), *grad_out = head.allocate(TILE * D), *sums = head.allocate(TILE * D);
            float *scores = head.allocate(TILE * padded), *grads = head.allocate(TILE * padded);
            for (long r = batch.query_offsets[s]; r < end; r += TILE) {
                long count = std::min(TILE, end - r);
                for (long i = 0; i < count; i++) {
                    head.read(batch.queries ? batch.queries[r + i] : r + i, n * D, scale, q + i * D);
                    for (long d = 0; d < D; d++) grad_out[i * D + d] = load(grad_context[(r + i) * H + n * D + d]);
                }
                product(q, D, 1, transposed_keys, padded, scores, padded, count, padded, D, false);
                product(grad_out, D, 1, transposed_values, padded, grads, padded, count, padded, D, false);
                for (long i = 0; i < count; i++) {
                    float *x = scores + i * padded, *g = grads + i * padded, delta = 0, row_lse = lse[(r + i) * N + n];
                    long token = batch.queries ? batch.queries[r + i] : r + i;
#pragma omp simd reduction(+ : delta)
                    for (long d = 0; d < D; d++) delta += load(context[(r + i) * H + n * D + d]) * grad_out[i * D + d];
                    Dropout dropout(hash_bits(uint32_t(batch.seeds[token]) + uint32_t(n) * HEAD_STEP), batch.dropout);
                    if (batch.dropout > 0)
#pragma omp simd
                        for (long l = 0; l < length; l++) {
                            float weight = exponential(x[l] - row_lse), factor = dropout(l);
                            x[l] = weight * factor, g[l] = weight * (g[l] * factor - delta);
                        }
                    else
#pragma omp simd
                        for (long l = 0; l < length; l++) x[l] = exponential(x[l] - row_lse), g[l] = x[l] * (g[l] - delta);
                }
                product(grads, padded, 1, keys, D, sums, D, count, D, length, false);
                product(grads, 1, padded, q, D, grad_k, D, length, D, count, true);
                product(scores, 1, padded, grad_out, D, grad_v, D, length, D, count, true);
                for (long i = 0; i < count; i++) { // a token may be a query twice
                    float *to = grad_q + ((batch.queries ? batch.queries[r + i] : r + i) - head.begin) * D;
                    for (long d = 0; d < D; d++) to[d] += sums[i * D + d] * scale;
                }
            }
            head.write(grad_q, grad_qkv, n * D);
            head.write(grad_k, grad_qkv, H + n * D);
            head.write(grad_v, grad_qkv, 2 * H + n * D);
        }
    }
}

// Column sums, separate for each thread: [threads, width].
struct ThreadSums {
    std::vector<float> sums;
    long width;
    explicit ThreadSums(long width) : sums(omp_get_max_threads() * width), width(width) {}
    float *local() { return sums.data() + omp_get_thread_num() * width; }
    void total(float *to) const {
        std::fill(to, to + width, 0.0f);
        for (size_t i = 0; i < sums.size(); i++) to[i % width] += sums[i];
    }
};

template <class E>
static void gelu(long rows, long width, const E *x, const float *bias, E *out) {
#pragma omp parallel for
    for (long r = 0; r < rows; r++)
#pragma omp simd
        for (long j = 0; j < width; j++) {
            float value = load(x[r * width + j]) + bias[j], cdf;
            normal_cdf(value, cdf);
            store(out[r * width + j], value * cdf);
        }
}

template <class E>
static void gelu_backward(long rows, long width, const E *x, const float *bias, const E *grad, E *grad_x, float *grad_bias) {
    ThreadSums thread_sums(width);
#pragma omp parallel
    {
        float *local_sums = thread_sums.local();
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++)
#pragma omp simd
            for (long j = 0; j < width; j++) {
                float value = load(x[r * width + j]) + bias[j], cdf, density = normal_cdf(value, cdf);
                float to = load(grad[r * width + j]) * (cdf + value * density * 0.39894228f);
                store(grad_x[r * width + j], to);
                local_sums[j] += to;
            }
    }
    thread_sums.total(grad_bias);
}

// Sets `to` to the residual sum of a row: residual + dropout(x + bias).
template <class E>
static inline void residual_sum(const E *x, const float *bias, const E *residual, const Dropout &dropout, bool has_dropout, long width,
                                float *to) {
    if (has_dropout) {
#pragma omp simd
        for (long j = 0; j < width; j++) to[j] = load(residual[j]) + (load(x[j]) + bias[j]) * dropout(j);
    } else
        for (long j = 0; j < width; j++) to[j] = load(residual[j]) + load(x[j]) + bias[j];
}

template <class E>
static void norm(long rows, long width, const E *x, const float *bias, const E *residual, const int32_t *seeds, long site,
                 double dropout, const float *gain, const float *shift, double eps, E *out, float *moments) {
#pragma omp parallel
    {
        std::vector<float> buffer(width);
        float *sum = buffer.data();
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            Dropout dropped(dropout > 0 ? uint32_t(seeds[r]) ^ (site * SITE_STEP) : 0, dropout);
            residual_sum(x + r * width, bias, residual + r * width, dropped, dropout > 0, width, sum);
            float mean = 0, squares = 0;
#pragma omp simd reduction(+ : mean)
            for (long j = 0; j < width; j++) mean += sum[j];
            mean /= width;
#pragma omp simd reduction(+ : squares)
            for (long j = 0; j < width; j++) squares += (sum[j] - mean) * (sum[j] - mean);
            float inverse = 1 / std::sqrt(squares / width + eps);
            moments[2 * r] = mean, moments[2 * r + 1] = inverse;
#pragma omp simd
            for (long j = 0; j < width; j++) store(out[r * width + j], (sum[j] - mean) * inverse * gain[j] + shift[j]);
        }
    }
}

// `extra_grad` is added to `grad` and may be null. `sums` is set to the gradients of bias, gain and shift.
template <class E>
static void norm_backward(long rows, long width, const E *x, const float *bias, const E *residual, const int32_t *seeds, long site,
                          double dropout, const float *gain, const float *moments, const E *grad, const E *extra_grad, E *grad_x,
                          E *grad_residual, float *sums) {
    ThreadSums thread_sums(3 * width);
#pragma omp parallel
    {
        std::vector<float> buffer(2 * width);
        float *normed = buffer.data(), *scaled = normed + width;
        float *grad_bias = thread_sums.local(), *grad_gain = grad_bias + width, *grad_shift = grad_gain + width;
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            Dropout dropped(dropout > 0 ? uint32_t(seeds[r]) ^ (site * SITE_STEP) : 0, dropout);
            bool has_dropout = dropout > 0;
            residual_sum(x + r * width, bias, residual + r * width, dropped, has_dropout, width, normed);
            float mean = moments[2 * r], inverse = moments[2 * r + 1], mean_grad = 0, mean_product = 0;
            const E *g = grad + r * width, *m = extra_grad ? extra_grad + r * width : nullptr;
#pragma omp simd
            for (long j = 0; j < width; j++) scaled[j] = load(g[j]);
            if (m)
#pragma omp simd
                for (long j = 0; j < width; j++) scaled[j] += load(m[j]);
#pragma omp simd
            for (long j = 0; j < width; j++) {
                normed[j] = (normed[j] - mean) * inverse;
                grad_gain[j] += scaled[j] * normed[j];
                grad_shift[j] += scaled[j];
                scaled[j] *= gain[j];
            }
#pragma omp simd reduction(+ : mean_grad, mean_product)
            for (long j = 0; j < width; j++) mean_grad += scaled[j], mean_product += scaled[j] * normed[j];
            mean_grad /= width, mean_product /= width;
#pragma omp simd
            for (long j = 0; j < width; j++) {
                scaled[j] = inverse * (scaled[j] - mean_grad - normed[j] * mean_product);
                store(grad_residual[r * width + j], scaled[j]);
            }
            if (has_dropout)
#pragma omp simd
                for (long j = 0; j < width; j++) scaled[j] *= dropped(j);
#pragma omp simd
            for (long j = 0; j < width; j++) {
                grad_bias[j] += scaled[j];
                store(grad_x[r * width + j], scaled[j]);
            }
        }
    }
    thread_sums.total(sums);
}

// torch's fused AdamW for a table [rows, width]; also sets `weights`, in the model's dtype. A row that never had a gradient
// only decays. seen [rows]: 0 if a row never had a gradient, 1 if it had one, 2 if unknown.
template <class E>
static void adamw(long rows, long width, uint8_t *seen, const float *grad, float *master, float *exp_avg, float *exp_avg_sq,
                  E *weights, double divisor, double rate, double beta1, double beta2, double eps, double decay, double step) {
    float decay_factor = 1 - rate * decay, step_size = rate / (1 - std::pow(beta1, step));
    float sqrt_correction = std::sqrt(1 - std::pow(beta2, step));
    float b1 = beta1, b2 = beta2, e = eps, scale = 1 / divisor;
#pragma omp parallel for
    for (long r = 0; r < rows; r++) {
        float *w = master + r * width, *m = exp_avg + r * width, *v = exp_avg_sq + r * width;
        const float *g = grad + r * width;
        E *to = weights + r * width;
        if (seen[r] == 2) seen[r] = std::any_of(v, v + width, [](float x) { return x != 0; });
        if (seen[r]) {
#pragma omp simd
            for (long j = 0; j < width; j++) {
                float x = g[j] * scale;
                m[j] += (x - m[j]) * (1 - b1);
                v[j] = v[j] * b2 + x * x * (1 - b2);
                w[j] = w[j] * decay_factor - step_size * m[j] / (std::sqrt(v[j]) / sqrt_correction + e);
                store(to[j], w[j]);
            }
        } else if (decay_factor != 1)
#pragma omp simd
            for (long j = 0; j < width; j++) {
                w[j] *= decay_factor;
                store(to[j], w[j]);
            }
    }
}

#define KERNELS(NAME, E)                                                                                                 \
    void attention_##NAME(const Sequences *batch, const E *qkv, const float *bias, E *context, float *lse) {             \
        attention(*batch, qkv, bias, context, lse);                                                                      \
    }                                                                                                                    \
    void attention_backward_##NAME(const Sequences *batch, const E *qkv, const float *bias, const E *context,            \
                                   const float *lse, const E *grad, E *grad_qkv) {                                       \
        attention_backward(*batch, qkv, bias, context, lse, grad, grad_qkv);                                             \
    }                                                                                                                    \
    void gelu_##NAME(long rows, long width, const E *x, const float *bias, E *out) { gelu(rows, width, x, bias, out); }  \
    void gelu_backward_##NAME(long rows, long width, const E *x, const float *bias, const E *grad, E *grad_x,            \
                              float *grad_bias) {                                                                        \
        gelu_backward(rows, width, x, bias, grad, grad_x, grad_bias);                                                    \
    }                                                                                                                    \
    void norm_##NAME(long rows, long width, const E *x, const float *bias, const E *residual, const int32_t *seeds,       \
                     long site, double dropout, const float *gain, const float *shift, double eps, E *out, float *moments) {\
        norm(rows, width, x, bias, residual, seeds, site, dropout, gain, shift, eps, out, moments);                       \
    }                                                                                                                    \
    void norm_backward_##NAME(long rows, long width, const E *x, const float *bias, const E *residual,                   \
                              const int32_t *seeds, long site, double dropout, const float *gain, const float *moments,   \
                              const E *grad, const E *extra_grad, E *grad_x, E *grad_residual, float *sums) {            \
        norm_backward(rows, width, x, bias, residual, seeds, site, dropout, gain, moments, grad, extra_grad, grad_x,      \
                      grad_residual, sums);                                                                              \
    }                                                                                                                    \
    void adamw_##NAME(long rows, long width, uint8_t *seen, const float *grad, float *master, float *exp_avg,            \
                      float *exp_avg_sq, E *weights, double divisor, double rate, double beta1, double beta2,            \
                      double eps, double decay, double step) {                                                           \
        adamw(rows, width, seen, grad, master, exp_avg, exp_avg_sq, weights, divisor, rate, beta1, beta2, eps, decay, step); \
    }

extern "C" {
KERNELS(bf16, bf16)
KERNELS(fp32, float)
}
