// The exception of a session, which the C interface turns into an `outrider_failure`.
#ifndef OUTRIDER_FILES_FAILURE_H
#define OUTRIDER_FILES_FAILURE_H

#include <string>
#include <utility>

#include "outrider_session.h"

namespace outrider {

// cause, remedy: one line each, without a final full stop.
struct Failure {
  int32_t status;
  std::string cause, remedy;
};

[[noreturn]] inline void fail(int32_t status, std::string cause, std::string remedy) {
  throw Failure{status, std::move(cause), std::move(remedy)};
}

inline void refuse_if(bool condition, std::string cause, std::string remedy) {
  if (condition) fail(OUTRIDER_FAILED_OPTION, std::move(cause), std::move(remedy));
}

} // namespace outrider
#endif
