// JSON as the bundle's files have it: a reader, and the canonical text that checksums are of.
#ifndef OUTRIDER_FILES_JSON_H
#define OUTRIDER_FILES_JSON_H

#include <stdint.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace outrider {

// A value. Strings are UTF-8 (a lone surrogate as if it were a character); numbers keep their text.
// What is not of the kind that is asked for throws a BadJson, which names it where it is a field.
class Json {
public:
  // Throws BadJson where the text is not one value.
  static Json parse(std::string_view text);

  bool has(const std::string& name) const; // and it is not null
  const Json& at(const std::string& name) const;
  bool boolean() const;
  int64_t integer(int64_t least, int64_t most) const;
  const std::string& string() const;
  const std::vector<Json>& list() const;
  const std::map<std::string, Json>& object() const;

  // As Python's json.dumps(sort_keys=True, separators=(",", ":")) of the same value; without: a
  // name of the outermost object that is left out.
  std::string canonical(const char* without = nullptr) const;

private:
  enum Kind { NOTHING, FALSE, TRUE, NUMBER, STRING, LIST, OBJECT };

  friend class JsonReader;
  [[noreturn]] void refuse(const std::string& why) const;
  [[noreturn]] void is_not(const char* wanted) const;
  void write(std::string& out, const char* without) const;

  Kind kind_ = NOTHING;
  std::string name_; // of a field
  std::string text_; // of a number or a string
  std::vector<Json> list_;
  std::map<std::string, Json> object_; // UTF-8 sorts as its characters do
};

struct BadJson {
  std::string what;
};

} // namespace outrider
#endif
