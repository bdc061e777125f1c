#include "device_engine.h"

#include <dlfcn.h>

namespace outrider {

namespace {

// Loads the backend's library from this library's folder. It is never unloaded, since threads of
// the driver may outlive a session.
const ModelTable& find_table(const std::string& backend) {
  const std::string name = "liboutrider_" + backend + "_engine.so";
  const std::string remedy = "Compile it next to liboutrider: make plugin TENSORRT_ROOT=<folder>";
  Dl_info here{};
  dladdr(reinterpret_cast<const void*>(&outrider_abi_version), &here);
  const std::string own = here.dli_fname != nullptr ? here.dli_fname : "";
  const std::string path = own.substr(0, own.rfind('/') + 1) + name;
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    fail(OUTRIDER_FAILED_BACKEND, std::string("the bundle needs ") + name + ": " + dlerror(), remedy);
  const auto get = reinterpret_cast<GetModelTable*>(dlsym(library, GET_MODEL_TABLE));
  const ModelTable* const table = get != nullptr ? get() : nullptr;
  if (table == nullptr || table->version != MODEL_TABLE)
    fail(OUTRIDER_FAILED_BACKEND, path + " belongs to another version of liboutrider", remedy);
  return *table;
}

void check(int32_t status, const outrider_failure& failure) {
  if (status != OUTRIDER_OK) fail(status, failure.cause, failure.remedy);
}

} // namespace

// The narrowest call has one token: GPU libraries choose kernels by width, so wider calls would not
// make results independent of it.
DeviceEngine::DeviceEngine(const std::string& backend, const std::string& folder,
                           const ModelFacts& facts, int32_t slot_count, int32_t widest,
                           int32_t buffers)
    : Engine(facts, slot_count, 1), table_(find_table(backend)) {
  const CompiledFacts& compiled = *facts.compiled;
  std::vector<CacheShape> caches = facts.keys;
  caches.insert(caches.end(), facts.values.begin(), facts.values.end());
  const std::string file = folder + "/" + facts.file;
  ModelSpec spec{};
  spec.file = file.c_str(), spec.dtype = facts.dtype.c_str();
  spec.targets = compiled.targets.c_str();
  spec.profiles = compiled.profiles.data(), spec.caches = caches.data();
  spec.profile_count = static_cast<int32_t>(compiled.profiles.size() / 3);
  spec.cache_count = static_cast<int32_t>(caches.size());
  spec.slots = slots, spec.vocab_size = vocab_size, spec.widest = widest, spec.buffers = buffers;
  spec.capacity = capacity, spec.chunk = chunk, spec.activations = compiled.activations;
  outrider_failure failure{};
  check(table_.open(&spec, &model_, &failure), failure);
}

DeviceEngine::~DeviceEngine() { table_.close(model_); }

float* DeviceEngine::compute(const EngineCall& call) {
  outrider_failure failure{};
  float* logits = nullptr;
  check(table_.compute(model_, &call, &logits, &failure), failure);
  return logits;
}

void DeviceEngine::wipe(int32_t slot) {
  outrider_failure failure{};
  check(table_.wipe(model_, slot, &failure), failure);
}

} // namespace outrider
