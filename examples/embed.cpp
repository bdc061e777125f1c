// A text in your own C++ program: open a bundle, generate, print the ids and what drafting brought.
//
//   cmake -S examples -B build/embed -Doutrider_DIR="$(python -m outrider.cmake)"
//   cmake --build build/embed
//   build/embed/embed build/demo "$(python -m outrider.cmake --onnxruntime)" 11 42 7
//
// Ids are the interface: tokenize where you already do.
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
  for (int i = 3; i < count; ++i) prompt.push_back(std::atoll(words[i]));
  try {
    outrider::Config config;
    config.folder = words[1];
    config.onnxruntime = words[2];
    outrider::Session session(config);

    outrider::Options options;
    options.max_new_tokens = 48;
    options.temperature = 0.8;
    options.seed = 3;
    options.rule = outrider::Rule::coupled; // the seed alone decides the text
    outrider::Stream stream = session.stream(prompt, options);
    for (const outrider::Token& token : stream) {
      std::printf("%lld ", static_cast<long long>(token.id));
      std::fflush(stdout);
    }
    const outrider_stats stats = stream.stats();
    const double rounds = static_cast<double>(stats.rounds) / 1e3; // so that times are in ms
    const double models = stats.draft_seconds + stats.target_seconds;
    std::printf("\n%lld tokens in %lld rounds, %lld of %lld drafts stand; first token after %.2f ms, "
                "%.3f ms a round, %.3f of them outside the models\n",
                static_cast<long long>(stats.output_tokens), static_cast<long long>(stats.rounds),
                static_cast<long long>(stats.accepted), static_cast<long long>(stats.drafted),
                1e3 * stats.prefill_seconds, stats.round_seconds / rounds,
                (stats.round_seconds - models) / rounds);
  } catch (const outrider::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.status();
  }
  return 0;
}
