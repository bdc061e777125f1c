// outrider::Verify for TensorRT: the sampling kernels as an IPluginV3. Its semantics are those of
// the ONNX function of the same name (export/functions/). Attributes: vocab_size, and rule, which
// must be "token". Works with the headers of TensorRT 10.14 and newer, and 11.
//
//   in   target_logits [B, K, V], draft_logits [B, K - 1, V'] (float32, float16 or bfloat16),
//        drafts int64 [B, K - 1], seed, position, gamma int64 [B], temperature, lenience float32 [B]
//   out  accepted int32 [B], token int64 [B], status int32 [B]
//
// enqueue launches four kernels and does nothing else: no allocation and no synchronisation.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <new>

#include <NvInferRuntime.h>

#include "driver.h"
#include "outrider_device.h"

namespace {

using namespace nvinfer1;
using outrider_tensorrt::Kernels;

constexpr char NAME[] = "Verify", VERSION[] = "1", NAMESPACE[] = "outrider";
constexpr int32_t UNBOUNDED = INT32_MAX; // vocab_size: the width of the logits
constexpr size_t LINE = 256;

enum Input { TARGET, DRAFT, DRAFTS, SEED, POSITION, GAMMA, TEMPERATURE, LENIENCE, INPUTS };
enum Output { ACCEPTED, TOKEN, STATUS, OUTPUTS };
constexpr int32_t RANKS[INPUTS] = {3, 3, 2, 1, 1, 1, 1, 1};

// --- messages ---------------------------------------------------------------------------------

std::atomic<ILoggerFinder*> logger_finder{nullptr};

// Reports one line to TensorRT's logger, or else to stderr. Returns TensorRT's failure status.
int32_t fail(const char* what) noexcept {
  char line[LINE + 64];
  std::snprintf(line, sizeof line, "outrider::Verify: %s", what);
  try {
    ILoggerFinder* const finder = logger_finder.load();
    ILogger* const logger = finder != nullptr ? finder->findLogger() : nullptr;
    if (logger != nullptr) {
      logger->log(ILogger::Severity::kERROR, line);
      return -1;
    }
  } catch (...) { // thrown by TensorRT; no exception may leave the plugin's entry points
  }
  std::fprintf(stderr, "%s\n", line);
  return -1;
}

// --- sizes ------------------------------------------------------------------------------------

struct Round {
  outrider_device_sizes sizes;
  int64_t target_width, draft_width; // of the tensors, padding included
  int32_t dtype, element;            // dtype of outrider.h, and its size in bytes
};

bool type_of(DataType type, int32_t* dtype) {
  switch (type) {
  case DataType::kFLOAT: *dtype = OUTRIDER_FLOAT32; return true;
  case DataType::kHALF: *dtype = OUTRIDER_FLOAT16; return true;
  case DataType::kBF16: *dtype = OUTRIDER_BFLOAT16; return true;
  default: return false;
  }
}

int32_t smaller(int64_t width, int32_t vocab_size) {
  return width < vocab_size ? static_cast<int32_t>(width) : vocab_size;
}

// Returns false for invalid sizes. Zero slots are valid, with nothing to do.
bool round_of(const Dims& target, const Dims& draft, DataType type, int32_t vocab_size,
              Round* round) {
  if (target.nbDims != RANKS[TARGET] || draft.nbDims != RANKS[DRAFT] ||
      !type_of(type, &round->dtype))
    return false;
  const int64_t slots = target.d[0], rows = target.d[1];
  if (slots < 0 || slots > 65535 || rows < 1 || rows > OUTRIDER_MAX_WIDTH + 1 ||
      draft.d[0] != slots || draft.d[1] != rows - 1 || target.d[2] < 1 || draft.d[2] < 1 ||
      target.d[2] > 1 << 30 || draft.d[2] > 1 << 30)
    return false;
  round->target_width = target.d[2];
  round->draft_width = draft.d[2];
  round->element = round->dtype == OUTRIDER_FLOAT32 ? 4 : 2;
  round->sizes = {static_cast<int32_t>(slots),
                  static_cast<int32_t>(rows - 1),
                  smaller(target.d[2], vocab_size),
                  smaller(draft.d[2], vocab_size),
                  OUTRIDER_DEVICE_SHAPES,
                  0};
  return true;
}

struct Memory {
  outrider_slot* slots;
  outrider_verdict* verdicts;
  void* kernels;
  size_t kernels_size;
  size_t end;
};

// Lays out a workspace at `start`, which TensorRT may align less strictly than the kernels require.
Memory carve(const outrider_device_sizes& sizes, std::uintptr_t start) {
  Carver<256> carver{start};
  const auto count = static_cast<size_t>(sizes.slot_count);
  Memory memory;
  memory.slots = carver.take<outrider_slot>(count);
  memory.verdicts = carver.take<outrider_verdict>(count);
  memory.kernels_size = outrider_device::workspace_size(sizes);
  memory.kernels = carver.take<unsigned char>(memory.kernels_size);
  memory.end = carver.at - start;
  return memory;
}

outrider_logits logits_of(const Round& round, const void* data, int64_t rows, int64_t width,
                          int32_t vocab_size) {
  const int64_t row = width * round.element;
  return {data, rows * row, row, vocab_size, round.dtype};
}

// --- the plugin -------------------------------------------------------------------------------

class Verify final : public IPluginV3,
                     public IPluginV3OneCore,
                     public IPluginV3OneBuild,
                     public IPluginV3OneRuntime {
public:
  explicit Verify(int32_t vocab_size) noexcept : vocab_size_(vocab_size) {}

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
    switch (type) {
    case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }

  IPluginV3* clone() noexcept override {
    auto* const copy = new (std::nothrow) Verify(vocab_size_);
    if (copy != nullptr) copy->kernels_ = kernels_;
    return copy;
  }

  const char* getPluginName() const noexcept override { return NAME; }
  const char* getPluginVersion() const noexcept override { return VERSION; }
  const char* getPluginNamespace() const noexcept override { return NAMESPACE; }

  // Building

  int32_t getNbOutputs() const noexcept override { return OUTPUTS; }

  int32_t getOutputDataTypes(DataType* types, int32_t outputs, const DataType* inputs,
                             int32_t input_count) const noexcept override {
    int32_t dtype;
    if (outputs != OUTPUTS || input_count != INPUTS || !type_of(inputs[TARGET], &dtype))
      return fail("expects 8 inputs, the first of them float32, float16 or bfloat16");
    types[ACCEPTED] = DataType::kINT32;
    types[TOKEN] = DataType::kINT64;
    types[STATUS] = DataType::kINT32;
    return 0;
  }

  int32_t getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs*,
                          int32_t shape_inputs, DimsExprs* outputs, int32_t output_count,
                          IExprBuilder&) noexcept override {
    if (input_count != INPUTS || shape_inputs != 0 || output_count != OUTPUTS)
      return fail("expects 8 inputs, 3 outputs and no shape inputs");
    for (int32_t i = 0; i < INPUTS; ++i)
      if (inputs[i].nbDims != RANKS[i]) return fail("an input has the wrong number of dimensions");
    for (int32_t i = 0; i < OUTPUTS; ++i) {
      outputs[i].nbDims = 1;
      outputs[i].d[0] = inputs[TARGET].d[0];
    }
    return 0;
  }

