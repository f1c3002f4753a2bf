// Operators of the simulated device: each is one task that runs torch's CPU kernel on the device's memory.
//
// The shapes of the results are needed at once: torch's Meta kernels compute them. The numbers are computed in the task. An
// operator whose shapes depend on numbers (nonzero) or whose result is a number (equal) makes the host wait, as on a GPU.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "memory.h"

namespace device {
using at::Tensor, c10::IValue, torch::jit::Stack;
using Change = std::function<Tensor(const Tensor &)>;

// Inside, operators run on the CPU and no mode of the thread that happens to wait (autograd, a TorchDispatchMode) sees them.
struct Quiet {
    c10::impl::ExcludeDispatchKeyGuard no_autograd{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                                   c10::autocast_dispatch_keyset};
    c10::impl::LocalDispatchKeySet before = c10::impl::tls_local_dispatch_key_set();
    Quiet() {
        c10::DispatchKeySet modes({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                   c10::DispatchKey::PreDispatch});
        auto without = before;
        without.included_ = without.included_ - modes;
        without.excluded_ = without.excluded_ | modes;
        c10::impl::_force_tls_local_dispatch_key_set(without);
    }
    ~Quiet() { c10::impl::_force_tls_local_dispatch_key_set(before); }
};

// The same memory as a tensor of the CPU, for tasks. Makes no access.
inline Tensor twin(const Tensor &t) {
    return at::from_blob(inside(t.data_ptr()), t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()));
}
inline Tensor empty_like_on_device(const Tensor &t) {
    return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()).device(c10::kCUDA));
}

// A copy of an argument or a result in which every tensor is changed, and every device is another.
inline IValue changed(const IValue &value, const Change &change, c10::Device device) {
    if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
    if (value.isDevice()) return IValue(device);
    if (value.isGenerator()) return IValue();    // random numbers are the host's
    if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor &t : value.toTensorVector()) list.push_back(change(t));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const auto &t : value.toOptionalTensorVector())
            list.push_back(t && t->defined() ? std::optional<Tensor>(change(*t)) : t);
        return list;
    }
    return value;
}

struct Call {
    const c10::OperatorHandle &op;
    std::vector<IValue> args;
    const c10::FunctionSchema &schema = op.schema();

    // A GPU's kernel cannot read host memory: only numbers (tensors without dimensions) and indices may be there.
    void check_devices() const {
        for (const IValue &arg : args) changed(arg, [&](const Tensor &t) {
            TORCH_CHECK(t.is_cuda() || t.dim() == 0 || arg.isOptionalTensorList(), op.operator_name(),
                        ": Expected all tensors to be on the same device, but found one on ", t.device());
            return t;
        }, c10::kCPU);
    }

    // The results without numbers; nothing if they depend on numbers. Resizes tensors that are given as out=.
    std::optional<Stack> shapes() const {
        if (op.hasTag(at::Tag::nondeterministic_seeded)) return {};    // drawn now, in the order of the program
        Quiet quiet;
        std::vector<IValue> metas;
        for (const IValue &arg : args) metas.push_back(changed(arg, [](const Tensor &t) {
            return t.dim() == 0 && !t.is_cuda() ? t : at::empty_strided(t.sizes(), t.strides(),
                t.options().device(c10::kMeta).pinned_memory(false));
        }, c10::kMeta));
        Stack stack = metas;
        try { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack); }
        catch (const c10::NotImplementedError &) { return {}; }
        catch (const c10::IndexError &) { throw; }
        catch (const std::exception &) { return {}; }
        for (size_t i = 0; i < args.size(); i++)
            if (args[i].isTensor() && args[i].toTensor().defined() && args[i].toTensor().is_cuda() &&
                args[i].toTensor().sizes() != metas[i].toTensor().sizes())
                args[i].toTensor().resize_(metas[i].toTensor().sizes());
        return stack;
    }

    // What the task does: the CPU kernel on twins. Host tensors are read now.
    std::function<Stack()> compute() const {
        Quiet quiet;
        Stack twins;
        for (const IValue &arg : args) twins.push_back(changed(arg, [](const Tensor &t) {
            if (t.is_cuda()) return twin(t);
            Tensor copy = t.detach().clone();    // of a number, or of indices
            copy.unsafeGetTensorImpl()->set_wrapped_number(t.unsafeGetTensorImpl()->is_wrapped_number());    // as in x * 2.5
            return copy;
        }, c10::kCPU));
        return [op = op, twins] {
            Stack stack = twins;
            if (op.operator_name().name == "aten::native_layer_norm_backward")    // on CPUs mean and rstd have its dtype
                for (int i : {3, 4}) stack[i] = stack[i].toTensor().to(stack[1].toTensor().scalar_type());
            op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
            return stack;
        };
    }

    // Whether a result is one of the arguments, written in place.
    bool in_place(size_t result) const { return schema.returns()[result].alias_info() != nullptr; }
    IValue written(size_t result) const {
        for (size_t i = 0; i < args.size(); i++)
            if (schema.arguments()[i].alias_info() &&
                *schema.arguments()[i].alias_info() == *schema.returns()[result].alias_info()) return args[i];
        TORCH_CHECK(false, op.operator_name(), ": result ", result, " is no argument");
    }
};

// Copies a task's result into the tensors that the program got for it.
inline void put(const IValue &result, const std::vector<Tensor> &places) {
    auto place = places.begin();
    bool defined = result.isTensor() ? result.toTensor().defined() : result.isTensorList();
    if (defined) changed(result, [&](const Tensor &t) { return (*place++).copy_(t); }, c10::kCPU);
}

