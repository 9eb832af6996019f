/* A decoding step over a few rows, on CPUs: where calling an operator costs more than what it computes.
 *
 * Whatever is computed for a row does not depend on the rows beside it, nor on masked columns between those it sees: sums
 * run over the visible ones in order. So verifying n drafted tokens gives plain decoding's numbers, bit for bit.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float f32x8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t i32x8 __attribute__((vector_size(32), aligned(4)));
typedef float f32x4 __attribute__((vector_size(16), aligned(4)));
typedef int32_t i32x4 __attribute__((vector_size(16), aligned(4)));

#define EACH1(DO) DO(0)
#define EACH2(DO) EACH1(DO) DO(1)
#define EACH3(DO) EACH2(DO) DO(2)
#define EACH4(DO) EACH3(DO) DO(3)
#define EACH5(DO) EACH4(DO) DO(4)
#define EACH6(DO) EACH5(DO) DO(5)

/* Sums of a product are named variables, not an array: compilers keep only those in registers. */
#define ZERO(r) f32x8 a##r = {0}, b##r = {0};
#define STEP(r) { float s = x[r * K + k]; a##r += s * lo; b##r += s * hi; }
#define STORE(r) *(f32x8 *)(y + r * stride) = a##r; *(f32x8 *)(y + r * stride + 8) = b##r;

#define PANEL(M) \
    static void panel##M(const float *x, const int32_t *w, long K, float *y, long stride) \
    { \
        EACH##M(ZERO) \
        for (long k = 0; k < K; k++) { \
            __builtin_prefetch(w + 8 * k + 1024); /* the machine's own prefetching ends with each page */ \
            i32x8 pair = *(const i32x8 *)(w + 8 * k); \
            f32x8 lo = (f32x8)(pair << 16), hi = (f32x8)(pair & (int32_t)0xffff0000); \
            EACH##M(STEP) \
        } \
        EACH##M(STORE) \
    }

PANEL(1) PANEL(2) PANEL(3) PANEL(4) PANEL(5) PANEL(6)

typedef void (*panel_t)(const float *, const int32_t *, long, float *, long);
static const panel_t panels[] = {0, panel1, panel2, panel3, panel4, panel5, panel6};

/* Cephes' polynomial: within 2 units in the last place. */
static f32x8 exp8(f32x8 x)
{
    const f32x8 least = {-87, -87, -87, -87, -87, -87, -87, -87}, most = -least, magic = least * 0 + 12582912.0f;
    const i32x8 low = x < least, high = x > most;
    x = (f32x8)(((i32x8)x & ~(low | high)) | ((i32x8)least & low) | ((i32x8)most & high));
    const f32x8 shifted = x * 1.44269504f + magic, n = shifted - magic; /* rounds to a whole number */
    const f32x8 r = x - n * 0.693359375f - n * -2.12194440e-4f;
    f32x8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f, p = p * r + 1.6666665459e-1f, p = p * r + 5.0000001201e-1f;
    p = (p * r * r + r + 1) * (f32x8)(((i32x8)shifted - (i32x8)magic + 127) << 23);
    return (f32x8)(((i32x8)p & ~high) | (high & 0x7f800000)); /* infinity there */
}

static void normalize(const float *x, const float *weight, float eps, float *y, long K)
{
    f32x8 squares = {0};
    long k = 0;
    float sum = 0;
    for (; k + 8 <= K; k += 8) {
        const f32x8 v = *(const f32x8 *)(x + k);
        squares += v * v;
    }
    for (; k < K; k++)
        sum += x[k] * x[k];
    for (int i = 0; i < 8; i++)
        sum += squares[i];
    const float scale = 1 / sqrtf(sum / K + eps);
    for (k = 0; k < K; k++)
        y[k] = x[k] * scale * weight[k];
}

/* By all threads of a team, or by each that calls it for itself; rows of y are `apart`. */
static void norms(const float *x, const float *weight, float eps, float *y, long n, long K, long apart, int alone)
{
    for (long r = 0; alone && r < n; r++)
        normalize(x + r * K, weight, eps, y + r * apart, K);
    if (alone)
        return;
#pragma omp for schedule(static)
    for (long r = 0; r < n; r++)
        normalize(x + r * K, weight, eps, y + r * apart, K);
}

/* Rows of x (n, K), each divided by its root mean square. */
void rms_norm(const float *x, const float *weight, float eps, float *y, long n, long K)
{
#pragma omp parallel if (n > 16)
    norms(x, weight, eps, y, n, K, K, 0);
}

static f32x8 gated(f32x8 gate, f32x8 up)
{
    return gate / (1 + exp8(-gate)) * up;
}