  bool supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* ends,
                                 int32_t inputs, int32_t outputs) noexcept override {
    if (inputs != INPUTS || outputs != OUTPUTS || position < 0 || position >= INPUTS + OUTPUTS ||
        ends[position].desc.format != TensorFormat::kLINEAR)
      return false;
    const DataType type = ends[position].desc.type;
    int32_t dtype;
    switch (position) {
    case TARGET: return type_of(type, &dtype);
    case DRAFT: return type == ends[TARGET].desc.type;
    case TEMPERATURE:
    case LENIENCE: return type == DataType::kFLOAT;
    case INPUTS + ACCEPTED:
    case INPUTS + STATUS: return type == DataType::kINT32;
    default: return type == DataType::kINT64;
    }
  }

  int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                          const DynamicPluginTensorDesc*, int32_t output_count) noexcept override {
    if (input_count != INPUTS || output_count != OUTPUTS)
      return fail("expects 8 inputs and 3 outputs");
    Round round;
    if (!round_of(inputs[TARGET].max, inputs[DRAFT].max, inputs[TARGET].desc.type, vocab_size_,
                  &round))
      return fail("the largest logits are not [B, K, V] and [B, K - 1, V'], B <= 65535, K <= 65");
    return 0;
  }

  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                          const DynamicPluginTensorDesc*, int32_t) const noexcept override {
    Round round;
    if (input_count != INPUTS || !round_of(inputs[TARGET].max, inputs[DRAFT].max,
                                           inputs[TARGET].desc.type, vocab_size_, &round))
      return 0; // configurePlugin rejects it
    return carve(round.sizes, 0).end + 255;
  }

  // Running

  int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t input_count,
                        const PluginTensorDesc*, int32_t) noexcept override {
    Round round;
    if (input_count != INPUTS || !round_of(inputs[TARGET].dims, inputs[DRAFT].dims,
                                           inputs[TARGET].type, vocab_size_, &round))
      return fail("logits are not [B, K, V] and [B, K - 1, V'], B <= 65535, K <= 65");
    return load() ? 0 : -1;
  }

  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override {
    return load() ? clone() : nullptr;
  }

  int32_t enqueue(const PluginTensorDesc* in, const PluginTensorDesc*, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
    Round round;
    if (!round_of(in[TARGET].dims, in[DRAFT].dims, in[TARGET].type, vocab_size_, &round))
      return fail("logits are not [B, K, V] and [B, K - 1, V'], B <= 65535, K <= 65");
    const outrider_device_sizes& sizes = round.sizes;
    if (sizes.slot_count == 0) return 0;
    if (kernels_ == nullptr) return fail("enqueue before attachToContext");
    const Memory memory = carve(sizes, reinterpret_cast<std::uintptr_t>(workspace));
    const outrider_logits target = logits_of(round, inputs[TARGET], int64_t{sizes.width} + 1,
                                             round.target_width, sizes.vocab_size);
    const outrider_logits draft = logits_of(round, inputs[DRAFT], sizes.width, round.draft_width,
                                            sizes.draft_vocab_size);
    outrider_device_plan plan;
    const int32_t status = outrider_device::plan_verify(
        &sizes, &target, sizes.width > 0 ? &draft : nullptr, memory.slots, nullptr,
        static_cast<const int64_t*>(inputs[DRAFTS]), nullptr, memory.verdicts, nullptr,
        memory.kernels, memory.kernels_size, &plan);
    if (status != OUTRIDER_OK) return fail("a tensor is null, or not aligned to its elements");
    outrider_device_call call;
    std::memcpy(&call, plan.call, sizeof call);

    constexpr int32_t WARPS = 4; // one thread per slot
    const int32_t blocks = (sizes.slot_count + 32 * WARPS - 1) / (32 * WARPS);
    const auto first = outrider_device::launch_of("outrider_tensorrt_pack", blocks, 1, 1, WARPS);
    const auto last = outrider_device::launch_of("outrider_tensorrt_unpack", blocks, 1, 1, WARPS);
    int32_t count = sizes.slot_count;
    const void *seed = inputs[SEED], *position = inputs[POSITION], *gamma = inputs[GAMMA],
               *temperature = inputs[TEMPERATURE], *lenience = inputs[LENIENCE],
               *slots = memory.slots, *finished_blocks = call.finished_blocks,
               *verdicts = memory.verdicts, *accepted = outputs[ACCEPTED], *token = outputs[TOKEN],
               *state = outputs[STATUS];
    void* pack[] = {&seed,     &position, &gamma,           &temperature,
                    &lenience, &slots,    &finished_blocks, &count};
    void* unpack[] = {&verdicts, &accepted, &token, &state, &count};
    void* whole[] = {plan.call};

    char reason[LINE] = "";
    bool good = kernels_->launch(first, pack, stream, reason, LINE);
    for (int32_t i = 0; good && i < plan.launch_count; ++i)
      good = kernels_->launch(plan.launches[i], whole, stream, reason, LINE);
    good = good && kernels_->launch(last, unpack, stream, reason, LINE);
    return good ? 0 : fail(reason);
  }

  // The rule need not be serialised: it is always "token".
  const PluginFieldCollection* getFieldsToSerialize() noexcept override {
    field_ = PluginField("vocab_size", &vocab_size_, PluginFieldType::kINT32, 1);
    fields_.nbFields = 1;
    fields_.fields = &field_;
    return &fields_;
  }

