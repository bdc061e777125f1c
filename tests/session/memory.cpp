// Failing allocations. Usage: memory <bundle> <libonnxruntime.so> <bundle with broken logits>
//
// For each kind of request, every call is retried until it has all its memory; in the n-th attempt
// liboutrider's own n-th allocation fails. Prints the number of failures. Exits with 2 if the
// output or the number of callback calls differs from a run without failures, and with 3 if broken
// logits are not reported or occupy the slot.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

#include <outrider_session.h>

namespace {

thread_local int before_failure = -1; // allocations until one fails; below 0: none fails

bool called_by_us(void* address) {
  Dl_info ours{}, caller{};
  return dladdr(reinterpret_cast<void*>(&outrider_abi_version), &ours) != 0 &&
         dladdr(address, &caller) != 0 && ours.dli_fbase == caller.dli_fbase;
}

} // namespace

void* operator new(std::size_t size) {
  if (before_failure >= 0 && called_by_us(__builtin_return_address(0)) && before_failure-- == 0)
    throw std::bad_alloc();
  void* const memory = std::malloc(size > 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

int failures, callback_calls;

std::int32_t count_calls(void*, std::int64_t) { return ++callback_calls, 0; }

// Repeats a call until no allocation fails, and returns its status.
template <class Call> std::int32_t retry_until_memory(bool allocations_fail, const Call& call) {
  for (int n = 0;; ++n) {
    before_failure = allocations_fail ? n : -1;
    const std::int32_t status = call();
    before_failure = -1;
    if (!allocations_fail || status != OUTRIDER_FAILED_MEMORY) return status;
    ++failures;
  }
}

// Returns no tokens if a call fails for another reason.
std::vector<std::int64_t> generate(outrider_session* session, const outrider_options& options,
                                   bool allocations_fail) {
  const std::int64_t prompt[] = {5, 6, 7, 5, 6};
  std::uint64_t request = 0;
  const auto start = options.draft == OUTRIDER_DRAFT_NONE ? outrider_admit : outrider_begin;
  if (retry_until_memory(allocations_fail, [&] {
        return start(session, prompt, 5, &options, &request, nullptr);
      }) != OUTRIDER_OK)
    return {};
  std::vector<std::int64_t> found;
  outrider_token tokens[8];
  std::int32_t count = 0, finish = OUTRIDER_RUNNING;
  while (finish == OUTRIDER_RUNNING) {
    if (retry_until_memory(allocations_fail, [&] { return outrider_round(session, nullptr); }) !=
        OUTRIDER_OK)
      return {};
    if (retry_until_memory(allocations_fail, [&] {
          return outrider_take(session, request, tokens, 8, &count, &finish, nullptr);
        }) != OUTRIDER_OK)
      return {};
    for (std::int32_t i = 0; i < count; ++i) found.push_back(tokens[i].id);
  }
  outrider_release(session, request, nullptr);
  return found;
}

} // namespace

int main(int, char** words) {
  outrider_config config{};
  config.abi_version = OUTRIDER_ABI_VERSION, config.folder = words[1];
  config.onnxruntime = words[2], config.slots = 1, config.threads = 1;
  outrider_session *session = nullptr, *broken = nullptr;
  if (outrider_open(&config, &session, nullptr) != OUTRIDER_OK) return 1;
  for (const int draft : {OUTRIDER_DRAFT_NONE, OUTRIDER_DRAFT_MODEL, OUTRIDER_DRAFT_NGRAM,
                          OUTRIDER_DRAFT_CHAIN}) {
    outrider_options options;
    outrider_default_options(&options);
    options.temperature = 0.8, options.seed = 3, options.ignore_eos = 1;
    options.max_new_tokens = 30, options.logprobs = 2, options.presence_penalty = 0.5;
    options.draft = draft, options.stop = count_calls;
    const std::vector<std::int64_t> expected = generate(session, options, false);
    failures = callback_calls = 0;
    const bool same = generate(session, options, true) == expected && callback_calls == 30;
    std::printf("%d allocations failed, draft %d\n", failures, draft);
    if (!same) return 2;
  }
  outrider_close(session);
  config.folder = words[3], config.unverified = 1;
  if (outrider_open(&config, &broken, nullptr) != OUTRIDER_OK) return 1;
  outrider_options options;
  outrider_default_options(&options);
  const std::int64_t prompt[] = {5, 6};
  std::uint64_t request = 0;
  for (const bool allocations_fail : {true, false, true}) // the last one with a kept call
    if (retry_until_memory(allocations_fail, [&] {
          return outrider_admit(broken, prompt, 2, &options, &request, nullptr);
        }) != OUTRIDER_FAILED_NUMERIC)
      return 3;
  outrider_close(broken);
}
