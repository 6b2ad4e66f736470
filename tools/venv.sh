#!/bin/sh
# Makes the virtual environment $1 with the pinned packages and this checkout in it; does nothing where that is done.
set -eu
cd "$(dirname "$0")/.."
venv=$1
stamp=$venv/peftlab.stamp

if [ ! -e "$venv" ]; then
  python=$(sh tools/find_python.sh)
  echo "Making $venv with $python."
  "$python" -m venv "$venv"
fi
if ! version=$("$venv/bin/python" -c 'import sys; print(sys.version); sys.exit(sys.version_info < (3, 12))' 2>/dev/null); then
  echo "The virtual environment '$venv' has no working Python 3.12 or newer; remove it, or name another: make VENV=DIR." >&2
  exit 1
fi

key=$( (pwd; echo "$version"; cat requirements/data.txt requirements/lock.txt pyproject.toml) | cksum)
[ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && exit 0

echo "Installing the pinned packages into $venv (about 480 MB are fetched the first time)."
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps "$@"; }
pip --requirement requirements/lock.txt --requirement requirements/data.txt
pip --no-build-isolation --editable .
echo "$key" >"$stamp"
