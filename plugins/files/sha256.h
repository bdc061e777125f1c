// SHA-256 (FIPS 180-4), with the processor's SHA instructions if it has them.
#ifndef OUTRIDER_FILES_SHA256_H
#define OUTRIDER_FILES_SHA256_H

#include <stddef.h>
#include <stdint.h>

#include <string>

namespace outrider {

class Sha256 {
public:
  void update(const void* data, size_t size);
  std::string hex(); // the digest; no update may follow
  static std::string of(const std::string& text);

private:
  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  unsigned char rest_[64];
  uint64_t size_ = 0;
};

} // namespace outrider
#endif
