// Fused loops of a layer on a CPU, called by native.py: attention, bias + GELU, and bias + dropout + residual sum +
// LayerNorm, forward and backward. Tensors are contiguous, bf16 or fp32; sums are fp32.
//
// T tokens, R query positions, S sequences, N heads of width D (a multiple of 16), H = N * D.

#include "native_attention.hpp"

// Returns exp(-x^2 / 2) and sets `cdf` to the normal CDF at x (Abramowitz and Stegun 7.1.26, error below 1.5e-7).
static inline float normal_cdf(float x, float &cdf) {
    float z = std::fabs(x) * 0.70710678f, t = 1 / (1 + 0.3275911f * z), density = exponential(-z * z);
    float tail = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    cdf = x < 0 ? 0.5f * tail * density : 1 - 0.5f * tail * density;
    return density;
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

// Cross-entropy of `logits` + `bias` (may be null) with the labels; negative labels are ignored. Sets `losses` [rows], and
// `correct` [rows] to 1 / n where the label is one of the n highest entries. With `gradient`, overwrites the logits by it.
template <class E>
static void cross_entropy(long rows, long width, E *logits, const float *bias, const int64_t *labels, long gradient, float *losses,
                          float *correct) {
    long padded = (width + 15) / 16 * 16;
#pragma omp parallel
    {
        std::vector<float> buffer(padded, -INFINITY);
        float *x = buffer.data();
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            E *row = logits + r * width;
            if (labels[r] < 0) {
                losses[r] = correct[r] = 0;
                if (gradient) std::fill(row, row + width, E{});
                continue;
            }
            load_row(row, width, x);
            if (bias) add_row(bias, width, x);
            std::fill(x + width, x + padded, -INFINITY);
            float max_score = row_max(x, padded), label_score = x[labels[r]], total = 0, ties = 0;
#pragma omp simd reduction(+ : total, ties)
            for (long j = 0; j < padded; j++) {
                ties += x[j] >= max_score ? 1.0f : 0.0f;
                x[j] = exponential(x[j] - max_score);
                total += x[j];
            }
            losses[r] = max_score + std::log(total) - label_score;
            correct[r] = label_score >= max_score ? 1 / ties : 0.0f;
            if (!gradient) continue;
            float inverse_total = 1 / total;
#pragma omp simd
            for (long j = 0; j < padded; j++) x[j] *= inverse_total;
            x[labels[r]] -= 1;
            store_row(x, width, row);
        }
    }
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
    void cross_entropy_##NAME(long rows, long width, E *logits, const float *bias, const int64_t *labels, long gradient,  \
                              float *losses, float *correct) {                                                           \
        cross_entropy(rows, width, logits, bias, labels, gradient, losses, correct);                                      \
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
