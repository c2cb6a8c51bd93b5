# The Hopper kernels, where nvcc is: backlite_find_cuda() sets BACKLITE_HAS_CUDA, and
# backlite_add_hopper(TARGET) adds the sources to a library. Without nvcc the CPU backend is built alone.
set(BACKLITE_MIN_CUDA 12.8)

macro(backlite_find_cuda)
  set(BACKLITE_CUDA AUTO CACHE STRING "Build the Hopper kernels: AUTO (where nvcc is), ON or OFF")
  set_property(CACHE BACKLITE_CUDA PROPERTY STRINGS AUTO ON OFF)
  set(BACKLITE_HAS_CUDA OFF)
  if(BACKLITE_CUDA STREQUAL "AUTO" OR BACKLITE_CUDA)
    # CMake looks on the PATH alone; the installer of CUDA does not put nvcc there.
    if(NOT DEFINED ENV{CUDACXX} AND NOT CMAKE_CUDA_COMPILER)
      find_program(BACKLITE_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
      if(BACKLITE_NVCC)
        set(ENV{CUDACXX} "${BACKLITE_NVCC}")
      endif()
    endif()
    set(CMAKE_CUDA_ARCHITECTURES 90a)  # before CMake tries the compiler out
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
      if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1, of Debian 12, knows 17 only
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      endif()
      find_package(CUDAToolkit)
      if(TARGET CUDA::cudart_static
         AND CUDAToolkit_VERSION VERSION_GREATER_EQUAL BACKLITE_MIN_CUDA)
        set(BACKLITE_HAS_CUDA ON)
      endif()
    endif()
    if(BACKLITE_HAS_CUDA)
      message(STATUS "Hopper kernels: CUDA ${CUDAToolkit_VERSION}")
    elseif(BACKLITE_CUDA STREQUAL "AUTO")
      message(STATUS "Hopper kernels: not built, for lack of nvcc ${BACKLITE_MIN_CUDA} or newer "
                     "(with the static runtime library)")
    else()
      message(FATAL_ERROR "BACKLITE_CUDA is ON, but nvcc ${BACKLITE_MIN_CUDA} or newer was not "
                          "found: put it on the PATH, or name it in CUDACXX")
    endif()
  endif()
endmacro()

function(backlite_add_hopper target)
  file(GLOB sources CONFIGURE_DEPENDS src/*/*_sm90*.cu src/*/*_sm90*.cpp)
  target_sources(${target} PRIVATE ${sources} src/sm90/tensor_map.cpp src/api/cuda.cpp)
  # Static, and the driver's functions are looked up at run time: the library loads, and its CPU
  # backend works, on a machine without a driver.
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:CUDA::cudart_static>)
  target_link_options(${target} PRIVATE -Wl,--exclude-libs,ALL)
  set_target_properties(${target} PROPERTIES CUDA_EXTENSIONS OFF CUDA_VISIBILITY_PRESET hidden)
endfunction()
