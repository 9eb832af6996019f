/* y = x W^T for float32 x and bfloat16 W, on CPUs that have no bfloat16 instructions.
 *
 * A bfloat16 is the upper half of a float32, so widening costs a shift; done in registers, it reads half the bytes that a
 * float32 weight would. W lies in panels of 16 outputs: for each k eight words of two weights, the lower half of output
 * i, the upper of output i + 8. Up to six rows share a panel's pass. Each sum runs over k in order whatever the number
 * of rows, so that a row's result does not depend on its neighbours: verifying n tokens gives plain decoding's numbers.
 */
#include <stdint.h>
#include <string.h>

typedef float f32x8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t i32x8 __attribute__((vector_size(32), aligned(4)));

#define EACH1(DO) DO(0)
#define EACH2(DO) EACH1(DO) DO(1)
#define EACH3(DO) EACH2(DO) DO(2)
#define EACH4(DO) EACH3(DO) DO(3)
#define EACH5(DO) EACH4(DO) DO(4)
#define EACH6(DO) EACH5(DO) DO(5)

/* Sums are named variables, not an array: compilers keep only those in registers. */
#define ZERO(r) f32x8 a##r = {0}, b##r = {0};
#define STEP(r) { float s = x[r * K + k]; a##r += s * lo; b##r += s * hi; }
#define STORE(r) *(f32x8 *)(y + r * stride) = a##r; *(f32x8 *)(y + r * stride + 8) = b##r;

#define PANEL(M) \
    static void panel##M(const float *x, const int32_t *w, long K, float *y, long stride) \
    { \
        EACH##M(ZERO) \
        for (long k = 0; k < K; k++) { \
            i32x8 pair = *(const i32x8 *)(w + 8 * k); \
            f32x8 lo = (f32x8)(pair << 16), hi = (f32x8)(pair & (int32_t)0xffff0000); \
            EACH##M(STEP) \
        } \
        EACH##M(STORE) \
    }

PANEL(1) PANEL(2) PANEL(3) PANEL(4) PANEL(5) PANEL(6)

typedef void (*panel_t)(const float *, const int32_t *, long, float *, long);
static const panel_t panels[] = {0, panel1, panel2, panel3, panel4, panel5, panel6};

/* x (n, K), w (ceil(O / 16), K, 8) words, y (n, O). */
void bf16_linear(const float *x, const int32_t *w, float *y, long n, long K, long O)
{
    const long blocks = (n + 5) / 6;
#pragma omp parallel for schedule(static)
    for (long p = 0; p < (O + 15) / 16; p++) {
        const long width = O - 16 * p < 16 ? O - 16 * p : 16;
        for (long b = 0; b < blocks; b++) {
            const long from = b * n / blocks, m = (b + 1) * n / blocks - from;
            float *out = y + from * O + 16 * p, edge[6 * 16];
            panels[m](x + from * K, w + p * 8 * K, K, width < 16 ? edge : out, width < 16 ? 16 : O);
            for (long r = 0; width < 16 && r < m; r++)
                memcpy(out + r * O, edge + 16 * r, width * sizeof(float));
        }
    }
}
