"""Sites: the layers that can be adapted, and which of them some patterns name."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import re
from typing import Any
import warnings

from flax import nnx

from peftlab import _kernel, _layer, _parts, _registry, _stack

Patterns = str | Sequence[str]

HEADS = ('head', 'lm_head', 'output_projection', 'unembed', 'logits')


@dataclasses.dataclass(frozen=True)
class Site:
  """A layer that can be adapted.

  Attributes:
    path: of the layer in the model.
    layer: the layer.
    kind: what is registered for its class.
    layout: how it uses its weight.
    stack: axes of its weight that count layers, outermost first.
  """

  path: tuple
  layer: Any
  kind: _kernel.LayerType
  layout: _kernel.Layout
  stack: tuple[int, ...]

  @property
  def name(self) -> str:
    """The path, dotted."""
    return _parts.path_name(self.path) or type(self.layer).__name__

  @property
  def weight(self) -> nnx.Variable:
    """The Variable that holds the weight."""
    return getattr(self.layer, self.kind.weight)

  @property
  def shape(self) -> tuple[int, ...]:
    """The weight's shape without stack axes."""
    full = self.weight.get_raw_value().shape
    return tuple(s for i, s in enumerate(full) if i not in self.stack)

  @property
  def layers(self) -> tuple[int, ...]:
    """How many layers are stacked here, by stack axis."""
    return tuple(self.weight.get_raw_value().shape[i] for i in self.stack)

  @property
  def sizes(self) -> dict[str, int]:
    """{'in': n, 'out': m}."""
    return _kernel.kernel_sizes(self.layout.words, self.shape)


def sites(model: nnx.Module) -> list[Site]:
  """Every layer of a registered type, in the order of the model."""
  found = []
  inside: list[tuple] = []
  for path, node in nnx.iter_graph(model):
    if isinstance(node, _layer.Attached):
      inside.append(path)
  for path, node in nnx.iter_graph(model):
    kind = _kernel.layer_type(node) if isinstance(node, nnx.Module) else None
    if kind is None or any(path[: len(p)] == p for p in inside):
      continue
    name = _parts.path_name(path)
    try:
      layout = kind.layout(node)
    except ValueError as error:
      warnings.warn(f'{name} cannot be adapted: {error}', stacklevel=2)
      continue
    stack = _stack.stack_axes(getattr(node, kind.weight), len(layout.words), layout.shape, name)
    found.append(Site(path, node, kind, layout, stack))
  return sorted(found, key=lambda site: [(isinstance(k, str), k) for k in site.path])


def select(all_sites: list[Site], where: Patterns, exclude: Patterns = ()) -> list[Site]:
  """The sites that the patterns name, `exclude` winning.

  A pattern is the word 'all-linear' (every linear layer but the head), the last words of a path
  ('q_proj', 'attn.q': never the end of a word), or a regular expression for the whole path.

  Raises:
    ValueError: a pattern that matches nothing (with the nearest path), or nothing is left.
  """
  chosen = _matched(all_sites, where, 'where')
  dropped = {s.path for s in _matched(all_sites, exclude, 'exclude')}
  left = [s for s in all_sites if s.path in {c.path for c in chosen} and s.path not in dropped]
  if not left:
    raise ValueError(f'where={where!r} without exclude={exclude!r} leaves no layer to adapt.')
  return left


def _matched(all_sites: list[Site], patterns: Patterns, argument: str) -> list[Site]:
  if isinstance(patterns, str):
    patterns = (patterns,)
  found: list[Site] = []
  for pattern in patterns:
    if not isinstance(pattern, str):
      raise ValueError(f'{argument} takes strings, given {pattern!r}.')
    hits = [s for s in all_sites if _matches(s, pattern)]
    if not hits:
      names = [s.name for s in all_sites]
      ends = {'.'.join(n.split('.')[-k:]) for n in names for k in (1, 2, 3)}
      known = [n for n in ('all-linear', *sorted(ends), *names) if n != pattern]
      near = _registry.did_you_mean(pattern, known)
      shown = ', '.join(names[:6]) + (', ...' if len(names) > 6 else '')
      raise ValueError(f'{argument}={pattern!r} matches no layer{near or "."} Layers: {shown}.')
    found += hits
  return found


def _matches(site: Site, pattern: str) -> bool:
  if pattern == 'all-linear':
    return site.kind.linear and (not site.path or site.path[-1] not in HEADS)
  if site.name == pattern or site.name.endswith('.' + pattern):
    return True
  try:
    return re.fullmatch(pattern, site.name) is not None
  except re.error as error:
    raise ValueError(f'{pattern!r} is not a path or a regular expression: {error}.') from None
