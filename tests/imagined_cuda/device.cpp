// An imagined CUDA device in a CPU build of torch: host memory that says it is cuda:0..7.
//
// Every operator reaches `fallback` on the CUDA dispatch key. It turns device tensors into aliases on the host, calls
// the CPU kernel, and notes a launch with what it reads and writes (clocks.h). Values are true and are there at once;
// what a GPU would do later, or in another order, is found by the clocks. Memory is counted by memory.h.
//
// It is loaded with ctypes before `import torch` (device.py), because torch makes its CUDA hooks once.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/function.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>
#include <unistd.h>
#include <unordered_map>
#include "memory.h"

// A CPU build of torch has no accelerator, and then autograd keeps no streams. Torch finds this function instead of its
// own. It answers once the device is there.
static bool is_there = false;
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) {
  return is_there ? std::optional(c10::DeviceType::CUDA) : std::nullopt;
}
}  // namespace at::accelerator

namespace {
using at::Tensor;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
using c10::Storage;
using c10::Stream;
using imagined::Block;
using imagined::device;
using imagined::kHost;
using imagined::memory;
using imagined::Site;
using Tensors = std::vector<Tensor>;
using Lock = std::lock_guard<std::mutex>;

constexpr int kDevices = 8;
thread_local DeviceIndex current = 0;
thread_local int current_stream = 0;  // torch's number of it, on whatever card: a process uses one
int visible = kDevices;  // cards that this process sees
pid_t owner = 0;  // the process that has begun to use them: a fork of it cannot

bool is_forked() { return owner && owner != getpid(); }

void check_process() {
  TORCH_CHECK(!is_forked(), "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
              "use the 'spawn' start method");
}

void check_card(DeviceIndex index) {
  if (index < visible) return;
  auto text = c10::str("CUDA error: invalid device ordinal (", int(index), ", and ", visible, " visible)");
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 101, text);
}

std::atomic<int> streams_made{0};
int number_of(const Stream& s) { return static_cast<int>(s.id()) + 1; }  // 0 is the host
int stream_now() { return current_stream + 1; }

// -- where in Python ------------------------------------------------------------------------------------------------

std::vector<std::string> own_files;  // of the imagined device, and Python's own folder: never named as a place
struct Code { std::string name; bool skipped; };
std::unordered_map<PyCodeObject*, Code> codes;
std::unordered_map<uint64_t, Site> forward_sites;  // by thread and autograd's sequence number

const Code& code_of(PyCodeObject* code) {
  auto found = codes.find(code);
  if (found != codes.end()) return found->second;
  Py_INCREF(code);
  std::string file = PyUnicode_AsUTF8(code->co_filename);
  bool installed = file.find("/site-packages/") != std::string::npos, skipped = file[0] == '<';
  for (const char* library : {"/torch/", "/typing_extensions.py"}) skipped |= file.find(library) != std::string::npos;
  for (auto& own : own_files) skipped |= file == own || (!installed && own.ends_with('/') && file.starts_with(own));
  auto cut = file.rfind('/');
  if (cut != std::string::npos && cut > 0) cut = file.rfind('/', cut - 1);
  return codes.emplace(code, Code{cut == std::string::npos ? file : file.substr(cut + 1), skipped}).first->second;
}

// The three innermost Python lines that are neither torch's nor ours.
std::string python_lines() {
  std::string found;
  if (!Py_IsInitialized()) return found;
  pybind11::gil_scoped_acquire gil;
  int names = 0;
  auto* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame && names < 3) {
    auto* code = PyFrame_GetCode(frame);
    if (auto& one = code_of(code); !one.skipped) {
      auto place = one.name + ":" + std::to_string(PyFrame_GetLineNumber(frame));
      if (!found.ends_with(place)) found += (names++ ? " < " : "") + place;  // a comprehension has a frame of its own
    }
    Py_DECREF(code);
    auto* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  return found;
}

// Those lines, or the forward's of a backward's operator.
Site site() {
  auto node = torch::autograd::get_current_node();
  std::string found = python_lines();
  Lock hold(device().mutex);
  if (node && found.empty()) {
    Site of = forward_sites[node->thread_id() << 40 | node->sequence_nr()];
    found = "backward (" + node->name() + ") of " + (of ? *of : "?");
  }
  Site place = &*device().sites.insert(found.empty() ? "?" : found).first;
  if (!node && at::GradMode::is_enabled())
    forward_sites[at::RecordFunction::currentThreadId() << 40 | (at::sequence_number::peek() - 1)] = place;
  return place;
}

