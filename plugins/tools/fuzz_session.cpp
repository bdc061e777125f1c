// Hostile use of outrider_session.h, to run under sanitizers: random options, joining and leaving
// requests, cancellation by other threads, and damaged manifests. It passes unless it crashes or a
// sanitizer reports an error.
//
// Usage: fuzz_session <bundle> <libonnxruntime.so> <folder> <count>. <folder> must contain links to
// the bundle's files other than the manifest, which this program writes there.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "files/json.h"
#include "files/sha256.h"
#include "outrider.hpp"

namespace {

std::mt19937_64 numbers(1);
std::int64_t below(std::int64_t limit) {
  return static_cast<std::int64_t>(numbers() % static_cast<std::uint64_t>(limit));
}

outrider::Options random_options() {
  const double odd_values[] = {0, 1, 0.7, -1, 1e9, NAN, 0.5, 1e-3};
  const auto number = [&](double default_value) {
    return below(60) ? default_value : odd_values[below(8)];
  };
  outrider::Options options;
  options.max_new_tokens = static_cast<std::int32_t>(below(30)) + 3;
  options.min_new_tokens = static_cast<std::int32_t>(below(3));
  options.temperature = number(below(2) ? 0.8 : 0);
  options.top_k = static_cast<std::int32_t>(below(40)) - (below(20) == 0);
  options.top_p = number(1), options.min_p = number(0);
  options.repetition_penalty = number(1.1), options.presence_penalty = number(0.1);
  options.seed = numbers();
  options.gamma = static_cast<std::int32_t>(below(10)) - 1;
  options.draft = static_cast<outrider::Draft>(below(40) ? below(7) : 7);
  options.rule = static_cast<outrider::Rule>(below(4) ? 3 * below(2) : below(5));
  options.draft_threshold = number(0), options.draft_temperature = number(0);
  options.ignore_eos = below(2);
  if (below(3) == 0) options.logprobs = static_cast<std::int32_t>(below(5));
  if (below(4) == 0) options.logit_bias = {{below(300) - 2, number(2)}, {3, -1}};
  if (below(4) == 0) options.stop = [](std::int64_t token) { return token % 17 == 0; };
  return options;
}

void run_requests(outrider::Session& session, int count) {
  std::vector<outrider::Stream> streams;
  int tokens = 0, refused = 0;
  for (int i = 0; i < count; ++i) {
    std::vector<std::int64_t> prompt(static_cast<std::size_t>(below(60)));
    for (std::int64_t& id : prompt) id = below(200);
    if (below(20) == 0) prompt.push_back(below(2) ? -5 : std::int64_t{1} << 40);
    try {
      streams.push_back(session.stream(prompt, random_options()));
    } catch (const outrider::Error&) {
      ++refused;
    }
    while (!streams.empty() && (streams.size() > 3 || below(3))) {
      const auto at = below(static_cast<std::int64_t>(streams.size()));
      outrider::Stream& stream = streams[static_cast<std::size_t>(at)];
      try {
        if (below(15) == 0) std::thread([&] { stream.cancel(); }).join();
        if (stream.next()) ++tokens;
        else streams.erase(streams.begin() + at);
      } catch (const outrider::Error&) {
        streams.erase(streams.begin() + at);
      }
      if (below(40) == 0 && !streams.empty()) streams.pop_back(); // as if the client disconnected
    }
  }
  std::printf("%d tokens, %d refused\n", tokens, refused);
}

// Requests of one session, cancelled by threads that do nothing else.
void run_cancellations(outrider_session* session) {
  std::atomic<bool> ended{false};
  std::vector<std::thread> others;
  for (int i = 0; i < 3; ++i)
    others.emplace_back([&, i] {
      for (std::uint64_t number = static_cast<std::uint64_t>(i); !ended; ++number)
        outrider_cancel(session, number % 500);
    });
  outrider_options options;
  outrider_default_options(&options);
  const std::int64_t prompt[] = {1, 2, 3};
  int cancelled = 0;
  for (int i = 0; i < 100; ++i) {
    std::uint64_t request = 0;
    const auto start = i % 2 ? outrider_begin : outrider_admit;
    if (start(session, prompt, 3, &options, &request, nullptr) != OUTRIDER_OK) continue;
    outrider_token token;
    std::int32_t count = 1, finish = OUTRIDER_RUNNING;
    while (finish == OUTRIDER_RUNNING) {
      outrider_round(session, nullptr);
      outrider_take(session, request, &token, 1, &count, &finish, nullptr);
    }
    cancelled += finish == OUTRIDER_CANCELLED;
    outrider_release(session, request, nullptr);
  }
  ended = true;
  for (std::thread& other : others) other.join();
  std::printf("%d cancelled\n", cancelled);
}

// Opens randomly damaged manifests, some of them with a matching checksum.
void open_damaged_manifests(const std::string& bundle, const std::string& library,
                            const std::string& folder, int count) {
  std::ifstream file(bundle + "/manifest.json");
  const std::string whole((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const char* const pieces[] = {"0", "-1", "null", "[]", "{}", "\"x\"", "1e99", "99999999999999999999",
                                "true", "\"../../x\"", "2147483648", "[[[[", "\\ud800"};
  int opened = 0;
  for (int i = 0; i < count; ++i) {
    std::string text = whole;
    for (std::int64_t n = below(3) + 1; n > 0; --n) {
      const auto at = static_cast<std::size_t>(below(static_cast<std::int64_t>(text.size())));
      const auto length = static_cast<std::size_t>(below(12));
      text.replace(at, length, below(2) ? pieces[below(13)] : std::string(1, static_cast<char>(below(256))));
    }
    if (below(2)) try { // with a new checksum
        outrider::Json value = outrider::Json::parse(text);
        const std::string body = value.canonical("checksum");
        text = body.substr(0, body.size() - 1) + ",\"checksum\":\"" + outrider::Sha256::of(body) + "\"}";
      } catch (const outrider::BadJson&) {
      }
    std::ofstream(folder + "/manifest.json") << text;
    try {
      outrider::Config config;
      config.folder = folder, config.onnxruntime = library, config.verify = below(2);
      outrider::Session session(config);
      ++opened;
    } catch (const outrider::Error&) {
    }
  }
  std::printf("%d of %d manifests opened\n", opened, count);
}

} // namespace

int main(int count, char** words) {
  if (count != 5) return 2;
  outrider::Config config;
  config.folder = words[1], config.onnxruntime = words[2], config.slots = 4, config.threads = 1;
  {
    outrider::Session session(config);
    run_requests(session, std::atoi(words[4]));
  }
  outrider_config plain{};
  plain.abi_version = OUTRIDER_ABI_VERSION;
  plain.folder = words[1], plain.onnxruntime = words[2], plain.slots = 2, plain.threads = 1;
  outrider_session* session = nullptr;
  if (outrider_open(&plain, &session, nullptr) != OUTRIDER_OK) return 1;
  run_cancellations(session);
  outrider_close(session);
  open_damaged_manifests(words[1], words[2], words[3], std::atoi(words[4]));
  return 0;
}