inline void kernel(const c10::OperatorHandle &op, Stack *stack) {
    size_t num = op.schema().arguments().size();
    Call call{op, {stack->end() - num, stack->end()}};
    torch::jit::drop(*stack, num);
    call.check_devices();
    auto shapes = call.shapes();
    { Lock lock(mutex); counts.kernels++; }
    auto compute = call.compute();
    bool known = shapes.has_value();
    if (!known) {
        bool random = op.hasTag(at::Tag::nondeterministic_seeded);
        random ? run_until(current, end_of(current)) : wait_for(current);
        Lock lock(mutex);
        Quiet quiet;
        shapes = compute();
    }
    std::vector<std::vector<Tensor>> places;
    for (size_t i = 0; i < shapes->size(); i++) {
        places.emplace_back();
        if (call.in_place(i)) { stack->push_back(call.written(i)); continue; }
        stack->push_back(changed((*shapes)[i], [&](const Tensor &t) {
            Tensor made = empty_like_on_device(t);
            Quiet quiet;
            places.back().push_back(twin(made));
            return made;
        }, c10::kCUDA));
    }
    give(current, [=, results = known ? Stack() : *shapes] {
        Quiet quiet;
        Stack computed = known ? compute() : results;
        for (size_t i = 0; i < places.size(); i++) if (!places[i].empty()) put(computed[i], places[i]);
    });
}

// ---- operators that are no kernels of the device

inline Tensor &copy_(Tensor &to, const Tensor &from, bool non_blocking) {
    if (!to.numel()) return to;
    Tensor source = from.expand_as(to);
    Quiet quiet;
    bool pinned_source = from.is_cpu() && is_pinned(from.data_ptr());
    bool pinned_target = to.is_cpu() && is_pinned(to.data_ptr());
    // CUDA stages a copy from pageable memory: the source may be written when the call returns.
    Tensor read = from.is_cpu() && !pinned_source ? source.clone() : twin(source);
    Lock lock(mutex);
    (from.is_cpu() ? counts.copies_in : to.is_cpu() ? counts.copies_out : counts.copies_inside)++;
    give(current, [place = twin(to), read] { Quiet inside_task; place.copy_(read); });
    for (const Tensor *host : {&from, (const Tensor *)&to})    // the allocator keeps pinned memory until the copy has ended
        if (Block *block = host->is_cpu() ? find_pinned(host->data_ptr()) : nullptr) block->users[current] = end_of(current);
    bool waits = from.is_cpu() ? !non_blocking : to.is_cpu() && !(non_blocking && pinned_target);
    if (waits) wait_for(current);
    return to;
}
inline at::Scalar item(const Tensor &t) { wait_for(current); Quiet quiet; return twin(t).item(); }

inline Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
    return at::detail::empty_generic(size, &near_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                     c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(size, stride, &near_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                             c10::dtype_or_default(dtype));
}
inline const Tensor &resize_(const Tensor &t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
    auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    size_t num_bytes = (c10::multiply_integers(sizes) + t.storage_offset()) * t.element_size();
    auto *storage = t.storage().unsafeGetStorageImpl();
    if (storage->nbytes() < num_bytes) {
        c10::DataPtr larger = near_memory.allocate(num_bytes);
        char *to = inside(larger.get()), *from = inside(storage->data());
        give(current, [to, from, n = storage->nbytes()] { memcpy(to, from, n); });
        storage->set_data_ptr_noswap(std::move(larger));
        storage->set_nbytes(num_bytes);
    }
    t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return t;
}
inline Tensor &set_storage(Tensor &t, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
    auto *impl = t.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(storage);
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
    return t;
}
inline Tensor &set_whole_storage(Tensor &t, at::Storage storage) {
    c10::SymInt numel = (int64_t)(storage.nbytes() / t.element_size());
    return set_storage(t, storage, 0, {numel}, {c10::SymInt(1)});
}
inline void record_stream(Tensor &t, c10::Stream stream) { near_memory.recordStream(t.storage().data_ptr(), stream); }

// ---- views, which touch no memory
inline Tensor as_strided(const Tensor &t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::SymInt> offset) {
    return at::cpu::as_strided_symint(t, size, stride, offset);
}
inline Tensor reshape_alias(const Tensor &t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline Tensor view(const Tensor &t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }

// Every operator with a CPU kernel becomes `kernel`: torch would else compute some of them (layer norm) by other formulas.
inline void register_kernels(torch::Library &library) {
    auto set = [&](const char *name, auto &&function) { library.impl(name, std::forward<decltype(function)>(function)); };
    set("empty.memory_format", empty), set("empty_strided", empty_strided), set("resize_", resize_), set("copy_", copy_);
    set("_local_scalar_dense", item), set("record_stream", record_stream), set("as_strided", as_strided), set("view", view);
    set("_reshape_alias", reshape_alias), set("unfold", at::native::unfold);
    set("set_.source_Storage_storage_offset", set_storage), set("set_.source_Storage", set_whole_storage);
    for (const auto &name : c10::Dispatcher::singleton().getAllOpNames()) {
        auto op = c10::Dispatcher::singleton().findSchema(name);
        if (name.name.rfind("aten::", 0) || !op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
            op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
        bool is_view = false;
        for (const auto &result : op->schema().returns()) is_view |= result.alias_info() && !result.alias_info()->isWrite();
        std::string called = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
        if (!is_view) set(called.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
    }
}
}    // namespace device
