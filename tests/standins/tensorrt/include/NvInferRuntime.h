// The part of TensorRT's interface that this repository calls or implements, so that code for it
// can be compiled and driven without its headers. Names, types and numbers are TensorRT's; the
// order of the functions is not, so nothing compiled with this header works with the library.
#ifndef STANDIN_NV_INFER_RUNTIME_H
#define STANDIN_NV_INFER_RUNTIME_H

#include <cstddef>
#include <cstdint>

#include "NvInferImpl.h"
#include "NvInferVersion.h"

namespace nvinfer1 {

using AsciiChar = char;

// --- tensors ----------------------------------------------------------------------------------

enum class DataType : int32_t {
  kFLOAT, kHALF, kINT8, kINT32, kBOOL, kUINT8, kFP8, kBF16, kINT64, kINT4, kFP4, kE8M0
};
enum class TensorFormat : int32_t { kLINEAR, kCHW2, kHWC8, kCHW4 };

struct Dims {
  int32_t nbDims;
  int64_t d[8];
};

struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
  float scale;
};

struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
  Dims min, max, opt;
};

class IDimensionExpr;
class IExprBuilder {};

struct DimsExprs {
  int32_t nbDims;
  const IDimensionExpr* d[8];
};

// --- messages ---------------------------------------------------------------------------------

class ILogger {
public:
  enum class Severity : int32_t { kINTERNAL_ERROR, kERROR, kWARNING, kINFO, kVERBOSE };
  virtual ~ILogger() = default;
  virtual void log(Severity severity, AsciiChar const* message) noexcept = 0;
};

class ILoggerFinder {
public:
  virtual ~ILoggerFinder() = default;
  virtual ILogger* findLogger() = 0;
};

// --- plugins ----------------------------------------------------------------------------------

enum class PluginFieldType : int32_t {
  kFLOAT16, kFLOAT32, kFLOAT64, kINT8, kINT16, kINT32, kCHAR, kDIMS, kUNKNOWN, kBF16, kINT64
};
enum class PluginCapabilityType : int32_t { kCORE, kBUILD, kRUNTIME };
enum class TensorRTPhase : int32_t { kBUILD, kRUNTIME };

class PluginField {
public:
  PluginField(AsciiChar const* n = nullptr, void const* given = nullptr,
              PluginFieldType kind = PluginFieldType::kUNKNOWN, int32_t count = 0) noexcept
      : name(n), data(given), type(kind), length(count) {}
  AsciiChar const* name;
  void const* data;
  PluginFieldType type;
  int32_t length;
};

struct PluginFieldCollection {
  int32_t nbFields;
  PluginField const* fields;
};

struct InterfaceInfo {
  AsciiChar const* kind;
  int32_t major, minor;
};

class IPluginCapability {
public:
  virtual ~IPluginCapability() noexcept = default;
};

class IPluginV3 {
public:
  virtual ~IPluginV3() noexcept = default;
  virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
  virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
public:
  virtual AsciiChar const* getPluginName() const noexcept = 0;
  virtual AsciiChar const* getPluginVersion() const noexcept = 0;
  virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
public:
  virtual int32_t getNbOutputs() const noexcept = 0;
  virtual int32_t getOutputDataTypes(DataType* outputs, int32_t count, DataType const* inputs,
                                     int32_t input_count) const noexcept = 0;
  virtual int32_t getOutputShapes(DimsExprs const* inputs, int32_t input_count,
                                  DimsExprs const* shape_inputs, int32_t shape_input_count,
                                  DimsExprs* outputs, int32_t output_count,
                                  IExprBuilder& builder) noexcept = 0;
  virtual bool supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* ends,
                                         int32_t inputs, int32_t outputs) noexcept = 0;
  virtual int32_t configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t input_count,
                                  DynamicPluginTensorDesc const* outputs,
                                  int32_t output_count) noexcept = 0;
  virtual std::size_t getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t input_count,
                                       DynamicPluginTensorDesc const* outputs,
                                       int32_t output_count) const noexcept = 0;
};

class IPluginResourceContext;

class IPluginV3OneRuntime : public IPluginCapability {
public:
  virtual int32_t onShapeChange(PluginTensorDesc const* inputs, int32_t input_count,
                                PluginTensorDesc const* outputs, int32_t output_count) noexcept = 0;
  virtual int32_t enqueue(PluginTensorDesc const* input_descs, PluginTensorDesc const* output_descs,
                          void const* const* inputs, void* const* outputs, void* workspace,
                          cudaStream_t stream) noexcept = 0;
  virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
  virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorInterface {
public:
  virtual ~IPluginCreatorInterface() noexcept = default;
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
public:
  InterfaceInfo getInterfaceInfo() const noexcept override {
    return {"PLUGIN CREATOR_V3ONE", 1, 0};
  }
  virtual IPluginV3* createPlugin(AsciiChar const* name, PluginFieldCollection const* fields,
                                  TensorRTPhase phase) noexcept = 0;
  virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
  virtual AsciiChar const* getPluginName() const noexcept = 0;
  virtual AsciiChar const* getPluginVersion() const noexcept = 0;
  virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

// --- engines: handles, whose functions call the implementation behind them -----------------------

enum class ExecutionContextAllocationStrategy : int32_t {
  kSTATIC, kON_PROFILE_CHANGE, kUSER_MANAGED
};

class IExecutionContext {
public:
  virtual ~IExecutionContext() noexcept = default;
  bool setOptimizationProfileAsync(int32_t index, cudaStream_t stream) noexcept {
    return mImpl->setOptimizationProfileAsync(index, stream);
  }
  void setDeviceMemoryV2(void* memory, int64_t size) noexcept {
    mImpl->setDeviceMemoryV2(memory, size);
  }
  bool setInputShape(char const* name, Dims const& dims) noexcept {
    return mImpl->setInputShape(name, dims);
  }
  bool setTensorAddress(char const* name, void* data) noexcept {
    return mImpl->setTensorAddress(name, data);
  }
  bool enqueueV3(cudaStream_t stream) noexcept { return mImpl->enqueueV3(stream); }

protected:
  apiv::VExecutionContext* mImpl;
};

class ICudaEngine {
public:
  virtual ~ICudaEngine() noexcept = default;
  int32_t getNbIOTensors() const noexcept { return mImpl->getNbIOTensors(); }
  char const* getIOTensorName(int32_t index) const noexcept {
    return mImpl->getIOTensorName(index);
  }
  DataType getTensorDataType(char const* name) const noexcept {
    return mImpl->getTensorDataType(name);
  }
  char const* getAliasedInputTensor(char const* name) const noexcept {
    return mImpl->getAliasedInputTensor(name);
  }
  int64_t getDeviceMemorySizeForProfileV2(int32_t index) const noexcept {
    return mImpl->getDeviceMemorySizeForProfileV2(index);
  }
  IExecutionContext* createExecutionContext(ExecutionContextAllocationStrategy strategy) noexcept {
    return mImpl->createExecutionContext(strategy);
  }

protected:
  apiv::VCudaEngine* mImpl;
};

class IRuntime {
public:
  virtual ~IRuntime() noexcept = default;
  ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept {
    return mImpl->deserializeCudaEngine(blob, size);
  }

protected:
  apiv::VRuntime* mImpl;
};

} // namespace nvinfer1
#endif
