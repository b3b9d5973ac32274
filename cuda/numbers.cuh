// Numbers: the formats that KV is kept in, as their bits, and the ways from and to fp32.
//
// Invariant: `widen` is exact and `narrow` rounds to nearest, ties to even. fp16 overflows to
// infinity; fp8 (e4m3) stops at 448 and int8 at 127, infinities too; NaN stays NaN but in int8.
// Without an instruction for it the arithmetic computes the same result, so a host compiles it too.
// Cost: one or two instructions per number; fp8 before sm_89 about a dozen.

#pragma once

using fp32 = float;
struct fp16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
struct fp8 { unsigned char bits; };
struct int8 { signed char bits; };

// The value of a quantised format's largest code at scale 1; other formats have no codes.
template <class T> constexpr float LARGEST = 1.f;
template <> constexpr float LARGEST<fp8> = 448.f;
template <> constexpr float LARGEST<int8> = 127.f;

__device__ inline float power_of_two(int exponent) {
    return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}

// The bits of |x| in a format with `mantissa` bits after the point and this bias; exponents are
// not bounded above. Below the least normal number the adder rounds: the last bit of its sum with
// `unit` is worth as much as the format's.
__device__ inline unsigned rounded(float x, unsigned mantissa, int bias) {
    const float size = fabsf(x);
    if (size < power_of_two(1 - bias)) {
        const float unit = power_of_two(24 - static_cast<int>(mantissa) - bias);
        return __float_as_uint(size + unit) - __float_as_uint(unit);
    }
    const unsigned drop = 23 - mantissa, bits = __float_as_uint(size);
    const unsigned up = bits + (1u << (drop - 1)) - 1 + (bits >> drop & 1);
    return (up >> drop) - (static_cast<unsigned>(127 - bias) << mantissa);
}

__device__ inline float widen(fp32 x) { return x; }

__device__ inline float widen(bf16 x) { return __uint_as_float(unsigned{x.bits} << 16); }

__device__ inline float widen(int8 x) { return x.bits; }

__device__ inline float widen(fp8 x) {
    const unsigned size = x.bits & 0x7fu;
    const float exact = __uint_as_float(size << 20) * power_of_two(120);
    const float wide = size == 0x7f ? __uint_as_float(0x7fffffff) : exact;
    return copysignf(wide, x.bits & 0x80 ? -1.f : 1.f);
}

__device__ inline float widen(fp16 x) {
#ifdef __CUDA_ARCH__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
#else
    const unsigned size = x.bits & 0x7fffu;
    const float finite = __uint_as_float(size << 13) * power_of_two(112);
    const float wide = size < 0x7c00 ? finite : __uint_as_float(size << 13 | 0x7f800000);
    return copysignf(wide, x.bits & 0x8000 ? -1.f : 1.f);
#endif
}

template <class T> __device__ T narrow(float x);

template <> __device__ inline fp32 narrow(float x) { return x; }

template <> __device__ inline bf16 narrow(float x) {
    bf16 near;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(near.bits) : "f"(x));
#else
    const unsigned bits = __float_as_uint(x);
    near.bits = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
    return near;
}

template <> __device__ inline fp16 narrow(float x) {
    fp16 near;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(near.bits) : "f"(x));
#else
    const unsigned sign = __float_as_uint(x) >> 16 & 0x8000, size = rounded(x, 10, 15);
    near.bits = sign | (x != x ? 0x7fff : size < 0x7c00 ? size : 0x7c00);
#endif
    return near;
}

template <> __device__ inline fp8 narrow(float x) {
    fp8 near;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.f), "f"(x));
    near.bits = static_cast<unsigned char>(two);
#else
    const unsigned sign = __float_as_uint(x) >> 24 & 0x80;
    near.bits = sign | (x != x ? 0x7f : rounded(fminf(fabsf(x), 448.f), 3, 7));
#endif
    return near;
}

template <> __device__ inline int8 narrow(float x) {
    return {static_cast<signed char>(rintf(fminf(fmaxf(x, -127.f), 127.f)))};
}
