// The part of ONNX Runtime's C API that operators and sessions need. ONNX Runtime guarantees that
// functions are only appended to the table, so their indices do not change; tests/ compares them
// with the official header.
#ifndef OUTRIDER_ORT_API_H
#define OUTRIDER_ORT_API_H

#include <stddef.h>
#include <stdint.h>

namespace ort {

constexpr uint32_t API_VERSION = 24; // of ONNX Runtime 1.24, the oldest supported version

struct Status;
struct Options;
struct Domain;
struct KernelInfo;
struct Context;
struct Value;
struct Shape; // OrtTensorTypeAndShapeInfo
struct Environment;
struct Session;
struct Binding;
struct MemoryInfo;
struct RunOptions;

using Function = void (*)();

struct Api {
  Function table[320];
};

struct ApiBase {
  const Api* (*get)(uint32_t version);
  const char* (*version)();
};

// A function of the table: ort::call<ort::GetInput>(api, ...).
template <size_t Index, class Type> struct ApiFunction {
  static constexpr size_t index = Index;
  using type = Type*;
};

using CreateStatus = ApiFunction<0, Status*(int code, const char* message)>;
using GetMessage = ApiFunction<2, const char*(const Status*)>; // GetErrorMessage
using CreateEnvironment =
    ApiFunction<3, Status*(int severity, const char* name, Environment** made)>;
using CreateSession =
    ApiFunction<7, Status*(const Environment*, const char* path, const Options*, Session** made)>;
using CreateOptions = ApiFunction<10, Status*(Options** made)>;       // CreateSessionOptions
using SetSeverity = ApiFunction<22, Status*(Options*, int severity)>; // SetSessionLogSeverityLevel
using SetThreads = ApiFunction<24, Status*(Options*, int threads)>;   // SetIntraOpNumThreads
using CreateDomain = ApiFunction<26, Status*(const char* name, Domain** made)>;
using AddOperator = ApiFunction<27, Status*(Domain*, const struct Operator*)>;
using AddDomain = ApiFunction<28, Status*(Options*, Domain*)>;
using CreateTensor =
    ApiFunction<49, Status*(const MemoryInfo*, void* data, size_t bytes, const int64_t* sizes,
                            size_t count, int type, Value** made)>;
using TensorData = ApiFunction<51, Status*(Value*, void** data)>; // GetTensorMutableData
using CountDimensions = ApiFunction<61, Status*(const Shape*, size_t* count)>;
using GetDimensions = ApiFunction<62, Status*(const Shape*, int64_t* sizes, size_t count)>;
using GetShape = ApiFunction<65, Status*(const Value*, Shape** made)>;
using CreateCpuMemory = ApiFunction<69, Status*(int allocator, int kind, MemoryInfo** made)>;
using FloatAttribute = ApiFunction<85, Status*(const KernelInfo*, const char* name, float* value)>;
using IntegerAttribute =
    ApiFunction<86, Status*(const KernelInfo*, const char* name, int64_t* value)>;
using CountOutputs = ApiFunction<89, Status*(const Context*, size_t* count)>; // KernelContext_
using GetInput = ApiFunction<90, Status*(const Context*, size_t index, const Value** found)>;
using GetOutput = ApiFunction<91, Status*(Context*, size_t index, const int64_t* sizes,
                                          size_t count, Value** made)>;
using ReleaseEnvironment = ApiFunction<92, void(Environment*)>;
using ReleaseStatus = ApiFunction<93, void(Status*)>;
using ReleaseMemory = ApiFunction<94, void(MemoryInfo*)>;
using ReleaseSession = ApiFunction<95, void(Session*)>;
using ReleaseValue = ApiFunction<96, void(Value*)>;
using ReleaseShape = ApiFunction<99, void(Shape*)>;
using ReleaseOptions = ApiFunction<100, void(Options*)>;
using ReleaseDomain = ApiFunction<101, void(Domain*)>; // ReleaseCustomOpDomain
using SetEntry = ApiFunction<130, Status*(Options*, const char* name, const char* value)>;
using RunBinding = ApiFunction<133, Status*(Session*, const RunOptions*, const Binding*)>;
using CreateBinding = ApiFunction<134, Status*(Session*, Binding** made)>;
using ReleaseBinding = ApiFunction<135, void(Binding*)>;
using BindInput = ApiFunction<136, Status*(Binding*, const char* name, const Value*)>;
using BindOutput = ApiFunction<137, Status*(Binding*, const char* name, const Value*)>;
using ParallelFor = ApiFunction<274, Status*(const Context*, void (*work)(void*, size_t),
                                             size_t total, size_t batches, void* data)>;

template <class Called, class... Arguments>
auto call(const Api* api, Arguments... arguments) {
  return reinterpret_cast<typename Called::type>(api->table[Called::index])(arguments...);
}

// OrtCustomOp. Unused functions are null.
struct Operator {
  uint32_t version;
  void* (*create)(const Operator*, const Api*, const KernelInfo*);
  const char* (*name)(const Operator*);
  const char* (*provider)(const Operator*);
  int (*input_type)(const Operator*, size_t index);
  size_t (*input_count)(const Operator*);
  int (*output_type)(const Operator*, size_t index);
  size_t (*output_count)(const Operator*);
  void (*compute)(void* kernel, Context*);
  void (*destroy)(void* kernel);
  int (*input_characteristic)(const Operator*, size_t index);
  int (*output_characteristic)(const Operator*, size_t index);
  int (*input_memory)(const Operator*, size_t index);
  Function variadic[4];
  Status* (*create_or_fail)(const Operator*, const Api*, const KernelInfo*, void** kernel);
  Status* (*compute_or_fail)(void* kernel, Context*);
  Function infer_shapes;
  int (*first_version)(const Operator*);
  int (*last_version)(const Operator*);
  Function in_place[4];
};

enum { FLOAT = 1, UINT8 = 2, INT8 = 3, UINT16 = 4, INT64 = 7, FLOAT16 = 10, BFLOAT16 = 16 };
enum { REQUIRED = 0, OPTIONAL = 1, FAIL = 1 };

} // namespace ort
#endif