// -- memory ---------------------------------------------------------------------------------------------------------

void give_back(void* context) {
  Lock hold(device().mutex);
  memory().free(static_cast<Block*>(context));
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    check_process();
    c10::Device home(DeviceType::CUDA, current);
    if (!bytes) return {nullptr, nullptr, &c10::detail::deleteNothing, home};
    Lock hold(device().mutex);
    auto* block = memory().allocate(bytes, stream_now());
    TORCH_CHECK_WITH(OutOfMemoryError, block, "CUDA out of memory (imagined). Tried to allocate ", bytes, " bytes; ",
                     memory().reserved, " of ", memory().capacity, " are in use");
    return {block->host, block, &give_back, home};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} allocator;

struct PinnedAllocator final : c10::Allocator {
  inline static std::map<const void*, Block*> blocks;  // by their first byte; under the device's mutex
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(DeviceType::CPU)};
    auto* data = static_cast<char*>(aligned_alloc(64, (bytes + 63) / 64 * 64));
    Lock hold(device().mutex);
    auto* block = blocks[data] = new Block{static_cast<int64_t>(bytes), kHost, data};
    return {data, block, &release, c10::Device(DeviceType::CPU)};
  }
  static void release(void* context) {
    Lock hold(device().mutex);
    auto* block = static_cast<Block*>(context);
    std::erase_if(device().arriving, [&](auto& one) { return find(one.low) == block; });
    blocks.erase(block->host);
    ::free(block->host);
    delete block;
  }
  static Block* find(const void* pointer) {
    auto after = blocks.upper_bound(pointer);
    if (after == blocks.begin()) return nullptr;
    auto* block = (--after)->second;
    return pointer < block->host + block->size ? block : nullptr;
  }
  static bool holds(const void* pointer) {
    Lock hold(device().mutex);
    return find(pointer);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} pinned_allocator;

// -- streams, events and the current device -------------------------------------------------------------------------

imagined::Clock clock_of(int stream) {
  Lock hold(device().mutex);
  return device().clock(stream);
}

void host_waits(const std::string& what, Site where, const imagined::Clock& until) {
  Lock hold(device().mutex);
  device().find("host wait", what, where, where);
  device().wait(kHost, until);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device before(DeviceType::CUDA, current);
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(DeviceType::CUDA, current); }
  void setDevice(c10::Device d) const override {
    check_card(d.index());
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.has_index()) current = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return visible; }
  Stream stream(c10::Device d, int id) const {
    return Stream(Stream::UNSAFE, c10::Device(DeviceType::CUDA, d.has_index() ? d.index() : current), id);
  }
  Stream getStream(c10::Device d) const override { return stream(d, current_stream); }
  Stream getDefaultStream(c10::Device d) const override { return stream(d, 0); }
  Stream getNewStream(c10::Device d, int) const override {
    check_process();
    return stream(d, ++streams_made);
  }
  Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    return stream(s.device(), std::exchange(current_stream, static_cast<int>(s.id())));
  }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new imagined::Event;
    Lock hold(device().mutex);
    *static_cast<imagined::Event*>(*event) = device().record(number_of(s));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<imagined::Event*>(event);
  }
  void block(void* event, const Stream& s) const override {
    if (!event) return;
    Lock hold(device().mutex);
    device().wait(number_of(s), static_cast<imagined::Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Lock hold(device().mutex);
    return device().query(*static_cast<imagined::Event*>(event));
  }
  bool queryStream(const Stream& s) const override {
    Lock hold(device().mutex);
    return device().query(device().record(number_of(s)));
  }
  void synchronizeStream(const Stream& s) const override {
    host_waits("stream.synchronize", site(), clock_of(number_of(s)));
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits("event.synchronize", site(), static_cast<imagined::Event*>(event)->clock);
  }
  void synchronizeDevice(const DeviceIndex) const override {
    imagined::Clock all;
    for (int stream = kHost; stream <= streams_made + 1; ++stream) imagined::merge(all, clock_of(stream));
    host_waits("torch.cuda.synchronize", site(), all);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    Lock hold(device().mutex);
    if (data.get_deleter() != &give_back) return;
    auto* block = static_cast<Block*>(data.get_context());
    if (number_of(s) != block->stream) block->recorded.push_back(number_of(s));
  }
};

// -- launches -------------------------------------------------------------------------------------------------------

