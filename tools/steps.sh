# Sourced by the scripts that run several checks: each runs even if an earlier one failed, and a
# table of all of them ends the run.

step_names=()
step_results=()
step_seconds=()

# step NAME COMMAND [ARG...]
step() {
  local name=$1 start=$SECONDS result=ok
  shift
  echo "== $name"
  "$@" || result=FAILED
  step_names+=("$name")
  step_results+=("$result")
  step_seconds+=($((SECONDS - start)))
  [[ $result == ok ]]
}

# Prints the table and exits: with 1 if a step failed.
finish() {
  local status=0 i
  echo
  printf '%-16s %-8s %s\n' step result seconds
  for i in "${!step_names[@]}"; do
    printf '%-16s %-8s %s\n' "${step_names[i]}" "${step_results[i]}" "${step_seconds[i]}"
    [[ ${step_results[i]} == ok ]] || status=1
  done
  exit "$status"
}
