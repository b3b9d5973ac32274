// Scatter-fused recompute: fresh rows of K and V, straight from the projection, into their slots.
//
// In one pass row i turns by row positions[i] of the tables (RoPE, fp32), is quantised where the
// pool is, and replaces the numbers in slots[i]. `deviation`, where it is not null, holds a row of
// `tokens` numbers per plane: each becomes the sum over the token of (fresh - old)^2, taken before
// fresh is rounded. The first plane turns if `turns`, the second (V) never does; `positions` is
// null for models without RoPE. A slot not in [0, capacity) or a position not in [0, angles) is
// passed over: skipped[i] is 1 and its deviation 0. Slots inside must differ. Strides are in
// numbers. Grid: one z-layer of a block per token, of each plane (z). Cost: one read and one write
// of every number, and one more read with `deviation`.

#include "paged.cuh"

extern "C" __global__ void __launch_bounds__(MOST_THREADS) scatter_fused_recompute(
    CELL* __restrict__ first, CELL* __restrict__ second, long long layer_stride,
    long long block_stride, long long token_stride, long long head_stride,
    long long block_tokens, long long capacity,
    float* __restrict__ first_scales, float* __restrict__ second_scales,
    long long scale_layer, long long scale_block, long long scale_token, long long scale_head,
    long long found, const ROW* __restrict__ first_rows, const ROW* __restrict__ second_rows,
    long long row_layer, long long row_stride, long long row_head_stride,
    const long long* __restrict__ positions, const float* __restrict__ cos,
    const float* __restrict__ sin, long long angles, long long rotary_first,
    long long rotary_width, long long neighbours, long long turns,
    const long long* __restrict__ slots, long long tokens, unsigned char* __restrict__ skipped,
    float* __restrict__ deviation) {
    const long long i = token_of_grid();
    const long long slot = i < tokens ? slots[i] : -1;
    const long long position = i < tokens && positions ? positions[i] : 0;
    const bool inside = 0 <= slot && slot < capacity &&
                        (!positions || (0 <= position && position < angles));
    if (i < tokens && speaks()) skipped[i] = !inside;

    const Strides cells = {layer_stride, block_stride, token_stride, head_stride};
    const Strides by = {scale_layer, scale_block, scale_token, scale_head};
    float* scales = plane_of(first_scales, second_scales);
    const unsigned width = turns && blockIdx.z == 0 ? static_cast<unsigned>(rotary_width) : 0;
    const Rotary rotary = {cos, sin, static_cast<unsigned>(rotary_first), width, neighbours != 0};
    const Lane lane = rotary_lane(rotary.first, rotary.width);
    CELL* cell = plane_of(first, second) + place(inside ? slot : 0, block_tokens, cells);
    Pair fresh;
    if (inside) {
        const ROW* rows = plane_of(first_rows, second_rows);
        fresh = widened(rows + row_of(i, row_layer, row_stride, row_head_stride), lane, 1.f);
        if (lane.turns) turn(fresh, rotary, position, 1.f);
    }
    if (deviation) {
        float sum = 0.f;
        if (inside) {
            const Pair stood = widened(cell, lane, scale_of(scales, slot, block_tokens, by));
            for (unsigned k = 0; k < VECTOR; ++k) {
                const float lo = fresh.lo[k] - stood.lo[k], hi = fresh.hi[k] - stood.hi[k];
                sum += lo * lo + hi * hi;
            }
        }
        sum = over(blockDim.x * blockDim.y, sum, Sum());
        if (i < tokens && threadIdx.x + threadIdx.y == 0)
            deviation[blockIdx.z * tokens + i] = sum;
    }
    const float scale = fresh_scale(fresh, inside, scales, slot, block_tokens, by, found);
    if (inside) narrowed(cell, fresh, lane, 1.f / scale);
}
