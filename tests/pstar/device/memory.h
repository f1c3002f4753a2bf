// Memory of the simulated device, and page-locked memory of the host.
//
// Device memory is mapped twice. Tensors point into the first mapping, which nobody may read or write: a host that touches
// it dies of SIGSEGV, and faulthandler prints the line. Tasks use the second mapping, `inside(pointer)`.
//
// New memory is filled with 0xff bytes (NaN), in the order of the stream that allocates it. So memory that is read before it
// is written, or after it was freed and allocated again, shows in the numbers.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "streams.h"

namespace device {
constexpr size_t ARENA_BYTES = 1ull << 36;    // of addresses; pages exist when they are written
constexpr size_t ROUND_BYTES = 512;           // as CUDA's caching allocator rounds
inline size_t total_bytes = 1ull << 30;       // more than this is out of memory
inline char *outside_base, *inside_base;

inline bool is_near(const void *p) { return (char *)p >= outside_base && (char *)p < outside_base + ARENA_BYTES; }
inline char *inside(const void *p) { return is_near(p) ? inside_base + ((char *)p - outside_base) : (char *)p; }

struct Block {
    char *begin;
    size_t num_bytes;
    long stream;                    // of the allocation; -1 for host memory
    std::map<long, long> users;     // other streams that use it, up to which position
    bool free() const {
        for (auto [id, position] : users) if (!passed(id, position)) return false;
        return true;
    }
};

// Freed blocks, for the next allocation of the same size on the same stream, when other streams have passed their uses. The
// block that was freed last comes first: a copy that still uses it then meets the next user, whatever was freed before.
struct Pool {
    std::map<char *, Block> taken;
    std::vector<Block> idle;
    template <class Make> char *take(size_t num_bytes, long stream, Make make) {
        for (size_t i = idle.size(); i-- > 0;)
            if (idle[i].num_bytes == num_bytes && idle[i].stream == stream && idle[i].free()) {
                Block block = idle[i];
                idle.erase(idle.begin() + i);
                block.users.clear();
                taken[block.begin] = block;
                return block.begin;
            }
        char *begin = make(num_bytes);
        taken[begin] = {begin, num_bytes, stream, {}};
        return begin;
    }
    Block give_back(char *begin) {
        Block block = taken.at(begin);
        taken.erase(begin);
        idle.push_back(block);
        return block;
    }
    Block *find(const void *p) {    // the block around an address
        auto after = taken.upper_bound((char *)p);
        if (after == taken.begin()) return nullptr;
        Block &block = std::prev(after)->second;
        return (char *)p < block.begin + block.num_bytes ? &block : nullptr;
    }
};
inline Pool near_pool, pinned_pool;
inline std::map<char *, Block> registered;    // by cudaHostRegister

struct NearMemory final : c10::DeviceAllocator {
    size_t used = 0;
    c10::CachingDeviceAllocator::DeviceStats stats;
    NearMemory() {
        int file = memfd_create("simulated device", 0);
        TORCH_CHECK(file >= 0 && ftruncate(file, ARENA_BYTES) == 0);
        inside_base = (char *)mmap(nullptr, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
        outside_base = (char *)mmap(nullptr, ARENA_BYTES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
        TORCH_CHECK(inside_base != MAP_FAILED && outside_base != MAP_FAILED);
        close(file);
    }
    c10::DataPtr allocate(size_t num_bytes) override;
    static void release(void *p);
    static void nothing(void *) {}
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, size_t n) const override { memcpy(inside(to), inside(from), n); }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t = {0, 0}) override {}
    void recordStream(const c10::DataPtr &p, c10::Stream stream) override {
        Lock lock(mutex);
        Block *block = near_pool.find(p.get());
        if (block && stream.id() != block->stream) block->users[stream.id()] = 0;    // known when it is freed
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return stats; }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex) override { stats.allocated_bytes[0].reset_peak(); }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
        return {total_bytes - counts.near_bytes, total_bytes};
    }
} inline near_memory;

inline c10::DataPtr NearMemory::allocate(size_t num_bytes) {
    c10::Device here(c10::kCUDA, 0);
    if (!num_bytes) return {nullptr, nullptr, &nothing, here};
    Lock lock(mutex);
    size_t size = (num_bytes + ROUND_BYTES - 1) / ROUND_BYTES * ROUND_BYTES;
    TORCH_CHECK_WITH(OutOfMemoryError, counts.near_bytes + size <= total_bytes, "CUDA out of memory. Tried to allocate ",
                     num_bytes, " bytes of ", total_bytes, ", ", counts.near_bytes, " are in use");
    char *p = near_pool.take(size, current, [this](size_t n) {
        char *begin = outside_base + used;
        used += n;
        TORCH_CHECK(used < ARENA_BYTES, "no addresses are left");
        return begin;
    });
    give(current, [=] { memset(inside(p), 0xff, size); });
    counts.near_bytes += size;
    stats.allocated_bytes[0].increase(size);
    return {p, p, &release, here};
}

inline void NearMemory::release(void *p) {
    Lock lock(mutex);
    for (auto &[id, position] : near_pool.taken.at((char *)p).users) position = end_of(id);
    size_t size = near_pool.give_back((char *)p).num_bytes;
    counts.near_bytes -= size;
    near_memory.stats.allocated_bytes[0].decrease(size);
}

// Rounds up to a power of two and keeps what is freed, as torch's allocator of page-locked memory does.
struct PinnedMemory final : c10::Allocator {
    static void nothing(void *) {}
    c10::DataPtr allocate(size_t num_bytes) override {
        if (!num_bytes) return {nullptr, nullptr, &nothing, c10::Device(c10::kCPU)};
        Lock lock(mutex);
        size_t size = 1;
        while (size < num_bytes) size *= 2;
        char *p = pinned_pool.take(size, -1, [](size_t n) {
            counts.pinned_bytes += n;
            return (char *)aligned_alloc(4096, (n + 4095) / 4096 * 4096);
        });
        memset(p, 0xff, size);
        return {p, p, &release, c10::Device(c10::kCPU)};
    }
    static void release(void *p) { Lock lock(mutex); pinned_pool.give_back((char *)p); }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, size_t n) const override { memcpy(to, from, n); }
} inline pinned_memory;

inline Block *find_pinned(const void *p) {
    if (Block *block = pinned_pool.find(p)) return block;
    auto after = registered.upper_bound((char *)p);
    if (after == registered.begin()) return nullptr;
    Block &block = std::prev(after)->second;
    return (char *)p < block.begin + block.num_bytes ? &block : nullptr;
}
inline bool is_pinned(const void *p) { Lock lock(mutex); return find_pinned(p) != nullptr; }
}    // namespace device
