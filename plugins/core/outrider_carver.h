// Divides memory into consecutive aligned pieces. From address 0, it only measures their size.
#ifndef OUTRIDER_CARVER_H
#define OUTRIDER_CARVER_H

#include <cstddef>
#include <cstdint>

namespace {

template <std::uintptr_t ALIGNMENT> struct Carver {
  std::uintptr_t at;

  void align() { at = (at + ALIGNMENT - 1) & ~(ALIGNMENT - 1); }

  template <class T> T* take(std::size_t count) {
    align();
    T* piece = reinterpret_cast<T*>(at);
    at += count * sizeof(T);
    return piece;
  }
};

} // namespace
#endif