static void gate(const float *x, float *y, long K)
{
    long k = 0;
    for (; k + 8 <= K; k += 8)
        *(f32x8 *)(y + k) = gated(*(const f32x8 *)(x + k), *(const f32x8 *)(x + K + k));
    if (k < K) {
        f32x8 last = {0}, up = {0};
        memcpy(&last, x + k, (K - k) * sizeof(float));
        memcpy(&up, x + K + k, (K - k) * sizeof(float));
        last = gated(last, up);
        memcpy(y + k, &last, (K - k) * sizeof(float));
    }
}

static void gates(const float *x, float *y, long n, long K, int alone)
{
    for (long r = 0; alone && r < n; r++)
        gate(x + r * 2 * K, y + r * K, K);
    if (alone)
        return;
#pragma omp for schedule(static)
    for (long r = 0; r < n; r++)
        gate(x + r * 2 * K, y + r * K, K);
}

/* y = x W^T [+ residual] by all threads of a team; y may be the residual. */
static void linear(const float *x, const int32_t *w, float *y, long n, long K, long O, const float *residual)
{
    const long blocks = (n + 5) / 6;
#pragma omp for schedule(static)
    for (long p = 0; p < (O + 15) / 16; p++) {
        const long width = O - 16 * p < 16 ? O - 16 * p : 16;
        for (long b = 0; b < blocks; b++) {
            const long from = b * n / blocks, m = (b + 1) * n / blocks - from;
            float sums[6 * 16];
            panels[m](x + from * K, w + p * 8 * K, K, sums, 16);
            for (long r = 0; r < m; r++) {
                const long at = (from + r) * O + 16 * p;
                for (long i = 0; i < width; i++)
                    y[at + i] = sums[16 * r + i] + (residual ? residual[at + i] : 0);
            }
        }
    }
}

/* y = f(x) W^T [+ residual] for float32 x and bfloat16 W, on CPUs that have no bfloat16 instructions; f is nothing, an RMS
 * norm, or silu(gate) * up.
 *
 * A bfloat16 is the upper half of a float32, so widening costs a shift; done in registers, it reads half the bytes that a
 * float32 weight would. W lies in panels of 16 outputs: for each k eight words of two weights, the lower half of output
 * i, the upper of output i + 8. Up to six rows share a panel's pass.
 *
 * x (n, K), or (n, 2 K) where gated; w (ceil(O / 16), K, 8) words; y and residual (n, O); norm (K,). norm and residual may
 * be null. */
void bf16_linear(const float *x, const int32_t *w, float *y, long n, long K, long O, const float *norm, float eps,
                 long gated, const float *residual)
{
    float *f = norm || gated ? malloc(n * K * sizeof(float)) : NULL;
#pragma omp parallel
    {
        if (norm)
            norms(x, norm, eps, f, n, K, K, 0);
        else if (gated)
            gates(x, f, n, K, 0);
        linear(f ? f : x, w, y, n, K, O, residual);
    }
    free(f);
}

static void rotate_row(float *x, const float *cos, const float *sin, long heads, long d)
{
    const long half = d / 2;
    for (long h = 0; h < heads; h++) {
        float *low = x + h * d, *high = low + half;
        for (long i = 0; i < half; i++) {
            const float a = low[i], b = high[i];
            low[i] = a * cos[i] - b * sin[i];
            high[i] = b * cos[half + i] + a * sin[half + i];
        }
    }
}

/* Rotary positions, in place: rows of `stride` floats begin with `heads` heads of width d; cos and sin (rows, d). */
void rotate(float *x, const float *cos, const float *sin, long rows, long stride, long heads, long d)
{
#pragma omp parallel for schedule(static) if (rows > 16)
    for (long r = 0; r < rows; r++)
        rotate_row(x + r * stride, cos + r * d, sin + r * d, heads, d);
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i32x4){__VA_ARGS__})
#endif

static f32x4 halves(f32x8 a)
{
    f32x4 half[2];
    memcpy(half, &a, sizeof a);
    return half[0] + half[1];
}

/* The sums of four vectors, each added up in the same order. */
static f32x4 totals(f32x8 a, f32x8 b, f32x8 c, f32x8 d)
{
    const f32x4 w = halves(a), x = halves(b), y = halves(c), z = halves(d);
    const f32x4 wx = SHUFFLE(w, x, 0, 4, 1, 5) + SHUFFLE(w, x, 2, 6, 3, 7);
    const f32x4 yz = SHUFFLE(y, z, 0, 4, 1, 5) + SHUFFLE(y, z, 2, 6, 3, 7);
    return SHUFFLE(wx, yz, 0, 1, 4, 5) + SHUFFLE(wx, yz, 2, 3, 6, 7);
}