// The host's addresses that a tensor reaches.
std::pair<char*, char*> bytes_of(const Tensor& t) {
  int64_t last = 0, size = t.element_size();
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  auto* low = static_cast<char*>(t.storage().mutable_data()) + t.storage_offset() * size;
  return {low, low + (last + 1) * size};
}

// Of memory that a card can use: its own and the host's pinned one. Under the device's mutex, as `access`.
Block* block_of(const Tensor& t) {
  if (!t.defined() || !t.has_storage() || !t.numel()) return nullptr;
  auto& data = t.storage().data_ptr();
  if (data.get_deleter() == &give_back) return static_cast<Block*>(data.get_context());
  return t.is_cpu() ? PinnedAllocator::find(data.get()) : nullptr;
}

void access(const Tensor& t, const std::string& op, int stream, uint32_t tick, bool write, Site where) {
  auto* block = block_of(t);
  if (!block) return;
  auto [low, high] = bytes_of(t);
  device().touch(block->accesses, {low - block->host, high - block->host, stream, tick, write, op, where});
}

// One launch: its reads and writes.
void launch(const std::string& op, const Tensors& reads, const Tensors& writes) {
  check_process();
  Site where = site();
  Lock hold(device().mutex);
  auto tick = device().launch(stream_now(), op);
  for (auto& t : reads) access(t, op, stream_now(), tick, false, where);
  for (auto& t : writes) access(t, op, stream_now(), tick, true, where);
}

// The host reads or writes by itself.
void host_touches(const Tensor& t, const std::string& op, bool write) {
  if (!t.is_cpu() || !t.has_storage() || !PinnedAllocator::holds(t.storage().data())) return;
  Site where = site();
  Lock hold(device().mutex);
  access(t, op, kHost, 0, write, where);
}

// -- random numbers -------------------------------------------------------------------------------------------------

// A card's own: as Philox's, its state is a seed and an offset, and every launch that draws moves the offset on.
struct CardGenerator final : c10::GeneratorImpl {
  uint64_t state[2] = {c10::default_rng_seed_val, 0};

  explicit CardGenerator(DeviceIndex index)
      : GeneratorImpl(c10::Device(DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  static DeviceType device_type() { return DeviceType::CUDA; }
  void set_current_seed(uint64_t seed) override { state[0] = seed, state[1] = 0; }
  void set_offset(uint64_t offset) override { state[1] = offset; }
  uint64_t current_seed() const override { return state[0]; }
  uint64_t get_offset() const override { return state[1]; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return state[0];
  }
  void set_state(const c10::TensorImpl& from) override {
    TORCH_CHECK(from.device().is_cpu() && from.numel() * from.itemsize() == sizeof state, "RNG state is wrong size");
    memcpy(state, from.data(), sizeof state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto into = at::detail::empty_cpu({sizeof state}, at::kByte);
    memcpy(into.mutable_data_ptr(), state, sizeof state);
    return into.getIntrusivePtr();
  }
  CardGenerator* clone_impl() const override {
    auto* made = new CardGenerator(device_.index());
    memcpy(made->state, state, sizeof state);
    return made;
  }
  uint32_t of_launch() {  // from which a CPU's kernel draws
    Lock hold(mutex_);
    uint64_t x = state[0] * 0x9e3779b97f4a7c15 + state[1] * 0xbf58476d1ce4e5b9;
    state[1] += 4;
    x = (x ^ (x >> 31)) * 0x94d049bb133111eb;
    return x >> 32;
  }
};

const at::Generator& generator_of(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kDevices; ++i) made->push_back(at::make_generator<CardGenerator>(i));
    return made;
  }();
  return (*all)[index < 0 ? current : index];
}

// While it lives, CPU kernels draw from a card's generator.
struct Drawing {
  explicit Drawing(const at::Generator& card) {
    cpu.set_current_seed(at::check_generator<CardGenerator>(card)->of_launch());
  }
  ~Drawing() { cpu.set_state(before); }

