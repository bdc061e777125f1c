#include "json.h"

#include <stdlib.h>
#include <string.h>

#include <utility>

#include "utf8.h"

namespace outrider {

namespace {

constexpr int MAX_DEPTH = 64; // levels of nesting; Outrider's files have 8
// One-letter escapes, and the characters they denote.
const char LETTERS[] = "\"\\bfnrt/", LITERALS[] = "\"\\\b\f\n\r\t/";

[[noreturn]] void throw_bad_json(std::string what) { throw BadJson{std::move(what)}; }

void append_utf8(std::string& text, uint32_t c) {
  const auto put = [&](uint32_t byte) { text += static_cast<char>(byte); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6), put(0x80 | (c & 63));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 63)), put(0x80 | (c & 63));
  } else {
    put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 63)), put(0x80 | (c >> 6 & 63)), put(0x80 | (c & 63));
  }
}

// The character at text[i]; advances i past it. Throws BadJson for invalid UTF-8.
uint32_t next_character(std::string_view text, size_t& i) {
  const int32_t c = next_utf8(text, i);
  if (c < 0) throw_bad_json("not UTF-8");
  return static_cast<uint32_t>(c);
}

void append_escaped(std::string& out, std::string_view text) {
  static const char HEX[] = "0123456789abcdef";
  const auto unit = [&](uint32_t u) {
    out += "\\u";
    for (int shift = 12; shift >= 0; shift -= 4) out += HEX[u >> shift & 15];
  };
  out += '"';
  for (size_t i = 0; i < text.size();) {
    const uint32_t c = next_character(text, i);
    const void* found = c < 0x80 ? memchr(LITERALS, static_cast<int>(c), 7) : nullptr; // not '/'
    if (found != nullptr) {
      out += '\\';
      out += LETTERS[static_cast<const char*>(found) - LITERALS];
    } else if (c >= 0x10000) {
      unit(0xD800 | (c - 0x10000) >> 10), unit(0xDC00 | ((c - 0x10000) & 0x3FF));
    } else if (c < 0x20 || c > 0x7E) {
      unit(c);
    } else {
      out += static_cast<char>(c);
    }
  }
  out += '"';
}

} // namespace

class JsonReader {
public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  Json parse_document() {
    Json value = read(0);
    skip_space();
    if (at_ != text_.size()) throw_bad_json("more than one value");
    return value;
  }

private:
  char peek() {
    skip_space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  void skip_space() {
    while (at_ < text_.size() && memchr(" \t\n\r", text_[at_], 4) != nullptr) ++at_;
  }

  bool take(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  void expect(char c) {
    if (peek() != c) throw_bad_json("truncated, or not JSON");
    ++at_;
  }

  Json read(int depth) {
    if (depth > MAX_DEPTH) throw_bad_json("nested too deeply");
    Json value;
    const char c = peek();
    if (c == '{') {
      value.kind_ = Json::OBJECT;
      items('}', [&] {
        std::string name = quoted();
        expect(':');
        Json& field = value.object_[name] = read(depth + 1);
        field.name_ = std::move(name);
      });
    } else if (c == '[') {
      value.kind_ = Json::LIST;
      items(']', [&] { value.list_.push_back(read(depth + 1)); });
    } else if (c == '"') {
      value.kind_ = Json::STRING, value.text_ = quoted();
    } else if (take("null")) {
      value.kind_ = Json::NOTHING;
    } else if (take("true")) {
      value.kind_ = Json::TRUE;
    } else if (take("false")) {
      value.kind_ = Json::FALSE;
    } else {
      value.kind_ = Json::NUMBER, value.text_ = number();
    }
    return value;
  }

  template <class Item> void items(char end, const Item& item) {
    ++at_;
    if (peek() == end) {
      ++at_;
      return;
    }
    for (;;) {
      item();
      if (peek() == end) break;
      expect(',');
    }
    ++at_;
  }

  std::string number() {
    const size_t from = at_;
    const auto digits = [&] {
      const size_t start = at_;
      while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
      if (at_ == start) throw_bad_json("truncated, or not JSON");
    };
    take("-");
    digits();
    if (take(".")) digits();
    if (take("e") || take("E")) {
      if (!take("-")) take("+");
      digits();
    }
    return std::string(text_.substr(from, at_ - from));
  }

  std::string quoted() {
    expect('"');
    std::string found;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] != '\\') {
        const uint32_t c = next_character(text_, at_);
        if (c < 0x20) throw_bad_json("a control character in a string");
        append_utf8(found, c);
        continue;
      }
      ++at_;
      const void* letter = at_ < text_.size() ? memchr(LETTERS, text_[at_], 8) : nullptr;
      if (letter != nullptr) {
        found += LITERALS[static_cast<const char*>(letter) - LETTERS];
        ++at_;
      } else if (take("u")) {
        uint32_t c = unit();
        if (c >= 0xD800 && c < 0xDC00 && text_.substr(at_, 2) == "\\u") {
          const size_t before = at_;
          at_ += 2;
          const uint32_t low = unit();
          if (low >= 0xDC00 && low < 0xE000) c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
          else at_ = before;
        }
        append_utf8(found, c);
      } else {
        throw_bad_json("a string with a broken escape");
      }
    }
    expect('"');
    return found;
  }

  uint32_t unit() {
    uint32_t c = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char digit = at_ < text_.size() ? text_[at_] : '\0';
      if (digit >= '0' && digit <= '9') c = c << 4 | static_cast<uint32_t>(digit - '0');
      else if (digit >= 'a' && digit <= 'f') c = c << 4 | static_cast<uint32_t>(digit - 'a' + 10);
      else if (digit >= 'A' && digit <= 'F') c = c << 4 | static_cast<uint32_t>(digit - 'A' + 10);
      else throw_bad_json("a string with a broken escape");
    }
    return c;
  }

  std::string_view text_;
  size_t at_ = 0;
};

