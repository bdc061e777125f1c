#include "bundle.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>

#include <algorithm>
#include <memory>

#include "json.h"
#include "sha256.h"

namespace outrider {

namespace {

constexpr int SCHEMA = 2;
constexpr int64_t MAX_MANIFEST_BYTES = 64 << 20, MAX_COUNT = (int64_t{1} << 31) - 1,
                  MAX_DIMENSION = 1 << 16;
constexpr int64_t MAX_VOCAB_SIZE = int64_t{1} << 30; // limit of outrider_workspace_size
constexpr int SCALE_BYTES = 4; // after the levels of a quantised row
constexpr double MAX_CACHE_NUMBERS = 1e12; // of a slot, so that all slots' bytes fit an int64_t
constexpr int MAX_STEP_WIDTH = 2;          // maximum number of tokens in a plain step's call
const char REBUILD_REMEDY[] =
    "Build it again: make engines MODEL=<target> DRAFT=<draft> OUT=<folder>";

[[noreturn]] void fail_unreadable(const std::string& path) {
  const int error = errno;
  const bool denied = error == EACCES || error == EPERM;
  fail(OUTRIDER_FAILED_BUNDLE, path + " cannot be read: " + strerror(error),
       denied ? "Make it readable for this user, with chmod or chown" : REBUILD_REMEDY);
}

bool exists(const std::string& path, struct stat& found) {
  if (stat(path.c_str(), &found) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) fail_unreadable(path);
  return false;
}

struct FileCloser {
  void operator()(FILE* file) const { fclose(file); }
};
using File = std::unique_ptr<FILE, FileCloser>;

File open_file(const std::string& path) {
  File file(fopen(path.c_str(), "rb"));
  if (file == nullptr) fail_unreadable(path);
  return file;
}

// Calls work(bytes, size) for each piece of a file.
template <class Work> void for_each_piece(const std::string& path, const Work& work) {
  const File file = open_file(path);
  std::vector<char> piece(1 << 20);
  while (const size_t size = fread(piece.data(), 1, piece.size(), file.get()))
    work(piece.data(), size);
  if (ferror(file.get())) fail_unreadable(path);
}

// Whether a file name stays inside the bundle's folder.
bool stays_inside(const std::string& name) {
  return !name.empty() && name[0] != '/' && ("/" + name + "/").find("/../") == std::string::npos;
}

std::vector<CacheShape> read_shapes(const Json& rows, bool quantised) {
  std::vector<CacheShape> found;
  for (const Json& row : rows.list()) {
    if (row.list().size() != 2) throw BadJson{"a cache's shape is not [heads, width]"};
    found.emplace_back(row.list()[0].integer(1, MAX_DIMENSION),
                       row.list()[1].integer(1, MAX_DIMENSION) + (quantised ? SCALE_BYTES : 0));
  }
  return found;
}

CompiledFacts read_compiled(const Json& engine) {
  CompiledFacts found;
  for (const Json& target : engine.at("targets").list()) found.targets += " " + target.string();
  if (!found.targets.empty()) found.targets += " ";
  for (const Json& profile : engine.at("profiles").list()) {
    for (const char* name : {"slots", "tokens", "outputs"}) {
      const std::vector<Json>& sizes = profile.at(name).list(); // smallest, expected, largest
      if (sizes.size() != 3) throw BadJson{"a profile does not have three sizes"};
      found.profiles.push_back({sizes[0].integer(1, MAX_COUNT), sizes[2].integer(1, MAX_COUNT)});
    }
    if (profile.has("memory"))
      found.activations =
          std::max(found.activations, profile.at("memory").integer(0, int64_t{1} << 62));
  }
  if (found.profiles.empty()) throw BadJson{"an engine has no profiles"};
  return found;
}

// engine: the facts of its compiled engine, or null.
ModelFacts read_model(const Json& facts, const std::string& role, const Json* engine) {
  ModelFacts found;
  const Json& files = facts.at("files");
  if (files.has("graph.pt2"))
    fail(OUTRIDER_FAILED_BACKEND, "the " + role + " is not an ONNX graph",
         "Build with BACKEND=onnxruntime");
  if (facts.has("encoder"))
    fail(OUTRIDER_FAILED_BACKEND, "the " + role + " is an encoder-decoder",
         "Use the Python runtime: C++ sessions do not support encoders yet");
  if (facts.has("states") && engine != nullptr)
    fail(OUTRIDER_FAILED_BACKEND,
         "the " + role + " carries a recurrent state, which GPU backends do not support",
         "Build with BACKEND=onnxruntime");
  found.file = role + (files.has("host.onnx") ? "/host.onnx" : "/graph.onnx");
  found.weights = role + (files.has("host.bin") ? "/host.bin" : "/weights.bin");
  if (engine != nullptr) {
    found.file = found.weights = role + "/" + engine->at("file").string();
    if (engine->has("weights") || facts.has("cache"))
      throw BadJson{"its engines are of a kind that no GPU library supports"};
    found.compiled = read_compiled(*engine);
  }
  found.dtype = facts.at("dtype").string();
  const bool quantised = facts.has("cache");
  found.cache = quantised ? facts.at("cache").string() : found.dtype;
  found.vocab_size = static_cast<int32_t>(facts.at("vocab_size").integer(1, MAX_VOCAB_SIZE));
  found.max_len = static_cast<int32_t>(facts.at("max_len").integer(1, MAX_COUNT));
  found.capacity = facts.at("capacity").integer(1, MAX_COUNT);
  found.keys = read_shapes(facts.at("key_shapes"), quantised);
  found.values = read_shapes(facts.at("value_shapes"), quantised);
  if (facts.has("states")) {
    const Json& states = facts.at("states");
    found.states = StateFacts{read_shapes(states.at("shapes"), false),
                              states.at("rows").integer(1, MAX_DIMENSION),
                              states.at("reach").integer(1, MAX_DIMENSION)};
  }
  return found;
}

// capacity: the pair's.
void check_model(const Bundle& bundle, const ModelFacts& model, int64_t capacity) {
  if ((model.keys.empty() && !model.states) || model.keys.size() != model.values.size())
    throw BadJson{"it contradicts itself about its caches"};
  // Even if a verification accepts nothing, the rows that the next one reads must still be there.
  if (model.states && model.states->rows < bundle.max_gamma + 3 + model.states->reach)
    throw BadJson{"it contradicts itself about its states"};
  if (model.capacity < int64_t{bundle.max_len} + bundle.max_gamma + 1 || model.capacity != capacity)
    throw BadJson{"it contradicts itself about its sizes"};
  double numbers = 0;
  for (const auto* side : {&model.keys, &model.values})
    for (const auto& [heads, width] : *side)
      numbers += static_cast<double>(heads * width) * static_cast<double>(model.capacity);
  if (numbers > MAX_CACHE_NUMBERS) throw BadJson{"its caches are larger than any memory"};
  if (bundle.files.count(model.file) == 0 || bundle.files.count(model.weights) == 0)
    throw BadJson{"it contradicts itself about its files"};
}

std::string python_repr(const std::string& text) {
  const bool single = text.find('\'') != std::string::npos && text.find('"') == std::string::npos;
  const char mark = single ? '"' : '\'';
  std::string found(1, mark);
  for (const char c : text) {
    if (c == '\\' || c == mark) found += '\\';
    found += c;
  }
  return found + mark;
}

std::string strip(const std::string& text) {
  const size_t from = text.find_first_not_of(" \t\r\f\v");
  if (from == std::string::npos) return "";
  return text.substr(from, text.find_last_not_of(" \t\r\f\v") - from + 1);
}

// This processor's name, as in runtime/files/machine.py: measured bits are valid on that one only.
std::string processor() {
  std::map<std::string, std::string> facts;
  if (const File file{fopen("/proc/cpuinfo", "r")}) {
    static const char* const KEYS[] = {
        "vendor_id", "cpu family",      "model",       "model name", "stepping",
        "flags",     "CPU implementer", "CPU variant", "CPU part",   "Features"};
    char* line = nullptr;
    size_t size = 0;
    while (getline(&line, &size, file.get()) > 1) { // up to an empty one
      const std::string text = line;
      const size_t colon = text.find(':');
      const std::string key = strip(text.substr(0, std::min(colon, text.find('\n'))));
      if (std::find(std::begin(KEYS), std::end(KEYS), key) == std::end(KEYS)) continue;
      const size_t end = text.find('\n');
      facts[key] = colon == std::string::npos ? "" : strip(text.substr(colon + 1, end - colon - 1));
    }
    free(line);
  }
  std::string shown = "[", between;
  for (const auto& [key, value] : facts) {
    shown += between + "(" + python_repr(key) + ", " + python_repr(value) + ")";
    between = ", ";
  }
  shown += "]";
  const std::string name = facts["model name"].empty() ? facts["CPU part"] : facts["model name"];
  utsname machine{};
  uname(&machine);
  return std::string(machine.machine) + " " + name + " " + Sha256::of(shown).substr(0, 8);
}

} // namespace

Bundle Bundle::read(const std::string& folder) {
  struct stat found{};
  if (stat(folder.c_str(), &found) != 0) fail_unreadable(folder);
  if (!S_ISDIR(found.st_mode))
    fail(OUTRIDER_FAILED_BUNDLE, folder + " is not a folder", REBUILD_REMEDY);
  const std::string path = folder + "/manifest.json";
  if (!exists(path, found))
    fail(OUTRIDER_FAILED_BUNDLE, folder + " is not a bundle: it has no manifest.json", REBUILD_REMEDY);
  if (!S_ISREG(found.st_mode) || found.st_size > MAX_MANIFEST_BYTES)
    fail(OUTRIDER_FAILED_BUNDLE, path + " is not an Outrider manifest", REBUILD_REMEDY);
  std::string text;
  for_each_piece(path, [&](const char* bytes, size_t size) { text.append(bytes, size); });

  Bundle bundle;
  bundle.folder = folder;
  try {
    const Json manifest = Json::parse(text);
    if (!manifest.has("kind") || manifest.at("kind").string() != "manifest")
      throw BadJson{"not a manifest file of Outrider"};
    if (manifest.at("schema").integer(0, MAX_COUNT) != SCHEMA)
      throw BadJson{"schema " + manifest.at("schema").canonical() + "; this version reads schema " +
                    std::to_string(SCHEMA)};
    if (!manifest.has("checksum") ||
        manifest.at("checksum").string() != Sha256::of(manifest.canonical("checksum")))
      throw BadJson{"the checksum does not match: the file was edited or damaged"};

    const Json &facts = manifest.at("facts"), &pair = facts.at("pair");
    bundle.backend = facts.at("backend").string();
    if (bundle.backend != "onnxruntime" && bundle.backend != "tensorrt")
      fail(OUTRIDER_FAILED_BACKEND, folder + " was built for the backend " + bundle.backend,
           "Build it with BACKEND=onnxruntime or tensorrt: C++ sessions support no other yet");
    if (bundle.on_gpu() != facts.has("engines"))
      throw BadJson{"it contradicts itself about its engines"};
    for (const auto& [name, version] : facts.at("versions").object())
      bundle.versions[name] = version.string();
    for (const auto& [name, file] : facts.at("files").object()) {
      if (!stays_inside(name)) throw BadJson{name + " leads out of the folder"};
      bundle.files[name] = {file.at("size").integer(0, int64_t{1} << 62),
                            file.at("sha256").string()};
    }
    bundle.slots = static_cast<int32_t>(facts.at("slots").integer(1, MAX_DIMENSION));
    bundle.vocab_size = static_cast<int32_t>(pair.at("vocab_size").integer(1, MAX_VOCAB_SIZE));
    bundle.max_len = static_cast<int32_t>(pair.at("max_len").integer(1, MAX_COUNT));
    bundle.max_gamma =
        static_cast<int32_t>(pair.at("max_gamma").integer(1, OUTRIDER_MAX_WIDTH));
    bundle.ngram_by_default = pair.has("lookup") && pair.at("lookup").string() == "ngram";
    for (const Json& id : pair.at("tokenizer").at("eos_token_ids").list())
      bundle.eos_ids.push_back(id.integer(0, MAX_COUNT));
    std::sort(bundle.eos_ids.begin(), bundle.eos_ids.end());
    const auto engine = [&](const char* role) {
      return bundle.on_gpu() ? &facts.at("engines").at(role) : nullptr;
    };
    bundle.target = read_model(pair.at("target"), "target", engine("target"));
    if (pair.has("draft")) bundle.draft = read_model(pair.at("draft"), "draft", engine("draft"));
    if (pair.has("rules")) { // after what cannot be mended by removing them
      std::string names;
      for (const auto& [name, rule] : pair.at("rules").object())
        if (pair.at("rules").has(name)) names += (names.empty() ? "" : ", ") + name;
      fail(OUTRIDER_FAILED_BACKEND, "the checkpoint's generation config asks for " + names,
           "Use the Python runtime: C++ sessions do not support that yet");
    }

    const int64_t capacity = pair.at("capacity").integer(1, MAX_COUNT);
    check_model(bundle, bundle.target, capacity);
    if (bundle.draft) check_model(bundle, *bundle.draft, capacity);
    if (bundle.vocab_size > bundle.target.vocab_size)
      throw BadJson{"it contradicts itself about its vocabulary"};

    if (facts.has("invariance")) {
      const Json& measured = facts.at("invariance");
      const auto read_bits = [](const Json& json) {
        CallBits calls{{}, {}, json.at("neighbours").boolean(), json.at("rows").boolean()};
        for (const Json& width : json.at("widths").list())
          calls.widths.push_back(width.integer(1, MAX_DIMENSION));
        for (const Json& width : json.at("others").list())
          calls.others.push_back(width.integer(1, MAX_DIMENSION));
        if (calls.widths.empty()) throw BadJson{"no widths agree"};
        return calls;
      };
      bundle.invariance_ =
          Invariance{measured.at("processor").string(), read_bits(measured.at("one")),
                     read_bits(measured.at("several"))};
    }
  } catch (const BadJson& bad) {
    fail(OUTRIDER_FAILED_BUNDLE, path + ": " + bad.what, REBUILD_REMEDY);
  }
  for (const auto& [name, file] : bundle.files) {
    const std::string at = folder + "/" + name;
    if (!exists(at, found) || !S_ISREG(found.st_mode))
      fail(OUTRIDER_FAILED_BUNDLE, at + " is missing", REBUILD_REMEDY);
    if (found.st_size != file.size)
      fail(OUTRIDER_FAILED_BUNDLE,
           at + " has " + std::to_string(found.st_size) + " bytes, not " +
               std::to_string(file.size) + ": truncated or replaced",
           REBUILD_REMEDY);
  }
  return bundle;
}

std::optional<std::pair<uint64_t, int64_t>> Bundle::identity(const std::string& folder) {
  struct stat found;
  if (stat((folder + "/manifest.json").c_str(), &found) != 0) return std::nullopt;
  return std::pair(uint64_t{found.st_ino},
                   int64_t{found.st_mtim.tv_sec} * 1'000'000'000 + found.st_mtim.tv_nsec);
}

void Bundle::verify(bool weights) const {
  for (const auto& [name, file] : files) {
    const std::string last = name.substr(name.rfind('/') + 1);
    if ((last == "weights.bin" || last == "host.bin") != weights) continue;
    Sha256 hash;
    const std::string path = folder + "/" + name;
    for_each_piece(path, [&](const char* bytes, size_t size) { hash.update(bytes, size); });
    if (hash.hex() != file.sha256)
      fail(OUTRIDER_FAILED_BUNDLE, path + " was edited or damaged: its hash differs",
           REBUILD_REMEDY);
  }
}

Guarantees Bundle::guarantees_for(int32_t slot_count, const std::string& version,
                                  int32_t plain_width) const {
  Guarantees guarantees;
  const int32_t default_width = guarantees.min_width;
  if (plain_width != 0) guarantees.min_width = plain_width;
  const auto built = versions.find("onnxruntime");
  if (!invariance_ || (built != versions.end() && built->second != version) ||
      invariance_->processor != processor()) {
    guarantees.invariance_lost = guarantees.min_width < default_width;
    return guarantees;
  }
  const CallBits& calls = slot_count == 1 ? invariance_->one : invariance_->several;
  const int64_t required_width = *std::min_element(calls.widths.begin(), calls.widths.end());
  const bool wide = required_width <= MAX_STEP_WIDTH &&
                    std::all_of(calls.others.begin(), calls.others.end(),
                                [&](int64_t w) { return w < required_width; });
  if (!wide) return guarantees;
  if (plain_width == 0) guarantees.min_width = static_cast<int32_t>(required_width);
  guarantees.invariance_lost = guarantees.min_width < required_width;
  guarantees.output_invariant = !guarantees.invariance_lost && calls.rows && calls.neighbours;
  return guarantees;
}

} // namespace outrider
