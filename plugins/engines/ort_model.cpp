#include "ort_model.h"

#include <dlfcn.h>
#include <stdlib.h>

#include <algorithm>
#include <cctype>

#include "outrider_operator.h"

namespace ort {

namespace {

using outrider::fail;

const char PATH_REMEDY[] =
    "Give the path of libonnxruntime.so: python -m outrider.cmake --onnxruntime prints it";

// The message's first line without its full stop, and the second line if the first ends in a colon.
std::string first_line(const std::string& message) {
  const size_t end = message.find('\n');
  std::string line = message.substr(0, end);
  if (!line.empty() && line.back() == ':' && end != std::string::npos)
    line += " " + message.substr(end + 1, message.find('\n', end + 1) - end - 1);
  while (!line.empty() && (line.back() == '.' || line.back() == ':')) line.pop_back();
  return line.substr(0, 200);
}

bool out_of_memory(std::string message) {
  std::transform(message.begin(), message.end(), message.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const char* word : {"bad_alloc", "allocate", "out of memory", "failed to map segment"})
    if (message.find(word) != std::string::npos) return true;
  return false;
}

template <class Release, class Made> Owned<Made, Release> owned(const Api* api, Made* made) {
  return Owned<Made, Release>(made, {api});
}

} // namespace

Library::Library(const char* path) : environment(nullptr, {nullptr}), memory(nullptr, {nullptr}) {
  const auto non_empty = [](const char* name) {
    return name != nullptr && *name != '\0' ? name : nullptr;
  };
  path = non_empty(path) ? path : non_empty(getenv("OUTRIDER_ONNXRUNTIME"));
  setenv("ORT_DISABLE_TELEMETRY", "1", 0); // otherwise it writes a device id to the home folder
  const auto load = [](const char* name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL); };
  void* library = load(path != nullptr ? path : "libonnxruntime.so.1");
  if (library == nullptr && path == nullptr) library = load("libonnxruntime.so");
  if (library == nullptr)
    fail(OUTRIDER_FAILED_BACKEND, "ONNX Runtime cannot be loaded: " + first_line(dlerror()),
         PATH_REMEDY);
  const auto get = reinterpret_cast<const ApiBase* (*)()>(dlsym(library, "OrtGetApiBase"));
  if (get == nullptr)
    fail(OUTRIDER_FAILED_BACKEND, std::string(path ? path : "the library") + " is not ONNX Runtime",
         PATH_REMEDY);
  const ApiBase* const base = get();
  version = base->version();
  api = base->get(API_VERSION);
  if (api == nullptr)
    fail(OUTRIDER_FAILED_BACKEND, "ONNX Runtime " + version + " is too old", "Use 1.24 or newer");
  Environment* made = nullptr;
  check(call<CreateEnvironment>(api, 4, "outrider", &made), "starting up"); // 4: log fatal errors
  environment = owned<ReleaseEnvironment>(api, made);
  MemoryInfo* info = nullptr;
  check(call<CreateCpuMemory>(api, 1, 0, &info), "describing the CPU's memory"); // arena, default
  memory = owned<ReleaseMemory>(api, info);
}

void Library::check(Status* status, const std::string& what) const {
  if (status == nullptr) return;
  const std::string message = call<GetMessage>(api, status);
  call<ReleaseStatus>(api, status);
  if (out_of_memory(message))
    fail(OUTRIDER_FAILED_MEMORY, "not enough memory for " + what,
         "Free some memory, or use a bundle of a smaller checkpoint, or with fewer SLOTS or smaller "
         "WEIGHTS");
  fail(OUTRIDER_FAILED_BACKEND,
       "ONNX Runtime " + version + " failed on " + what + ": " + first_line(message),
       "Build the bundle again; if the error persists, use the ONNX Runtime it was built with");
}

size_t bytes_of(int type) {
  return type == INT64 ? 8 : type == FLOAT ? 4 : type == INT8 || type == UINT8 ? 1 : 2;
}

int type_of(const std::string& dtype) {
  if (dtype == "float32") return FLOAT;
  if (dtype == "float16") return FLOAT16;
  if (dtype == "int8") return INT8;
  if (dtype == "bfloat16") return BFLOAT16;
  fail(OUTRIDER_FAILED_BUNDLE, "the type " + dtype + " is unknown",
       "Use the version of Outrider that built the bundle");
}

Model::Model(const Library& library, const std::string& file, const std::string& dtype, int threads)
    : library_(library), domain_(nullptr, {library.api}), session_(nullptr, {library.api}) {
  const Api* api = library.api;
  const std::string what = "opening " + file;
  Options* made = nullptr;
  library.check(call<CreateOptions>(api, &made), what);
  const auto options = owned<ReleaseOptions>(api, made);
  library.check(call<SetSeverity>(api, made, 4), what); // 4: fatal errors only
  library.check(call<SetThreads>(api, made, threads), what);
  // Two models share the cores: the idle one's threads must not busy-wait on them.
  library.check(call<SetEntry>(api, made, "session.force_spinning_stop", "1"), what);
  // See open_session in runtime/backends/onnxruntime.py.
  library.check(
      call<SetEntry>(api, made, "optimization.constant_folding_max_output_size_in_bytes", "0"), what);
  if (dtype == "float16") // see ORT_LEFT_OUT in runtime/files/manifest.py
    library.check(call<SetEntry>(api, made, "optimization.disable_specified_optimizers",
                                 "MatmulTransposeFusion"), what);
  Domain* domain = nullptr;
  Status* const added = add_operators(api, made, &domain);
  domain_.reset(domain);
  library.check(added, what);
  Session* session = nullptr;
  library.check(call<CreateSession>(api, library.environment.get(), file.c_str(), made, &session),
                what);
  session_.reset(session);
}

Call Model::bind(const std::vector<NamedTensor>& inputs, const NamedTensor& logits,
                 const std::vector<NamedTensor>& caches) const {
  const Api* api = library_.api;
  const char* const what = "preparing a call";
  Binding* made = nullptr;
  library_.check(call<CreateBinding>(api, session_.get(), &made), what);
  Call bound = owned<ReleaseBinding>(api, made);
  const auto value = [&](const NamedTensor& tensor) {
    size_t bytes = bytes_of(tensor.type);
    for (const int64_t size : tensor.sizes) bytes *= static_cast<size_t>(size);
    Value* found = nullptr;
    library_.check(call<CreateTensor>(api, library_.memory.get(), tensor.data, bytes,
                                      tensor.sizes.data(), tensor.sizes.size(), tensor.type,
                                      &found), what);
    return owned<ReleaseValue>(api, found); // the binding keeps its own reference
  };
  for (const NamedTensor& tensor : inputs)
    library_.check(call<BindInput>(api, made, tensor.name.c_str(), value(tensor).get()), what);
  library_.check(call<BindOutput>(api, made, logits.name.c_str(), value(logits).get()), what);
  for (const NamedTensor& cache : caches) {
    const auto rows = value(cache);
    library_.check(call<BindInput>(api, made, cache.name.c_str(), rows.get()), what);
    library_.check(call<BindOutput>(api, made, (cache.name + "_out").c_str(), rows.get()), what);
  }
  return bound;
}

void Model::run(const Call& bound) const {
  library_.check(call<RunBinding>(library_.api, session_.get(),
                                  static_cast<const RunOptions*>(nullptr), bound.get()), "a call");
}

} // namespace ort
