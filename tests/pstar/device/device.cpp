// A CUDA device for a torch that was built for CPUs only: what torch asks of a device, and what Python calls.
//
// streams.h: when tasks run. memory.h: memory that the host cannot touch. operators.h: what tasks compute.
// It uses private C++ interfaces of torch and is built for one version of it (simulated.py). Limits: one device, no NCCL, no
// generator of its own, no kernels that only CUDA has.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "operators.h"

namespace device {
using c10::Device, c10::DeviceIndex, c10::kCUDA;

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kCUDA; }
    Device exchangeDevice(Device) const override { return {kCUDA, 0}; }
    Device getDevice() const override { return {kCUDA, 0}; }
    void setDevice(Device device) const override { TORCH_CHECK(device.index() <= 0, "there is one device"); }
    void uncheckedSetDevice(Device) const noexcept override {}
    DeviceIndex deviceCount() const noexcept override { return 1; }

    static c10::Stream stream(long id) { return c10::Stream(c10::Stream::UNSAFE, Device(kCUDA, 0), id); }
    c10::Stream getStream(Device) const override { return stream(current); }
    c10::Stream getDefaultStream(Device) const override { return stream(DEFAULT); }
    c10::Stream getNewStream(Device, int = 0) const override { Lock lock(mutex); return stream(next_stream++); }
    c10::Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
    c10::Stream exchangeStream(c10::Stream chosen) const override { return stream(std::exchange(current, chosen.id())); }
    bool queryStream(const c10::Stream &s) const override { Lock lock(mutex); return streams[s.id()].tasks.empty(); }
    void synchronizeStream(const c10::Stream &s) const override { wait_for(s.id()); }
    void synchronizeDevice(DeviceIndex) const override { for (long id = DEFAULT; id < next_stream; id++) wait_for(id); }

    void destroyEvent(void *event, DeviceIndex) const noexcept override { delete (Event *)event; }
    void record(void **event, const c10::Stream &s, DeviceIndex, c10::EventFlag) const override {
        if (!*event) *event = new Event;
        *(Event *)*event = event_on(s.id());
    }
    void block(void *event, const c10::Stream &s) const override {    // the stream waits, not the host
        if (event) give(s.id(), [before = *(Event *)event] { run_until(before.stream, before.position); });
    }
    bool queryEvent(void *event) const override {
        Lock lock(mutex);
        return !event || passed(((Event *)event)->stream, ((Event *)event)->position);
    }
    void synchronizeEvent(void *event) const override {
        if (event) wait_until(((Event *)event)->stream, ((Event *)event)->position);
    }
    double elapsedTime(void *from, void *to, DeviceIndex) const override {
        return *((Event *)to)->at_ms - *((Event *)from)->at_ms;
    }
    void recordDataPtrOnStream(const c10::DataPtr &p, const c10::Stream &s) const override {
        near_memory.recordStream(p, s);
    }
};

struct Hooks final : at::CUDAHooksInterface {
    explicit Hooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return 1; }
    DeviceIndex current_device() const override { return 0; }
    DeviceIndex getCurrentDevice() const override { return 0; }
    DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
    DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
    void setCurrentDevice(DeviceIndex) const override {}
    bool isPinnedPtr(const void *p) const override { return is_pinned(p); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return &pinned_memory; }
    Device getDeviceFromPtr(void *p) const override { return is_near(p) ? Device(kCUDA, 0) : Device(c10::kCPU); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
TORCH_LIBRARY_IMPL(aten, CUDA, library) { register_kernels(library); }
struct SetAllocator { SetAllocator() { c10::SetAllocator(kCUDA, &near_memory); } } set_allocator;
}    // namespace device

namespace at {
using SimulatedHooks = device::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", SimulatedHooks)
}

// ---- for simulated.py
#define PYTHON extern "C" __attribute__((visibility("default")))
PYTHON void simulated_late(int which) { device::late = which; }
PYTHON void simulated_total_bytes(long num_bytes) { device::total_bytes = num_bytes; }
PYTHON void simulated_counts(long *values) {
    device::Lock lock(device::mutex);
    memcpy(values, &device::counts, sizeof device::counts);
}
PYTHON long simulated_waits_of(long thread) { device::Lock lock(device::mutex); return device::waits_of_thread[thread]; }
PYTHON int simulated_host_register(char *p, long num_bytes) {
    device::Lock lock(device::mutex);
    device::counts.pinned_bytes += num_bytes;
    return !device::registered.insert({p, {p, (size_t)num_bytes, -1, {}}}).second;
}
PYTHON int simulated_host_unregister(char *p) {    // an error while a copy may still use the memory
    device::Lock lock(device::mutex);
    auto found = device::registered.find(p);
    if (found == device::registered.end() || !found->second.free()) return 1;
    device::counts.pinned_bytes -= found->second.num_bytes;
    device::registered.erase(found);
    return 0;
}
