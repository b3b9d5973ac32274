// Attend: code that the attention kernels share: rows in shared memory, scores, and the mask.
//
// A block of threads takes QUERIES queries and KEYS rows of the cache at a time; each warp has 16
// of the queries. Heads of up to WIDTH numbers are filled up with zeros.
// Invariant: a query at position p sees rows whose tokens have positions `first` to p; a head is a
// whole number of vectors, and all rows begin at one, which the host makes sure of. Shared memory
// stays below 48 KiB. Cost: of scores, a product of WIDTH numbers each.

#pragma once

#include "tiles.cuh"

constexpr unsigned BYTES = WIDTH * sizeof(ROW);
constexpr unsigned QUERIES = BYTES <= 256 ? 64 : BYTES <= 512 ? 32 : 16;
constexpr unsigned KEYS = BYTES <= 256 ? 32 : BYTES <= 512 ? 16 : 8;
constexpr unsigned THREADS = 2 * QUERIES;
constexpr unsigned VECTOR = 16 / sizeof(ROW);
constexpr unsigned STRIDE = WIDTH + VECTOR;  // rows begin in different banks
constexpr unsigned SCORES = KEYS + 1;

__device__ inline float infinity() { return __uint_as_float(0x7f800000); }

// How far apart neighbours are, in numbers.
struct Apart {
    long long batch, head, row;
};

// Bring rows of `dim` numbers into shared memory, by all BLOCK threads; rows beyond the end are
// zero.
template <unsigned ROWS, unsigned BLOCK = THREADS, class From>
__device__ inline void bring(ROW* to, unsigned dim, const From& row_at) {
    constexpr unsigned ACROSS = WIDTH / VECTOR;
    for (unsigned at = threadIdx.x; at < ROWS * ACROSS; at += BLOCK) {
        const unsigned row = at / ACROSS, first = at % ACROSS * VECTOR;
        const ROW* from = row_at(row);
        Vector some = {};
        if (from && first < dim) some = *reinterpret_cast<const Vector*>(from + first);
        *reinterpret_cast<Vector*>(to + row * STRIDE + first) = some;
    }
}

// Scores of this warp's queries with all keys in shared memory, into `scores`.
__device__ inline void score(float* scores, const ROW* queries, const ROW* keys, float scale) {
    const unsigned top = threadIdx.x / WARP * 16;
    for (unsigned n = 0; n < KEYS; n += 8) {
        Tile sum;
        for (unsigned k = 0; k < WIDTH; k += DEPTH)
            multiply<1>(sum, queries + top * STRIDE + k, STRIDE, keys + n * STRIDE + k, STRIDE);
        float* to = scores + (top + tile_row()) * SCORES + n + tile_column();
        to[0] = sum.at[0] * scale;
        to[1] = sum.at[1] * scale;
        to[8 * SCORES] = sum.at[2] * scale;
        to[8 * SCORES + 1] = sum.at[3] * scale;
    }
}
