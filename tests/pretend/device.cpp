// A device that behaves towards PyTorch as an accelerator does, for tests on machines without one.
//
// Its memory is a CPU storage that no code outside of this file can reach: a tensor on the device has a storage of its
// own, whose context holds the CPU storage behind it. Every operator runs as the CPU's kernel on aliases of its arguments;
// what the kernel returns becomes a tensor on the device, a view where it shares memory. What the host would have to wait
// for on an accelerator is told to Python, by name. Copies between the device and pinned memory that do not block are done
// when somebody waits for them, and until then their destination on the host holds NaN, or the largest integer.
//
// Operators run at once, whatever their stream. That one stream waits for another where it must is checked by vector
// clocks, as torch.cuda._sanitizer does: each access to memory must come after the last write of any other stream, each
// write after all reads, and memory must not be freed while a stream that its allocator does not know of still uses it.
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

struct Task {
  int64_t number;
  std::function<void()> on_device;  // what the stream does before its next operator; empty once it is done
  std::function<void()> on_host;    // what the host sees only after it has waited; may be empty
  std::function<bool()> ready;      // false while something else, such as an exchange, is not done
};
std::map<int64_t, std::deque<Task>> queues;  // by stream
int64_t tasks = 0, streams = 0;
thread_local Index current_device = 0;
thread_local int64_t current_stream = 0;

// The tasks of a stream up to a number, or only what its operators would see.
void finish(int64_t stream, int64_t upto = INT64_MAX, bool only_on_device = false) {
  while (true) {
    std::function<void()> run;
    {  // which is not held while it runs: the interpreter may be needed then, and its holder may want the lock
      Locked held(lock);
      auto& queue = queues[stream];
      auto at = std::find_if(queue.begin(), queue.end(), [&](auto& task) { return task.on_device || !only_on_device; });
      if (at == queue.end() || at->number > upto) return;
      if (at->on_device) std::swap(run, at->on_device);
      else std::swap(run, at->on_host);
      if (!at->on_host) queue.erase(at);
    }
    if (run) run();
  }
}

// What a stream does now, and what the host sees later. It is postponed while the stream waits for something else.
void enqueue(std::function<void()> on_device, std::function<void()> on_host = {}, std::function<bool()> ready = {}) {
  bool now;
  {
    Locked held(lock);
    auto& queue = queues[current_stream];
    queue.push_back({++tasks, std::move(on_device), std::move(on_host), std::move(ready)});
    now = std::all_of(queue.begin(), queue.end(), [](auto& task) { return !task.on_device || !task.ready || task.ready(); });
  }
  if (now) finish(current_stream, INT64_MAX, true);
}

void finish_all() {
  for (int64_t stream = 0; stream <= streams; ++stream) finish(stream);
}

// ---- The order of streams

using Clock = std::map<int64_t, int64_t>;  // by stream
std::map<int64_t, Clock> clocks;
Clock host;
std::vector<std::string> problems;

struct Uses {  // of a storage
  int64_t allocated = 0, writer = -1, written = 0;
  Clock reads;
  std::set<int64_t> known;  // streams that its allocator knows of
};
std::unordered_map<StorageImpl*, Uses> uses;  // by the storage behind it

void merge(Clock& into, const Clock& from) {
  for (auto& [stream, time] : from) into[stream] = std::max(into[stream], time);
}

bool follows(int64_t stream, int64_t other, int64_t time) { return stream == other || clocks[stream][other] >= time; }

int64_t tick(int64_t stream) {
  Locked held(lock);
  merge(clocks[stream], host);
  return ++clocks[stream][stream];
}

void host_waited(const Clock& clock) { Locked held(lock); merge(host, clock); }
void host_waited(int64_t stream) { Locked held(lock); merge(host, clocks[stream]); }

void use(StorageImpl* storage, bool writes, int64_t stream, const std::string& what) {
  Locked held(lock);
  auto& u = uses[storage];
  const int64_t time = clocks[stream][stream];
  if (u.writer >= 0 && !follows(stream, u.writer, u.written))
    problems.push_back(what + ": does not wait for the stream that wrote its argument");
  if (!writes) { u.reads[stream] = time; return; }
  for (auto& [other, read] : u.reads)
    if (!follows(stream, other, read)) problems.push_back(what + ": overwrites what another stream may not have read yet");
  u.reads.clear();
  u.writer = stream;
  u.written = time;
}