 private:
  inline static std::mutex one_at_a_time;
  Lock hold{one_at_a_time};
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  Tensor before = cpu.get_state();
};

// -- device tensors as host tensors, and back -----------------------------------------------------------------------

// A tensor like another one, in a storage on the host or on a card.
Tensor tensor_in(Storage storage, c10::DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (like.is_neg()) made._set_neg(true);
  if (like.is_conj()) made._set_conj(true);
  return made;
}

Storage storage_of(size_t bytes, c10::DataPtr data, c10::Allocator* of) {
  auto size = c10::StorageImpl::use_byte_size_t();
  return Storage(c10::make_intrusive<c10::StorageImpl>(size, bytes, std::move(data), of, true));
}

// New memory for a card's storage, with what is given or what it held.
void renew(c10::StorageImpl* storage, size_t bytes, const void* from, size_t held) {
  auto data = allocator.allocate(bytes);
  if (size_t both = from ? std::min(bytes, held) : 0) memcpy(data.get(), from, both);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

void let_go(void* storage) { delete static_cast<Storage*>(storage); }

// On the host, in the memory of a card's storage, which it keeps.
Storage alias_of(const Storage& storage) {
  c10::DataPtr data(storage.mutable_data(), new Storage(storage), &let_go, c10::Device(DeviceType::CPU));
  return storage_of(storage.nbytes(), std::move(data), c10::GetAllocator(DeviceType::CPU));
}

struct Call {
  std::unordered_map<c10::StorageImpl*, Storage> aliases;  // by the card's storage
  std::unordered_map<c10::TensorImpl*, Tensor> stands_for;  // host tensor -> the card's that it was made of
  bool trained = false;  // whether an argument was not made under inference_mode
  bool fresh = false;  // whether a result has memory of its own

  Tensor host(const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    auto& alias = aliases[t.storage().unsafeGetStorageImpl()];
    if (!alias) alias = alias_of(t.storage());
    trained |= !t.is_inference();
    auto made = tensor_in(alias, c10::DispatchKey::CPU, t);
    stands_for.emplace(made.unsafeGetTensorImpl(), t);
    return made;
  }

  Tensor back(const Tensor& t) {
    if (!t.defined() || t.device().type() != DeviceType::CPU) return t;
    auto same = stands_for.find(t.unsafeGetTensorImpl());
    if (same != stands_for.end()) return resized(same->second, t);
    auto& data = t.storage().data_ptr();
    if (data.get_deleter() == &let_go) {
      std::optional<c10::InferenceMode> as_its_base;  // a view is an inference tensor if its base is one
      if (trained) as_its_base.emplace(false);
      return tensor_in(*static_cast<Storage*>(data.get_context()), c10::DispatchKey::CUDA, t);
    }
    fresh = true;
    size_t bytes = t.storage().nbytes();
    auto storage = storage_of(bytes, allocator.allocate(bytes), &allocator);
    if (bytes && data) memcpy(storage.mutable_data(), data.get(), bytes);
    return tensor_in(std::move(storage), c10::DispatchKey::CUDA, t);
  }

  // A tensor that the kernel was given, and may have resized.
  const Tensor& resized(const Tensor& mine, const Tensor& host) {
    auto *theirs = host.storage().unsafeGetStorageImpl(), *own = mine.storage().unsafeGetStorageImpl();
    if (theirs->data() != own->data() || theirs->nbytes() != own->nbytes())
      renew(own, theirs->nbytes(), theirs->data(), theirs->nbytes());
    if (mine.sizes() != host.sizes() || mine.strides() != host.strides())
      mine.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    return mine;
  }

  template <class F>
  static IValue each(const IValue& value, F change) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> all;
      for (const Tensor& t : value.toTensorVector()) all.push_back(change(t));
      return all;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> all;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        all.push_back(t ? std::optional<Tensor>(change(*t)) : std::nullopt);
      return all;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(DeviceType::CPU);
    return value;
  }
};

Tensors tensors_in(const IValue& value) {
  Tensors all;
  Call::each(value, [&](const Tensor& t) { all.push_back(t); return t; });
  return all;
}

// What an operator reads and what it writes of its arguments, the last ones of the stack.
std::pair<Tensors, Tensors> accesses(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  Tensors reads, writes;
  auto argument = stack.end() - schema.arguments().size();
  for (auto& parameter : schema.arguments()) {
    auto& into = parameter.alias_info() && parameter.alias_info()->isWrite() ? writes : reads;
    for (auto& t : tensors_in(*argument++))
      if (t.defined()) into.push_back(t);
  }
  return {reads, writes};
}

// -- operators ------------------------------------------------------------------------------------------------------

// The host waits for these before it can go on; of the last ones, it needs the size of the result.
const std::map<std::string, std::string> kWaits{
    {"aten::_local_scalar_dense", "item"}, {"aten::equal", "equal"}, {"aten::nonzero", "nonzero"},
    {"aten::masked_select", "masked_select"}, {"aten::_unique2", "unique"}, {"aten::unique_dim", "unique"},
    {"aten::unique_consecutive", "unique"}, {"aten::bincount", "bincount"},
    {"aten::repeat_interleave", "repeat_interleave without output_size"}};
// These launch nothing.
const std::set<std::string> kNoLaunch{"aten::empty", "aten::empty_strided", "aten::resize_", "aten::is_set_to",
                                      "aten::_has_same_storage_numel"};

bool by_mask(const std::string& name, const std::vector<IValue>& arguments) {
  if (name.rfind("aten::index", 0) != 0 && name.rfind("aten::_index_put", 0) != 0) return false;
  auto number = name == "aten::index" || !arguments[2].isTensor() ? Tensor() : arguments[2].toTensor();
  bool fills = number.defined() && number.is_cpu() && number.numel() == 1;  // by the mask, as torch does
  for (auto& one : arguments)
    if (one.isOptionalTensorList() || one.isTensorList())
      for (auto& t : tensors_in(one))
        if (t.defined() && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte)) return !fills;
  return false;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto& parameters = schema.arguments();
  std::string name = schema.name();
  size_t begin = stack->size() - parameters.size();
  std::vector<IValue> arguments(stack->begin() + begin, stack->end());
  auto [reads, writes] = accesses(schema, *stack);
  DeviceIndex index = current;
  for (auto& one : arguments)
    if (one.isDevice() && one.toDevice().has_index()) index = one.toDevice().index();
  for (auto* all : {&writes, &reads})
    for (auto& t : *all)
      if (t.is_cuda()) index = t.device().index();
  c10::DeviceGuard guard(c10::Device(DeviceType::CUDA, index));

