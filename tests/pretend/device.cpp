// A device that behaves towards PyTorch as an accelerator does, for tests on machines without one.
//
// Its memory is a CPU storage that no code outside of this file can reach: a tensor on the device has a storage of its
// own, whose context holds the CPU storage behind it. Every operator runs as the CPU's kernel on aliases of its arguments;
// what the kernel returns becomes a tensor on the device, a view where it shares memory. What the host would have to wait
// for on an accelerator is told to Python, by name. Copies between the device and pinned memory that do not block are done
// when somebody waits for them, and until then their destination on the host holds NaN, or the largest integer.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

using at::Tensor;
using c10::Device;
using c10::IValue;
using c10::StorageImpl;
using Index = c10::DeviceIndex;

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr Index DEVICES = 2;
std::recursive_mutex lock;
using Locked = std::lock_guard<std::recursive_mutex>;

// ---- What the host waits for

py::object* told = nullptr;  // Called with what it waits for; never freed, since threads outlive the interpreter

void waits(const std::string& what) {
  if (told == nullptr) return;
  py::gil_scoped_acquire gil;
  (*told)(what);
}

// ---- Streams, events, and copies that are still to be done

struct Copy {
  int64_t number;
  bool to_device;
  std::function<void()> run;
};
std::map<int64_t, std::deque<Copy>> queues;  // by stream
int64_t copies = 0, streams = 0;
thread_local Index current_device = 0;
thread_local int64_t current_stream = 0;

// The copies of a stream up to a number, or only those that its operators would see.
void finish(int64_t stream, int64_t upto = INT64_MAX, bool only_to_device = false) {
  while (true) {
    std::function<void()> run;
    {  // which is not held while it runs: the interpreter may be needed then, and its holder may want the lock
      Locked held(lock);
      auto& queue = queues[stream];
      auto at = std::find_if(queue.begin(), queue.end(), [&](auto& copy) { return copy.to_device || !only_to_device; });
      if (at == queue.end() || at->number > upto) return;
      run = std::move(at->run);
      queue.erase(at);
    }
    run();
  }
}

void finish_all() {
  for (int64_t stream = 0; stream <= streams; ++stream) finish(stream);
}

struct Event { int64_t stream, upto; int asked; };

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  Device exchangeDevice(Device d) const override { auto before = getDevice(); current_device = d.index(); return before; }
  Device getDevice() const override { return Device(TYPE, current_device); }
  void setDevice(Device d) const override { current_device = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = d.index(); }
  c10::Stream getStream(Device d) const override { return c10::Stream(c10::Stream::UNSAFE, at(d), current_stream); }
  c10::Stream getDefaultStream(Device d) const override { return c10::Stream(c10::Stream::UNSAFE, at(d), 0); }
  c10::Stream getNewStream(Device d, int) const override {
    Locked held(lock);
    return c10::Stream(c10::Stream::UNSAFE, at(d), ++streams);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    current_stream = s.id();
    return before;
  }
  Index deviceCount() const noexcept override { return DEVICES; }
  void destroyEvent(void* event, const Index) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& s, const Index, const c10::EventFlag) const override {
    Locked held(lock);
    delete static_cast<Event*>(*event);
    *event = new Event{s.id(), copies, 0};
  }
  void block(void* event, const c10::Stream&) const override {
    if (auto* e = static_cast<Event*>(event)) finish(e->stream, e->upto, true);
  }
  bool queryEvent(void* event) const override {  // not yet, for whoever asks first
    auto* e = static_cast<Event*>(event);
    if (e != nullptr && e->asked++ > 0) finish(e->stream, e->upto);
    Locked held(lock);
    return e == nullptr || queues[e->stream].empty() || queues[e->stream].front().number > e->upto;
  }
  void synchronizeEvent(void* event) const override {
    waits("event.synchronize");
    if (auto* e = static_cast<Event*>(event)) finish(e->stream, e->upto);
  }
  bool queryStream(const c10::Stream& s) const override { Locked held(lock); return queues[s.id()].empty(); }
  void synchronizeStream(const c10::Stream& s) const override { waits("stream.synchronize"); finish(s.id()); }
  void synchronizeDevice(const Index) const override { waits("synchronize"); finish_all(); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static Device at(Device d) { return d.has_index() ? d : Device(TYPE, current_device); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- Memory

std::unordered_map<StorageImpl*, c10::weak_intrusive_ptr<StorageImpl>> on_device;  // by the storage behind it

void forget(void* context) {
  auto* behind = static_cast<c10::Storage*>(context);
  { Locked held(lock); on_device.erase(behind->unsafeGetStorageImpl()); }
  delete behind;
}

c10::DataPtr pointer(const c10::Storage& behind, Index device) {
  return {behind.mutable_data(), new c10::Storage(behind), &forget, Device(TYPE, device)};
}

const c10::Storage& behind(const c10::Storage& storage) {
  return *static_cast<c10::Storage*>(storage.data_ptr().get_context());
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    return pointer(at::empty({static_cast<int64_t>(n)}, at::kByte).storage(), current_device);
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} memory;

c10::Storage storage_for(const c10::Storage& cpu, Index device) {
  Locked held(lock);
  auto found = on_device.find(cpu.unsafeGetStorageImpl());
  if (found != on_device.end())
    if (auto there = found->second.lock()) return c10::Storage(there);
  auto made = c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), cpu.nbytes(), pointer(cpu, device), &memory, true);
  on_device.insert_or_assign(cpu.unsafeGetStorageImpl(), c10::weak_intrusive_ptr<StorageImpl>(made));
  return c10::Storage(std::move(made));
}

