// Paged: what the kernels share about the planes (K and V, or latent vectors) of layers of a pool.
//
// A block of threads serves whole tokens: x runs over the lanes of a head, y over its heads, z
// over tokens. The grid's x runs over tokens too, y over layers, z over planes, which differ in
// where they begin alone. A lane owns two vectors of a head, `lo` and `hi`; in the rotary part of K
// they are the two halves of the same rotary pairs, so no other lane touches them. Invariant: the
// head is blockDim.x * 2 * VECTOR numbers wide, a block has at most MOST_THREADS, and every vector
// is aligned; the host refuses what breaks this. A place outside the pool is never touched. Cost:
// each number is read once and written once, 16 bytes of a ROW at a time.

#pragma once

#include "numbers.cuh"

constexpr unsigned MOST_THREADS = 1024;
constexpr unsigned VECTOR = 16 / sizeof(ROW);
constexpr bool QUANTISED = sizeof(CELL) == 1;

template <class T, unsigned N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T at[N];
};

// A lane's numbers in fp32.
struct Pair {
    float lo[VECTOR] = {}, hi[VECTOR] = {};
};

// Offsets of a lane's vectors in the head, and whether they are rotated.
struct Lane {
    unsigned lo, hi;
    bool turns;
};

// Rotary embedding of `width` numbers from `first` on, at either end of the head: half a table
// row each of cosines and sines, for pairs of the two halves or of neighbours.
struct Rotary {
    const float *cos, *sin;
    unsigned first, width;
    bool neighbours;
};

__device__ inline long long token_of_grid() {
    return static_cast<long long>(blockIdx.x) * blockDim.z + threadIdx.z;
}

__device__ inline Lane plain_lane() {
    return {threadIdx.x * VECTOR, (blockDim.x + threadIdx.x) * VECTOR, false};
}

__device__ inline Lane rotary_lane(unsigned first, unsigned width) {
    const unsigned turning = width / (2 * VECTOR);
    if (threadIdx.x < turning) {
        const unsigned lo = first + threadIdx.x * VECTOR;
        return {lo, lo + width / 2, true};
    }
    const unsigned lo = (first ? 0 : width) + (threadIdx.x - turning) * VECTOR;
    return {lo, lo + (blockDim.x - turning) * VECTOR, false};
}

// How far apart neighbours are, in numbers: of cells, or of their scales.
struct Strides {
    long long layer, block, token, head;
};

// Offset of this thread's head of a slot: slot = block * block_tokens + token of the block.
__device__ inline long long place(long long slot, long long block_tokens, const Strides& by) {
    const unsigned at = static_cast<unsigned>(slot), tokens = static_cast<unsigned>(block_tokens);
    return blockIdx.y * by.layer + at / tokens * by.block + at % tokens * by.token +
           threadIdx.y * by.head;
}

// Offset of this thread's head of row i.
__device__ inline long long row_of(long long i, long long layer_stride, long long row_stride,
                                   long long head_stride) {
    return blockIdx.y * layer_stride + i * row_stride + threadIdx.y * head_stride;
}

// Whether this thread speaks for its token: one does, of all layers and planes.
__device__ inline bool speaks() {
    return threadIdx.x + threadIdx.y == 0 && blockIdx.y + blockIdx.z == 0;
}

// This grid layer's plane.
template <class T> __device__ inline T* plane_of(T* first, T* second) {
    return blockIdx.z ? second : first;
}

// Scale of the codes of this thread's head.
__device__ inline float scale_of(const float* scales, long long slot, long long block_tokens,
                                 const Strides& by) {
    if constexpr (QUANTISED) return scales[place(slot, block_tokens, by)];
    return 1.f;
}

