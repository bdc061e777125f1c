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
constexpr int64_t LARGEST_MANIFEST = 64 << 20, COUNT = (int64_t{1} << 31) - 1, SMALL = 1 << 16;
constexpr int64_t MOST_TOKENS = int64_t{1} << 30; // limit of outrider_workspace_size
constexpr int SCALE_BYTES = 4; // after the levels of a quantised row
constexpr double MOST_NUMBERS = 1e12; // in a slot's caches, so that all slots' bytes fit an int64_t
constexpr int WIDEST_STEP = 2; // maximum number of tokens in a plain step's call
const char REBUILD[] = "Build it again: make engines MODEL=<target> DRAFT=<draft> OUT=<folder>";

[[noreturn]] void unreadable(const std::string& path) {
  const int error = errno;
  const bool denied = error == EACCES || error == EPERM;
  fail(OUTRIDER_FAILED_BUNDLE, path + " cannot be read: " + strerror(error),
       denied ? "Make it readable for this user, with chmod or chown" : REBUILD);
}

struct Closed {
  void operator()(FILE* file) const { fclose(file); }
};
using File = std::unique_ptr<FILE, Closed>;

File open(const std::string& path) {
  File file(fopen(path.c_str(), "rb"));
  if (file == nullptr) unreadable(path);
  return file;
}

// Calls work(bytes, size) for each piece of a file.
template <class Work> void pieces(const std::string& path, const Work& work) {
  const File file = open(path);
  std::vector<char> piece(1 << 20);
  while (const size_t size = fread(piece.data(), 1, piece.size(), file.get()))
    work(piece.data(), size);
  if (ferror(file.get())) unreadable(path);
}

// Whether a file name stays inside the bundle's folder.
bool inside(const std::string& name) {
  return !name.empty() && name[0] != '/' && ("/" + name + "/").find("/../") == std::string::npos;
}

std::vector<CacheShape> shapes(const Json& rows, bool quantised) {
  std::vector<CacheShape> found;
  for (const Json& row : rows.list()) {
    if (row.list().size() != 2) throw BadJson{"a cache's shape is not [heads, width]"};
    found.emplace_back(row.list()[0].integer(1, SMALL),
                       row.list()[1].integer(1, SMALL) + (quantised ? SCALE_BYTES : 0));
  }
  return found;
}

CompiledFacts compiled(const Json& engine) {
  CompiledFacts found;
  for (const Json& target : engine.at("targets").list()) found.targets += " " + target.string();
  if (!found.targets.empty()) found.targets += " ";
  for (const Json& profile : engine.at("profiles").list()) {
    for (const char* name : {"slots", "tokens", "outputs"}) {
      const std::vector<Json>& sizes = profile.at(name).list(); // smallest, expected, largest
      if (sizes.size() != 3) throw BadJson{"a profile does not have three sizes"};
      found.profiles.push_back({sizes[0].integer(1, COUNT), sizes[2].integer(1, COUNT)});
    }
    if (profile.has("memory"))
      found.activations =
          std::max(found.activations, profile.at("memory").integer(0, int64_t{1} << 62));
  }
  if (found.profiles.empty()) throw BadJson{"an engine has no profiles"};
  return found;
}

// engine: the facts of its compiled engine, or null.
ModelFacts model(const Json& facts, const std::string& role, const Json* engine) {
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
    found.compiled = compiled(*engine);
  }
  found.dtype = facts.at("dtype").string();
  const bool quantised = facts.has("cache");
  found.cache = quantised ? facts.at("cache").string() : found.dtype;
  found.vocab_size = static_cast<int32_t>(facts.at("vocab_size").integer(1, MOST_TOKENS));
  found.max_len = static_cast<int32_t>(facts.at("max_len").integer(1, COUNT));
  found.capacity = facts.at("capacity").integer(1, COUNT);
  found.keys = shapes(facts.at("key_shapes"), quantised);
  found.values = shapes(facts.at("value_shapes"), quantised);
  if (facts.has("states")) {
    const Json& states = facts.at("states");
    found.states =
        StateFacts{shapes(states.at("shapes"), false), states.at("rows").integer(1, SMALL),
                   states.at("reach").integer(1, SMALL)};
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
  if (numbers > MOST_NUMBERS) throw BadJson{"its caches are larger than any memory"};
  if (bundle.files.count(model.file) == 0 || bundle.files.count(model.weights) == 0)
    throw BadJson{"it contradicts itself about its files"};
}

