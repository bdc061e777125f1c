// A model on a GPU, run by a separate library that is loaded when a bundle needs it.
#ifndef OUTRIDER_ENGINES_DEVICE_ENGINE_H
#define OUTRIDER_ENGINES_DEVICE_ENGINE_H

#include <string>

#include "table.h"

namespace outrider {

class DeviceEngine final : public Engine {
public:
  // backend: the bundle's. widest: the largest K of a call. buffers: number of calls whose logits
  // it keeps. Throws Failure.
  DeviceEngine(const std::string& backend, const std::string& folder, const ModelFacts& facts,
               int32_t slots, int32_t widest, int32_t buffers);
  ~DeviceEngine() override;
  DeviceEngine(const DeviceEngine&) = delete;
  DeviceEngine& operator=(const DeviceEngine&) = delete;

private:
  float* compute(const EngineCall& call) override;
  void wipe(int32_t slot) override;

  const ModelTable& table_;
  void* model_ = nullptr;
};

} // namespace outrider
#endif
