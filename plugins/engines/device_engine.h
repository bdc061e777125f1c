// A model on a GPU, in a library of its own that is loaded when a bundle asks for it.
#ifndef OUTRIDER_ENGINES_DEVICE_ENGINE_H
#define OUTRIDER_ENGINES_DEVICE_ENGINE_H

#include <string>

#include "table.h"

namespace outrider {

class DeviceEngine final : public Engine {
public:
  // backend: of the bundle. widest: the largest K of a call. buffers: calls whose logits it holds.
  // Throws Failure.
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
