"""Sites: the layers that can be adapted, and which of them some patterns name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any
import warnings

from flax import nnx

from peftlab import _flax_layers, _kernel, _layer, _parts, _registry, _stack

BUILT_IN = (_flax_layers,)  # importing it registers the layers of flax

Patterns = str | Sequence[str]

HEADS = ('head', 'lm_head', 'output_projection', 'unembed', 'logits')
NOT_LINEAR = ('head', 'router')  # roles that 'all-linear' leaves alone


@dataclasses.dataclass(frozen=True)
class Site:
  """A layer that can be adapted.

  Attributes:
    path: of the layer in the model.
    layer: the layer.
    kind: what is registered for its class.
    layout: how it uses its weight (of one expert, where it has experts).
    stack: axes of its weight that count layers, outermost first; the last may count experts.
    experts: whether the last of them does.
    order: number of the layer at each place of the first of them (see `_stack.layer_order`), -1
      where there is none; None: as they come.
  """

  path: tuple
  layer: Any
  kind: _kernel.LayerType
  layout: _kernel.Layout
  stack: tuple[int, ...]
  experts: bool = False
  order: tuple[int, ...] | None = None

  @property
  def name(self) -> str:
    """The path, dotted."""
    return _parts.path_name(self.path) or type(self.layer).__name__

  @property
  def weight(self) -> nnx.Variable:
    """The Variable that holds the weight."""
    return getattr(self.layer, self.kind.weight)

  @property
  def bias(self) -> nnx.Variable | None:
    """The Variable that holds the bias, or None."""
    return getattr(self.layer, self.kind.bias, None) if self.kind.bias else None

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
  def numbers(self) -> tuple[tuple[int, ...], ...]:
    """The numbers of the layers at the places of each stack axis; -1 where there is none."""
    counted = [tuple(range(n)) for n in self.layers]
    return tuple(counted if self.order is None else [self.order, *counted[1:]])

  @property
  def sizes(self) -> dict[str, int]:
    """{'in': n, 'out': m}."""
    return _kernel.kernel_sizes(self.layout.words, self.shape)


def sites(model: nnx.Module, *, norms: bool = False) -> list[Site]:
  """Every layer of a registered type, sorted by path; with `norms` the norms that have a scale."""
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
    if kind.norm and not (norms and isinstance(getattr(node, kind.weight), nnx.Variable)):
      continue
    try:
      layout = kind.layout(node)
    except ValueError as error:
      warnings.warn(f'{name} cannot be adapted: {error}', stacklevel=2)
      continue
    weight = _weight(node, kind, name)
    stack = _stack.stack_axes(weight, len(layout.words), layout.shape, name)
    experts = _kernel.EXPERT in layout.words
    if experts:
      own = [i for i in range(len(layout.words) + len(stack)) if i not in stack]
      stack = (*stack, own[layout.words.index(_kernel.EXPERT)])
      layout = layout.of_one_expert()
    order = _stack.order_at(model, path) if stack else None
    found.append(Site(path, node, kind, layout, stack, experts, order))
  return sorted(found, key=lambda site: [(isinstance(k, str), k) for k in site.path])


def _weight(layer: Any, kind: _kernel.LayerType, name: str) -> nnx.Variable:
  weight = getattr(layer, kind.weight, None)
  if isinstance(weight, nnx.Variable):
    return weight
  held = sorted(k for k, v in vars(layer).items() if isinstance(v, nnx.Variable))
  near = _registry.did_you_mean(kind.weight, held)
  raise ValueError(
    f'{name or type(layer).__name__} has no weight {kind.weight!r}{near or ";"} register_layer '
    f'names that of {type(layer).__name__}. Variables: {", ".join(held) or "none"}.'
  )


def select(all_sites: list[Site], where: Patterns, exclude: Patterns = ()) -> list[Site]:
  """The sites that the patterns name, `exclude` winning.

  A pattern is the word 'all-linear' (every linear layer but the head and routers), a role that
  layers have ('attention', 'mlp', 'experts', 'router'), the last words of a path ('q_proj',
  'attn.q': never the end of a word), or a regular expression for the whole path.

  Raises:
    ValueError: a pattern that matches nothing (with the nearest path), or nothing is left.
  """
  chosen = _matched(all_sites, where, 'where')
  dropped = {s.path for s in _matched(all_sites, exclude, 'exclude')}
  left = [s for s in all_sites if s.path in {c.path for c in chosen} and s.path not in dropped]
  if not left:
    raise ValueError(f'where={where!r} without exclude={exclude!r} leaves no layer to adapt.')
  return left


def assign(
  chosen: list[Site], by_pattern: Mapping[str, Any], fields: Mapping[str, Mapping[str, Any]]
) -> dict[tuple, Any]:
  """{path: what the site gets}: the first pattern that names it ('' names all), fields replaced.

  Raises:
    ValueError: a pattern that names none of the sites, or a field that nothing has.
  """
  kinds = {s.path: _first(by_pattern, s) for s in chosen}
  for pattern in by_pattern:
    if pattern:
      _matched(chosen, pattern, 'the pattern of an adapter')
  for field, values in fields.items():
    known = [f.name for kind in by_pattern.values() for f in dataclasses.fields(kind)]
    if field not in known:
      near = _registry.did_you_mean(field, known)
      raise ValueError(f'fields has {field!r}, which no adapter given has{near or "."}')
    for pattern in values:
      _matched(chosen, pattern, f'fields[{field!r}]')
    for site in chosen:
      if any(_matches(site, pattern) for pattern in values) and hasattr(kinds[site.path], field):
        new: dict[str, Any] = {field: _first(values, site)}
        kinds[site.path] = dataclasses.replace(kinds[site.path], **new)
  return kinds


def _first(by_pattern: Mapping[str, Any], site: Site) -> Any:
  return next(v for pattern, v in by_pattern.items() if not pattern or _matches(site, pattern))


def _matched(all_sites: list[Site], patterns: Patterns, argument: str) -> list[Site]:
  if isinstance(patterns, str):
    patterns = (patterns,)
  if not isinstance(patterns, Sequence):
    raise ValueError(f'{argument} takes a pattern or a list of patterns, given {patterns!r}.')
  found: list[Site] = []
  for pattern in patterns:
    if not isinstance(pattern, str):
      raise ValueError(f'{argument} takes strings, given {pattern!r}.')
    hits = [s for s in all_sites if _matches(s, pattern)]
    if not hits:
      names = [s.name for s in all_sites]
      ends = {'.'.join(n.split('.')[-k:]) for n in names for k in (1, 2, 3)}
      roles = {str(r) for s in all_sites if (r := getattr(s.layer, 'role', None))}
      known = [n for n in ('all-linear', *sorted(ends | roles), *names) if n != pattern]
      near = _registry.did_you_mean(pattern, known)
      shown = ', '.join(names[:6]) + (', ...' if len(names) > 6 else '')
      raise ValueError(f'{argument}={pattern!r} matches no layer{near or "."} Layers: {shown}.')
    found += hits
  return found


def _matches(site: Site, pattern: str) -> bool:
  role = getattr(site.layer, 'role', None)
  if pattern == 'all-linear':
    named = bool(site.path) and site.path[-1] in HEADS
    return site.kind.linear and not named and role not in NOT_LINEAR
  if role == pattern or site.name == pattern or site.name.endswith('.' + pattern):
    return True
  try:
    return re.fullmatch(pattern, site.name) is not None
  except re.error as error:
    raise ValueError(f'{pattern!r} is not a path or a regular expression: {error}.') from None