void freed(StorageImpl* storage) {
  Locked held(lock);
  auto found = uses.find(storage);
  if (found == uses.end()) return;
  Uses& u = found->second;
  auto still = [&](int64_t stream, int64_t time) {
    return !u.known.count(stream) && !follows(u.allocated, stream, time) && !(host[stream] >= time);
  };
  bool early = u.writer >= 0 && still(u.writer, u.written);
  for (auto& [stream, time] : u.reads) early = early || still(stream, time);
  if (early) problems.push_back("memory is freed while a stream that its allocator does not know of may use it");
  uses.erase(found);
}

struct Event { int64_t stream, upto; int asked; Clock clock; };

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
    tick(s.id());
    *event = new Event{s.id(), tasks, 0, clocks[s.id()]};
  }
  void block(void* event, const c10::Stream& s) const override {
    auto* e = static_cast<Event*>(event);
    if (e == nullptr) return;
    finish(e->stream, e->upto, true);
    Locked held(lock);
    merge(clocks[s.id()], e->clock);
  }
  bool queryEvent(void* event) const override {  // not yet, for whoever asks first
    auto* e = static_cast<Event*>(event);
    if (e == nullptr) return true;
    if (e->asked++ > 0 && std::all_of(queues[e->stream].begin(), queues[e->stream].end(), [](auto& task) { return !task.ready || task.ready(); }))
      finish(e->stream, e->upto);
    Locked held(lock);
    const bool done = queues[e->stream].empty() || queues[e->stream].front().number > e->upto;
    if (done) merge(host, e->clock);
    return done;
  }
  void synchronizeEvent(void* event) const override {
    waits("event.synchronize");
    if (auto* e = static_cast<Event*>(event)) { finish(e->stream, e->upto); host_waited(e->clock); }
  }
  bool queryStream(const c10::Stream& s) const override { Locked held(lock); return queues[s.id()].empty(); }
  void synchronizeStream(const c10::Stream& s) const override { waits("stream.synchronize"); finish(s.id()); host_waited(s.id()); }
  void synchronizeDevice(const Index) const override { waits("synchronize"); finish_all(); for (int64_t s = 0; s <= streams; ++s) host_waited(s); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    Locked held(lock);
    uses[static_cast<c10::Storage*>(data.get_context())->unsafeGetStorageImpl()].known.insert(s.id());
  }

 private:
  static Device at(Device d) { return d.has_index() ? d : Device(TYPE, current_device); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- Memory

std::unordered_map<StorageImpl*, c10::weak_intrusive_ptr<StorageImpl>> on_device;  // by the storage behind it

void forget(void* context) {
  auto* behind = static_cast<c10::Storage*>(context);
  freed(behind->unsafeGetStorageImpl());
  { Locked held(lock); on_device.erase(behind->unsafeGetStorageImpl()); }
  delete behind;
}

c10::DataPtr pointer(const c10::Storage& behind, Index device) {
  {
    Locked held(lock);
    auto [at, made] = uses.try_emplace(behind.unsafeGetStorageImpl());
    if (made) at->second = {current_stream, current_stream, clocks[current_stream][current_stream], {}, {}};
  }
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
StorageImpl* storage_of(const Tensor& t) { return behind(t.storage()).unsafeGetStorageImpl(); }
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
  tick(current_stream);
  bool waiting = SIZE_DEPENDS.count(name) > 0, writes = false;
  auto to_cpu = [&](const Tensor& t) -> Tensor {
    if (!t.defined()) return t;
    if (here(t)) use(storage_of(t), writes, current_stream, name);
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
    auto* alias = schema.arguments()[k].alias_info();
    writes = alias != nullptr && alias->isWrite();
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
  if (waiting) { waits(name); host_waited(current_stream); }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [t, cpu] : aliases) follow(t, cpu);
  auto back = [&](const Tensor& cpu) -> Tensor {
    for (auto& [t, alias] : aliases) if (alias.is_same(cpu)) return t;
    return wrapped(cpu, device);  // whose storage is new, or one of those that were used
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
  const bool to_device = !here(from);
  tick(current_stream);
  if (here(from)) use(storage_of(from), false, current_stream, "copy");
  if (here(to)) use(storage_of(to), true, current_stream, "copy");
  if (here(from) && here(to)) {
    finish(current_stream, INT64_MAX, true);
    target.copy_(source);
  } else if (to_device && non_blocking && is_pinned(from)) {
    Tensor value = source.clone();
    Locked held(lock);
    queues[current_stream].push_back({++tasks, [=]() mutable {
      auto now = source.contiguous(), then = value.contiguous();
      TORCH_CHECK(std::memcmp(now.const_data_ptr(), then.const_data_ptr(), now.nbytes()) == 0, "a pinned source was overwritten before its copy was done");
      target.copy_(value);
    }, {}, {}});
  } else if (!to_device && non_blocking && is_pinned(to)) {
    if (target.is_floating_point() || target.is_complex()) target.fill_(NAN);
    else if (target.scalar_type() == at::kBool) target.fill_(true);
    else target.fill_(target.scalar_type() == at::kByte ? 255 : target.scalar_type() == at::kChar ? 127 : 32767);
    auto value = std::make_shared<Tensor>();
    enqueue([=] { *value = source.clone(); }, [=]() mutable { target.copy_(*value); });
  } else {
    finish(current_stream, INT64_MAX, true);
    if (!to_device || !non_blocking) { waits(to_device ? "copy to the device" : "copy to the host"); host_waited(current_stream); }
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
  tick(current_stream);
  use(storage_of(t), false, current_stream, "item");
  finish(current_stream, INT64_MAX, true);
  host_waited(current_stream);
  return at::_local_scalar_dense(twin(t));
}

void reads(std::initializer_list<Tensor> tensors, const std::string& what) {
  tick(current_stream);
  for (const Tensor& t : tensors) if (here(t)) use(storage_of(t), false, current_stream, what);
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  finish(current_stream, INT64_MAX, true);
  reads({input, weight, bias ? *bias : Tensor()}, "convolution");
  std::optional<Tensor> b = bias && bias->defined() ? std::optional<Tensor>(twin(*bias)) : std::nullopt;
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
  return wrapped(at::convolution_symint(twin(input), twin(weight), b, stride, padding, dilation, transposed, output_padding, groups), input.device().index());
}

bool rounds = false;  // gradients of kernels, as cuDNN does by default; here all in one direction

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  finish(current_stream, INT64_MAX, true);
  reads({grad, input, weight}, "convolution_backward");
  auto channels = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
  auto [x, w, b] = at::convolution_backward_symint(
      twin(grad), twin(input), twin(weight), c10::SymIntArrayRef(&channels, 1), stride, padding, dilation, transposed, output_padding, groups, mask);
  auto device = input.device().index();
  if (rounds) w = w * 1.0005;
  return {wrapped(x, device), wrapped(w, device), wrapped(b, device)};
}

void record_stream(Tensor& t, c10::Stream s) {
  Locked held(lock);
  uses[behind(t.storage()).unsafeGetStorageImpl()].known.insert(s.id());
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0), mask};
}