template <unsigned N, class T> __device__ inline Pack<T, N> load(const T* from) {
    return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <unsigned N, class T> __device__ inline void store(T* to, const Pack<T, N>& pack) {
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Copy a lane's vectors; numbers that keep their format keep their bits.
template <class T> __device__ inline void copy(T* to, const T* from, Lane lane, float) {
    const auto lo = load<VECTOR>(from + lane.lo), hi = load<VECTOR>(from + lane.hi);
    store(to + lane.lo, lo);
    store(to + lane.hi, hi);
}

template <class T> __device__ inline Pair widened(const T* from, Lane lane, float scale) {
    const auto lo = load<VECTOR>(from + lane.lo), hi = load<VECTOR>(from + lane.hi);
    Pair wide;
    for (unsigned k = 0; k < VECTOR; ++k) {
        wide.lo[k] = widen(lo.at[k]) * scale;
        wide.hi[k] = widen(hi.at[k]) * scale;
    }
    return wide;
}

template <class T>
__device__ inline void narrowed(T* to, const Pair& wide, Lane lane, float inverse) {
    Pack<T, VECTOR> lo, hi;
    for (unsigned k = 0; k < VECTOR; ++k) {
        lo.at[k] = narrow<T>(wide.lo[k] * inverse);
        hi.at[k] = narrow<T>(wide.hi[k] * inverse);
    }
    store(to + lane.lo, lo);
    store(to + lane.hi, hi);
}

template <class To, class From>
__device__ inline void copy(To* to, const From* from, Lane lane, float scale) {
    narrowed(to, widened(from, lane, scale), lane, 1.f);
}

__device__ inline void spin(float& x, float& y, float cos, float sin) {
    const float turned = x * cos - y * sin;
    y = y * cos + x * sin;
    x = turned;
}

// Turn a lane's pairs by the angles of one table row, or back where `direction` is -1.
__device__ inline void turn(Pair& x, const Rotary& by, long long row, float direction) {
    const float* cos = by.cos + row * (by.width / 2);
    const float* sin = by.sin + row * (by.width / 2);
    if (by.neighbours) {
        const unsigned lo = threadIdx.x * VECTOR / 2, hi = by.width / 4 + lo;
        const auto clo = load<VECTOR / 2>(cos + lo), slo = load<VECTOR / 2>(sin + lo);
        const auto chi = load<VECTOR / 2>(cos + hi), shi = load<VECTOR / 2>(sin + hi);
        for (unsigned k = 0; k < VECTOR / 2; ++k) {
            spin(x.lo[2 * k], x.lo[2 * k + 1], clo.at[k], slo.at[k] * direction);
            spin(x.hi[2 * k], x.hi[2 * k + 1], chi.at[k], shi.at[k] * direction);
        }
    } else {
        const unsigned at = threadIdx.x * VECTOR;
        const auto c = load<VECTOR>(cos + at), s = load<VECTOR>(sin + at);
        for (unsigned k = 0; k < VECTOR; ++k) spin(x.lo[k], x.hi[k], c.at[k], s.at[k] * direction);
    }
}

struct Larger {
    __device__ float operator()(float x, float y) const { return fmaxf(x, y); }
};

struct Sum {
    __device__ float operator()(float x, float y) const { return x + y; }
};

// `join` of what the `span` neighbours of this thread bring. All threads of the block must call,
// once for each kind of join.
template <class Join> __device__ inline float over(unsigned span, float mine, Join join) {
    __shared__ float part[MOST_THREADS];
    const unsigned at = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned place = at % span;
    part[at] = mine;
    unsigned reach = 1;
    while (reach < span) reach *= 2;
    while (reach /= 2) {
        __syncthreads();
        if (place < reach && place + reach < span) part[at] = join(part[at], part[at + reach]);
    }
    __syncthreads();
    return part[at - place];
}

// Scale that is computed as numbers are written: none (scales are given), one per token or one per
// head.
enum Found : long long { GIVEN = 0, TOKEN = 1, HEAD = 2 };

// The scale that fresh numbers are stored at; all threads of the block must call. One that is found
// is the least that keeps them inside CELL, and noted.
__device__ inline float fresh_scale(const Pair& fresh, bool inside, float* scales, long long slot,
                                    long long block_tokens, const Strides& by, long long found) {
    if constexpr (QUANTISED) {
        float* noted = scales + place(inside ? slot : 0, block_tokens, by);
        if (found == GIVEN) return *noted;
        float largest = 0.f;
        for (unsigned k = 0; k < VECTOR; ++k)
            largest = fmaxf(largest, fmaxf(fabsf(fresh.lo[k]), fabsf(fresh.hi[k])));
        const unsigned span = found == HEAD ? blockDim.x : blockDim.x * blockDim.y;
        largest = over(span, largest, Larger());
        const float scale = fmaxf(largest / LARGEST<CELL>, power_of_two(-126));
        if (inside && threadIdx.x == 0 && (found == HEAD || threadIdx.y == 0)) *noted = scale;
        return scale;
    }
    return 1.f;
}
