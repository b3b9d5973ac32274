// Paged copy: rows of bytes from places in one memory to places in another. Either may be pinned
// memory of the host, which the card reaches over the link.
//
// Row to[i] of the target becomes row from[i] of the source, `width` vectors of 16 bytes; strides
// are in vectors too. Rows written must differ. The host refuses rows outside the memories.
// Grid: x runs over the vectors of all rows, again and again: a few blocks fill a link and leave
// the rest of the card to computation. Cost: one read and one write of every vector, AT_ONCE of a
// thread under way together.

#include "paged.cuh"

constexpr unsigned AT_ONCE = 4;

extern "C" __global__ void __launch_bounds__(MOST_THREADS) paged_copy(
    const unsigned* __restrict__ source, unsigned* __restrict__ target, long long source_stride,
    long long target_stride, long long width, const long long* __restrict__ from,
    const long long* __restrict__ to, long long rows) {
    const unsigned across = static_cast<unsigned>(width);
    const unsigned total = static_cast<unsigned>(rows) * across;  // below 2^31
    const unsigned threads = gridDim.x * blockDim.x;
    for (unsigned first = blockIdx.x * blockDim.x + threadIdx.x; first < total;
         first += AT_ONCE * threads) {
        Pack<unsigned, 4> part[AT_ONCE];
        for (unsigned k = 0; k < AT_ONCE; ++k) {
            const unsigned at = first + k * threads;
            if (at < total)
                part[k] = load<4>(source + 4 * (from[at / across] * source_stride + at % across));
        }
        for (unsigned k = 0; k < AT_ONCE; ++k) {
            const unsigned at = first + k * threads;
            if (at < total)
                store(target + 4 * (to[at / across] * target_stride + at % across), part[k]);
        }
    }
}
