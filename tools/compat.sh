#!/usr/bin/env bash
# Tries one built wheel under several versions of torch, each in an environment of its own:
# tools/compat.sh [VERSION...], by default 2.2, 2.3, 2.4 and the newest. Downloads each of them.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/steps.sh

readonly folder=build/compat
versions=("$@")
[[ ${#versions[@]} -gt 0 ]] || versions=(2.2 2.3 2.4 newest)

build_wheel() {
  rm -rf "$folder/wheel"
  python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$folder/wheel" \
    --config-settings=build-dir=build/package .
}

# Torch 2.2 was built against numpy 1 and warns, or fails, beside numpy 2.
try_version() {
  local version=$1 requirement="torch==$1.*" numpy="numpy"
  [[ $version == newest ]] && requirement=torch
  [[ $version == 2.2 ]] && numpy="numpy<2"
  local environment=$folder/torch-$version
  [[ -x $environment/bin/python ]] || python -m venv "$environment" || return
  local python=$environment/bin/python
  "$python" -m pip install --quiet "$requirement" "$numpy" pytest hypothesis || return
  "$python" -m pip install --quiet --force-reinstall --no-deps "$folder"/wheel/*.whl || return
  "$python" -m pip install --quiet "$folder"/wheel/*.whl || return
  "$python" -m pytest tests/python
}

step "wheel" build_wheel || finish
for version in "${versions[@]}"; do
  step "torch $version" try_version "$version"
done
finish