Tensor with(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

bool here(const Tensor& t) { return t.defined() && t.device().type() == TYPE; }
Tensor twin(const Tensor& t) { return with(behind(t.storage()), c10::DispatchKey::CPU, t); }
Tensor wrapped(const Tensor& t, Index device) {
  return t.defined() ? with(storage_for(t.storage(), device), c10::DispatchKey::PrivateUse1, t) : t;
}

// The alias may have been resized: so is the tensor.
void follow(const Tensor& t, const Tensor& cpu) {
  auto& storage = t.storage();
  if (storage.data() != cpu.storage().data() || storage.nbytes() != cpu.storage().nbytes()) {
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_nbytes(cpu.storage().nbytes());
    auto* kept = new c10::Storage(cpu.storage());
    Locked held(lock);
    impl->set_data_ptr_noswap({kept->mutable_data(), kept, &forget, t.device()});
    on_device.insert_or_assign(kept->unsafeGetStorageImpl(), c10::weak_intrusive_ptr<StorageImpl>(
        c10::intrusive_ptr<StorageImpl>::reclaim_copy(impl)));
  }
  if (t.sizes() != cpu.sizes() || t.strides() != cpu.strides())
    t.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
}

// ---- Random numbers: the device has generators of its own

struct Generator final : c10::GeneratorImpl {
  explicit Generator(Index device) : GeneratorImpl(Device(TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  c10::intrusive_ptr<at::CPUGeneratorImpl> inner = c10::make_intrusive<at::CPUGeneratorImpl>();
  void set_current_seed(uint64_t seed) override { inner->set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner->set_offset(offset); }
  uint64_t get_offset() const override { return inner->get_offset(); }
  uint64_t current_seed() const override { return inner->current_seed(); }
  uint64_t seed() override { return inner->seed(); }
  void set_state(const c10::TensorImpl& state) override { inner->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner->get_state(); }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->inner->set_state(*inner->get_state());
    return made;
  }
};

const at::Generator& default_generator(Index device) {
  static std::vector<at::Generator> made = [] {
    std::vector<at::Generator> all;
    for (Index k = 0; k < DEVICES; ++k) all.push_back(at::make_generator<Generator>(k));
    return all;
  }();
  return made.at(device < 0 ? current_device : device);
}

// ---- Pinned memory

std::set<void*> pinned;
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* data = std::malloc(std::max<size_t>(n, 1));
    Locked held(lock);
    pinned.insert(data);
    return {data, data, &release, Device(c10::DeviceType::CPU)};
  }
  static void release(void* data) { { Locked held(lock); pinned.erase(data); } std::free(data); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} pinned_memory;

bool is_pinned(const Tensor& t) { Locked held(lock); return pinned.count(t.storage().mutable_data()) > 0; }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(Index) const override { return true; }
  const at::Generator& getDefaultGenerator(Index device) const override { return default_generator(device); }
  at::Generator getNewGenerator(Index device) const override { return at::make_generator<Generator>(device < 0 ? current_device : device); }
  Device getDeviceFromPtr(void*) const override { return Device(TYPE, current_device); }
  bool isPinnedPtr(const void* data) const override { Locked held(lock); return pinned.count(const_cast<void*>(data)) > 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Index deviceCount() const override { return DEVICES; }
  Index getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(Index device) const override { current_device = device; }
  Index exchangeDevice(Index device) const override { auto before = current_device; current_device = device; return before; }
  Index maybeExchangeDevice(Index device) const override { return exchangeDevice(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto made = at::empty({static_cast<int64_t>(size)}, at::kByte);
    std::memcpy(made.mutable_data_ptr(), storage.data(), std::min(size, storage.nbytes()));
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(pointer(made.storage(), storage.device().index()));
    impl->set_nbytes(size);
    Locked held(lock);
    on_device.insert_or_assign(made.storage().unsafeGetStorageImpl(), c10::weak_intrusive_ptr<StorageImpl>(
        c10::intrusive_ptr<StorageImpl>::reclaim_copy(impl)));
  }
};

// ---- Operators

const std::set<std::string> SIZE_DEPENDS = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::_unique", "aten::unique_dim", "aten::bincount",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::nonzero_static", "aten::histc", "aten::argwhere"};
const std::set<std::string> TAKES_HOST_INDICES = {
    "aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put", "aten::_unsafe_index"};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t n = schema.arguments().size(), first = stack->size() - n;
  std::vector<std::pair<Tensor, Tensor>> aliases;
  Index device = -1;
  finish(current_stream, INT64_MAX, true);
  bool waiting = SIZE_DEPENDS.count(name) > 0;
  auto to_cpu = [&](const Tensor& t) -> Tensor {
    if (!t.defined()) return t;
    if (!here(t)) {
      TORCH_CHECK(
          t.device().is_cpu() && (t.dim() == 0 || TAKES_HOST_INDICES.count(name)), name,
          ": expected all tensors to be on the same device, but found pretend and ", t.device());
      return t;
    }
    TORCH_CHECK(device < 0 || device == t.device().index() || t.dim() == 0, name, ": expected all tensors to be on the same device");
    device = device < 0 || t.dim() > 0 ? t.device().index() : device;
    aliases.emplace_back(t, twin(t));
    return aliases.back().second;
  };
  for (size_t k = 0; k < n; ++k) {
    IValue& value = (*stack)[first + k];
    if (value.isTensor()) value = to_cpu(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(to_cpu(t));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorList().vec())
        list.push_back(t ? std::optional<Tensor>(to_cpu(*t)) : t);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == TYPE) {
      device = value.toDevice().has_index() ? value.toDevice().index() : current_device;
      value = Device(c10::DeviceType::CPU);
    }
  }
  device = device < 0 ? current_device : device;
  for (size_t k = 0; k < n; ++k) {
    auto type = schema.arguments()[k].type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() != c10::TypeKind::GeneratorType) continue;
    IValue& value = (*stack)[first + k];
    at::Generator given = value.isNone() ? default_generator(device) : value.toGenerator();
    TORCH_CHECK(given.device().type() == TYPE, "Expected a 'pretend' device type for generator but found '", given.device().type(), "'");
    value = at::Generator(static_cast<Generator*>(given.unsafeGetGeneratorImpl())->inner);
  }
  for (const auto& result : schema.returns())
    if (result.type()->kind() != c10::TypeKind::TensorType && result.type()->kind() != c10::TypeKind::ListType) waiting = true;
  if (waiting) waits(name);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [t, cpu] : aliases) follow(t, cpu);
  auto back = [&](const Tensor& cpu) -> Tensor {
    for (auto& [t, alias] : aliases) if (alias.is_same(cpu)) return t;
    return wrapped(cpu, device);
  };
  for (size_t k = stack->size() - schema.returns().size(); k < stack->size(); ++k) {
    IValue& value = (*stack)[k];
    if (value.isTensor()) value = back(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(back(t));
      value = list;
    }
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor source = here(from) ? twin(from) : from, target = here(to) ? twin(to) : to;
  finish(current_stream, INT64_MAX, true);
  const bool to_device = !here(from);
  if (here(from) && here(to)) {
    target.copy_(source);
  } else if (non_blocking && is_pinned(to_device ? from : to)) {
    Tensor value = source.clone();
    if (!to_device) {
      if (target.is_floating_point() || target.is_complex()) target.fill_(NAN);
      else if (target.scalar_type() == at::kBool) target.fill_(true);
      else target.fill_(target.scalar_type() == at::kByte ? 255 : target.scalar_type() == at::kChar ? 127 : 32767);
    }
    Locked held(lock);
    queues[current_stream].push_back({++copies, to_device, [=]() mutable {
      auto now = source.contiguous(), then = value.contiguous();
      const bool same = std::memcmp(now.const_data_ptr(), then.const_data_ptr(), now.nbytes()) == 0;
      TORCH_CHECK(!to_device || same, "a pinned source was overwritten before its copy was done");
      target.copy_(value);
    }});
  } else {
    if (!to_device || !non_blocking) waits(to_device ? "copy to the device" : "copy to the host");
    target.copy_(source);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  const_cast<Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& t) {
  waits("item");
  finish(current_stream, INT64_MAX, true);
  return at::_local_scalar_dense(twin(t));
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  finish(current_stream, INT64_MAX, true);
  std::optional<Tensor> b = bias && bias->defined() ? std::optional<Tensor>(twin(*bias)) : std::nullopt;
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
  return wrapped(at::convolution_symint(twin(input), twin(weight), b, stride, padding, dilation, transposed, output_padding, groups), input.device().index());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  finish(current_stream, INT64_MAX, true);
  auto channels = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
  auto [x, w, b] = at::convolution_backward_symint(
      twin(grad), twin(input), twin(weight), c10::SymIntArrayRef(&channels, 1), stride, padding, dilation, transposed, output_padding, groups, mask);
  auto device = input.device().index();
  return {wrapped(x, device), wrapped(w, device), wrapped(b, device)};
}

void record_stream(Tensor&, c10::Stream) {}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_dropout", &native_dropout);
}

