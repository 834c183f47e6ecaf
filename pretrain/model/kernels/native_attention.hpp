// Attention of a sequence's head by tiles of queries, forward and backward, with scores that stay in the cache (as in flash
// attention, Dao et al. 2022, but all keys of a tile at once).
#pragma once

#include "native_vectors.hpp"

struct Sequences {
    const int32_t *offsets;       // [S + 1] into the tokens
    const int64_t *queries;       // [R], the query positions; null if all tokens are queries
    const int32_t *query_offsets; // [S + 1] into the query positions
    const int32_t *seeds;         // [T], dropout seeds
    const float *cos, *sin;       // [T, D / 2], the rotation of queries and keys; null without rotary positions
    long count, heads, width;     // S, N, D
    long interleaved, window;     // see positions.Rotation and layout.AttentionOptions
    double dropout;
};

// One head of one sequence: reads and writes its tokens, in fp32, and allocates buffers.
template <class E> struct Head {
    const Sequences &batch;
    const E *qkv;
    const float *bias; // bias of qkv, or null
    long s, n, begin, length, padded, D, stride; // s: the sequence, n: the head
    std::vector<float> buffer;
    float *next;

    Head(const Sequences &batch, const E *qkv, const float *bias)
        : batch(batch), qkv(qkv), bias(bias), D(batch.width), stride(3 * batch.heads * batch.width) {
        long longest = 0;
        for (long s = 0; s < batch.count; s++) longest = std::max<long>(longest, batch.offsets[s + 1] - batch.offsets[s]);
        padded = (longest + 15) / 16 * 16;
        buffer.resize(10 * padded * D + 7 * TILE * D + 3 * TILE * std::max(D, padded));
    }
    float *allocate(long entries) { return (next += entries) - entries; }
    void start(long sequence, long head) {
        s = sequence, n = head;
        begin = batch.offsets[s], length = batch.offsets[s + 1] - begin, padded = (length + 15) / 16 * 16, next = buffer.data();
    }
    long token(long query) const { return batch.queries ? batch.queries[query] : query; }
    Dropout dropout(long query) const {
        uint32_t seed = batch.dropout > 0 ? uint32_t(batch.seeds[token(query)]) : 0;
        return Dropout(hash_bits(seed + uint32_t(n) * HEAD_STEP), batch.dropout);
    }
    void rotate(long token, float direction, float *x) const {
        if (!batch.cos) return;
        const float *cos = batch.cos + token * (D / 2), *sin = batch.sin + token * (D / 2);
        auto rotate_pair = [&](float &first, float &second, long k) {
            float a = first, b = second, s = sin[k] * direction;
            first = a * cos[k] - b * s, second = b * cos[k] + a * s;
        };
        if (batch.interleaved)
#pragma omp simd
            for (long k = 0; k < D / 2; k++) rotate_pair(x[2 * k], x[2 * k + 1], k);
        else
#pragma omp simd
            for (long k = 0; k < D / 2; k++) rotate_pair(x[k], x[k + D / 2], k);
    }
    void read(long token, long column, bool rotated, float *to) const { // a token's query, key or value
        const E *from = qkv + token * stride + column;
        load_row(from, D, to);
        for (long d = 0; d < D; d += 64 / sizeof(E)) __builtin_prefetch(from + D + d); // the next head's
        if (bias) add_row(bias + column, D, to);
        if (rotated) rotate(token, 1, to);
    }
    float *read_all(long column, bool rotated) { // `read` for all tokens: [padded, D], with zeros at the end
        float *to = allocate(padded * D);
        for (long l = 0; l < length; l++) read(begin + l, column, rotated, to + l * D);
        std::fill(to + length * D, to + padded * D, 0.0f);
        return to;
    }
    void write(const float *from, long column, E *to) const {
        for (long l = 0; l < length; l++) store_row(from + l * D, D, to + (begin + l) * stride + column);
    }
    float *zeros(long entries) {
        float *to = allocate(entries);
        std::fill(to, to + entries, 0.0f);
        return to;
    }
    float *packed_columns(const float *from) { // [padded, D] -> units [padded / UNIT, D]
        float *to = allocate(padded * D);
        pack_columns<E>(from, padded, D, to);
        return to;
    }
    float *packed_transposed(const float *from) { // [padded, D] -> units [D / UNIT, padded]
        float *to = allocate(padded * D), *scratch = allocate(padded * D);
        long width = D / UNIT<E>;
        pack_rows<E>(from, padded, D, scratch);
        for (long d = 0; d < width; d++)
            for (long l = 0; l < padded; l++) to[d * padded + l] = scratch[l * width + d];
        return to;
    }
};

