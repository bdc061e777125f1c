// Generate in a C++ program: open a bundle, generate, print the token ids and statistics.
//
//   cmake -S examples -B build/embed -Doutrider_DIR="$(python -m outrider.cmake)"
//   cmake --build build/embed
//   build/embed/embed build/demo "$(python -m outrider.cmake --onnxruntime)" 11 42 7
//
// Prompts and results are token ids: the program does its own tokenization.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <outrider.hpp>

int main(int count, char** words) {
  if (count < 4) {
    std::fprintf(stderr, "usage: embed <bundle> <libonnxruntime.so> <token id> ...\n");
    return 2;
  }
  std::vector<std::int64_t> prompt;
  for (int i = 3; i < count; ++i) {
    char* end = nullptr;
    prompt.push_back(std::strtoll(words[i], &end, 10));
    if (end == words[i] || *end != 0) {
      std::fprintf(stderr, "error: %s is not a token id\n", words[i]);
      return 2;
    }
  }
  try {
    outrider::Config config;
    config.folder = words[1];
    config.onnxruntime = words[2];
    outrider::Session session(config);

    outrider::Options options;
    options.max_new_tokens = 48;
    options.temperature = 0.8;
    options.seed = 3;
    options.rule = outrider::Rule::coupled; // the seed alone determines the output
    outrider::Stream stream = session.stream(prompt, options);
    for (const outrider::Token& token : stream) {
      std::printf("%lld ", static_cast<long long>(token.id));
      std::fflush(stdout);
    }
    const outrider_stats stats = stream.stats();
    // In thousands, so that seconds divided by it are milliseconds per round.
    const double rounds = stats.rounds > 0 ? static_cast<double>(stats.rounds) / 1e3 : 1;
    const double models = stats.draft_seconds + stats.target_seconds;
    std::printf("\n%lld tokens in %lld rounds, %lld of %lld draft tokens accepted; first token "
                "after %.2f ms, %.3f ms per round, %.3f of them outside the models\n",
                static_cast<long long>(stats.output_tokens), static_cast<long long>(stats.rounds),
                static_cast<long long>(stats.accepted), static_cast<long long>(stats.drafted),
                1e3 * stats.prefill_seconds, stats.round_seconds / rounds,
                (stats.round_seconds - models) / rounds);
    if (std::fflush(stdout) != 0) {
      std::perror("error: standard output");
      return 12;
    }
  } catch (const outrider::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.status();
  }
  return 0;
}
