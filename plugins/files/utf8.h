// UTF-8, as in a bundle's files and in error messages.
#ifndef OUTRIDER_FILES_UTF8_H
#define OUTRIDER_FILES_UTF8_H

#include <stddef.h>
#include <stdint.h>

#include <string_view>

namespace outrider {

// The character at text[i], which may be a surrogate, and i advances past it; -1 if there is none,
// and i advances by one byte. Requires i < text.size().
inline int32_t next_utf8(std::string_view text, size_t& i) {
  const auto byte = [&](size_t at) { return static_cast<unsigned char>(text[at]); };
  const uint32_t first = byte(i++);
  if (first < 0x80) return static_cast<int32_t>(first);
  const size_t more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
  if (first < 0xC2 || first > 0xF4 || i + more > text.size()) return -1;
  uint32_t c = first & (0x3Fu >> more);
  for (size_t k = 0; k < more; ++k) {
    if ((byte(i + k) & 0xC0) != 0x80) return -1;
    c = c << 6 | (byte(i + k) & 63u);
  }
  constexpr uint32_t LEAST[] = {0, 0x80, 0x800, 0x10000}; // others have a shorter encoding
  if (c < LEAST[more] || c > 0x10FFFF) return -1;
  i += more;
  return static_cast<int32_t>(c);
}

} // namespace outrider
#endif
