"""Sites: the layers that can be adapted, and which of them some patterns name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
import dataclasses
import re
from typing import Any
import warnings

from flax import nnx

from peftlab import _adapter, _flax_layers, _kernel, _layer, _parts, _registry, _stack

BUILT_IN = (_flax_layers,)  # importing it registers the layers of flax

Patterns = str | Sequence[str]

WORDS = ('all-linear', 'all-embeddings')
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
    one: whether an adapter has one set of arrays here for all experts, instead of one for each.
    beside: of a point the layer behind which it lies, whose weight stands for its own.
  """

  path: tuple
  layer: Any
  kind: _kernel.LayerType
  layout: _kernel.Layout
  stack: tuple[int, ...]
  experts: bool = False
  order: tuple[int, ...] | None = None
  one: bool = False
  beside: Any = None

  @property
  def point(self) -> str:
    """The role of a point; '' where there is a weight."""
    return self.layer.role if self.kind.point else ''

  @property
  def factor(self) -> float:
    """What the outputs of the weight are multiplied by before they come here."""
    return self.layer.factor if self.kind.point else 1.0

  @property
  def name(self) -> str:
    """The path, dotted."""
    return _parts.path_name(self.path) or type(self.layer).__name__

  @property
  def weight(self) -> nnx.Variable:
    """The Variable that holds the weight."""
    return getattr(self.layer if self.beside is None else self.beside, self.kind.weight)

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
    """{'in': n, 'out': m, 'taps': t}; at a point both are the number of features."""
    sizes = _kernel.kernel_sizes(self.layout.words, self.shape)
    return sizes | {'in': sizes['out']} if self.kind.point else sizes

  @property
  def full_rank(self) -> int:
    """The largest rank that a change of the kernel can have."""
    return min(self.sizes['in'], self.sizes['out'])

  @property
  def shared_by(self) -> str:
    """Which experts an adapter's arrays are for: 'each' its own, 'one' for all; '' without any."""
    return ('one' if self.one else 'each') if self.experts else ''

  @property
  def own_layers(self) -> tuple[int, ...]:
    """How often an adapter has its arrays here: `layers`, less the experts that share them."""
    return self.layers[:-1] if self.one else self.layers

  @property
  def own_numbers(self) -> tuple[tuple[int, ...], ...]:
    """`numbers`, less those of experts that share their arrays."""
    return self.numbers[:-1] if self.one else self.numbers

  def own_stack(self, rank: int) -> tuple[int, ...]:
    """The axes of `own_layers` in an array of an adapter that has `rank` dimensions of its own."""
    axes = self.stack
    if self.one:
      axes = tuple(a - (a > self.stack[-1]) for a in self.stack[:-1])
    return _stack.place_axes(axes, rank)

  def slot_axes(self, slot: Any) -> tuple[int, ...]:
    """The same for the array of a slot; none where the whole model shares it."""
    return () if slot.shared else self.own_stack(len(slot.dims.split()))

  def under(self, attached: _layer.Attached) -> Site:
    """The site as an adapter that it carries has it."""
    return dataclasses.replace(self, one=attached.one)


def sites(model: nnx.Module, *, norms: bool = False, points: bool = False) -> list[Site]:
  """Every layer of a registered type, sorted by path.

  Args:
    model: any.
    norms: with the norms that have a scale.
    points: with the points.
  """
  found = []
  nodes = dict(nnx.iter_graph(model)) if points else {}
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
    beside = None
    if kind.point:
      if not points:
        continue
      beside = getattr(nodes[path[:-1]], node.behind)
      of = _kernel.layer_type(beside)
      assert of is not None
      kind = dataclasses.replace(kind, weight=of.weight, layout=of.layout)
    holder = node if beside is None else beside
    try:
      layout = kind.layout(holder)
    except ValueError as error:
      warnings.warn(f'{name} cannot be adapted: {error}', stacklevel=2)
      continue
    weight = _weight(holder, kind, name)
    stack = _stack.stack_axes(weight, len(layout.words), layout.shape, name)
    experts = _kernel.EXPERT in layout.words
    if experts:
      own = [i for i in range(len(layout.words) + len(stack)) if i not in stack]
      stack = (*stack, own[layout.words.index(_kernel.EXPERT)])
      layout = layout.of_one_expert()
    order = _stack.order_at(model, path) if stack else None
    found.append(Site(path, node, kind, layout, stack, experts, order, beside=beside))
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


