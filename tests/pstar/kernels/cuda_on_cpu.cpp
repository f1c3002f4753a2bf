// cuda_adam.cu compiled as C++: each CUDA thread of a block is a thread here, __syncthreads a barrier. Slow and exact: tests
// hold the kernels' indices, alignment and order of additions against the CPU kernels on a machine without a GPU.
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(count)
#define __grid_constant__
#define __shared__ static

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { int x; };
static thread_local Index blockIdx, threadIdx;
static std::barrier<> *synchronise;
static void __syncthreads() { synchronise->arrive_and_wait(); }
using std::max;

#include "cuda_adam.cu"

static void launch(int grid, int threads, const std::function<void()> &kernel) {
    std::barrier<> barrier(threads);
    synchronise = &barrier;
    std::vector<std::thread> all;
    for (int thread = 0; thread < threads; thread++)
        all.emplace_back([=, &barrier, &kernel] {
            threadIdx.x = thread;
            for (int block = 0; block < grid; block++) {
                blockIdx.x = block;
                kernel();
                barrier.arrive_and_wait();    // what is shared belongs to the next block only when all have left this one
            }
        });
    for (std::thread &thread : all) thread.join();
}

extern "C" void emulate_adam(const AdamBatch *batch) {
    launch(batch->first_block[batch->num_chunks], THREADS, [=] { pstar_adam(*batch); });
}

extern "C" void emulate_norms(const NormBatch *batch, double *results) {
    std::vector<double> sums(batch->first_block[batch->num_chunks] + 1);
    launch((int)batch->first_block[batch->num_chunks], NORM_THREADS, [&] { pstar_norm_blocks(*batch, sums.data()); });
    launch(batch->num_chunks, NORM_LANES, [&] { pstar_norm_sum(*batch, sums.data(), results); });
}