  Call call;
  std::optional<Drawing> drawing;
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& slot = (*stack)[begin + i];
    bool pins = parameters[i].name() == "pin_memory" && slot.isBool();
    slot = pins ? IValue(false) : Call::each(arguments[i], [&](const Tensor& t) { return call.host(t); });
    if (parameters[i].name() != "generator") continue;
    drawing.emplace(slot.isNone() ? generator_of(index) : slot.toGenerator());
    slot = IValue();
  }
  if (!drawing && op.hasTag(at::Tag::nondeterministic_seeded)) drawing.emplace(generator_of(index));
  auto waits = kWaits.find(name);
  if (name == "aten::repeat_interleave" && !arguments.back().isNone()) waits = kWaits.end();
  bool masked = by_mask(name, arguments);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  drawing.reset();
  Tensors results;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& slot = (*stack)[i];
    slot = Call::each(slot, [&](const Tensor& t) { return call.back(t); });
    for (auto& t : tensors_in(slot)) results.push_back(t);
  }
  bool view = writes.empty() && !call.fresh && !results.empty();
  if (view || kNoLaunch.count(name)) return;
  if (writes.empty()) writes = results;
  launch(name, reads, writes);
  auto until = clock_of(stream_now());
  if (waits != kWaits.end()) host_waits(waits->second, site(), until);
  if (masked) host_waits("an index by a mask", site(), until);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  bool arrives = !self.is_cuda(), leaves = !source.is_cuda();
  auto& there = arrives ? self : source;  // on the host, unless both lie on cards
  c10::DeviceGuard guard((arrives ? source : self).device());
  Call call;
  auto to = call.host(self), from = call.host(source);
  auto show = [&](bool shown) {
    Lock hold(device().mutex);
    if (!leaves || device().arriving.empty() || !source.numel()) return;
    auto [low, high] = bytes_of(source);
    device().show(low, high, stream_now(), shown);
  };
  show(true);
  {
    c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::CUDA);
    at::native::copy_(to, from, non_blocking);
  }
  show(false);
  launch("aten::copy_", {source}, {self});
  if (!arrives && !leaves) return self;
  const char* what = arrives ? "copy to the host" : "copy from the host";
  Site where = site();
  bool is_pinned = !there.numel() || PinnedAllocator::holds(there.data_ptr());
  if (!is_pinned) {
    Lock hold(device().mutex);
    device().find("pageable copy", std::string(what) + (non_blocking ? ", said to be non_blocking" : ""), where, where);
  }
  if (!non_blocking || (!is_pinned && arrives)) {
    host_waits(what, where, clock_of(stream_now()));
  } else if (arrives && there.numel() && there.is_contiguous()) {
    auto [low, high] = bytes_of(there);
    Lock hold(device().mutex);
    auto tick = imagined::at(device().clock(stream_now()), stream_now());
    device().arriving.push_back({low, {low, high}, stream_now(), tick});
    memset(low, 0xff, high - low);
  }
  return self;
}