def fitting(
  model: nnx.Module, every: list[Site], adapters: Collection[_adapter.Adapter], where: Patterns
) -> list[Site]:
  """The sites of the kinds that some adapters go on: weights, or points of a role.

  Raises:
    ValueError: a pattern of `where` names none of them, but a site of another kind, or a layer of
      the model that is no site.
  """
  fits = [s for s in every if any(goes_on(a, s) for a in adapters)]
  others = [s for s in every if s not in fits]
  for pattern in _each(where, 'where'):
    if not any(_matches(s, pattern) for s in fits):
      wrong = next((s for s in others if _matches(s, pattern)), None)
      if wrong is not None:
        raise ValueError(wrong_kind(wrong, adapters, f'where={pattern!r} names '))
      for name, layer, why in _no_sites(model):
        if _names(pattern, name, getattr(layer, 'role', None)):
          types = ', '.join(dict.fromkeys(type(a).__name__ for a in adapters))
          raise ValueError(
            f'where={pattern!r} matches no layer that {types} goes on: {name} {why.rstrip(".")}.'
          )
  return fits


def _no_sites(model: nnx.Module) -> Iterator[tuple[str, nnx.Module, str]]:
  """(name, layer, why it is no site) of every norm, and of what has a weight but is no layer."""
  for path, node in nnx.iter_graph(model):
    if not isinstance(node, nnx.Module) or isinstance(node, _layer.Attached):
      continue
    name, kind = _parts.path_name(path) or type(node).__name__, _kernel.layer_type(node)
    if kind is None:
      if any(isinstance(v, nnx.Param) for v in vars(node).values()):
        cls = type(node).__name__
        yield name, node, f'is of a class, {cls}, that peftlab.register_layer does not know'
    elif kind.norm and not isinstance(getattr(node, kind.weight), nnx.Variable):
      yield name, node, 'is a norm without a scale'
    elif kind.norm:
      known = [n for n in _registry.adapters.names() if _registry.adapters.get(n).norms]
      yield name, node, f'is a norm. Types that go on norms: {", ".join(known)}'
    elif not kind.point:
      try:
        kind.layout(node)
      except ValueError as error:
        yield name, node, f'cannot be adapted. {error}'


def goes_on(adapter: Any, site: Site) -> bool:
  """Whether a site is of the kind that an adapter goes on."""
  return getattr(adapter, 'point', '') == site.point


def wrong_kind(site: Site, adapters: Collection[_adapter.Adapter], start: str = '') -> str:
  def of(role: str) -> str:
    return f"points of the role '{role}'" if role else 'layers with a weight'

  is_a = f"a point of the role '{site.point}'" if site.point else 'a layer with a weight'
  told = ', '.join(f'{type(a).__name__} goes on {of(a.point)}' for a in adapters)
  return f'{start}{site.name}, {is_a}; {told}.'


