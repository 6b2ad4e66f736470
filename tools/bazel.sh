#!/bin/sh
# Checks every BUILD file: buildifier's format and lint, bazel's analysis of all targets, and the small tests.
# $1 is the virtual environment. Bazel and buildifier come from npm; bazel fetches nothing itself.
set -eu
cd "$(dirname "$0")/.."
venv=$(cd "$1" && pwd)
cache=${BAZEL_CACHE:-${TMPDIR:-/tmp}/peftlab-bazel-$(id -u)}
stubs=$PWD/third_party/bazel_stubs

if ! command -v npm >/dev/null 2>&1; then
  echo "make bazel needs npm, which is not on PATH." >&2
  exit 1
fi
if [ "$(uname -sm)" != 'Linux x86_64' ]; then
  echo "make bazel runs on Linux x86_64 only, not on $(uname -sm)." >&2
  exit 1
fi
mkdir -p "$cache"
npm install --silent --no-audit --no-fund --prefix "$cache" \
  @bazel/bazel-linux_x64@2.1.0 @bazel/buildifier@8.2.1
PATH=$venv/bin:$cache/node_modules/.bin:$PATH
export PATH

files() {
  find "$@" \( -name .venv -o -name .cache -o -name .git \) -prune -o \
    \( -name BUILD -o -name WORKSPACE -o -name '*.bzl' \) -print
}
# The stubs are written as they must be for bazel 2.1, so only their format is checked.
files third_party/bazel_stubs | xargs buildifier -mode=check -lint=off
files . | grep -v bazel_stubs | xargs buildifier -mode=check -lint=warn -warnings=-native-py

bazel() {
  # Every call needs the same options, or the server starts anew.
  command=$1
  shift
  "$cache/node_modules/.bin/bazel" --output_user_root="$cache/out" "$command" \
    --override_repository=rules_cc="$stubs/rules_cc" \
    --override_repository=rules_java="$stubs/rules_java" \
    --override_repository=rules_proto="$stubs/rules_proto" \
    --override_repository=remote_coverage_tools="$stubs/coverage" "$@"
}
trap '"$cache/node_modules/.bin/bazel" --output_user_root="$cache/out" shutdown >/dev/null 2>&1 || true' EXIT
bazel build --noshow_progress //...
bazel test --noshow_progress --local_test_jobs="${WORKERS:-2}" //...
