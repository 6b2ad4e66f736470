"""Registries: a short name -> a class or function, open to packages from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import difflib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from typing import Any, TypeVar

T = TypeVar('T')


def did_you_mean(given: str, choices: Iterable[str]) -> str:
  """`"; did you mean 'x'?"` for the choice nearest to `given`, or `''` where none is near."""
  names = list(choices)
  plain = {name.casefold(): name for name in names}  # 'LoRA' is near 'lora'
  near = _near(str(given), names) or [plain[n] for n in _near(str(given).casefold(), plain)]
  return f"; did you mean '{near[0]}'?" if near else ''


def _near(given: str, names: Iterable[str]) -> list[str]:
  return difflib.get_close_matches(given, list(names), n=1, cutoff=0.5)


class Registry:
  """Names of one kind of thing. Filled by `register`, by a package's modules, by entry points.

  Args:
    kind: what is registered, for messages ('adapter').
    package: a package whose modules register themselves when first asked for a name.
    entry_points: an entry-point group; an installed package adds `name = module:Class` to it.
  """

  def __init__(self, kind: str, *, package: str | None = None, entry_points: str | None = None):
    self.kind = kind
    self._package = package
    self._group = entry_points
    self._found: dict[str, Any] = {}
    self._discovered = False

  def register(self, name: str) -> Callable[[T], T]:
    """Decorator that files a class or function under `name`.

    Raises:
      ValueError: the name is not an identifier or is taken by another object.
    """
    if not name.replace('-', '_').isidentifier():
      raise ValueError(f'The {self.kind} name {name!r} is not a word of letters, digits and _.')

    def add(thing: T) -> T:
      self._add(name, thing)
      return thing

    return add

  def _add(self, name: str, thing: Any) -> None:
    taken = self._found.get(name)
    if taken is not None and _where(taken) != _where(thing):
      raise ValueError(
        f'The {self.kind} name {name!r} is taken by {_where(taken)}, so {_where(thing)} cannot '
        'have it.'
      )
    self._found[name] = thing

  def get(self, name: str) -> Any:
    """What is registered under `name`.

    Raises:
      ValueError: no such name; the message has the nearest one and all of them.
    """
    if name not in self._found:
      self._discover()
    if name not in self._found:
      near = did_you_mean(name, self._found)
      raise ValueError(
        f'No {self.kind} {name!r}{near or "."} Registered: {", ".join(sorted(self._found))}.'
      )
    return self._found[name]

  def names(self) -> tuple[str, ...]:
    """Every registered name, sorted."""
    self._discover()
    return tuple(sorted(self._found))

  def name_of(self, thing: Any) -> str:
    """The name under which `thing` (or its class) is registered."""
    cls = thing if isinstance(thing, type) else type(thing)
    for name, found in self._found.items():
      if found is cls or found is thing:
        return name
    raise ValueError(f'{_where(cls)} is not a registered {self.kind}.')

  def _discover(self) -> None:
    if self._discovered:
      return
    self._discovered = True  # a module may ask for a name while it is imported
    try:
      if self._package and importlib.util.find_spec(self._package):
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
          importlib.import_module(f'{self._package}.{module.name}')
      for point in importlib.metadata.entry_points(group=self._group) if self._group else ():
        self._add(point.name, point.load())
    except BaseException:
      self._discovered = False
      raise


def _where(thing: Any) -> str:
  return f'{thing.__module__}.{getattr(thing, "__qualname__", thing)}'


adapters = Registry('adapter', package='peftlab.plugins', entry_points='peftlab.adapters')
appliers = Registry('applier', package='peftlab.appliers')
families = Registry('model family', package='peftlab.models')
quantizers = Registry('quantizer', package='peftlab.quant')
corpora = Registry('corpus', package='peftlab.data')
tokenizers = Registry('tokenizer', package='peftlab.data')