// The queries first..first + count, and the keys start..end that any of them attends to, both multiples of 16.
template <class E> struct Tile {
    const Head<E> &head;
    long first, count, even, start, end; // even: count, rounded up to a multiple of UNIT

    Tile(const Head<E> &head, long first, long last)
        : head(head), first(first), count(std::min(TILE, last - first)), even((count + UNIT<E> - 1) / UNIT<E> * UNIT<E>) {
        start = low(0) / 16 * 16, end = (high(count - 1) + 15) / 16 * 16;
    }
    long position(long i) const { return head.token(first + i) - head.begin; }
    long low(long i) const { return head.batch.window ? std::max(0L, position(i) - head.batch.window) : 0; }
    long high(long i) const {
        return head.batch.window ? std::min(head.length, position(i) + head.batch.window + 1) : head.length;
    }
    // scores [count, end - start] = queries keys^T of units, -inf where a query does not attend
    void products(const float *units, const float *keys, float *to) const {
        long width = head.D / UNIT<E>;
        product<E>(units, width, 1, keys + start, head.padded, to, end - start, count, end - start, width, false);
    }
    void mask(long i, float *scores) const {
        std::fill(scores, scores + low(i) - start, -INFINITY);
        std::fill(scores + high(i) - start, scores + end - start, -INFINITY);
    }
    // to [count, D] = weights values, both units
    void weighted_sum(const float *weights, const float *values, float *to) const {
        long D = head.D, width = (end - start) / UNIT<E>;
        product<E>(weights, width, 1, values + start / UNIT<E> * D, D, to, D, count, D, width, false);
    }
    // to [length, D] += weights^T rows, both units of columns
    void add_transposed(const float *weights, const float *rows, float *to) const {
        long D = head.D, keys = std::min(end, head.length) - start;
        product<E>(weights, 1, end - start, rows, D, to + start * D, D, keys, D, even / UNIT<E>, true);
    }
    void pad_rows(long columns, float *rows) const { std::fill(rows + count * columns, rows + even * columns, 0.0f); }
};

// Replaces a row of scores by their softmax, with dropout; returns their log-sum-exp.
static inline float softmax(float *x, long columns, long start, float scale, const Dropout &dropout, bool has_dropout) {
    float max_score = row_max(x, columns), total = 0;
#pragma omp simd reduction(+ : total)
    for (long l = 0; l < columns; l++) {
        x[l] = exponential((x[l] - max_score) * scale);
        total += x[l];
    }
    float inverse_total = 1 / total;
    if (has_dropout)
#pragma omp simd
        for (long l = 0; l < columns; l++) x[l] *= inverse_total * dropout(start + l);
    else
#pragma omp simd
        for (long l = 0; l < columns; l++) x[l] *= inverse_total;
    return max_score * scale + std::log(total);
}

// Replaces a row of scores by their softmax, with dropout, and `g`, the gradient of that, by the gradient of the products.
static inline void softmax_backward(float *x, float *g, long columns, long start, float scale, float lse, float delta,
                                    const Dropout &dropout, bool has_dropout) {
    if (has_dropout)
#pragma omp simd
        for (long l = 0; l < columns; l++) {
            float weight = exponential(x[l] * scale - lse), factor = dropout(start + l);
            x[l] = weight * factor;
            g[l] = scale * weight * (g[l] * factor - delta);
        }
    else
#pragma omp simd
        for (long l = 0; l < columns; l++) {
            x[l] = exponential(x[l] * scale - lse);
            g[l] = scale * x[l] * (g[l] - delta);
        }
}

// Calls `function(head)` for each head of each sequence, in parallel.
template <class E, class F>
static void for_each_head(const Sequences &batch, const E *qkv, const float *bias, F function) {
#pragma omp parallel
    {
        Head<E> head(batch, qkv, bias);
#pragma omp for schedule(static, 1)
        for (long task = 0; task < batch.count * batch.heads; task++) {
            head.start(task / batch.heads, task % batch.heads);
            function(head);
        }
    }
}