// Recurrent layers call these, which only accelerators have.

using Maybe = std::optional<Tensor>;
Tensor plus(const Tensor& gates, const Maybe& bias) { return bias && bias->defined() ? gates + *bias : gates; }
Tensor summed(const Tensor& grad, bool has_bias) { return has_bias ? grad.sum(0) : Tensor(); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& of_input, const Tensor& of_hidden, const Tensor& cx, const Maybe& b1, const Maybe& b2) {
  auto gates = (plus(of_input, b1) + plus(of_hidden, b2)).chunk(4, 1);
  auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx, const Tensor& cy, const Tensor& kept, bool has_bias) {
  auto gates = kept.chunk(4, 1);
  auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  auto t = cy.tanh(), gh = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  auto gc = gh * o * (1 - t * t);
  if (grad_cy && grad_cy->defined()) gc = gc + *grad_cy;
  auto all = at::cat({gc * g * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - g * g), gh * t * o * (1 - o)}, 1);
  return {all, gc * f, summed(all, has_bias)};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& of_input, const Tensor& of_hidden, const Tensor& hx, const Maybe& b1, const Maybe& b2) {
  auto a = plus(of_input, b1).chunk(3, 1), h = plus(of_hidden, b2).chunk(3, 1);
  auto r = (a[0] + h[0]).sigmoid(), z = (a[1] + h[1]).sigmoid(), n = (a[2] + r * h[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& kept, bool has_bias) {
  auto parts = kept.chunk(5, 1);
  auto &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &h = parts[4];
  auto gz = grad * (hx - n) * z * (1 - z), gn = grad * (1 - z) * (1 - n * n), gr = gn * h * r * (1 - r);
  auto of_input = at::cat({gr, gz, gn}, 1), of_hidden = at::cat({gr, gz, gn * r}, 1);
  return {of_input, of_hidden, grad * z, summed(of_input, has_bias), summed(of_hidden, has_bias)};
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
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
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

// ---- Collectives: gloo's, on what is behind the tensors, on a stream of their own

struct Exchange final : c10d::Work {
  Exchange(c10::intrusive_ptr<c10d::Work> gloo, int64_t stream, std::vector<Tensor> tensors)
      : gloo_(std::move(gloo)), clock_(clocks[stream]), tensors_(std::move(tensors)) {}
  bool isCompleted() override { return gloo_->isCompleted(); }
  bool isSuccess() const override { return gloo_->isSuccess(); }
  std::exception_ptr exception() const override { return gloo_->exception(); }
  bool wait(std::chrono::milliseconds timeout) override {  // the stream waits, the host does not
    { Locked held(lock); merge(clocks[current_stream], clock_); }
    enqueue([gloo = gloo_] { try { gloo->wait(); } catch (...) {} /* a device has no exceptions */ }, {}, [gloo = gloo_] { return gloo->isCompleted(); });
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    { Locked held(lock); merge(clocks[current_stream], clock_); }
    return gloo_->getFuture()->then(
        [tensors = tensors_](c10::ivalue::Future& done) { done.value(); return IValue(tensors); },
        c10::ListType::create(c10::TensorType::get()));
  }

 private:
  c10::intrusive_ptr<c10d::Work> gloo_;
  Clock clock_;
  std::vector<Tensor> tensors_;
};

struct Collectives final : c10d::Backend {
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {
    Locked held(lock);
    stream_ = ++streams;
  }
  const std::string getBackendName() const override { return "pretend"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& t, const c10d::AllreduceOptions& o) override {
    auto a = taken(t, true);
    return begun(gloo_->allreduce(a, o), t);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& t, const c10d::BroadcastOptions& o) override {
    auto a = taken(t, true);
    return begun(gloo_->broadcast(a, o), t);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<Tensor>>& to, std::vector<Tensor>& t, const c10d::AllgatherOptions& o) override {
    std::vector<std::vector<Tensor>> all;
    for (auto& each : to) all.push_back(taken(each, true));
    auto a = taken(t, false);
    return begun(gloo_->allgather(all, a, o), to.at(0));
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override { return gloo_->barrier(o); }

 private:
  std::vector<Tensor> taken(const std::vector<Tensor>& tensors, bool writes) {
    finish(current_stream, INT64_MAX, true);
    std::vector<Tensor> made;
    Locked held(lock);
    ::merge(clocks[stream_], clocks[current_stream]);
    tick(stream_);
    for (const Tensor& t : tensors) {
      TORCH_CHECK(here(t), "this group takes tensors on the device, not on ", t.device());
      use(storage_of(t), writes, stream_, "exchange");
      uses[storage_of(t)].known.insert(stream_);
      made.push_back(twin(t));
    }
    return made;
  }
  c10::intrusive_ptr<c10d::Work> begun(c10::intrusive_ptr<c10d::Work> work, const std::vector<Tensor>& tensors) {
    Locked held(lock);
    return c10::make_intrusive<Exchange>(std::move(work), stream_, tensors);
  }
  c10::intrusive_ptr<c10d::Backend> gloo_;
  int64_t stream_;
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("tell", [](py::object call) { told = call.is_none() ? nullptr : new py::object(std::move(call)); });
  m.def("round_convolutions", [](bool yes) { rounds = yes; });
  m.def("problems", [] { Locked held(lock); return std::exchange(problems, {}); });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { current_device = static_cast<Index>(device); });
  m.def("default_generator", [](int device) { return default_generator(static_cast<Index>(device)); });
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(std::move(gloo));
  });
}
