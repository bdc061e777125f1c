// Validates a session's configuration, and a request before it takes a slot (runtime/checks.py,
// sampling/warp.py in C++).
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>

#include "decoder.h"
#include "engines/host_engine.h"

namespace outrider {

namespace {

std::string format_number(double value) {
  char text[40];
  snprintf(text, sizeof text, "%.15g", value); // whole numbers without a decimal point
  return text;
}

// valid: false for NaN too.
void require_in_range(bool valid, const char* name, double value, const std::string& what) {
  refuse_if(!valid, std::string(name) + "=" + format_number(value) + " is out of range",
            std::string(name) + " must be " + what);
}

bool is_between(double value, double min, double max) { return value >= min && value <= max; }

void check_sampling(const outrider_options& o) {
  require_in_range(o.temperature == 0 || is_between(o.temperature, 1e-6, 1e6), "temperature",
                   o.temperature, "0, or from 1e-6 to 1e6");
  require_in_range(o.top_k >= 0, "top_k", o.top_k, "0 (off) or more");
  require_in_range(o.top_p > 0 && o.top_p <= 1, "top_p", o.top_p, "in (0, 1]");
  require_in_range(is_between(o.min_p, 0, 1), "min_p", o.min_p, "in [0, 1]");
  require_in_range(is_between(o.repetition_penalty, 1e-3, 1e3), "repetition_penalty",
                   o.repetition_penalty, "from 0.001 to 1000; 1 is off");
  require_in_range(is_between(o.frequency_penalty, -2, 2), "frequency_penalty", o.frequency_penalty,
                   "from -2 to 2; 0 is off");
  require_in_range(is_between(o.presence_penalty, -2, 2), "presence_penalty", o.presence_penalty,
                   "from -2 to 2; 0 is off");
  require_in_range(o.lenience > 0 && o.lenience <= 1, "lenience", o.lenience, "in (0, 1]");
  require_in_range(o.rule >= OUTRIDER_TOKEN && o.rule <= OUTRIDER_COUPLED, "rule", o.rule,
                   "OUTRIDER_TOKEN to OUTRIDER_COUPLED");
  require_in_range(isfinite(o.sigmoid_alpha) && o.sigmoid_alpha < 0, "sigmoid_alpha",
                   o.sigmoid_alpha, "negative");
  require_in_range(isfinite(o.sigmoid_beta) && o.sigmoid_beta > 0, "sigmoid_beta", o.sigmoid_beta,
                   "positive");
  refuse_if(o.lenience != 1 && o.rule != OUTRIDER_TOKEN, "lenience requires the token rule",
            "Use the token rule, or leave lenience at 1");
  refuse_if(o.rule == OUTRIDER_SIGMOID && o.temperature == 0,
            "the sigmoid rule is not defined at temperature 0",
            "Use the token rule, or a positive temperature");
  refuse_if(o.rule != OUTRIDER_SIGMOID && (o.sigmoid_alpha != -1e3 || o.sigmoid_beta != 1e3),
            "sigmoid_alpha and sigmoid_beta have no effect with this rule",
            "Use the sigmoid rule, or leave them out");
}

void check_prompt(const int64_t* prompt, int64_t length, const outrider_options& options,
                  const Bundle& bundle) {
  if (length < 1 || prompt == nullptr)
    fail(OUTRIDER_FAILED_PROMPT, "the prompt is empty", "Give it at least one token");
  if (length >= bundle.max_len)
    fail(OUTRIDER_FAILED_PROMPT,
         "the prompt has " + std::to_string(length) + " tokens, and the bundle's context is " +
             std::to_string(bundle.max_len),
         "Shorten it, or build the bundle with MAX_LEN=" +
             std::to_string(static_cast<uint64_t>(length) +
                            static_cast<uint64_t>(options.max_new_tokens)) +
             ", if the model can");
  for (int64_t i = 0; i < length; ++i)
    if (prompt[i] < 0 || prompt[i] >= bundle.target.vocab_size)
      fail(OUTRIDER_FAILED_PROMPT,
           "the prompt contains token id " + std::to_string(prompt[i]) +
               ", and the model has only 0 to " + std::to_string(bundle.target.vocab_size - 1),
           "Remove that token from the prompt or the chat template");
}

// Whether the bundle has the requested draft source, and it supports the options.
void check_draft(const Request& request, const Bundle& bundle) {
  const outrider_options& o = request.options;
  const bool has_temperature = o.draft_temperature != 0, has_threshold = o.draft_threshold > 0;
  refuse_if(request.uses_draft_model() && !bundle.draft,
            "gamma=" + std::to_string(o.gamma) + " needs a draft model, and the bundle has none",
            "Use gamma=0, or OUTRIDER_DRAFT_NGRAM, or build the bundle with DRAFT=<draft>");
  refuse_if(request.drafts_point_masses() && o.rule == OUTRIDER_SIGMOID,
            "the sigmoid rule needs the draft's logits, and a lookup has none",
            "Use the token rule, or the draft model");
  refuse_if(has_temperature && o.temperature == 0,
            "draft_temperature has no effect at temperature 0",
            "Leave it out, or sample with temperature above 0");
  require_in_range(!has_temperature || is_between(o.draft_temperature, 1e-3, 1e3),
                   "draft_temperature", o.draft_temperature,
                   "from 0.001 to 1000, or 0 for the target's");
  refuse_if((has_temperature || has_threshold) && request.drafts_point_masses(),
            "a lookup has no probabilities for a temperature or threshold",
            "Leave them out, or use the draft model");
  refuse_if(has_threshold && request.drafts_all_at_once(), "this draft always drafts gamma tokens",
            "Leave draft_threshold out, or use OUTRIDER_DRAFT_MODEL");
}

void check_memory(const Bundle& bundle, int32_t slots) {
  const int32_t gamma = bundle.max_gamma;
  double need = HostEngine::min_bytes(bundle.target, slots, gamma + 1, 1);
  if (bundle.draft) need += HostEngine::min_bytes(*bundle.draft, slots, gamma + 1, gamma);
  const double have =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (need > have)
    fail(OUTRIDER_FAILED_MEMORY,
         std::to_string(slots) + " slots need " + std::to_string(static_cast<int64_t>(need / 1048576)) +
             " MiB, and this machine has " + std::to_string(static_cast<int64_t>(have / 1048576)),
         "Use fewer slots");
}

} // namespace

int cores() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

Bundle read_bundle(const outrider_config& config) {
  refuse_if(
      config.abi_version != OUTRIDER_ABI_VERSION,
      "the program was compiled for version " + std::to_string(config.abi_version) +
          " of the interface, and this liboutrider has " + std::to_string(OUTRIDER_ABI_VERSION),
      "Set abi_version to OUTRIDER_ABI_VERSION, and compile with the headers of this library");
  refuse_if(config.folder == nullptr || *config.folder == 0, "no folder is named",
            "Set it to a bundle made by make engines");
  const int max_threads = 4 * cores();
  refuse_if(config.threads < 0 || config.threads > max_threads,
            "threads=" + std::to_string(config.threads) + " is out of range",
            "Use 0 (automatic) to " + std::to_string(max_threads));
  refuse_if(config.slots < 0 || config.slots > 1 << 16,
            "slots=" + std::to_string(config.slots) + " is out of range",
            "Use 1 to 65536, or 0 for the bundle's");
  refuse_if(config.plain_width < 0 || config.plain_width > 2, "plain_width is out of range",
            "Use 1 or 2, or 0");
  refuse_if(config.corpus_length < 0 || config.corpus_length > INT32_MAX ||
                (config.corpus_length > 0 && config.corpus == nullptr),
            "corpus_length is out of range", "Set it to the number of ids in corpus");
  Bundle bundle = Bundle::read(config.folder);
  for (int64_t i = 0; i < config.corpus_length; ++i)
    refuse_if(config.corpus[i] < 0 || config.corpus[i] >= bundle.vocab_size,
              "the corpus has the token id " + std::to_string(config.corpus[i]) +
                  ", but the bundle's ids are 0 to " + std::to_string(bundle.vocab_size - 1),
              "Tokenize it with the bundle's own tokenizer");
  refuse_if(config.plain_width != 0 && bundle.on_gpu(), "plain_width is for the CPU",
            "Leave it at 0");
  if (!bundle.on_gpu()) // a GPU engine checks its own memory
    check_memory(bundle, config.slots > 0 ? config.slots : bundle.slots);
  if (!config.unverified) bundle.verify(false);
  return bundle;
}

Request check_request(const int64_t* prompt, int64_t length, const outrider_options& options,
                      const Bundle& bundle, bool invariance_lost) {
  Request request{options, length, {}, {}, {}, bundle.eos_ids};
  outrider_options& o = request.options;
  check_sampling(o);
  refuse_if(o.rule == OUTRIDER_COUPLED && invariance_lost,
            "the coupled rule promises the same text for every gamma, which plain_width=1 rules out",
            "Leave one of them out");
  require_in_range(o.max_new_tokens >= 1, "max_new_tokens", o.max_new_tokens,
                   "an integer >= 1");
  require_in_range(o.min_new_tokens >= 0 && o.min_new_tokens <= o.max_new_tokens, "min_new_tokens",
                   o.min_new_tokens, "from 0 to max_new_tokens");
  require_in_range(o.draft_threshold >= 0 && o.draft_threshold < 1, "draft_threshold",
                   o.draft_threshold, "0 (off) or a probability below 1");
  require_in_range(o.logprobs >= -1 && o.logprobs <= bundle.vocab_size, "logprobs", o.logprobs,
                   "from 0 to " + std::to_string(bundle.vocab_size) + ", or -1 for none");
  require_in_range(o.gamma >= OUTRIDER_DEFAULT_GAMMA && o.gamma <= bundle.max_gamma, "gamma",
                   o.gamma,
                   "from 0 to " + std::to_string(bundle.max_gamma) + ", or build with MAX_GAMMA");
  require_in_range(o.draft >= OUTRIDER_DRAFT_DEFAULT && o.draft <= OUTRIDER_DRAFT_NONE, "draft",
                   o.draft, "one of OUTRIDER_DRAFT_...");
  require_in_range(o.bias_length >= 0 && (o.bias_length == 0 || (o.bias_ids && o.biases)),
                   "bias_length", o.bias_length, "the length of bias_ids and biases");
  require_in_range(o.stop_length >= 0 && (o.stop_length == 0 || o.stops), "stop_length",
                   o.stop_length, "the length of stops");
  check_prompt(prompt, length, o, bundle);

  const bool names_draft = o.draft != OUTRIDER_DRAFT_DEFAULT && o.draft != OUTRIDER_DRAFT_NONE;
  refuse_if(names_draft && o.gamma == 0, "a draft contradicts gamma=0", "Leave one of them out");
  refuse_if(o.draft == OUTRIDER_DRAFT_NONE && o.gamma > 0, "gamma contradicts OUTRIDER_DRAFT_NONE",
            "Leave one of them out");
  if (o.draft == OUTRIDER_DRAFT_DEFAULT)
    o.draft = bundle.draft              ? OUTRIDER_DRAFT_MODEL
              : bundle.ngram_by_default ? OUTRIDER_DRAFT_NGRAM
                                        : OUTRIDER_DRAFT_NONE;
  if (o.gamma == OUTRIDER_DEFAULT_GAMMA) {
    const int32_t default_gamma = request.uses_draft_model()       ? 4
                                  : o.draft == OUTRIDER_DRAFT_NONE ? 0
                                                                   : 8;
    o.gamma = std::min(default_gamma, bundle.max_gamma);
  }
  if (o.draft == OUTRIDER_DRAFT_NONE) o.draft = OUTRIDER_DRAFT_MODEL; // unused: gamma is 0
  if (o.gamma == 0)
    refuse_if((o.rule != OUTRIDER_TOKEN && o.rule != OUTRIDER_COUPLED) || o.lenience != 1 ||
                  o.draft_temperature != 0 || o.draft_threshold != 0,
              "rule, lenience, draft_temperature and draft_threshold have no effect with gamma=0",
              "Leave them out, or use a draft");
  else
    check_draft(request, bundle);

  std::map<int64_t, float> biases; // ascending
  for (int32_t i = 0; i < o.bias_length; ++i) {
    require_in_range(is_between(o.biases[i], -100, 100), "a bias", o.biases[i], "from -100 to 100");
    biases[o.bias_ids[i]] = static_cast<float>(o.biases[i]);
  }
  refuse_if(biases.size() != static_cast<size_t>(o.bias_length), "biases name a token id twice",
            "Name it once");
  for (const auto& [id, bias] : biases) {
    request.bias_ids.push_back(id);
    request.biases.push_back(bias);
  }
  request.stop_ids.assign(o.stops, o.stops + o.stop_length);
  for (const Tokens* ids : {&request.bias_ids, &request.stop_ids})
    for (const int64_t id : *ids)
      refuse_if(id < 0 || id >= bundle.vocab_size,
                "the token id " + std::to_string(id) + " does not exist",
                "Choose from 0 to " + std::to_string(bundle.vocab_size - 1));
  o.bias_ids = nullptr, o.biases = nullptr, o.stops = nullptr; // the caller's memory
  return request;
}

} // namespace outrider