int64_t math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}
namespace at::native { REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &math_attention) }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FULL)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(WIDEST)
}

// ---- Collectives: gloo's, on what is behind the tensors

struct Collectives final : c10d::Backend {
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "pretend"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& t, const c10d::AllreduceOptions& o) override { auto a = on_host(t); return gloo_->allreduce(a, o); }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& t, const c10d::BroadcastOptions& o) override { auto a = on_host(t); return gloo_->broadcast(a, o); }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<Tensor>>& to, std::vector<Tensor>& t, const c10d::AllgatherOptions& o) override {
    std::vector<std::vector<Tensor>> all;
    for (auto& each : to) all.push_back(on_host(each));
    auto a = on_host(t);
    return gloo_->allgather(all, a, o);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override { return gloo_->barrier(o); }

 private:
  static std::vector<Tensor> on_host(const std::vector<Tensor>& tensors) {
    finish(current_stream, INT64_MAX, true);
    std::vector<Tensor> made;
    for (const Tensor& t : tensors) {
      TORCH_CHECK(here(t), "this group takes tensors on the device, not on ", t.device());
      made.push_back(twin(t));
    }
    return made;
  }
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("tell", [](py::object call) { told = call.is_none() ? nullptr : new py::object(std::move(call)); });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { current_device = static_cast<Index>(device); });
  m.def("default_generator", [](int device) { return default_generator(static_cast<Index>(device)); });
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(std::move(gloo));
  });
}
