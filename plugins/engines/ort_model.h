// ONNX Runtime's library, loaded when a bundle is opened, and a graph that it runs on fixed memory.
#ifndef OUTRIDER_ENGINES_ORT_MODEL_H
#define OUTRIDER_ENGINES_ORT_MODEL_H

#include <memory>
#include <string>
#include <vector>

#include "files/failure.h"
#include "outrider_ort_api.h"

namespace ort {

// Objects of ONNX Runtime are released through its function table.
template <class Made, class Release> struct Releaser {
  const Api* api;
  void operator()(Made* made) const { call<Release>(api, made); }
};
template <class Made, class Release> using Owned = std::unique_ptr<Made, Releaser<Made, Release>>;

// The library and its environment. It is never unloaded, since its threads may outlive a session.
class Library {
public:
  // path: of the shared library; null or empty: $OUTRIDER_ONNXRUNTIME, else the system's search
  // path. Throws Failure.
  explicit Library(const char* path);

  // Throws Failure unless the status is null. what: the operation, for the message.
  void check(Status* status, const std::string& what) const;

  const Api* api = nullptr;
  std::string version;
  Owned<Environment, ReleaseEnvironment> environment;
  Owned<MemoryInfo, ReleaseMemory> memory; // the CPU's
};

struct NamedTensor {
  std::string name;
  void* data;
  std::vector<int64_t> sizes;
  int type;
};

size_t bytes_of(int type); // of one element
int type_of(const std::string& dtype);

// A call of a model, with the addresses of its inputs and outputs bound.
using Call = Owned<Binding, ReleaseBinding>;

class Model {
public:
  // dtype: of its activations. threads: 0 for ONNX Runtime's default. Throws Failure.
  Model(const Library& library, const std::string& file, const std::string& dtype, int threads);

  // Caches are updated in place: input and output are the same memory.
  Call bind(const std::vector<NamedTensor>& inputs, const NamedTensor& logits,
            const std::vector<NamedTensor>& caches) const;
  void run(const Call& call) const;

private:
  const Library& library_;
  Owned<Domain, ReleaseDomain> domain_; // the session points to it
  Owned<Session, ReleaseSession> session_;
};

} // namespace ort
#endif
