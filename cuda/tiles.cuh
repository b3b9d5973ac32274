// Tiles: products of 16 rows by 8 columns, which a warp takes out of shared memory.
//
// A lane owns four sums of a tile: of row lane / 4 and of the row 8 below it, columns
// 2 * (lane % 4) and the next. fp16 and bf16 go through a card's tensor cores; fp32, and a host,
// add products up one by one. Sums are fp32 in any case.
// Invariant: no lane needs what another one holds, so the host's form has no exchange either.
// Cost: one mma per product of 16-bit numbers, DEPTH of them deep.

#pragma once

#include "numbers.cuh"

constexpr unsigned WARP = 32;

// Numbers along which one call of `multiply` adds up.
constexpr unsigned DEPTH = sizeof(ROW) == 2 ? 16 : 8;

struct Tile {
    float at[4] = {};
};

struct alignas(16) Vector {
    ROW at[16 / sizeof(ROW)];
};

__device__ inline unsigned tile_row() { return threadIdx.x % WARP / 4; }
__device__ inline unsigned tile_column() { return threadIdx.x % 4 * 2; }

// Before loops over tiles: only what is unrolled stays in registers.
#ifdef __CUDACC_RTC__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED
#endif

#ifdef __CUDA_ARCH__
template <class T> __device__ inline unsigned side_by_side(const T* two) {
    return *reinterpret_cast<const unsigned*>(two);
}

template <class T> __device__ inline unsigned joined(T low, T high) {
    return low.bits | unsigned{high.bits} << 16;
}

__device__ inline void tensor_cores(Tile& sum, const unsigned (&a)[4], const unsigned (&b)[2],
                                    fp16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum.at[0]), "+f"(sum.at[1]), "+f"(sum.at[2]), "+f"(sum.at[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void tensor_cores(Tile& sum, const unsigned (&a)[4], const unsigned (&b)[2],
                                    bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum.at[0]), "+f"(sum.at[1]), "+f"(sum.at[2]), "+f"(sum.at[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// Add left (16 rows of DEPTH numbers) times right (DEPTH steps of 8 columns) to a tile. A step of
// the right side is STEP numbers on, a column `column` numbers; the left side's numbers are
// adjacent, at even places.
template <unsigned STEP, class T>
__device__ inline void multiply(Tile& sum, const T* left, unsigned row, const T* right,
                                unsigned column) {
    const T* top = left + tile_row() * row;
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(T) == 2) {
        const unsigned at = tile_column();
        const T* bottom = top + 8 * row;
        const T* down = right + tile_row() * column + at * STEP;
        const unsigned a[4] = {side_by_side(top + at), side_by_side(bottom + at),
                               side_by_side(top + at + 8), side_by_side(bottom + at + 8)};
        unsigned b[2];
        if constexpr (STEP == 1) {
            b[0] = side_by_side(down);
            b[1] = side_by_side(down + 8);
        } else {
            b[0] = joined(down[0], down[STEP]);
            b[1] = joined(down[8 * STEP], down[9 * STEP]);
        }
        tensor_cores(sum, a, b, T());
    } else
#endif
    for (unsigned k = 0; k < DEPTH; ++k) {
        const float high = widen(top[k]), low = widen(top[8 * row + k]);
        for (unsigned n = 0; n < 2; ++n) {
            const float across = widen(right[k * STEP + (tile_column() + n) * column]);
            sum.at[n] += high * across;
            sum.at[2 + n] += low * across;
        }
    }
}