template <class E>
static void attention(const Sequences &batch, const E *qkv, const float *bias, E *context, float *lse) {
    long N = batch.heads, D = batch.width, H = N * D;
    float scale = 1 / std::sqrt(float(D));
    for_each_head<E>(batch, qkv, bias, [&](Head<E> &head) {
        long n = head.n, first = batch.query_offsets[head.s], last = batch.query_offsets[head.s + 1];
        float *keys = head.packed_transposed(head.read_all(H + n * D, true));
        float *values = head.packed_columns(head.read_all(2 * H + n * D, false));
        float *q = head.allocate(TILE * D), *sums = head.allocate(TILE * D);
        float *units = head.allocate(TILE * std::max(D, head.padded)), *scores = head.allocate(TILE * head.padded);
        for (long r = first; r < last; r += TILE) {
            Tile<E> tile(head, r, last);
            long columns = tile.end - tile.start;
            for (long i = 0; i < tile.count; i++) head.read(head.token(r + i), n * D, true, q + i * D);
            pack_rows<E>(q, tile.count, D, units);
            tile.products(units, keys, scores);
            for (long i = 0; i < tile.count; i++) {
                float *x = scores + i * columns;
                tile.mask(i, x);
                lse[(r + i) * N + n] = softmax(x, columns, tile.start, scale, head.dropout(r + i), batch.dropout > 0);
            }
            pack_rows<E>(scores, tile.count, columns, units);
            tile.weighted_sum(units, values, sums);
            for (long i = 0; i < tile.count; i++) store_row(sums + i * D, D, context + (r + i) * H + n * D);
        }
    });
}

template <class E>
static void attention_backward(const Sequences &batch, const E *qkv, const float *bias, const E *context, const float *lse,
                               const E *grad_context, E *grad_qkv) {
    long N = batch.heads, D = batch.width, H = N * D;
    float scale = 1 / std::sqrt(float(D));
    for_each_head<E>(batch, qkv, bias, [&](Head<E> &head) {
        long n = head.n, first = batch.query_offsets[head.s], last = batch.query_offsets[head.s + 1];
        float *keys = head.read_all(H + n * D, true);
        float *transposed_keys = head.packed_transposed(keys), *packed_keys = head.packed_columns(keys);
        float *transposed_values = head.packed_transposed(head.read_all(2 * H + n * D, false));
        float *grad_q = head.zeros(head.padded * D), *grad_k = head.zeros(head.padded * D);
        float *grad_v = head.zeros(head.padded * D);
        float *q = head.allocate(TILE * D), *grad_out = head.allocate(TILE * D), *sums = head.allocate(TILE * D);
        float *packed_q = head.allocate(TILE * D), *packed_grad_out = head.allocate(TILE * D);
        float *units = head.allocate(TILE * std::max(D, head.padded));
        float *scores = head.allocate(TILE * head.padded), *grads = head.allocate(TILE * head.padded);
        for (long r = first; r < last; r += TILE) {
            Tile<E> tile(head, r, last);
            long columns = tile.end - tile.start, start = tile.start;
            for (long i = 0; i < tile.count; i++) {
                head.read(head.token(r + i), n * D, true, q + i * D);
                load_row(grad_context + (r + i) * H + n * D, D, grad_out + i * D);
            }
            tile.pad_rows(D, q), tile.pad_rows(D, grad_out);
            pack_columns<E>(q, tile.even, D, packed_q), pack_columns<E>(grad_out, tile.even, D, packed_grad_out);
            pack_rows<E>(q, tile.count, D, units);
            tile.products(units, transposed_keys, scores);
            pack_rows<E>(grad_out, tile.count, D, units);
            tile.products(units, transposed_values, grads);
            for (long i = 0; i < tile.count; i++) {
                float delta = 0;
                load_row(context + (r + i) * H + n * D, D, sums);
#pragma omp simd reduction(+ : delta)
                for (long d = 0; d < D; d++) delta += sums[d] * grad_out[i * D + d];
                tile.mask(i, scores + i * columns);
                softmax_backward(scores + i * columns, grads + i * columns, columns, start, scale, lse[(r + i) * N + n], delta,
                                 head.dropout(r + i), batch.dropout > 0);
            }
            tile.pad_rows(columns, scores), tile.pad_rows(columns, grads);
            pack_columns<E>(scores, tile.even, columns, units);
            tile.add_transposed(units, packed_grad_out, grad_v);
            pack_columns<E>(grads, tile.even, columns, units);
            tile.add_transposed(units, packed_q, grad_k);
            pack_rows<E>(grads, tile.count, columns, units);
            tile.weighted_sum(units, packed_keys, sums);
            for (long i = 0; i < tile.count; i++) // a token may be a query twice
                add_row(sums + i * D, D, grad_q + tile.position(i) * D);
        }
        for (long l = 0; l < head.length; l++)
            for (float *x : {grad_q, grad_k}) head.rotate(head.begin + l, -1, x + l * D);
        head.write(grad_q, n * D, grad_qkv);
        head.write(grad_k, H + n * D, grad_qkv);
        head.write(grad_v, 2 * H + n * D, grad_qkv);
    });
}
