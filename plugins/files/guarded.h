// Turns exceptions at a C interface into a status with a cause and a remedy.
#ifndef OUTRIDER_FILES_GUARDED_H
#define OUTRIDER_FILES_GUARDED_H

#include <string.h>

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <system_error>

#include "failure.h"

namespace outrider {

// Bytes of the UTF-8 character at text[i]; 0 if there is none, or a control character.
inline size_t character_size(const std::string& text, size_t i) {
  const auto byte = [&](size_t at) -> unsigned {
    return at < text.size() ? static_cast<unsigned char>(text[at]) : 0;
  };
  const unsigned first = byte(i), second = byte(i + 1);
  if (first < 0x80) return first >= 0x20 && first != 0x7F;
  const size_t size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  for (size_t k = 1; k < size; ++k)
    if ((byte(i + k) & 0xC0) != 0x80) return 0;
  const bool shortest = first >= 0xC2 && (first != 0xE0 || second >= 0xA0) &&
                        (first != 0xF0 || second >= 0x90);
  const bool surrogate = first == 0xED && second >= 0xA0;
  const bool too_large = first > 0xF4 || (first == 0xF4 && second >= 0x90);
  return shortest && !surrogate && !too_large ? size : 0;
}

// Copies a text as one line of UTF-8, cut if too long; `?` replaces what cannot be in one.
inline void copy_line(char* to, size_t size, const std::string& text) {
  size_t length = 0;
  for (size_t i = 0, count; i < text.size(); i += count, length += count) {
    const size_t found = character_size(text, i);
    count = std::max<size_t>(found, 1);
    if (length + count >= size) break;
    memcpy(to + length, &text[i], count);
    if (found == 0) to[length] = text[i] == '\n' ? ' ' : '?';
  }
  to[length] = '\0';
}

inline int32_t fill_failure(outrider_failure* failure, const Failure& found) {
  if (failure != nullptr) {
    failure->status = found.status;
    copy_line(failure->cause, sizeof failure->cause, found.cause);
    copy_line(failure->remedy, sizeof failure->remedy, found.remedy);
  }
  return found.status;
}

template <class Work> int32_t run_guarded(outrider_failure* failure, const Work& work) {
  try {
    if (failure != nullptr) *failure = {};
    work();
    return OUTRIDER_OK;
  } catch (const Failure& found) {
    return fill_failure(failure, found);
  } catch (const std::bad_alloc&) {
    return fill_failure(failure,
                        {OUTRIDER_FAILED_MEMORY, "not enough memory",
                         "Free some memory, use fewer slots, or build with a smaller MAX_LEN"});
  } catch (const std::system_error& error) { // no thread could be started
    return fill_failure(failure,
                        {OUTRIDER_FAILED_MEMORY, error.what(), "Raise the process's thread limit"});
  } catch (const std::exception& error) { // no exception may cross a C interface
    return fill_failure(failure,
                        {OUTRIDER_FAILED_BACKEND, error.what(), "Report this bug in Outrider"});
  }
}

} // namespace outrider
#endif
