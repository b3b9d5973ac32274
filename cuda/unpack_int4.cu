// Unpack int4: units of 4-bit codes and their scales into rows of whole blocks; see int4.cuh.
//
// Row `i * tokens + t` becomes token t of the block at units[i]; the host refuses units outside the
// memory. Grid: x runs over the vectors of all rows. Cost: one read of every code and one write of
// every number; scales are read by several threads, out of a cache.

#include "int4.cuh"

extern "C" __global__ void __launch_bounds__(MOST_THREADS) unpack_int4(
    ROW* __restrict__ rows, const unsigned char* __restrict__ memory, long long stride,
    long long codes_at, long long scales_at, long long tokens, long long heads, long long dim,
    long long keys, const long long* __restrict__ units, long long count) {
    const Units of = {codes_at, scales_at, static_cast<unsigned>(tokens),
                      static_cast<unsigned>(heads), static_cast<unsigned>(dim)};
    const unsigned jobs = of.tokens * of.heads * of.vectors();
    const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= static_cast<unsigned>(count) * jobs) return;
    const unsigned i = at / jobs, job = at % jobs;
    const unsigned char* unit = memory + units[i] * stride;
    const fp16* scales = reinterpret_cast<const fp16*>(unit + scales_at);
    const auto codes = load<VECTOR / 2>(unit + codes_at + job * (VECTOR / 2));
    Pack<fp16, VECTOR> scale, zero;
    if (keys) {
        const unsigned row = of.heads * of.vectors();
        const unsigned place = (job / row / GROUP * row + job % row) * VECTOR;
        scale = load<VECTOR>(scales + place);
        zero = load<VECTOR>(scales + of.token_groups() * row * VECTOR + place);
    } else {
        const unsigned head = job / of.vectors(), group = job % of.vectors() * VECTOR / GROUP;
        const fp16 one = scales[head * of.groups() + group];
        for (unsigned k = 0; k < VECTOR; ++k) {
            scale.at[k] = one;
            zero.at[k] = {0};
        }
    }
    Pack<ROW, VECTOR> wide;
    for (unsigned k = 0; k < VECTOR; ++k) {
        const Codec codec = {scale.at[k], zero.at[k], keys ? 0.f : -8.f};
        wide.at[k] = narrow<ROW>(codec.number(codes.at[k / 2] >> (k % 2 * 4) & 15u));
    }
    store(rows + static_cast<long long>(at) * VECTOR, wide);
}
