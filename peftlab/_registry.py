"""Registries: a short name -> a class or function, open to packages from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import difflib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from typing import Any, TypeVar
import warnings

T = TypeVar('T')


def did_you_mean(given: str, choices: Iterable[str]) -> str:
  """`"; did you mean 'x'?"` for the choice nearest to `given`, or `''` where none is near."""
  plain = {name.casefold(): name for name in choices if name != given}  # 'LoRA' is near 'lora'
  near = difflib.get_close_matches(str(given).casefold(), list(plain), n=1, cutoff=0.5)
  return f"; did you mean '{plain[near[0]]}'?" if near else ''


class Registry:
  """Names of one kind of thing. Filled by `register`, by a package's modules, by entry points.

  Args:
    kind: what is registered, for messages ('adapter').
    package: a package whose modules register themselves when first asked for a name.
    entry_points: an entry-point group; an installed package adds `name = module:Class` to it. One
      that cannot be loaded is told in a warning, and is an error for who asks for that very name.
  """

  def __init__(self, kind: str, *, package: str | None = None, entry_points: str | None = None):
    self.kind = kind
    self._package = package
    self._group = entry_points
    self.check: Callable[[str, Any], None] | None = None  # raises ValueError for what is none
    self._found: dict[str, Any] = {}
    self._broken: dict[str, str] = {}  # the name of an entry point -> why it could not be loaded
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
      ValueError: no such name; the message has the nearest one and all of them. Or the installed
        package that has it cannot be loaded.
    """
    if name not in self._found:
      self._discover()
    if name not in self._found and name in self._broken:
      raise ValueError(self._broken[name])
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
    except BaseException:
      self._discovered = False
      raise
    for point in importlib.metadata.entry_points(group=self._group) if self._group else ():
      self._load(point)
    for reason in self._broken.values():
      warnings.warn(reason, stacklevel=3)

  def _load(self, point: importlib.metadata.EntryPoint) -> None:
    """Adds what an installed package has; an error in it leaves all other names usable."""
    try:
      thing = point.load()
      if self.check is not None:
        self.check(point.name, thing)
      own = next((n for n, t in self._found.items() if t is thing and n != point.name), None)
      if own is not None:
        raise ValueError(f'it is registered as {own!r}; expected an entry point of that name')
      self._add(point.name, thing)
    except (Exception, SystemExit) as error:  # noqa: BLE001, it is told
      package = f'the package {point.dist.name!r}' if point.dist else 'an installed package'
      self._broken[point.name] = (
        f'The {self.kind} {point.name!r} of {package} (entry point {point.name} = {point.value}) '
        f'cannot be loaded: {type(error).__name__}: {str(error).rstrip(".")}.'
      )


def _where(thing: Any) -> str:
  return f'{thing.__module__}.{getattr(thing, "__qualname__", thing)}'


adapters = Registry('adapter', package='peftlab.plugins', entry_points='peftlab.adapters')
appliers = Registry('applier', package='peftlab.appliers')
families = Registry('model family', package='peftlab.models')
quantizers = Registry('quantizer', package='peftlab.quant')
corpora = Registry('corpus', package='peftlab.data')
tokenizers = Registry('tokenizer', package='peftlab.data')
