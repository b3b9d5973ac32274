// Runs kernels for whoever speaks to its standard input and output: a CUDA thread is a thread,
// a block's __syncthreads a barrier, and the grid runs block by block.
//
// A request is little-endian int64s: which kernel, grid, block x, y, z, how many arguments; then
// per argument -1 and a number, or the size of a buffer and its bytes. The answer is the bytes of
// all buffers in order. Buffers are allocated to the byte, so that a sanitizer sees a step beyond
// them. Cost: a thread per CUDA thread; keep blocks under about a hundred.

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "on_host.hpp"

constinit thread_local Dim threadIdx, blockIdx;
Dim blockDim, gridDim;
static std::barrier<>* block_barrier;

void __syncthreads() { block_barrier->arrive_and_wait(); }

static void launch(const Kernel& kernel, const std::int64_t* words) {
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    for (unsigned b = 0; b < gridDim.x; ++b) {
        std::barrier<> barrier(threads);
        block_barrier = &barrier;
        std::vector<std::jthread> running;
        for (unsigned t = 0; t < threads; ++t)
            running.emplace_back([=, &kernel] {
                blockIdx = {b, 0, 0};
                threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y,
                             t / blockDim.x / blockDim.y};
                kernel.call(words);
                block_barrier->arrive_and_drop();
            });
    }
}

struct Freed {
    void operator()(void* memory) const { std::free(memory); }
};
struct Buffer {
    std::unique_ptr<void, Freed> memory;
    std::size_t size;
};

static bool read(void* to, std::size_t size) { return std::fread(to, 1, size, stdin) == size; }

static std::int64_t number() {
    std::int64_t word;
    if (!read(&word, sizeof word)) std::exit(2);
    return word;
}

int main() {
    std::int64_t which;
    while (read(&which, sizeof which)) {
        for (unsigned* side : {&gridDim.x, &blockDim.x, &blockDim.y, &blockDim.z})
            *side = static_cast<unsigned>(number());
        std::vector<std::int64_t> words(number());
        if (words.size() != kernels[which].arguments) std::exit(3);
        std::vector<Buffer> buffers;
        for (std::int64_t& word : words) {
            const std::int64_t size = number();
            if (size < 0) {
                word = number();
                continue;
            }
            void* memory = nullptr;
            if (posix_memalign(&memory, 16, size) || (size && !read(memory, size))) std::exit(2);
            buffers.push_back({std::unique_ptr<void, Freed>(memory), std::size_t(size)});
            word = reinterpret_cast<std::int64_t>(memory);
        }
        launch(kernels[which], words.data());
        for (const Buffer& buffer : buffers)
            std::fwrite(buffer.memory.get(), 1, buffer.size, stdout);
        std::fflush(stdout);
    }
}