def select(all_sites: list[Site], where: Patterns, exclude: Patterns = ()) -> list[Site]:
  """The sites that the patterns name, `exclude` winning.

  A pattern is the word 'all-linear' (every linear layer but the head and routers) or
  'all-embeddings' (every table of vectors), a role that layers have ('attention', 'mlp', 'experts',
  'router'), the last words of a path ('q_proj', 'attn.q': never the end of a word), or a regular
  expression for the whole path.

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


EXPERTS = ('each', 'one')


def with_experts(chosen: list[Site], rule: str | Mapping[str, str]) -> list[Site]:
  """The sites, those with experts told whether their experts share the arrays of an adapter.

  Args:
    chosen: the sites that are adapted.
    rule: 'each', 'one', or {pattern: one of them}; the first that names a site wins ('' names
      all), and what none names has arrays for each.

  Raises:
    ValueError: another word, a pattern that names no site, or one that names none with experts.
  """
  words = {'': rule} if isinstance(rule, str) else dict(rule)
  with_some = [s for s in chosen if s.experts]
  for pattern, word in words.items():
    if word not in EXPERTS:
      near = _registry.did_you_mean(str(word), EXPERTS)
      raise ValueError(f"experts has {word!r}{near or '.'} Expected 'each' or 'one'.")
    named = _matched(chosen, pattern, 'experts') if pattern else chosen
    if not any(s.experts for s in named) and (pattern or word == 'one'):
      has = ', '.join(s.name for s in with_some[:6]) or 'none'
      raise ValueError(
        f'experts={rule!r}: no layer that is adapted{f" and named {pattern!r}" if pattern else ""} '
        f'has experts. Layers with experts: {has}.'
      )
  one = {s.path for s in with_some if _first({**words, '': words.get('', 'each')}, s) == 'one'}
  return [dataclasses.replace(s, one=s.path in one) for s in chosen]


def _first(by_pattern: Mapping[str, Any], site: Site) -> Any:
  named = [v for pattern, v in by_pattern.items() if not pattern or _matches(site, pattern)]
  return next(
    (v for v in named if not isinstance(v, _adapter.Adapter) or goes_on(v, site)), named[0]
  )


def _each(patterns: Patterns, argument: str) -> Sequence[str]:
  """Every pattern; ValueError where they are something else."""
  if isinstance(patterns, str):
    patterns = (patterns,)
  if not isinstance(patterns, Sequence):
    raise ValueError(f'{argument} takes a pattern or a list of patterns, given {patterns!r}.')
  for pattern in patterns:
    if not isinstance(pattern, str):
      raise ValueError(f'{argument} takes strings, given {pattern!r}.')
  return patterns


def _matched(all_sites: list[Site], patterns: Patterns, argument: str) -> list[Site]:
  found: list[Site] = []
  for pattern in _each(patterns, argument):
    hits = [s for s in all_sites if _matches(s, pattern)]
    if not hits:
      names = [s.name for s in all_sites]
      ends = {'.'.join(n.split('.')[-k:]) for n in names for k in (1, 2, 3)}
      roles = {str(r) for s in all_sites if (r := getattr(s.layer, 'role', None))}
      words = () if pattern in WORDS else WORDS
      near = _registry.did_you_mean(pattern, (*words, *sorted(ends | roles), *names))
      shown = (', '.join(names[:6]) or 'none') + (', ...' if len(names) > 6 else '')
      raise ValueError(f'{argument}={pattern!r} matches no layer{near or "."} Layers: {shown}.')
    found += hits
  return found


def _matches(site: Site, pattern: str) -> bool:
  if pattern == 'all-linear':
    return site.kind.linear and not is_head(site)
  if pattern == 'all-embeddings':
    return not (site.kind.linear or site.kind.norm or site.kind.point)
  return _names(pattern, site.name, getattr(site.layer, 'role', None))


def _names(pattern: str, name: str, role: str | None) -> bool:
  if role == pattern or name == pattern or name.endswith('.' + pattern):
    return True
  try:
    return re.fullmatch(pattern, name) is not None
  except re.error as error:
    raise ValueError(f'{pattern!r} is not a path or a regular expression: {error}.') from None


def is_head(site: Site) -> bool:
  """Whether 'all-linear' leaves a layer alone for what it is: the head, or a router."""
  named = bool(site.path) and site.path[-1] in HEADS
  return named or getattr(site.layer, 'role', None) in NOT_LINEAR
