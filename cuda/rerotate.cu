// Rerotate: keys that stand in a pool, turned from their positions to others, in place.
//
// The key in slots[i] turns by deltas[i] positions: row |delta| of the tables, backwards where
// delta is negative. It is computed in fp32 and stored in the pool's format, quantised anew. A
// slot not in [0, capacity) or a delta not in (-angles, angles) is passed over and skipped[i] is
// 1. Slots inside must differ. ROW only says how wide a vector is.
// Grid: one z-layer of a block per token. Cost: one read and one write of every number.

#include "paged.cuh"

extern "C" __global__ void __launch_bounds__(MOST_THREADS) rerotate(
    CELL* __restrict__ cells, long long block_stride, long long token_stride,
    long long head_stride, long long block_tokens, long long capacity,
    float* __restrict__ scales, long long scale_per_slot, long long scale_per_head,
    const long long* __restrict__ deltas, const float* __restrict__ cos,
    const float* __restrict__ sin, long long angles, long long rotary_first,
    long long rotary_width, long long neighbours,
    const long long* __restrict__ slots, long long tokens, unsigned char* __restrict__ skipped) {
    const long long i = token_of_grid();
    const long long slot = i < tokens ? slots[i] : -1, delta = i < tokens ? deltas[i] : 0;
    const long long row = delta < 0 ? -delta : delta;
    const bool inside = 0 <= slot && slot < capacity && 0 <= row && row < angles;
    if (i < tokens && threadIdx.x + threadIdx.y == 0) skipped[i] = !inside;

    const Rotary rotary = {cos, sin, static_cast<unsigned>(rotary_first),
                           static_cast<unsigned>(rotary_width), neighbours != 0};
    const Lane lane = rotary_lane(rotary.first, rotary.width);
    CELL* cell = cells + cell_of(inside ? slot : 0, block_tokens, block_stride, token_stride,
                                 head_stride);
    const bool changes = inside && (lane.turns || (QUANTISED && scale_per_slot));
    Pair key;
    if (changes) {
        const float scale =
            QUANTISED ? scales[slot * scale_per_slot + threadIdx.y * scale_per_head] : 1.f;
        key = widened(cell, lane, scale);
        if (lane.turns) turn(key, rotary, row, delta < 0 ? -1.f : 1.f);
    }
    const float scale = fresh_scale(key, inside, scales, slot, scale_per_slot, scale_per_head);
    if (changes) narrowed(cell, key, lane, 1.f / scale);
}
