#!/usr/bin/env bash
# Runs a command in an environment that has everything it needs: tools/with_env.sh COMMAND [ARG...]
#
# The active virtual environment serves if it has torch. Otherwise .venv in the checkout, which sees
# the system's packages, is made. What is missing is installed; a torch that is there is used as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Used only where no torch is there at all. Why this one: docs/decisions/dependencies.md
readonly torch="torch==2.13.0"

fail() {
  echo "error: $*" >&2
  exit 1
}

has_torch() {
  "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
}

make_venv() {
  local python=${PYTHON:-python3}
  command -v "$python" >/dev/null || fail "$python was not found: Python 3.10 or newer is needed"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version) is too old: 3.10 or newer is needed (PYTHON=... names another)"
  echo "Making .venv"
  # Debian splits ensurepip off; the system's pip, which the environment sees, serves then.
  "$python" -m venv --system-site-packages .venv >/dev/null 2>&1 ||
    "$python" -m venv --clear --system-site-packages --without-pip .venv
}

environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [[ -z $environment || ! -x $environment/bin/python ]] || ! has_torch "$environment/bin/python"; then
  environment=$PWD/.venv
  [[ -x .venv/bin/python ]] && .venv/bin/python -c "" || make_venv
fi

export VIRTUAL_ENV=$environment
export PATH=$environment/bin:$PATH
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONHOME

has_torch python || {
  echo "Installing $torch"
  python -m pip install --quiet "$torch"
}
# Nothing is downloaded when all is there.
python -m pip install --quiet --requirement requirements-dev.txt
exec "$@"
