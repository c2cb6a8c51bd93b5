# Installs the build in BUILD_DIR into an empty prefix, then configures, builds and runs the example in
# EXAMPLE_DIR against it, as a stranger's project would. Everything happens in WORK_DIR.
cmake_minimum_required(VERSION 3.25)

set(prefix ${WORK_DIR}/prefix)
file(REMOVE_RECURSE ${WORK_DIR})

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix})
# The prefix may be moved after the install: nothing in it may point back to the build.
file(RENAME ${prefix} ${prefix}_moved)
run(${CMAKE_COMMAND} -S ${EXAMPLE_DIR} -B ${WORK_DIR}/build -DCMAKE_PREFIX_PATH=${prefix}_moved
    -DCMAKE_CXX_COMPILER=${CXX_COMPILER} "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}")
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
run(${CTEST_COMMAND} --test-dir ${WORK_DIR}/build --output-on-failure --no-tests=error)
