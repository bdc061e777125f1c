// The library's only exported symbol. Exceptions become a status with a cause and a remedy.
#include "files/guarded.h"
#include "model.h"

namespace {

using outrider::EngineCall;
using outrider::ModelSpec;
using outrider::ModelTable;
using outrider::run_guarded;
using outrider::TensorRtModel;

TensorRtModel& model_of(void* model) { return *static_cast<TensorRtModel*>(model); }

constexpr ModelTable TABLE = {
    outrider::MODEL_TABLE,
    [](const ModelSpec* spec, void** model, outrider_failure* failure) {
      return run_guarded(failure, [&] { *model = new TensorRtModel(*spec); });
    },
    [](void* model, const EngineCall* call, float** logits, outrider_failure* failure) {
      return run_guarded(failure, [&] { *logits = model_of(model).compute(*call); });
    },
    [](void* model, int32_t slot, outrider_failure* failure) {
      return run_guarded(failure, [&] { model_of(model).wipe(slot); });
    },
    [](void* model) { delete static_cast<TensorRtModel*>(model); },
};

} // namespace

extern "C" __attribute__((visibility("default"))) const ModelTable* outrider_model_table() {
  return &TABLE;
}
