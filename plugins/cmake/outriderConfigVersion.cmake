# find_package(outrider N): N must equal OUTRIDER_ABI_VERSION, the version of the C interface.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../include/outrider.h" _outrider_line
  REGEX "^#define OUTRIDER_ABI_VERSION ")
string(REGEX REPLACE "^.* ([0-9]+)$" "\\1" PACKAGE_VERSION "${_outrider_line}")
unset(_outrider_line)
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
