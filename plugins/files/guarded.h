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

inline void copy_line(char* to, size_t size, const std::string& text) {
  size_t length = std::min(size - 1, text.size());
  while (length < text.size() && length > 0 && (text[length] & 0xC0) == 0x80) --length; // UTF-8
  memcpy(to, text.data(), length);
  to[length] = '\0';
  for (size_t i = 0; i < length; ++i)
    if (to[i] == '\n') to[i] = ' ';
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
