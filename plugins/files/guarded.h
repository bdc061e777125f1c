// Turns exceptions at a C interface into a status with a cause and a remedy.
#ifndef OUTRIDER_FILES_GUARDED_H
#define OUTRIDER_FILES_GUARDED_H

#include <string.h>

#include <exception>
#include <new>
#include <string>
#include <system_error>

#include "failure.h"
#include "utf8.h"

namespace outrider {

// Copies a text as one line of UTF-8, cut if too long; `?` replaces what cannot be in one.
inline void copy_line(char* to, size_t size, const std::string& text) {
  size_t length = 0;
  for (size_t i = 0, from = 0; i < text.size(); from = i) {
    const int32_t c = next_utf8(text, i);
    const bool control = c < 0x20 || (c >= 0x7F && c <= 0x9F), surrogate = c >> 11 == 0x1B;
    const bool fits = !control && !surrogate;
    const size_t count = fits ? i - from : 1;
    if (length + count >= size) break;
    if (fits) memcpy(to + length, &text[from], count);
    else to[length] = c == '\n' ? ' ' : '?';
    length += count;
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
