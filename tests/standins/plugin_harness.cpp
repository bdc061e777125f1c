// Drives a plugin library as TensorRT does, from looking up its creators to one enqueue, in the
// order that the headers document. Returns its observations as lines of text for the test.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <dlfcn.h>

#include <NvInferRuntime.h>

namespace {

using namespace nvinfer1;

std::string output;

void report(const std::string& line) { output += line + "\n"; }

struct Logger final : ILogger {
  void log(Severity, const char* message) noexcept override {
    report(std::string("log: ") + message);
  }
};

struct Finder final : ILoggerFinder {
  Logger logger;
  ILogger* findLogger() override { return &logger; }
};

struct Builder final : IExprBuilder {};

PluginTensorDesc desc_of(DataType type, std::vector<int64_t> sizes) {
  PluginTensorDesc desc{};
  desc.type = type;
  desc.format = TensorFormat::kLINEAR;
  desc.dims.nbDims = static_cast<int32_t>(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) desc.dims.d[i] = sizes[i];
  return desc;
}

} // namespace

extern "C" {

struct Case {
  int32_t type; // nvinfer1::DataType of the logits
  int32_t vocab_size; // 0: no such field
  int64_t slots, rows, draft_rows, target_width, draft_width;
  const char* rule; // null: no such field
  const void* inputs[8];
  void* outputs[3];
};

__attribute__((visibility("default"))) const char* drive(const char* path, const Case* given) {
  output.clear();
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  using Creators = IPluginCreatorInterface* const* (*)(int32_t&);
  const auto creators = reinterpret_cast<Creators>(dlsym(library, "getCreators"));
  const auto set_finder =
      reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"));
  static Finder finder;
  set_finder(&finder);
  int32_t count = 0;
  auto* const interface = creators(count)[0];
  auto* const creator = static_cast<IPluginCreatorV3One*>(interface);
  report(std::to_string(count) + " " + interface->getInterfaceInfo().kind + " " +
       creator->getPluginNamespace() + "::" + creator->getPluginName() + " " +
       creator->getPluginVersion());

  std::vector<PluginField> fields;
  if (given->vocab_size != 0)
    fields.emplace_back("vocab_size", &given->vocab_size, PluginFieldType::kINT32, 1);
  if (given->rule != nullptr)
    fields.emplace_back("rule", given->rule, PluginFieldType::kCHAR,
                        static_cast<int32_t>(std::strlen(given->rule)));
  const PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
  const std::unique_ptr<IPluginV3> plugin(
      creator->createPlugin("a node", &collection, TensorRTPhase::kBUILD));
  if (plugin == nullptr) return report("not created"), output.c_str();

  auto* const build = static_cast<IPluginV3OneBuild*>(
      plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
  const int64_t b = given->slots, k = given->rows;
  const auto logits = static_cast<DataType>(given->type);
  const DataType id = DataType::kINT64, real = DataType::kFLOAT, whole = DataType::kINT32;
  const PluginTensorDesc ends[] = {
      desc_of(logits, {b, k, given->target_width}), desc_of(logits, {b, given->draft_rows, given->draft_width}),
      desc_of(id, {b, k - 1}), desc_of(id, {b}), desc_of(id, {b}), desc_of(id, {b}),
      desc_of(real, {b}), desc_of(real, {b}), desc_of(whole, {b}), desc_of(id, {b}),
      desc_of(whole, {b})};
  DynamicPluginTensorDesc dynamic[11];
  for (int i = 0; i < 11; ++i) {
    dynamic[i].desc = ends[i];
    dynamic[i].min = dynamic[i].opt = dynamic[i].max = ends[i].dims;
  }

  std::string formats;
  for (int i = 0; i < 11; ++i) {
    int types = 0;
    for (int type = 0; type < 12; ++type) {
      DynamicPluginTensorDesc tried[11];
      std::memcpy(tried, dynamic, sizeof tried);
      tried[i].desc.type = static_cast<DataType>(type);
      const bool linear = build->supportsFormatCombination(i, tried, 8, 3);
      tried[i].desc.format = TensorFormat::kCHW4;
      if (build->supportsFormatCombination(i, tried, 8, 3)) report("takes a format of no use");
      types += linear ? 1 : 0;
    }
    const bool own = build->supportsFormatCombination(i, dynamic, 8, 3);
    formats += " " + std::to_string(types) + (own ? "" : "!");
  }
  report("types" + formats);

  DataType input_types[8], output_types[3];
  for (int i = 0; i < 8; ++i) input_types[i] = ends[i].type;
  const int32_t typed = build->getOutputDataTypes(output_types, build->getNbOutputs(), input_types, 8);
  for (int i = 0; typed == 0 && i < 3; ++i)
    if (output_types[i] != ends[8 + i].type) report("another type of output");
  DimsExprs input_shapes[8], output_shapes[3];
  int symbols[8][3];
  for (int i = 0; i < 8; ++i) {
    input_shapes[i].nbDims = ends[i].dims.nbDims;
    for (int j = 0; j < ends[i].dims.nbDims; ++j)
      input_shapes[i].d[j] = reinterpret_cast<const IDimensionExpr*>(&symbols[i][j]);
  }
  Builder builder;
  const int32_t shaped =
      build->getOutputShapes(input_shapes, 8, nullptr, 0, output_shapes, 3, builder);
  for (const DimsExprs& shape : output_shapes)
    if (shape.nbDims != 1 || shape.d[0] != input_shapes[0].d[0]) report("another shape of output");
  const int32_t configured = build->configurePlugin(dynamic, 8, dynamic + 8, 3);
  report("build " + std::to_string(typed) + " " + std::to_string(shaped) + " " +
       std::to_string(configured));
  if (configured != 0) return output.c_str();
  const size_t size = build->getWorkspaceSize(dynamic, 8, dynamic + 8, 3);
  report("workspace " + std::to_string(size));

  // As an engine does: serialize the fields of a clone into a plan, and restore them from it.
  const std::unique_ptr<IPluginV3> copy(plugin->clone());
  auto* const builder_runtime = static_cast<IPluginV3OneRuntime*>(
      copy->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  const PluginFieldCollection* const saved = builder_runtime->getFieldsToSerialize();
  std::vector<PluginField> stored;
  std::vector<std::unique_ptr<unsigned char[]>> plan;
  for (int i = 0; i < saved->nbFields; ++i) {
    plan.emplace_back(new unsigned char[64]);
    std::memcpy(plan.back().get(), saved->fields[i].data, 4);
    PluginField field = saved->fields[i];
    field.data = plan.back().get();
    stored.push_back(field);
    int32_t value;
    std::memcpy(&value, field.data, 4);
    report(std::string("stored ") + field.name + " " + std::to_string(value));
  }
  const PluginFieldCollection restored{static_cast<int32_t>(stored.size()), stored.data()};
  const std::unique_ptr<IPluginV3> read(
      creator->createPlugin("a node", &restored, TensorRTPhase::kRUNTIME));
  auto* const loose = static_cast<IPluginV3OneRuntime*>(
      read->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  const auto stream = reinterpret_cast<cudaStream_t>(&finder); // the driver here only passes it on
  std::vector<unsigned char> memory(size + 64, 0xAB);
  unsigned char* const workspace = memory.data() + 16;
  if (loose->enqueue(ends, ends + 8, given->inputs, given->outputs, workspace, stream) == 0)
    report(b == 0 ? "nothing to do" : "enqueued without a context");
  const std::unique_ptr<IPluginV3> attached(loose->attachToContext(nullptr));
  if (attached == nullptr) return report("not attached"), output.c_str();
  auto* const runtime = static_cast<IPluginV3OneRuntime*>(
      attached->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  const int32_t changed = runtime->onShapeChange(ends, 8, ends + 8, 3);
  const int32_t enqueued =
      runtime->enqueue(ends, ends + 8, given->inputs, given->outputs, workspace, stream);
  report("run " + std::to_string(changed) + " " + std::to_string(enqueued));
  for (size_t i = 0; i < 16; ++i)
    if (memory[i] != 0xAB || memory[16 + size + i] != 0xAB) report("wrote beyond the workspace");
  return output.c_str();
}

} // extern "C"
