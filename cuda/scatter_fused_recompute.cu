// Scatter-fused recompute: fresh rows of K or V, straight from the projection, into their slots.
//
// In one pass row i turns by row positions[i] of the tables (RoPE, fp32), is quantised where the
// pool is, and replaces what stands in slots[i]. `deviation`, where it is not null, becomes the
// sum over the token of (fresh - what stood there)^2, taken before fresh is rounded. V comes with
// rotary_width 0, and so does K of models without RoPE, whose `positions` is null besides.
// A slot not in [0, capacity) or a position not in [0, angles) is passed over: skipped[i] is 1
// and its deviation 0. Slots inside must differ. Strides are in numbers.
// Grid: one z-layer of a block per token. Cost: one read and one write of every number, and one
// more read with `deviation`.

#include "paged.cuh"

extern "C" __global__ void __launch_bounds__(MOST_THREADS) scatter_fused_recompute(
    CELL* __restrict__ cells, long long block_stride, long long token_stride,
    long long head_stride, long long block_tokens, long long capacity,
    float* __restrict__ scales, long long scale_per_slot, long long scale_per_head,
    const ROW* __restrict__ rows, long long row_stride, long long row_head_stride,
    const long long* __restrict__ positions, const float* __restrict__ cos,
    const float* __restrict__ sin, long long angles, long long rotary_first,
    long long rotary_width, long long neighbours,
    const long long* __restrict__ slots, long long tokens, unsigned char* __restrict__ skipped,
    float* __restrict__ deviation) {
    const long long i = token_of_grid();
    const long long slot = i < tokens ? slots[i] : -1;
    const long long position = i < tokens && positions ? positions[i] : 0;
    const bool inside = 0 <= slot && slot < capacity &&
                        (!positions || (0 <= position && position < angles));
    const bool first_thread = threadIdx.x + threadIdx.y == 0;
    if (i < tokens && first_thread) skipped[i] = !inside;

    const Rotary rotary = {cos, sin, static_cast<unsigned>(rotary_first),
                           static_cast<unsigned>(rotary_width), neighbours != 0};
    const Lane lane = rotary_lane(rotary.first, rotary.width);
    CELL* cell = cells + cell_of(inside ? slot : 0, block_tokens, block_stride, token_stride,
                                 head_stride);
    Pair fresh;
    if (inside) {
        fresh = widened(rows + i * row_stride + threadIdx.y * row_head_stride, lane, 1.f);
        if (lane.turns) turn(fresh, rotary, position, 1.f);
    }
    if (deviation) {
        float sum = 0.f;
        if (inside) {
            const float scale =
                QUANTISED ? scales[slot * scale_per_slot + threadIdx.y * scale_per_head] : 1.f;
            const Pair stood = widened(cell, lane, scale);
            for (unsigned k = 0; k < VECTOR; ++k) {
                const float lo = fresh.lo[k] - stood.lo[k], hi = fresh.hi[k] - stood.hi[k];
                sum += lo * lo + hi * hi;
            }
        }
        sum = over(blockDim.x * blockDim.y, sum, Sum());
        if (i < tokens && first_thread) deviation[i] = sum;
    }
    const float scale = fresh_scale(fresh, inside, scales, slot, scale_per_slot, scale_per_head);
    if (inside) narrowed(cell, fresh, lane, 1.f / scale);
}
