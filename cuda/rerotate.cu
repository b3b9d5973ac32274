// Rerotate: rotates keys in a pool from their positions to others, in place.
//
// The key in slots[i] turns by deltas[i] positions: row |delta| of the tables, backwards where
// delta is negative. It is computed in fp32 and stored in the pool's format, quantised again. A
// slot not in [0, capacity) or a delta not in (-angles, angles) is passed over and skipped[i] is
// 1. Slots inside must differ. ROW only says how wide a vector is.
// Grid: one z-layer of a block per token, of each layer (y). Cost: one read and one write of every
// number.

#include "paged.cuh"

extern "C" __global__ void __launch_bounds__(MOST_THREADS) rerotate(
    CELL* __restrict__ keys, long long layer_stride, long long block_stride,
    long long token_stride, long long head_stride, long long block_tokens, long long capacity,
    float* __restrict__ key_scales, long long scale_layer, long long scale_block,
    long long scale_token, long long scale_head, long long found,
    const long long* __restrict__ deltas, const float* __restrict__ cos,
    const float* __restrict__ sin, long long angles, long long rotary_first,
    long long rotary_width, long long neighbours,
    const long long* __restrict__ slots, long long tokens, unsigned char* __restrict__ skipped) {
    const long long i = token_of_grid();
    const long long slot = i < tokens ? slots[i] : -1, delta = i < tokens ? deltas[i] : 0;
    const long long row = delta < 0 ? -delta : delta;
    const bool inside = 0 <= slot && slot < capacity && 0 <= row && row < angles;
    if (i < tokens && speaks()) skipped[i] = !inside;

    const Strides cells = {layer_stride, block_stride, token_stride, head_stride};
    const Strides scales = {scale_layer, scale_block, scale_token, scale_head};
    const Rotary rotary = {cos, sin, static_cast<unsigned>(rotary_first),
                           static_cast<unsigned>(rotary_width), neighbours != 0};
    const Lane lane = rotary_lane(rotary.first, rotary.width);
    CELL* cell = keys + place(inside ? slot : 0, block_tokens, cells);
    const bool changes = inside && (lane.turns || (QUANTISED && found != GIVEN));
    Pair key;
    if (changes) {
        key = widened(cell, lane, scale_of(key_scales, slot, block_tokens, scales));
        if (lane.turns) turn(key, rotary, row, delta < 0 ? -1.f : 1.f);
    }
    const float scale = fresh_scale(key, inside, key_scales, slot, block_tokens, scales, found);
    if (changes) narrowed(cell, key, lane, 1.f / scale);
}
