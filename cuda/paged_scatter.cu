// Paged scatter: rows into the slots of a pool, in the pool's format.
//
// Slot slots[i] becomes row i; where that is not in [0, capacity) nothing is written and
// skipped[i] is 1. Slots inside must differ. Strides are in numbers. Scales are given, or, with
// one per slot (scale_per_slot > 0), found here and written beside the numbers.
// Grid: one z-layer of a block per token. Cost: one read and one write of every number.

#include "paged.cuh"

extern "C" __global__ void __launch_bounds__(MOST_THREADS) paged_scatter(
    CELL* __restrict__ cells, long long block_stride, long long token_stride,
    long long head_stride, long long block_tokens, long long capacity,
    float* __restrict__ scales, long long scale_per_slot, long long scale_per_head,
    const ROW* __restrict__ rows, long long row_stride, long long row_head_stride,
    const long long* __restrict__ slots, long long tokens, unsigned char* __restrict__ skipped) {
    const long long i = token_of_grid();
    const long long slot = i < tokens ? slots[i] : -1;
    const bool inside = 0 <= slot && slot < capacity;
    if (i < tokens && threadIdx.x + threadIdx.y == 0) skipped[i] = !inside;

    const Lane lane = plain_lane();
    const ROW* row = rows + i * row_stride + threadIdx.y * row_head_stride;
    CELL* cell = cells + cell_of(inside ? slot : 0, block_tokens, block_stride, token_stride,
                                 head_stride);
    if constexpr (QUANTISED) {
        const Pair fresh = inside ? widened(row, lane, 1.f) : Pair();
        const float scale =
            fresh_scale(fresh, inside, scales, slot, scale_per_slot, scale_per_head);
        if (inside) narrowed(cell, fresh, lane, 1.f / scale);
    } else {
        if (inside) copy(cell, row, lane, 1.f);
    }
}
