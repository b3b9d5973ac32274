// Int4: whole blocks in codes of 4 bits, each group of up to 32 numbers with a scale in fp16.
//
// A group of K is a channel over tokens, because keys have channels that are large in every token:
// number = least + code * scale, codes 0 to 15, with the group's least number in fp16 too. A group of
// V is a run of a token's head: number = code * scale, codes -8 to 7; the number with the largest
// magnitude is code -8, so a scale has the opposite sign of that number. A byte is two neighbours of
// a head, the even one in its low bits. A unit is one layer of a block: `codes_at` and `scales_at`
// are its bytes of K, or of V. Codes are ordered by token, head and number. Scales of K are ordered
// by group of tokens, head and number, and the least numbers follow in the same order; scales of V
// are ordered by token, head and group.
// Invariant: a head has a multiple of 16 numbers, and units and scales begin at multiples of 16
// bytes; the host refuses other sizes.

#pragma once

#include "paged.cuh"

constexpr unsigned GROUP = 32;
constexpr float MOST_FP16 = 65504.f;

// A layer's K or V of a block, and where its units are.
struct Units {
    long long codes_at, scales_at;
    unsigned tokens, heads, dim;

    __device__ unsigned vectors() const { return dim / VECTOR; }
    __device__ unsigned groups() const { return (dim + GROUP - 1) / GROUP; }
    __device__ unsigned token_groups() const { return (tokens + GROUP - 1) / GROUP; }
};

// fp16 without infinities; a sum with 0 has no negative zero, which may come from either of two.
__device__ inline fp16 bounded(float x) {
    return narrow<fp16>(fminf(fmaxf(x, -MOST_FP16), MOST_FP16) + 0.f);
}

// Codes of a group: a number is `code * scale + zero`.
struct Codec {
    fp16 scale, zero;
    float lowest;  // code

    __device__ float inverse() const {
        const float wide = widen(scale);
        return wide == 0.f ? 0.f : 1.f / wide;
    }
    // The bits of the code nearest to x.
    __device__ unsigned code(float x, float inverse) const {
        const float code = fminf(fmaxf((x - widen(zero)) * inverse, lowest), lowest + 15.f);
        return static_cast<unsigned>(static_cast<int>(rintf(code))) & 15u;
    }
    __device__ float number(unsigned bits) const {
        const int code = lowest < 0.f ? static_cast<int>(bits ^ 8u) - 8 : static_cast<int>(bits);
        return static_cast<float>(code) * widen(scale) + widen(zero);
    }
};

__device__ inline Codec codec_of_keys(float most, float least) {
    return {bounded((most - least) / 15.f), bounded(least), 0.f};
}

__device__ inline Codec codec_of_values(float most, float least) {
    return {bounded((most > -least ? most : least) * -0.125f), fp16{0}, -8.f};
}
