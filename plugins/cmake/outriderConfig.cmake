# find_package(outrider): the target outrider::outrider, with headers and liboutrider.so.
#
# In an installed wheel this folder lies beside both; in a checkout the library is in build/lib.
get_filename_component(_outrider_beside "${CMAKE_CURRENT_LIST_DIR}/.." REALPATH)
find_path(outrider_INCLUDE_DIR outrider.hpp PATHS "${_outrider_beside}/include" NO_DEFAULT_PATH)
find_file(outrider_LIBRARY liboutrider.so
  PATHS "${_outrider_beside}" "${_outrider_beside}/../build/lib" NO_DEFAULT_PATH)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(outrider REQUIRED_VARS outrider_LIBRARY outrider_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "Install a wheel that was built with a C++ compiler, or run make plugins.")

if(outrider_FOUND AND NOT TARGET outrider::outrider)
  add_library(outrider::outrider SHARED IMPORTED)
  set_target_properties(outrider::outrider PROPERTIES
    IMPORTED_LOCATION "${outrider_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${outrider_INCLUDE_DIR}"
    INTERFACE_COMPILE_FEATURES cxx_std_17)
endif()
unset(_outrider_beside)