private:
  // Called while building too, since a plugin may be timed there without a context.
  bool load() noexcept {
    char reason[LINE] = "";
    if (kernels_ == nullptr) kernels_ = Kernels::load(reason, LINE);
    if (kernels_ == nullptr) fail(reason);
    return kernels_ != nullptr;
  }

  const int32_t vocab_size_;
  const Kernels* kernels_ = nullptr;
  PluginField field_;
  PluginFieldCollection fields_;
};

class VerifyCreator final : public IPluginCreatorV3One {
public:
  VerifyCreator() noexcept {
    fields_[0] = PluginField("vocab_size", nullptr, PluginFieldType::kINT32, 1);
    fields_[1] = PluginField("rule", nullptr, PluginFieldType::kCHAR, 1);
    collection_.nbFields = 2;
    collection_.fields = fields_;
  }

  const char* getPluginName() const noexcept override { return NAME; }
  const char* getPluginVersion() const noexcept override { return VERSION; }
  const char* getPluginNamespace() const noexcept override { return NAMESPACE; }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }

  IPluginV3* createPlugin(const char*, const PluginFieldCollection* attributes,
                          TensorRTPhase) noexcept override {
    int32_t vocab_size = UNBOUNDED;
    for (int32_t i = 0; attributes != nullptr && i < attributes->nbFields; ++i) {
      const PluginField& field = attributes->fields[i];
      if (field.name == nullptr || field.data == nullptr) continue;
      if (std::strcmp(field.name, "rule") == 0 && !is_token(field)) {
        fail("rule must be \"token\", the only rule of this plugin");
        return nullptr;
      }
      if (std::strcmp(field.name, "vocab_size") == 0 && !read(field, &vocab_size)) {
        fail("vocab_size must be a positive int32");
        return nullptr;
      }
    }
    return new (std::nothrow) Verify(vocab_size);
  }

