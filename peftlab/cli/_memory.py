"""What a person is told where memory runs out: what was asked for, and what is there."""

from __future__ import annotations

import re

_ASKED = (r'allocating (\d+) bytes', r'allocate ([\d.]+ ?[KMGTPE]?i?B)\b', r'allocate (\d+) bytes')


def told(error: BaseException) -> str | None:
  """The line about an error of XLA or of numpy, None where it is about something else."""
  text = str(error)
  if not isinstance(error, MemoryError) and 'RESOURCE_EXHAUSTED' not in text:
    return None
  import jax

  from peftlab.train import feasible, page

  found = next((match[1] for asked in _ASKED if (match := re.search(asked, text))), None)
  asked = page.size(int(found)) if found and found.isdigit() else found or 'more'
  there = feasible.memory(jax.local_devices()[:1])
  left = '' if there is None else f', {page.size(there)} are left'
  return (
    f'There is not enough memory: {asked} were asked for at once{left}. Expected a smaller '
    'adapter, batch or length, fewer tokens, or more devices.'
  )