void record_stream(Tensor& self, Stream stream) {
  if (self.has_storage()) Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// Operators on host tensors alone; what they see of pinned memory, while copies may still read or write it. Views touch
// nothing.
void host_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::TESTING_ONLY_GenericMode);
  if (PinnedAllocator::blocks.empty()) return op.callBoxed(stack);
  auto& schema = op.schema();
  bool touches = true;
  for (auto& one : schema.returns()) touches = touches && !(one.alias_info() && !one.alias_info()->isWrite());
  auto [reads, writes] = accesses(schema, *stack);
  for (auto* all : {&reads, &writes})
    for (auto& t : *all) touches = touches && !t.is_cuda();
  for (auto* all : {&reads, &writes})
    for (auto& t : *all)
      if (touches) host_touches(t, schema.name(), all == &writes);
  op.callBoxed(stack);
}
}  // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {  // torch looks for this name
  CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  bool isAvailable() const override { return true; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return std::exchange(current, d); }
  bool isPinnedPtr(const void* p) const override { return PinnedAllocator::holds(p); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const Generator& getDefaultGenerator(DeviceIndex d) const override { return generator_of(d); }
  Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<CardGenerator>(d < 0 ? current : d);
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace c10d {
struct NoTimer : Timer {  // DDP asks for one on CUDA; there is no time here
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, NoTimer)
}  // namespace c10d

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&host_operator>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  // One kernel each on a GPU, and elsewhere a loop.
  for (auto& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("aten::_foreach", 0) == 0 || op.name == "aten::_grouped_mm")
      m.impl((op.name + (op.overload_name.empty() ? "" : "." + op.overload_name)).c_str(),
             torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("copy_", copy_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("record_stream", record_stream);
}

// -- for device.py and nccl.py --------------------------------------------------------------------------------------

void resize_storage(pybind11::object object, int64_t bytes) {
  auto* storage = THPStorage_Unpack(object.ptr()).unsafeGetStorageImpl();
  c10::DeviceGuard guard(storage->device());
  renew(storage, bytes, storage->data(), storage->nbytes());
}

std::vector<std::tuple<std::string, std::string, std::string, std::string, int>> findings() {
  Lock hold(device().mutex);
  decltype(findings()) all;
  for (auto& [what, count] : device().findings) {
    auto& [kind, text, first, second] = what;
    all.emplace_back(kind, text, *first, *second, count);
  }
  return all;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  is_there = true;
  c10::SetAllocator(DeviceType::CUDA, &allocator);
  m.def("begin", [](std::vector<std::string> files) { own_files = std::move(files); });
  m.def("watch", [] {  // this thread's operators on the host
    c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::TESTING_ONLY_GenericMode, true);
  });
  m.def("resize_storage", &resize_storage);
  m.def("host_alias", [](const Tensor& t) { return tensor_in(alias_of(t.storage()), c10::DispatchKey::CPU, t); });
  m.def("host_read", [](const Tensor& t, const std::string& op) { host_touches(t, op, false); });
  m.def("launch", &launch);
  m.def("find", [](const std::string& kind, const std::string& text) {
    Site where = site();
    Lock hold(device().mutex);
    device().find(kind, text, where, where);
  });
  m.def("site", [] { return *site(); });
  m.def("findings", &findings);
  m.def("launches", [] { Lock hold(device().mutex); return device().launches; });
  m.def("memory", [] {
    Lock hold(device().mutex);
    auto& now = memory();
    return std::map<std::string, int64_t>{
        {"allocated", now.allocated}, {"peak", now.peak}, {"reserved", now.reserved}, {"capacity", now.capacity}};
  });
  m.def("reset_peak", [] { Lock hold(device().mutex); memory().peak = memory().allocated; });
  m.def("generator", &generator_of);
  m.def("own_cards", [](int cards) { owner = getpid(), visible = cards; });
  m.def("is_forked", &is_forked);
  m.def("visible_cards", [] { return visible; });
  m.def("set_lag", [](uint64_t launches) { Lock hold(device().mutex); device().lag = launches; });
  m.def("fail_allocation", [](int64_t from_now) {
    Lock hold(device().mutex);
    memory().fail_at = memory().allocations + from_now;
  });
  m.def("set_capacity", [](int64_t bytes) { Lock hold(device().mutex); memory().capacity = bytes; });
}