private:
  // With or without a terminating zero, depending on the parser's version.
  static bool is_token(const PluginField& field) {
    const auto* const text = static_cast<const char*>(field.data);
    int32_t length = field.length;
    while (length > 0 && text[length - 1] == '\0') --length;
    return field.type == PluginFieldType::kCHAR && length == 5 &&
           std::memcmp(text, "token", 5) == 0;
  }

  static bool read(const PluginField& field, int32_t* value) {
    int64_t wide;
    if (field.type == PluginFieldType::kINT32) {
      int32_t narrow;
      std::memcpy(&narrow, field.data, sizeof narrow);
      wide = narrow;
    } else if (field.type == PluginFieldType::kINT64) {
      std::memcpy(&wide, field.data, sizeof wide);
    } else {
      return false;
    }
    *value = static_cast<int32_t>(wide);
    return wide > 0 && wide <= INT32_MAX;
  }

  PluginField fields_[2];
  PluginFieldCollection collection_;
};

} // namespace

// --- symbols that TensorRT looks up when it loads a plugin library -------------------------------

extern "C" OUTRIDER_API IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static VerifyCreator creator;
  static IPluginCreatorInterface* const creators[] = {&creator};
  count = 1;
  return creators;
}

extern "C" OUTRIDER_API void setLoggerFinder(ILoggerFinder* finder) { logger_finder = finder; }