#define EACH8(DO) EACH6(DO) DO(6) DO(7)
#define QUERY(t) const f32x8 q##t = *(const f32x8 *)(q + 8 * t);
#define SUM(t) f32x8 a##t = {0};
#define WEIGH(t) a##t += p[j] * *(const f32x8 *)(value + 8 * t);
#define KEEP(t) *(f32x8 *)(y + 8 * t) = a##t * share;
#define AT(x, j) (x + (at ? at[j] : j) * row)

/* p[j] += q . k[j] over some columns; y = share * sum of p[j] v[j], for as many. `at` lists the visible rows, else all. */
#define COLUMNS(C, EACH, DOT) \
    static void scores##C(const float *q, const float *k, const int32_t *at, long count, long row, float *p) \
    { \
        EACH(QUERY) \
        for (long j = 0; j < count; j += 4) { \
            f32x8 dot[4]; \
            for (long c = 0; c < 4; c++) { \
                const f32x8 *key = (const f32x8 *)AT(k, (j + c < count ? j + c : count - 1)); \
                dot[c] = DOT; \
            } \
            *(f32x4 *)(p + j) += totals(dot[0], dot[1], dot[2], dot[3]); \
        } \
    } \
    static void values##C(const float *p, const float *v, const int32_t *at, long count, long row, float share, float *y) \
    { \
        EACH(SUM) \
        for (long j = 0; j < count; j++) { \
            const float *value = AT(v, j); \
            EACH(WEIGH) \
        } \
        EACH(KEEP) \
    }

COLUMNS(64, EACH8, (q0 * key[0] + q1 * key[1] + q2 * key[2] + q3 * key[3])
                       + (q4 * key[4] + q5 * key[5] + q6 * key[6] + q7 * key[7]))
COLUMNS(16, EACH2, q0 * key[0] + q1 * key[1])

/* One query's softmax(q K^T * scale) V; p has room for 8 more than `count`. */
static void attend_row(const float *q, const float *k, const float *v, const int32_t *at, long count, long row, long d,
                       float scale, float *p, float *y)
{
    memset(p, 0, (count + 8) * sizeof(float));
    long i = 0;
    for (; i + 64 <= d; i += 64)
        scores64(q + i, k + i, at, count, row, p);
    for (; i < d; i += 16)
        scores16(q + i, k + i, at, count, row, p);
    for (long j = count; j < count + 8; j++)
        p[j] = -INFINITY; /* exp8 gives about 1e-38 for it */
    f32x8 most = *(f32x8 *)p, sums = {0};
    for (long j = 8; j < count; j += 8) {
        const f32x8 x = *(f32x8 *)(p + j);
        const i32x8 more = x > most;
        most = (f32x8)(((i32x8)x & more) | ((i32x8)most & ~more));
    }
    for (int j = 1; j < 8; j++)
        most[0] = most[j] > most[0] ? most[j] : most[0];
    for (long j = 0; j < count; j += 8) {
        const f32x8 e = exp8((*(f32x8 *)(p + j) - most[0]) * scale);
        *(f32x8 *)(p + j) = e;
        sums += e;
    }
    const f32x4 sum = halves(sums);
    const float share = 1 / (sum[0] + sum[1] + sum[2] + sum[3]);
    for (i = 0; i + 64 <= d; i += 64)
        values64(p, v + i, at, count, row, share, y + i);
    for (; i < d; i += 16)
        values16(p, v + i, at, count, row, share, y + i);
}

typedef struct {
    long B, N, S, H, K, d; /* requests, new rows of each, columns, query heads, key/value heads, their width */
    long first, batch, head; /* where the first request's columns begin; from a request, and from a head, to the next */
    long mask_batch;         /* from one request's mask to the next */
    float scale;
} shape_t;

/* Attention by all threads of a team; see `attend`. */
static void attention(const float *q, long q_row, const float *k, const float *v, long row, const uint8_t *mask, float *y,
                      const shape_t *s)
{
    float *p = malloc((s->S + 8) * (sizeof(float) + sizeof(int32_t)));
    int32_t *list = (int32_t *)(p + s->S + 8);
#pragma omp for schedule(static)
    for (long unit = 0; unit < s->B * s->N * s->H; unit++) {
        const long h = unit % s->H, r = unit / s->H, n = r % s->N, b = r / s->N;
        const long start = s->first + b * s->batch + h / (s->H / s->K) * s->head;
        const int32_t *at = NULL; /* `count` columns, one behind the other */
        long from = 0, count = s->S - s->N + n + 1;
        if (mask) {
            const uint8_t *seen = mask + b * s->mask_batch + n * s->S, *one = memchr(seen, 1, s->S);
            from = one ? one - seen : 0;
            const uint8_t *hole = memchr(seen + from, 0, s->S - from);
            count = hole ? hole - seen - from : s->S - from;
            if (hole && memchr(hole, 1, s->S - (hole - seen))) {
                at = list, count = 0;
                for (long j = 0; j < s->S - from; j++) {
                    list[count] = j;
                    count += seen[from + j];
                }
            }
        }
        attend_row(q + r * q_row + h * s->d, k + start + from * row, v + start + from * row, at, count, row, s->d, s->scale,
                   p, y + (r * s->H + h) * s->d);
    }
    free(p);
}

