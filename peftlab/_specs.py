"""Logical axes -> PartitionSpec -> NamedSharding, fitted leaf by leaf, and what was dropped."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import math
from typing import Any

from flax import nnx
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from peftlab import _packed, _parts, _registry

P = PartitionSpec
Axes = Sequence[str | None]
Rules = tuple[tuple[str, tuple[str, ...]], ...]

MESH_AXES = ('data', 'fsdp', 'tensor', 'stage', 'expert')

# Several rules for one name are tried in order: the first whose mesh axes are free is taken.
DEFAULT_RULES: Rules = (
  ('batch', ('data', 'fsdp')),
  ('layers', ('stage',)),
  ('embed', ('fsdp',)),
  ('q_heads', ('tensor',)),
  ('kv_heads', ('tensor',)),
  ('mlp', ('tensor',)),
  ('vocab', ('tensor',)),
  ('experts', ('expert',)),
)

_RULES: contextvars.ContextVar[Rules] = contextvars.ContextVar('rules', default=DEFAULT_RULES)


@contextlib.contextmanager
def use_rules(rules: Rules | None) -> Generator[None]:
  """Within the block, logical axes are mapped by `rules` (None: as they were)."""
  token = _RULES.set(current_rules() if rules is None else tuple(rules))
  try:
    yield
  finally:
    _RULES.reset(token)


def current_rules() -> Rules:
  """The rules in force here."""
  return _RULES.get()


@dataclasses.dataclass(frozen=True)
class Dropped:
  """A mesh axis that does not divide a dimension of a parameter, so was not used for it.

  Attributes:
    path: of the array, dotted.
    dim: the dimension, and `size` its size.
    axis: the mesh axis, and `axis_size` its size.
    extra_bytes: what each device holds more than if the axis had divided.
    fitting: sizes of the axis, at most the number of devices, that would divide.
    reason: why the dimension was not padded where that was asked for.
  """

  path: str
  dim: int
  size: int
  axis: str
  axis_size: int
  extra_bytes: int = 0
  fitting: tuple[int, ...] = ()
  reason: str = ''

  def __str__(self) -> str:
    why = f'; not padded: {self.reason}' if self.reason else ''
    return (
      f"{self.path}: axis '{self.axis}' ({self.axis_size}) does not divide dimension {self.dim} "
      f'({self.size}); +{self.extra_bytes:,} bytes per device{why}'
    )


def make_mesh(shape: Mapping[str, int], devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
  """A mesh of Auto axes, {'fsdp': 4, 'tensor': 2} for example.

  Raises:
    ValueError: an axis name that no rule knows, a size below 1, or a product that is not the
      number of devices.
  """
  for name, size in shape.items():
    if name not in MESH_AXES:
      near = _registry.did_you_mean(name, MESH_AXES)
      raise ValueError(f'No mesh axis {name!r}{near or "."} Axes: {", ".join(MESH_AXES)}.')
    if size < 1:
      raise ValueError(f'Mesh axis {name!r} has size {size}; it must be at least 1.')
  found = list(jax.devices() if devices is None else devices)
  need = math.prod(shape.values())
  if need != len(found):
    given = ' x '.join(f'{n} {s}' for n, s in shape.items()) or '1'
    raise ValueError(f'Mesh {given} needs {need} devices; there are {len(found)}.')
  types = (AxisType.Auto,) * len(shape)
  return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=types, devices=found)


def entry_axes(entry: Any) -> tuple[str, ...]:
  """The mesh axes of one entry of a spec."""
  if entry is None or entry is P.UNCONSTRAINED:
    return ()
  return entry if isinstance(entry, tuple) else (entry,)


def as_entry(axes: Sequence[str]) -> Any:
  """The entry of a spec for some mesh axes: inverse of `entry_axes`."""
  return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def spec_for(axes: Axes, mesh: Any, rules: Rules | None = None) -> PartitionSpec:
  """The spec that `rules` give to an array with these logical axes, never dropping for size.

  A mesh axis is used once per array; where it is taken the next rule for that name is tried. A
  name without a rule is itself a mesh axis or replicated. Axes that the mesh lacks, or has with
  size 1, are left out.
  """
  rules = current_rules() if rules is None else rules
  used: set[str] = set()
  entries = []
  for name in axes:
    offers = [want for known, want in rules if known == name] or ([(name,)] if name else [])
    chosen: tuple[str, ...] = ()
    for want in offers:
      here = tuple(a for a in want if mesh.shape.get(a, 1) > 1)
      if here and not used.intersection(here):
        chosen = here
        break
    used.update(chosen)
    entries.append(as_entry(chosen))
  return P(*entries)


def fit_spec(
  shape: Sequence[int], spec: PartitionSpec, mesh: Any
) -> tuple[PartitionSpec, list[Dropped]]:
  """The spec with every mesh axis dropped that does not divide its dimension (law 7).

  Of several axes on one dimension the longest prefix that divides is kept. UNCONSTRAINED entries
  and `unreduced`/`reduced` sets stay as they are.

  Returns:
    The spec, one entry per dimension, and what was dropped (with path '').

  Raises:
    ValueError: the spec is longer than the rank, or names an axis that the mesh lacks.
  """
  wanted = spec.partitions
  if len(wanted) > len(shape):
    raise ValueError(f'Spec {spec} has {len(wanted)} entries for an array of shape {tuple(shape)}.')
  entries, dropped = [], []
  for dim, size in enumerate(shape):
    entry = wanted[dim] if dim < len(wanted) else None
    keep, whole = [], True
    parts = 1
    for axis in entry_axes(entry):
      if axis not in mesh.shape:
        near = _registry.did_you_mean(axis, mesh.shape)
        raise ValueError(f'Spec {spec} names {axis!r}, not an axis of the mesh{near or "."}')
      whole = whole and size % (parts * mesh.shape[axis]) == 0
      if whole:
        keep.append(axis)
        parts *= mesh.shape[axis]
      else:
        fitting = _divisors(size // parts, mesh.size) if size % parts == 0 else ()
        dropped.append(Dropped('', dim, size, axis, mesh.shape[axis], fitting=fitting))
    entries.append(entry if entry is P.UNCONSTRAINED else as_entry(keep))
  return spec.update(partitions=tuple(entries)), dropped


def _divisors(size: int, most: int) -> tuple[int, ...]:
  return tuple(n for n in range(1, most + 1) if size % n == 0)


def shards(spec: PartitionSpec, mesh: Any) -> int:
  """Into how many different pieces a spec cuts an array."""
  return math.prod(mesh.shape[a] for entry in spec.partitions for a in entry_axes(entry))


def axes_of(variable: nnx.Variable, shape: Sequence[int], path: str = '') -> Axes | None:
  """The logical axes a Variable carries (`axes`, or flax's `out_sharding`), one per dimension.

  Raises:
    ValueError: there are more or fewer of them than dimensions.
  """
  metadata = variable.get_metadata()
  for key in ('axes', 'out_sharding'):
    axes = metadata.get(key)
    if isinstance(axes, str):
      axes = (axes,)
    if axes is None or not isinstance(axes, (tuple, list, PartitionSpec)):
      continue
    if len(axes) != len(shape):
      raise ValueError(
        f'{path or type(variable).__name__} has {key} {tuple(axes)} ({len(axes)} names) for shape '
        f'{tuple(shape)} ({len(shape)} dimensions).'
      )
    return tuple(axes)
  return None


def shardings(
  model: nnx.Module, mesh: jax.sharding.Mesh, rules: Rules | None = None
) -> tuple[dict[tuple, NamedSharding], list[Dropped]]:
  """Where each array of a model (concrete or abstract) goes on a mesh, and what was dropped.

  Every array of a composite leaf (codes and scales in one Variable) is fitted to its own shape.

  Returns:
    {path: NamedSharding or a tree of them}, and the dropped axes, with paths and bytes.
  """
  placed, report = {}, []
  for path, leaf in nnx.iter_graph(model):
    if not isinstance(leaf, (nnx.Variable, jax.Array, jax.ShapeDtypeStruct)):
      continue
    value: Any = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    name = _parts.path_name(path)

    def sharding(array: Any, axes: Axes | None, name: str = name) -> NamedSharding:
      wanted = spec_for(axes or (), mesh, rules)
      spec, dropped = fit_spec(array.shape, wanted, mesh)
      report.extend(priced(dropped, name, array, spec, mesh))
      return NamedSharding(mesh, spec)

    placed[path] = jax.tree.map(sharding, value, leaf_axes(leaf, value, name))
  return placed, report


def leaf_axes(leaf: Any, value: Any, path: str) -> Any:
  """A tree like `value` with the logical axes of each array in it, or None."""
  if not isinstance(leaf, nnx.Variable):
    return jax.tree.map(lambda _: None, value)
  if isinstance(value, _packed.Packed):
    axes = axes_of(leaf, value.shape, path)
    return jax.tree.map(lambda _: None, value) if axes is None else value.leaf_axes(tuple(axes))
  return jax.tree.map(lambda array: axes_of(leaf, array.shape, path), value)


def use_specs(variable: nnx.Variable, rules: Rules | None = None) -> Any:
  """Where the arrays of a weight are gathered to before they are read; None: as they lie.

  The specs of their logical axes without the mesh axes that shard the batch: FSDP then gathers the
  codes of a packed weight, where XLA by itself would gather the decoded kernel.
  """
  value: Any = variable.get_raw_value()
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or len(mesh.explicit_axes) or axes_of(variable, value.shape) is None:
    return None
  rules = current_rules() if rules is None else rules
  away = {a for name, want in rules if name == 'batch' for a in want} | set(mesh.manual_axes)

  def spec(array: Any, axes: Axes) -> PartitionSpec:
    whole = spec_for(axes, mesh, rules)
    kept = P(*(as_entry([a for a in entry_axes(e) if a not in away]) for e in whole))
    return fit_spec(array.shape, kept, mesh)[0]

  return jax.tree.map(spec, value, leaf_axes(variable, value, ''))


def gather(variable: nnx.Variable) -> None:
  """Holds the arrays of a weight, in place, to where they are read: gathered here, and once.

  Before a loop that reads the weight in every pass, which would gather it in every pass.
  """
  specs = use_specs(variable)
  if specs is not None:
    held = variable.get_raw_value()
    variable.set_raw_value(jax.tree.map(jax.lax.with_sharding_constraint, held, specs))


def priced(
  dropped: Iterable[Dropped], path: str, array: Any, spec: PartitionSpec, mesh: Any
) -> list[Dropped]:
  """What was dropped, with the path of the array and the bytes that each device holds more."""
  held = math.prod(array.shape) * _parts.bits(array.dtype) // 8 // shards(spec, mesh)
  return [
    dataclasses.replace(d, path=path, extra_bytes=held - held // d.axis_size) for d in dropped
  ]


def extra_bytes(model: nnx.Module, mesh: jax.sharding.Mesh) -> int:
  """What a device holds more than if every mesh axis divided; axes dropped together count once."""

  def one(array: Any, axes: Axes | None) -> int:
    wanted = spec_for(axes or (), mesh)
    held = math.prod(array.shape) * _parts.bits(array.dtype) // 8
    fitted = fit_spec(array.shape, wanted, mesh)[0]
    return held // shards(fitted, mesh) - held // shards(wanted, mesh)

  held = [(v, v.get_raw_value()) for v in _parts.variables(model).values()]
  return sum(jax.tree.leaves([jax.tree.map(one, a, leaf_axes(v, a, '')) for v, a in held]))


def unknown_axes(mesh: jax.sharding.Mesh, rules: Rules | None = None) -> list[str]:
  """A line for each axis of a mesh, above 1, that no rule names."""
  rules = current_rules() if rules is None else rules
  known = tuple(dict.fromkeys(axis for _, want in rules for axis in want))
  return [
    f'Mesh axis {axis!r} ({size}) is named by no rule, so that it cuts no array'
    f'{_registry.did_you_mean(axis, known) or "."} Axes of the rules: {", ".join(known)}.'
    for axis, size in mesh.shape.items()
    if size > 1 and axis not in known
  ]


def place(
  model: nnx.Module, mesh: jax.sharding.Mesh, rules: Rules | None = None
) -> tuple[nnx.Module, list[Dropped]]:
  """A model whose arrays lie on `mesh` as its metadata and the rules say (others are shared).

  Returns:
    The new model and the axes that were dropped.
  """
  where, dropped = shardings(model, mesh, rules)
  parts = _parts.split(model)

  def put(tree: Any) -> Any:
    leaves = {p: jax.device_put(leaf, where[p]) for p, leaf in _parts.flat(tree).items()}
    return _parts.nest(leaves)

  trees = {n: put(getattr(parts, n)) for n in ('adapter', 'base', 'state')}
  return _parts.merge(parts.replace(**trees)), dropped


@contextlib.contextmanager
def using(mesh: jax.sharding.Mesh | None) -> Generator[None]:
  """Within the block activations are constrained to `mesh`."""
  with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
    yield


def constrain(
  x: jax.Array, axes: Axes, rules: Rules | None = None, *, output: bool = False
) -> jax.Array:
  """An activation held to the spec of its logical axes; untouched where no mesh is in context.

  The spec is never fitted (GSPMD pads an activation); axes that are manual here are left out.

  Args:
    x: the activation.
    axes: a logical name per dimension.
    rules: default: those in force.
    output: it leaves the compiled function, where JAX takes no padded array: fitted like a
      parameter.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or len(mesh.explicit_axes):
    return x
  spec = spec_for(axes, mesh, rules)
  manual = set(mesh.manual_axes)
  spec = P(*(as_entry([a for a in entry_axes(e) if a not in manual]) for e in spec))
  if output:
    spec, _ = fit_spec(x.shape, spec, mesh)
  return jax.lax.with_sharding_constraint(x, spec)


def batch_axes(size: int) -> tuple[str, ...]:
  """The mesh axes in context over which a batch of `size` rows is cut, where XLA places arrays."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or len(mesh.explicit_axes):
    return ()
  (entry,) = spec_for(('batch',), mesh)
  free = as_entry([a for a in entry_axes(entry) if a not in mesh.manual_axes])
  return entry_axes(fit_spec((size,), P(free), mesh)[0][0])


def factor_spec(
  dims: Sequence[str], kernel: Mapping[str, tuple[str, ...]], rules: Rules | None = None
) -> PartitionSpec:
  """The spec of an adapter's array, from its kernel's own, whatever its size.

  'in' and 'out' take the axes of the kernel's contracted and kept dimensions. A kernel that FSDP
  gathers at use has its factors gathered with it, so a factor with one of the two is stored over
  all axes that the kernel is stored over; under tensor parallelism alone each factor has its own
  side only.

  Args:
    dims: one word per dimension of the array.
    kernel: {'in': mesh axes, 'out': mesh axes} of the kernel.
    rules: what names the axes that shard the batch; default: those in force.
  """
  rules = current_rules() if rules is None else rules
  batch = {a for name, want in rules if name == 'batch' for a in want}
  both = kernel['in'] + tuple(a for a in kernel['out'] if a not in kernel['in'])
  sides = ('in', 'out', 'channels')
  spread = bool(batch.intersection(both)) and sum(d in sides for d in dims) == 1
  entries = []
  for word in dims:
    own = kernel.get(word, ())
    rest = tuple(a for a in both if a not in own) if spread and word in sides else ()
    entries.append(as_entry(own + rest))
  return P(*entries)
