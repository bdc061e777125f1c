// Converts between TensorRT's tensors and the sampling kernels' structures: one launch before the
// kernels, one after.
#include "outrider.h"

// seed holds the bits of an unsigned number. A gamma that does not fit an int32 is mapped to
// another invalid one. TensorRT's workspace contains what other layers left there, so the kernels'
// counters are set to 0 here.
extern "C" __global__ void outrider_tensorrt_pack(const int64_t* seed, const int64_t* position,
                                                  const int64_t* gamma, const float* temperature,
                                                  const float* lenience, outrider_slot* slots,
                                                  uint32_t* finished_blocks, int32_t slot_count) {
  const int32_t b = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (b >= slot_count) return;
  outrider_slot slot = {};
  slot.seed = static_cast<uint64_t>(seed[b]);
  slot.top_p = 1;
  slot.lenience = static_cast<double>(lenience[b]);
  slot.sigmoid_alpha = -1e3;
  slot.sigmoid_beta = 1e3;
  slot.temperature = temperature[b];
  slot.repetition_penalty = 1;
  slot.rule = OUTRIDER_TOKEN;
  const int64_t drafted = gamma[b];
  slot.gamma = drafted < -1                    ? -2
               : drafted > OUTRIDER_MAX_WIDTH ? OUTRIDER_MAX_WIDTH + 1
                                               : static_cast<int32_t>(drafted);
  slot.position = static_cast<uint32_t>(position[b]);
  slot.index = b;
  slots[b] = slot;
  finished_blocks[b] = 0;
}

extern "C" __global__ void outrider_tensorrt_unpack(const outrider_verdict* verdicts,
                                                    int32_t* accepted, int64_t* token,
                                                    int32_t* status, int32_t slot_count) {
  const int32_t b = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (b >= slot_count) return;
  const outrider_verdict verdict = verdicts[b];
  const bool ok = verdict.status == OUTRIDER_OK;
  accepted[b] = ok ? verdict.accepted : 0;
  token[b] = ok ? verdict.token : -1;
  status[b] = verdict.status;
}
