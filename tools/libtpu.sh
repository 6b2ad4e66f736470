#!/bin/sh
# Puts the pinned TPU compiler into the folder $2 with the environment $1; does nothing where it is there. Exits 3, with
# the reason in one line, where it cannot be had: no network, or no wheel for this machine.
set -eu
cd "$(dirname "$0")/.."
venv=$1 folder=$2
pin=$(grep -v '^#' requirements/tpu.txt)
[ "$(cat "$folder/pin" 2>/dev/null)" = "$pin" ] && exit 0

echo "Fetching $pin into $folder (214 MB)."
rm -rf "$folder" "$folder.part"
if ! told=$("$venv/bin/python" -m pip --disable-pip-version-check --quiet --retries 1 --timeout 20 install --no-deps --target "$folder.part" "$pin" 2>&1); then
  rm -rf "$folder.part"
  echo "Skipped, for $pin cannot be had here: $(echo "$told" | grep -m 1 ERROR || echo "$told" | tail -n 1)" >&2
  exit 3
fi
echo "$pin" >"$folder.part/pin"
mv "$folder.part" "$folder"
