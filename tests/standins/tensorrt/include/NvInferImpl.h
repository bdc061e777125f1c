// The interfaces that TensorRT's handles call: see NvInferRuntime.h here.
#ifndef STANDIN_NV_INFER_IMPL_H
#define STANDIN_NV_INFER_IMPL_H

#include <cstddef>
#include <cstdint>

struct CUstream_st;
using cudaStream_t = CUstream_st*;

namespace nvinfer1 {

class ICudaEngine;
class IExecutionContext;
struct Dims;
enum class DataType : int32_t;
enum class ExecutionContextAllocationStrategy : int32_t;

namespace apiv {

class VRoot {
public:
  virtual ~VRoot() noexcept = default;
};

class VRuntime : public VRoot
{
public:
  virtual ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept = 0;
};

class VCudaEngine : public VRoot
{
public:
  virtual int32_t getNbIOTensors() const noexcept = 0;
  virtual char const* getIOTensorName(int32_t index) const noexcept = 0;
  virtual DataType getTensorDataType(char const* name) const noexcept = 0;
  virtual char const* getAliasedInputTensor(char const* name) const noexcept = 0;
  virtual int64_t getDeviceMemorySizeForProfileV2(int32_t index) const noexcept = 0;
  virtual IExecutionContext* createExecutionContext(
      ExecutionContextAllocationStrategy strategy) noexcept = 0;
};

class VExecutionContext : public VRoot
{
public:
  virtual bool setOptimizationProfileAsync(int32_t index, cudaStream_t stream) noexcept = 0;
  virtual void setDeviceMemoryV2(void* memory, int64_t size) noexcept = 0;
  virtual bool setInputShape(char const* name, Dims const& dims) noexcept = 0;
  virtual bool setTensorAddress(char const* name, void* data) noexcept = 0;
  virtual bool enqueueV3(cudaStream_t stream) noexcept = 0;
};

} // namespace apiv
} // namespace nvinfer1
#endif