std::string quoted(const std::string& text) { // Python's repr
  const bool single = text.find('\'') != std::string::npos && text.find('"') == std::string::npos;
  const char mark = single ? '"' : '\'';
  std::string found(1, mark);
  for (const char c : text) {
    if (c == '\\' || c == mark) found += '\\';
    found += c;
  }
  return found + mark;
}

std::string stripped(const std::string& text) {
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
      const std::string key = stripped(text.substr(0, std::min(colon, text.find('\n'))));
      if (std::find(std::begin(KEYS), std::end(KEYS), key) == std::end(KEYS)) continue;
      const size_t end = text.find('\n');
      facts[key] = colon == std::string::npos ? "" : stripped(text.substr(colon + 1, end - colon - 1));
    }
    free(line);
  }
  std::string shown = "[", between;
  for (const auto& [key, value] : facts) {
    shown += between + "(" + quoted(key) + ", " + quoted(value) + ")";
    between = ", ";
  }
  shown += "]";
  const std::string name = facts.count("model name") ? facts["model name"] : facts["CPU part"];
  utsname machine{};
  uname(&machine);
  return std::string(machine.machine) + " " + name + " " + Sha256::of(shown).substr(0, 8);
}

} // namespace

Bundle Bundle::read(const std::string& folder) {
  struct stat found{};
  if (stat(folder.c_str(), &found) != 0) unreadable(folder);
  if (!S_ISDIR(found.st_mode)) fail(OUTRIDER_FAILED_BUNDLE, folder + " is not a folder", REBUILD);
  const std::string path = folder + "/manifest.json";
  if (stat(path.c_str(), &found) != 0)
    fail(OUTRIDER_FAILED_BUNDLE, folder + " is no bundle: it has no manifest.json", REBUILD);
  if (!S_ISREG(found.st_mode) || found.st_size > LARGEST_MANIFEST)
    fail(OUTRIDER_FAILED_BUNDLE, path + " is no manifest of Outrider", REBUILD);
  std::string text;
  pieces(path, [&](const char* bytes, size_t size) { text.append(bytes, size); });

  Bundle bundle;
  bundle.folder = folder;
  try {
    const Json whole = Json::parse(text);
    if (!whole.has("kind") || whole.at("kind").string() != "manifest")
      throw BadJson{"not a manifest file of Outrider"};
    if (whole.at("schema").integer(0, COUNT) != SCHEMA)
      throw BadJson{"schema " + whole.at("schema").canonical() + "; this version reads schema " +
                    std::to_string(SCHEMA)};
    if (!whole.has("checksum") ||
        whole.at("checksum").string() != Sha256::of(whole.canonical("checksum")))
      throw BadJson{"the checksum does not match: the file was edited or damaged"};

    const Json &facts = whole.at("facts"), &pair = facts.at("pair");
    bundle.backend = facts.at("backend").string();
    if (bundle.backend != "onnxruntime" && bundle.backend != "tensorrt")
      fail(OUTRIDER_FAILED_BACKEND, folder + " was built for the backend " + bundle.backend,
           "Build it with BACKEND=onnxruntime or tensorrt: C++ sessions support no other yet");
    if (bundle.on_gpu() != facts.has("engines"))
      throw BadJson{"it contradicts itself about its engines"};
    for (const auto& [name, version] : facts.at("versions").object())
      bundle.versions[name] = version.string();
    for (const auto& [name, file] : facts.at("files").object()) {
      if (!inside(name)) throw BadJson{name + " leads out of the folder"};
      bundle.files[name] = {file.at("size").integer(0, int64_t{1} << 62),
                            file.at("sha256").string()};
    }
    bundle.slots = static_cast<int32_t>(facts.at("slots").integer(1, SMALL));
    bundle.vocab_size = static_cast<int32_t>(pair.at("vocab_size").integer(1, MOST_TOKENS));
    bundle.max_len = static_cast<int32_t>(pair.at("max_len").integer(1, COUNT));
    bundle.max_gamma =
        static_cast<int32_t>(pair.at("max_gamma").integer(1, OUTRIDER_MAX_WIDTH));
    bundle.lookup = pair.has("lookup") && pair.at("lookup").string() == "ngram";
    for (const Json& id : pair.at("tokenizer").at("eos_token_ids").list())
      bundle.ends.push_back(id.integer(0, COUNT));
    std::sort(bundle.ends.begin(), bundle.ends.end());
    const auto engine = [&](const char* role) {
      return bundle.on_gpu() ? &facts.at("engines").at(role) : nullptr;
    };
    if (pair.has("rules")) {
      std::string names;
      for (const auto& [name, asked] : pair.at("rules").object())
        if (pair.at("rules").has(name)) names += (names.empty() ? "" : ", ") + name;
      fail(OUTRIDER_FAILED_BACKEND, "the checkpoint's generation config asks for " + names,
           "Use the Python runtime: C++ sessions do not support that yet");
    }
    bundle.target = model(pair.at("target"), "target", engine("target"));
    if (pair.has("draft")) bundle.draft = model(pair.at("draft"), "draft", engine("draft"));

    const int64_t capacity = pair.at("capacity").integer(1, COUNT);
    check_model(bundle, bundle.target, capacity);
    if (bundle.draft) check_model(bundle, *bundle.draft, capacity);
    if (bundle.vocab_size > bundle.target.vocab_size)
      throw BadJson{"it contradicts itself about its vocabulary"};

    if (facts.has("invariance")) {
      const Json& measured = facts.at("invariance");
      const auto bits = [](const Json& json) {
        CallBits calls{{}, {}, json.at("neighbours").boolean(), json.at("rows").boolean()};
        for (const Json& width : json.at("widths").list())
          calls.widths.push_back(width.integer(1, SMALL));
        for (const Json& width : json.at("others").list())
          calls.others.push_back(width.integer(1, SMALL));
        if (calls.widths.empty()) throw BadJson{"no widths agree"};
        return calls;
      };
      bundle.invariance_ = Invariance{measured.at("processor").string(), bits(measured.at("one")),
                                      bits(measured.at("several"))};
    }
  } catch (const BadJson& bad) {
    fail(OUTRIDER_FAILED_BUNDLE, path + ": " + bad.what, REBUILD);
  }
  for (const auto& [name, file] : bundle.files) {
    const std::string at = folder + "/" + name;
    if (stat(at.c_str(), &found) != 0 || !S_ISREG(found.st_mode))
      fail(OUTRIDER_FAILED_BUNDLE, at + " is missing", REBUILD);
    if (found.st_size != file.size)
      fail(OUTRIDER_FAILED_BUNDLE,
           at + " has " + std::to_string(found.st_size) + " bytes, not " +
               std::to_string(file.size) + ": truncated or replaced",
           REBUILD);
  }
  return bundle;
}

