#!/usr/bin/env bash
# usage: setup_venv.sh VENV REQUIREMENTS [EXTRA_REQUIREMENTS]
# Makes VENV with exactly the pinned packages and an editable install of this checkout.
# EXTRA_REQUIREMENTS is installed without its dependencies. Does nothing when VENV is already what is asked for.
set -euo pipefail
cd "$(dirname "$0")/.."

# Runs a command that writes into this checkout: others that are set up at the same time wait for it.
alone() {
  if command -v flock >/dev/null; then flock pyproject.toml "$@"; else "$@"; fi
}

venv=$1 requirements=$2 extra=${3:-}

key="$(pwd) ${PYTHON:-} $(cat "$requirements" ${extra:+"$extra"} pyproject.toml | cksum)"
if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$key" ] && "$venv/bin/python" -c "" 2>/dev/null; then
  exit 0
fi

python=$(scripts/find_python.sh)
echo "setting up $venv with $python ($requirements)"
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --no-deps --requirement "$requirements"
if [ -n "$extra" ]; then
  "$venv/bin/python" -m pip install --quiet --no-deps --requirement "$extra"
fi
alone "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
echo "$key" >"$venv/.installed"
