// Paged gather: tokens from the slots of a pool into rows, in the rows' format.
//
// Row i becomes what stands in slots[i]; where that is not in [0, capacity) the row is left alone
// and skipped[i] is 1. Strides are in numbers. `scales` is null for plain numbers.
// Grid: one z-layer of a block per token. Cost: one read and one write of every number.

#include "paged.cuh"

extern "C" __global__ void __launch_bounds__(MOST_THREADS) paged_gather(
    const CELL* __restrict__ cells, long long block_stride, long long token_stride,
    long long head_stride, long long block_tokens, long long capacity,
    const float* __restrict__ scales, long long scale_per_slot, long long scale_per_head,
    ROW* __restrict__ rows, long long row_stride, long long row_head_stride,
    const long long* __restrict__ slots, long long tokens, unsigned char* __restrict__ skipped) {
    const long long i = token_of_grid();
    if (i >= tokens) return;
    const long long slot = slots[i];
    const bool inside = 0 <= slot && slot < capacity;
    if (threadIdx.x + threadIdx.y == 0) skipped[i] = !inside;
    if (!inside) return;

    const CELL* cell =
        cells + cell_of(slot, block_tokens, block_stride, token_stride, head_stride);
    ROW* row = rows + i * row_stride + threadIdx.y * row_head_stride;
    const float scale =
        QUANTISED ? scales[slot * scale_per_slot + threadIdx.y * scale_per_head] : 1.f;
    copy(row, cell, plain_lane(), scale);
}
