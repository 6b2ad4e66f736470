#!/bin/sh
# Prints the path of a Python 3.12 or newer that can make virtual environments, or one line saying what is missing.
#
# Looked at in turn: $PYTHON; python3.13, 3.12, 3.14, python3 and python on PATH; the versions under pyenv; uv.
set -u

CHECK='
import sys
ok = sys.version_info >= (3, 12) and sys.implementation.name == "cpython"
if not ok: raise SystemExit(3)
import ensurepip, venv
print(sys.executable)
'
bare=''

# Prints the real path of the interpreter $1 and ends the search, if it will do.
try() {
  found=$("$1" -c "$CHECK" 2>/dev/null)
  status=$?
  if [ "$status" -eq 0 ] && [ -n "$found" ]; then
    printf '%s\n' "$found"
    exit 0
  fi
  # 1: new enough, but an import failed.
  if [ "$status" -eq 1 ] && "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 12))' 2>/dev/null; then
    bare=$1
  fi
}

if [ -n "${PYTHON:-}" ]; then
  try "$PYTHON"
  echo "PYTHON is '$PYTHON', which is not a Python 3.12 or newer with the modules venv and ensurepip." >&2
  exit 1
fi

for name in python3.13 python3.12 python3.14 python3 python; do
  path=$(command -v "$name" 2>/dev/null) && try "$path"
done

for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
  [ -d "$root/versions" ] || continue
  for minor in 13 12 14; do
    for path in "$root/versions/3.$minor"*/bin/python; do
      [ -x "$path" ] && try "$path"
    done
  done
done

if command -v uv >/dev/null 2>&1; then
  path=$(uv python find --no-project '>=3.12' 2>/dev/null) && try "$path"
  uv python install 3.13 >/dev/null 2>&1
  path=$(uv python find --no-project '>=3.12' 2>/dev/null) && try "$path"
fi

if [ -n "$bare" ]; then
  echo "Python at '$bare' is new enough but lacks the modules venv and ensurepip; install them (Debian and Ubuntu: python3-venv) or set PYTHON to another Python 3.12 or newer." >&2
else
  echo "Python 3.12 or newer was not found on PATH, under pyenv, or by uv; install one or set PYTHON to its path." >&2
fi
exit 1
