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
            __builtin_prefetch(w + 8 * k + 256); /* the machine's own prefetching ends with each page */ \
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

/* Rows of x (n, K), each divided by its root mean square. */
void rms_norm(const float *x, const float *weight, float eps, float *y, long n, long K)
{
#pragma omp parallel for schedule(static) if (n > 16)
    for (long r = 0; r < n; r++)
        normalize(x + r * K, weight, eps, y + r * K, K);
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

/* y = f(x) W^T [+ residual] for float32 x and bfloat16 W, on CPUs that have no bfloat16 instructions; f is nothing, an RMS
 * norm, or silu(gate) * up.
 *
 * A bfloat16 is the upper half of a float32, so widening costs a shift; done in registers, it reads half the bytes that a
 * float32 weight would. W lies in panels of 16 outputs: for each k eight words of two weights, the lower half of output
 * i, the upper of output i + 8. Up to six rows share a panel's pass.
 *
 * x (n, K), or (n, 2 K) where gated; w (ceil(O / 16), K, 8) words; y and residual (n, O); norm (K,); scratch (n, K).
 * norm and residual may be null, and scratch where there is neither norm nor gate. */
void bf16_linear(const float *x, const int32_t *w, float *y, long n, long K, long O, const float *norm, float eps,
                 long gated, const float *residual, float *scratch)
{
    const long blocks = (n + 5) / 6;
    if (norm || gated) {
#pragma omp parallel for schedule(static) if (n > 4)
        for (long r = 0; r < n; r++) {
            if (norm)
                normalize(x + r * K, norm, eps, scratch + r * K, K);
            else
                gate(x + r * 2 * K, scratch + r * K, K);
        }
        x = scratch;
    }
#pragma omp parallel for schedule(static)
    for (long p = 0; p < (O + 15) / 16; p++) {
        const long width = O - 16 * p < 16 ? O - 16 * p : 16;
        for (long b = 0; b < blocks; b++) {
            const long from = b * n / blocks, m = (b + 1) * n / blocks - from;
            float *out = y + from * O + 16 * p, edge[6 * 16];
            panels[m](x + from * K, w + p * 8 * K, K, width < 16 ? edge : out, width < 16 ? 16 : O);
            for (long r = 0; width < 16 && r < m; r++)
                memcpy(out + r * O, edge + 16 * r, width * sizeof(float));
            for (long r = 0; residual && r < m; r++)
                for (long i = 0; i < width; i++)
                    out[r * O + i] += residual[(from + r) * O + 16 * p + i];
        }
    }
}

/* Rotary positions, in place: rows of `stride` floats begin with `heads` heads of width d; cos and sin (rows, d). */
void rotate(float *x, const float *cos, const float *sin, long rows, long stride, long heads, long d)
{
    const long half = d / 2;
#pragma omp parallel for schedule(static) if (rows > 16)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            float *low = x + r * stride + h * d, *high = low + half;
            const float *c = cos + r * d, *s = sin + r * d;
            for (long i = 0; i < half; i++) {
                const float a = low[i], b = high[i];
                low[i] = a * c[i] - b * s[i];
                high[i] = b * c[half + i] + a * s[half + i];
            }
        }
}

#if defined(__clang__)
#define SHUFFLE(a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#else
#define SHUFFLE(a, ...) __builtin_shuffle(a, (i32x8){__VA_ARGS__})
#endif

static float total(f32x8 a)
{
    a += SHUFFLE(a, 4, 5, 6, 7, 0, 1, 2, 3);
    a += SHUFFLE(a, 2, 3, 0, 1, 6, 7, 4, 5);
    return a[0] + a[1];
}

#define EACH8(DO) EACH6(DO) DO(6) DO(7)
#define QUERY(t) const f32x8 q##t = *(const f32x8 *)(q + 8 * t);
#define SUM(t) f32x8 a##t = {0};
#define WEIGH(t) a##t += p[j] * *(const f32x8 *)(value + 8 * t);
#define KEEP(t) *(f32x8 *)(y + 8 * t) = a##t * share;
#define AT(x) (x + (at ? at[j] : j) * row)

/* p[j] += q . k[j] over some columns; y = share * sum of p[j] v[j], for as many. `at` lists the visible rows, else all. */
#define COLUMNS(C, EACH, DOT) \
    static void scores##C(const float *q, const float *k, const int32_t *at, long count, long row, float *p) \
    { \
        EACH(QUERY) \
        for (long j = 0; j < count; j++) { \
            const f32x8 *key = (const f32x8 *)AT(k); \
            p[j] += total(DOT); \
        } \
    } \
    static void values##C(const float *p, const float *v, const int32_t *at, long count, long row, float share, float *y) \
    { \
        EACH(SUM) \
        for (long j = 0; j < count; j++) { \
            const float *value = AT(v); \
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
    memset(p, 0, count * sizeof(float));
    long i = 0;
    for (; i + 64 <= d; i += 64)
        scores64(q + i, k + i, at, count, row, p);
    for (; i < d; i += 16)
        scores16(q + i, k + i, at, count, row, p);
    float most = -INFINITY;
    for (long j = 0; j < count; j++)
        most = p[j] > most ? p[j] : most;
    for (long j = count; j % 8; j++)
        p[j] = -INFINITY; /* exp8 gives about 1e-38 for it */
    f32x8 sums = {0};
    for (long j = 0; j < count; j += 8) {
        const f32x8 e = exp8((*(f32x8 *)(p + j) - most) * scale);
        *(f32x8 *)(p + j) = e;
        sums += e;
    }
    const float share = 1 / total(sums);
    for (i = 0; i + 64 <= d; i += 64)
        values64(p, v + i, at, count, row, share, y + i);
    for (; i < d; i += 16)
        values16(p, v + i, at, count, row, share, y + i);
}

/* Attention of N new rows over S columns, the new ones last. q: B * N rows of `q_row` floats that begin with H heads of
 * width d, a multiple of 16; k and v: (B, H / G, S, d) with strides batch, head, row; mask: (B, N, S) bytes, a batch
 * `mask_batch` apart, or null for causal; y (B, N, H * d). */
void attend(const float *q, const float *k, const float *v, const uint8_t *mask, float *y, long B, long N, long S, long H,
            long G, long d, long q_row, long batch, long head, long row, long mask_batch, float scale)
{
#pragma omp parallel
    {
        float *p = malloc((S + 8) * (sizeof(float) + sizeof(int32_t)));
        int32_t *at = (int32_t *)(p + S + 8);
#pragma omp for schedule(static)
        for (long unit = 0; unit < B * N * H; unit++) {
            const long h = unit % H, n = unit / H % N, b = unit / H / N, start = b * batch + h / G * head;
            long count = 0;
            if (mask) {
                const uint8_t *seen = mask + b * mask_batch + n * S;
                for (long s = 0; s < S; s++) {
                    at[count] = s;
                    count += seen[s];
                }
            } else {
                count = S - N + n + 1;
            }
            attend_row(q + (b * N + n) * q_row + h * d, k + start, v + start, mask ? at : NULL, count, row, d, scale, p,
                       y + ((b * N + n) * H + h) * d);
        }
        free(p);
    }
}
