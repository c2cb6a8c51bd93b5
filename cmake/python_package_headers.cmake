# Header-only libraries that come as Python packages (cmeel-eigen, cmeel-boost): they install without
# root, wherever pip does. A system copy serves as well.

# Sets `result` to the directory that holds `header`, or to <result>-NOTFOUND.
function(backlite_find_headers result header cmeel_subdir)
  if(Python3_Interpreter_FOUND)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c "import sys; print(';'.join(p for p in sys.path if p))"
      OUTPUT_VARIABLE python_path OUTPUT_STRIP_TRAILING_WHITESPACE)
    list(TRANSFORM python_path APPEND "/cmeel.prefix/include/${cmeel_subdir}")
  endif()
  find_path(${result} ${header} HINTS ${python_path} PATH_SUFFIXES ${cmeel_subdir})
endfunction()

function(backlite_find_eigen)
  backlite_find_headers(BACKLITE_EIGEN_INCLUDE_DIR Eigen/Core eigen3)
  if(NOT BACKLITE_EIGEN_INCLUDE_DIR)
    message(FATAL_ERROR "Eigen was not found: `pip install cmeel-eigen`, or install libeigen3-dev")
  endif()
  message(STATUS "Eigen: ${BACKLITE_EIGEN_INCLUDE_DIR}")
endfunction()
