// Paged gather: tokens from the slots of a pool into rows, in the rows' format.
//
// Row i becomes what stands in slots[i]; where that is not in [0, capacity) the row is left alone
// and skipped[i] is 1. Strides are in numbers. Scales are null for plain numbers.
// Grid: one z-layer of a block per token, of each layer (y) and plane (z). Cost: one read and one
// write of every number.

#include "paged.cuh"

extern "C" __global__ void __launch_bounds__(MOST_THREADS) paged_gather(
    const CELL* __restrict__ first, const CELL* __restrict__ second, long long layer_stride,
    long long block_stride, long long token_stride, long long head_stride,
    long long block_tokens, long long capacity,
    const float* __restrict__ first_scales, const float* __restrict__ second_scales,
    long long scale_layer, long long scale_block, long long scale_token, long long scale_head,
    ROW* __restrict__ first_rows, ROW* __restrict__ second_rows, long long row_layer,
    long long row_stride, long long row_head_stride, const long long* __restrict__ slots,
    long long tokens, unsigned char* __restrict__ skipped) {
    const long long i = token_of_grid();
    if (i >= tokens) return;
    const long long slot = slots[i];
    const bool inside = 0 <= slot && slot < capacity;
    if (speaks()) skipped[i] = !inside;
    if (!inside) return;

    const Strides cells = {layer_stride, block_stride, token_stride, head_stride};
    const Strides scales = {scale_layer, scale_block, scale_token, scale_head};
    const CELL* cell = plane_of(first, second) + place(slot, block_tokens, cells);
    ROW* row = plane_of(first_rows, second_rows) +
               row_of(i, row_layer, row_stride, row_head_stride);
    const float scale =
        scale_of(plane_of(first_scales, second_scales), slot, block_tokens, scales);
    copy(row, cell, plain_lane(), scale);
}
