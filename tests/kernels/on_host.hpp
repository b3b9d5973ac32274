// The words of CUDA for a C++20 compiler, so that kernels compile as they are; host.cpp runs them.
//
// Invariant: like on a card, threads of a block run in any order between barriers; unlike there,
// only one block runs at a time, so `__shared__` may be static.

#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <utility>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

struct Dim {
    unsigned x = 1, y = 1, z = 1;
};
extern constinit thread_local Dim threadIdx, blockIdx;
extern Dim blockDim, gridDim;
void __syncthreads();
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }

// A kernel whose arguments are all eight bytes wide, numbers or pointers.
struct Kernel {
    void (*call)(const std::int64_t* words);
    std::size_t arguments;
};

template <auto kernel> struct Deduced;
template <class... A, void (*kernel)(A...)> struct Deduced<kernel> {
    static void call(const std::int64_t* words) { spread(words, std::index_sequence_for<A...>()); }
    template <std::size_t... I>
    static void spread(const std::int64_t* words, std::index_sequence<I...>) {
        kernel(std::bit_cast<A>(words[I])...);
    }
    static constexpr Kernel of{&call, sizeof...(A)};
};

extern const Kernel kernels[];