Json Json::parse(std::string_view text) { return JsonReader(text).parse_document(); }

void Json::fail_field(const std::string& why) const {
  throw_bad_json(name_.empty() ? why : name_ + ": " + why);
}

void Json::fail_kind(const char* expected) const {
  std::string shown;
  write(shown, nullptr);
  fail_field(shown.substr(0, 60) + " is not " + expected);
}

bool Json::has(const std::string& name) const {
  const auto found = object().find(name);
  return found != object_.end() && found->second.kind_ != NOTHING;
}

const Json& Json::at(const std::string& name) const {
  const auto found = object().find(name);
  if (found == object_.end()) throw_bad_json("field " + name + " is missing");
  return found->second;
}

bool Json::boolean() const {
  if (kind_ != TRUE && kind_ != FALSE) fail_kind("true or false");
  return kind_ == TRUE;
}

int64_t Json::integer(int64_t min, int64_t max) const {
  if (kind_ != NUMBER || text_.size() > 20 || text_.find_first_of(".eE") != std::string::npos)
    fail_kind("an integer");
  const int64_t value = strtoll(text_.c_str(), nullptr, 10);
  if (value < min || value > max)
    fail_field(text_ + " is not from " + std::to_string(min) + " to " + std::to_string(max));
  return value;
}

const std::string& Json::string() const {
  if (kind_ != STRING) fail_kind("a string");
  return text_;
}

const std::vector<Json>& Json::list() const {
  if (kind_ != LIST) fail_kind("a list");
  return list_;
}

const std::map<std::string, Json>& Json::object() const {
  if (kind_ != OBJECT) fail_kind("an object");
  return object_;
}

std::string Json::canonical(const char* without) const {
  std::string out;
  write(out, without);
  return out;
}

void Json::write(std::string& out, const char* without) const {
  const char* between = "";
  switch (kind_) {
  case NOTHING: out += "null"; break;
  case FALSE: out += "false"; break;
  case TRUE: out += "true"; break;
  case NUMBER: out += text_; break;
  case STRING: append_escaped(out, text_); break;
  case LIST:
    out += '[';
    for (const Json& value : list_) {
      out += between;
      value.write(out, nullptr);
      between = ",";
    }
    out += ']';
    break;
  case OBJECT:
    out += '{';
    for (const auto& [name, value] : object_) {
      if (without != nullptr && name == without) continue;
      out += between;
      append_escaped(out, name);
      out += ':';
      value.write(out, nullptr);
      between = ",";
    }
    out += '}';
    break;
  }
}

} // namespace outrider
