// A JSON reader for the bundle's files, and the canonical text over which checksums are computed.
#ifndef OUTRIDER_FILES_JSON_H
#define OUTRIDER_FILES_JSON_H

#include <stdint.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace outrider {

// A JSON value. Strings are UTF-8 (a lone surrogate is encoded like a character); numbers keep
// their text. An accessor of another kind than the value's throws BadJson, which names the field if
// there is one.
class Json {
public:
  // Throws BadJson unless the text is exactly one value.
  static Json parse(std::string_view text);

  bool has(const std::string& name) const; // whether the field exists and is not null
  const Json& at(const std::string& name) const;
  bool boolean() const;
  int64_t integer(int64_t min, int64_t max) const;
  const std::string& string() const;
  const std::vector<Json>& list() const;
  const std::map<std::string, Json>& object() const;

  // The same text as Python's json.dumps(sort_keys=True, separators=(",", ":")). without: a field
  // of the outermost object to leave out.
  std::string canonical(const char* without = nullptr) const;

private:
  enum Kind { NOTHING, FALSE, TRUE, NUMBER, STRING, LIST, OBJECT };

  friend class JsonReader;
  [[noreturn]] void fail_field(const std::string& why) const;
  [[noreturn]] void fail_kind(const char* expected) const;
  void write(std::string& out, const char* without) const;

  Kind kind_ = NOTHING;
  std::string name_; // of a field
  std::string text_; // of a number or a string
  std::vector<Json> list_;
  std::map<std::string, Json> object_; // UTF-8 sorts by code point, as Python does
};

struct BadJson {
  std::string what;
};

} // namespace outrider
#endif
