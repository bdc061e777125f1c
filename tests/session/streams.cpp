// Unusual ends of streams. Prints each. Usage: streams <bundle> <libonnxruntime.so>
//
// The bundle's draft model returns NaN.
#include <cstdio>
#include <stdexcept>
#include <utility>

#include <outrider.hpp>

namespace {

void drain(const char* name, outrider::Stream& stream) {
  int tokens = 0;
  try {
    while (stream.next()) ++tokens;
    std::printf("%s: %d tokens, finish %d\n", name, tokens, static_cast<int>(stream.finish()));
  } catch (const outrider::Error& error) {
    std::printf("%s: %d tokens, failure %d\n", name, tokens, error.status());
  } catch (const std::runtime_error& error) {
    std::printf("%s: %d tokens, %s\n", name, tokens, error.what());
  }
}

} // namespace

int main(int, char** words) {
  outrider::Config config;
  config.folder = words[1], config.onnxruntime = words[2];
  config.slots = 2, config.verify = false;
  outrider::Options plain;
  plain.gamma = 0, plain.max_new_tokens = 6, plain.ignore_eos = true;
  outrider::Options drafted = plain, throwing = plain;
  drafted.gamma = 4;
  int calls = 0;
  throwing.stop = [&](std::int64_t) -> bool {
    if (++calls == 3) throw std::runtime_error("its own");
    return false;
  };

  outrider::Session session(config);
  outrider::Stream broken = session.stream({5, 6}, drafted), other = session.stream({5, 7}, plain);
  other.next(), other.next(); // runs a round, in which `broken` fails before its token is taken
  drain("broken", broken);
  drain("broken, again", broken);
  broken.close(); // frees the slot for the next stream
  outrider::Stream closed = session.stream({5, 6}, plain);
  closed.close();
  try {
    closed.next();
  } catch (const outrider::Error& error) {
    std::printf("%s\n", error.what());
  }
  broken = session.stream({5, 6}, throwing);
  {
    const outrider::Session taken = std::move(session);
    std::printf("%d slots, %d moved away\n", taken.facts().slots, session.facts().slots);
  } // the streams keep the session alive
  drain("other", other);
  drain("throwing", broken);
  drain("throwing, again", broken);
  outrider::Stream moved = std::move(broken);
  drain("moved", moved);
}
