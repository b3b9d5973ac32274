// Runs kernels for a process at its standard input and output: a CUDA thread is a thread,
// a block's __syncthreads a barrier, and the grid runs block by block.
//
// A request is little-endian int64s: which kernel, grid x, y, z, block x, y, z, how many buffers,
// and per buffer its size and its bytes; how many arguments, and per argument -1 and a number, or a
// buffer's number and a place in it. The answer is the bytes of all buffers in order. Buffers are
// allocated to the byte, so that a sanitizer sees a step beyond them. Cost: a thread per CUDA
// thread; keep blocks under about a hundred.

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
    for (unsigned b = 0; b < gridDim.x * gridDim.y * gridDim.z; ++b) {
        std::barrier<> barrier(threads);
        block_barrier = &barrier;
        std::vector<std::jthread> running;
        for (unsigned t = 0; t < threads; ++t)
            running.emplace_back([=, &kernel] {
                blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / gridDim.x / gridDim.y};
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
        for (unsigned* side : {&gridDim.x, &gridDim.y, &gridDim.z, &blockDim.x, &blockDim.y,
                               &blockDim.z})
            *side = static_cast<unsigned>(number());
        std::vector<Buffer> buffers(number());
        for (Buffer& buffer : buffers) {
            buffer.size = number();
            void* memory = nullptr;
            if (posix_memalign(&memory, 16, buffer.size) || !read(memory, buffer.size))
                std::exit(2);
            buffer.memory.reset(memory);
        }
        std::vector<std::int64_t> words(number());
        if (words.size() != kernels[which].arguments) std::exit(3);
        for (std::int64_t& word : words) {
            const std::int64_t buffer = number();
            word = number();
            if (buffer >= 0)
                word += reinterpret_cast<std::int64_t>(buffers.at(buffer).memory.get());
        }
        launch(kernels[which], words.data());
        for (const Buffer& buffer : buffers)
            std::fwrite(buffer.memory.get(), 1, buffer.size, stdout);
        std::fflush(stdout);
    }
}
