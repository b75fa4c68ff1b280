#!/usr/bin/env bash
# Prints the path of a Python >= 3.12 that can make virtual environments, or says what was tried and exits 1.
set -euo pipefail

check='
import sys, sysconfig
if sys.version_info < (3, 12): sys.exit("is Python %d.%d" % sys.version_info[:2])
if sysconfig.get_config_var("Py_GIL_DISABLED"): sys.exit("is a free-threaded build")
try: import ensurepip, venv
except ImportError as e: sys.exit("cannot make virtual environments (%s)" % e)
print(sys.executable)
'

candidates=()
[ -n "${PYTHON:-}" ] && candidates+=("$PYTHON")
candidates+=(python3.13 python3.12 python3)
for root in "${PYENV_ROOT:-}" "$HOME/.pyenv"; do
  [ -n "$root" ] || continue
  for candidate in "$root"/versions/3.1[2-9]*/bin/python; do
    [ -x "$candidate" ] && candidates+=("$candidate")
  done
done

tried=""
for candidate in "${candidates[@]}"; do
  # A pyenv shim exists for versions that are not active and then fails: only running it tells.
  if ! found=$(command -v "$candidate" 2>/dev/null); then
    reason="not found"
  elif output=$("$found" -c "$check" 2>&1); then
    echo "$output"
    exit 0
  else
    reason=$(head -n 1 <<<"$output")
  fi
  tried+="  $candidate: ${reason:-does not run}"$'\n'
done

cat >&2 <<EOF
pallasfuse needs Python >= 3.12 and found none. Tried:
$tried  ${PYENV_ROOT:-$HOME/.pyenv}/versions/3.12 and later
Install one (for example 'pyenv install 3.12'), or name one: make PYTHON=/path/to/python3.12 ...
EOF
exit 1