/* Attention of N new rows over S columns, the new ones last. q: B * N rows of `q_row` floats that begin with H heads of
 * width d, a multiple of 16; k and v: (B, K, S, d), rows `row` apart; mask: (B, N, S) bytes, or null for causal;
 * y (B, N, H * d). */
void attend(const float *q, long q_row, const float *k, const float *v, long row, const uint8_t *mask, float *y,
            const shape_t *shape)
{
#pragma omp parallel
    attention(q, q_row, k, v, row, mask, y, shape);
}

/* One block of a decoder. Null where it has none: embed_norm, attention_norm, bias, q_norm, k_norm, tap. With embed_norm
 * attention reads the normed embedding beside the normed hidden state, as in EAGLE-3. */
typedef struct {
    const float *embed_norm, *attention_norm, *bias, *q_norm, *k_norm, *mlp_norm;
    const int32_t *qkv, *out, *gate_up, *down;
    float *keys, *values, *tap;
} block_t;

/* Rotates q and k of a fused product's row in place, and writes its keys and values into row `at` of the cache. */
static void place_row(float *qkv, const float *cos, const float *sin, const block_t *block, float eps, long at,
                      const shape_t *s)
{
    const long H = s->H, K = s->K, d = s->d;
    for (long i = 0; block->bias && i < (H + 2 * K) * d; i++)
        qkv[i] += block->bias[i];
    for (long h = 0; block->q_norm && h < H + K; h++)
        normalize(qkv + h * d, h < H ? block->q_norm : block->k_norm, eps, qkv + h * d, d);
    rotate_row(qkv, cos, sin, H + K, d);
    for (long h = 0; at >= 0 && h < K; h++) {
        memcpy(block->keys + h * s->head + at * d, qkv + (H + h) * d, d * sizeof(float));
        memcpy(block->values + h * s->head + at * d, qkv + (H + K + h) * d, d * sizeof(float));
    }
}

/* Blocks of a Llama-shaped decoder over B * N rows, in place: hidden (B * N, D), embeds (where a block norms them) and
 * taps of the same shape, inner width F. The rows' keys and values go to rows `at` of the cache, none where negative; cos and sin are (B * N, d). */
void decode(const block_t *blocks, long count, float *hidden, const float *embeds, long D, long F, float eps,
            const float *cos, const float *sin, const int64_t *at, const uint8_t *mask, const shape_t *shape)
{
    const long n = shape->B * shape->N, wide = shape->H * shape->d, all = wide + 2 * shape->K * shape->d;
    const long widest = 2 * D > F ? 2 * D : F;
    float *normed = malloc(n * (widest + all + wide + 2 * F) * sizeof(float));
    float *qkv = normed + n * widest, *attended = qkv + n * all, *gate_up = attended + n * wide;
#pragma omp parallel
    {
        const int alone = n <= 4; /* each thread norms and gates all rows for itself: that costs less than to wait */
        float *x = alone ? malloc(n * widest * sizeof(float)) : normed;
        for (const block_t *block = blocks; block < blocks + count; block++) {
            const long both = block->embed_norm ? D : 0;
            if (both)
                norms(embeds, block->embed_norm, eps, x, n, D, 2 * D, alone);
            if (block->attention_norm)
                norms(hidden, block->attention_norm, eps, x + both, n, D, D + both, alone);
            linear(block->attention_norm ? x : hidden, block->qkv, qkv, n, D + both, all, NULL);
#pragma omp for schedule(static)
            for (long r = 0; r < n; r++)
                place_row(qkv + r * all, cos + r * shape->d, sin + r * shape->d, block, eps, at[r], shape);
            attention(qkv, all, block->keys, block->values, shape->d, mask, attended, shape);
            linear(attended, block->out, hidden, n, wide, D, hidden);
            norms(hidden, block->mlp_norm, eps, x, n, D, D, alone);
            linear(x, block->gate_up, gate_up, n, D, 2 * F, NULL);
            gates(gate_up, x, n, F, alone);
            linear(x, block->down, hidden, n, F, D, hidden);
#pragma omp single nowait
            if (block->tap)
                memcpy(block->tap, hidden, n * D * sizeof(float));
        }
        if (alone)
            free(x);
    }
    free(normed);
}