void Bundle::verify(bool weights) const {
  for (const auto& [name, file] : files) {
    const std::string last = name.substr(name.rfind('/') + 1);
    if ((last == "weights.bin" || last == "host.bin") != weights) continue;
    Sha256 hash;
    const std::string path = folder + "/" + name;
    pieces(path, [&](const char* bytes, size_t size) { hash.update(bytes, size); });
    if (hash.hex() != file.sha256)
      fail(OUTRIDER_FAILED_BUNDLE, path + " was edited or damaged: its hash differs", REBUILD);
  }
}

Bits Bundle::promise(int32_t slot_count, const std::string& version, int32_t plain_width) const {
  Bits bits;
  const int32_t usual = bits.narrowest;
  if (plain_width != 0) bits.narrowest = plain_width;
  const auto built = versions.find("onnxruntime");
  if (!invariance_ || (built != versions.end() && built->second != version) ||
      invariance_->processor != processor()) {
    bits.forgone = bits.narrowest < usual;
    return bits;
  }
  const CallBits& calls = slot_count == 1 ? invariance_->one : invariance_->several;
  const int64_t least = *std::min_element(calls.widths.begin(), calls.widths.end());
  const bool wide = least <= WIDEST_STEP && std::all_of(calls.others.begin(), calls.others.end(),
                                                        [&](int64_t w) { return w < least; });
  if (!wide) return bits;
  if (plain_width == 0) bits.narrowest = static_cast<int32_t>(least);
  bits.forgone = bits.narrowest < least;
  bits.output_invariant = !bits.forgone && calls.rows && calls.neighbours;
  return bits;
}

} // namespace outrider
