// Paged scatter: rows into the slots of a pool, in the pool's format.
//
// Slot slots[i] becomes row i; where that is not in [0, capacity) nothing is written and
// skipped[i] is 1. Slots inside must differ. Strides are in numbers. Scales are given, or computed
// here and written next to the numbers. Grid: one z-layer of a block per token, of each layer (y)
// and plane (z). Cost: one read and one write of every number.

#include "paged.cuh"

extern "C" __global__ void __launch_bounds__(MOST_THREADS) paged_scatter(
    CELL* __restrict__ first, CELL* __restrict__ second, long long layer_stride,
    long long block_stride, long long token_stride, long long head_stride,
    long long block_tokens, long long capacity,
    float* __restrict__ first_scales, float* __restrict__ second_scales,
    long long scale_layer, long long scale_block, long long scale_token, long long scale_head,
    long long found, const ROW* __restrict__ first_rows, const ROW* __restrict__ second_rows,
    long long row_layer, long long row_stride, long long row_head_stride,
    const long long* __restrict__ slots, long long tokens, unsigned char* __restrict__ skipped) {
    const long long i = token_of_grid();
    const long long slot = i < tokens ? slots[i] : -1;
    const bool inside = 0 <= slot && slot < capacity;
    if (i < tokens && speaks()) skipped[i] = !inside;

    const Strides cells = {layer_stride, block_stride, token_stride, head_stride};
    const Strides scales = {scale_layer, scale_block, scale_token, scale_head};
    const Lane lane = plain_lane();
    const ROW* row = plane_of(first_rows, second_rows) +
                     row_of(i, row_layer, row_stride, row_head_stride);
    CELL* cell = plane_of(first, second) + place(inside ? slot : 0, block_tokens, cells);
    if constexpr (QUANTISED) {
        const Pair fresh = inside ? widened(row, lane, 1.f) : Pair();
        const float scale = fresh_scale(fresh, inside, plane_of(first_scales, second_scales),
                                        slot, block_tokens, scales, found);
        if (inside) narrowed(cell, fresh, lane, 1.f / scale);
    } else {
        if (inside) copy(cell, row, lane, 1.f);
    }
}
