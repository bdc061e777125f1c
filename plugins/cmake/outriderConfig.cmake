# find_package(outrider) defines the target outrider::outrider, with headers and liboutrider.so.
#
# In an installed wheel, both are beside this folder; in a checkout, the library is in build/lib.
# Nothing is cached, so that a changed outrider_DIR takes effect.
get_filename_component(_outrider_beside "${CMAKE_CURRENT_LIST_DIR}/.." REALPATH)
set(outrider_LIBRARY "${_outrider_beside}/liboutrider.so")
if(NOT EXISTS "${outrider_LIBRARY}")
  set(outrider_LIBRARY "${_outrider_beside}/../build/lib/liboutrider.so")
endif()

if(NOT EXISTS "${outrider_LIBRARY}")
  set(outrider_FOUND FALSE)
  set(outrider_NOT_FOUND_MESSAGE
    "liboutrider.so is missing. Install a wheel built with a C++ compiler, or run make plugins.")
elseif(NOT TARGET outrider::outrider)
  add_library(outrider::outrider SHARED IMPORTED)
  set_target_properties(outrider::outrider PROPERTIES
    IMPORTED_LOCATION "${outrider_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${_outrider_beside}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_17)
endif()
unset(_outrider_beside)
