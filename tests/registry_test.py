"""Registries: names, clashes, discovery of a package and of entry points."""

import importlib.metadata
import sys

import pytest

import peftlab
from peftlab import _registry
from peftlab._registry import Registry, did_you_mean


def test_a_name_gives_what_was_registered():
  registry = Registry('tool')

  @registry.register('saw')
  class Saw:
    pass

  assert registry.get('saw') is Saw
  assert registry.names() == ('saw',)
  assert registry.name_of(Saw) == registry.name_of(Saw()) == 'saw'


def test_an_unknown_name_is_told_with_the_nearest_and_all():
  registry = Registry('tool')
  registry.register('hammer')(dict)
  registry.register('saw')(list)
  message = "^No tool 'hamer'; did you mean 'hammer'\\? Registered: hammer, saw.$"
  with pytest.raises(ValueError, match=message):
    registry.get('hamer')
  with pytest.raises(ValueError, match=r"^No tool 'xyz'. Registered: hammer, saw.$"):
    registry.get('xyz')


def test_a_taken_name_names_both_and_keeps_the_first():
  registry = Registry('tool')
  registry.register('saw')(dict)
  message = "^The tool name 'saw' is taken by builtins.dict, so builtins.list cannot have it.$"
  with pytest.raises(ValueError, match=message):
    registry.register('saw')(list)
  assert registry.get('saw') is dict


def test_a_module_that_is_loaded_again_replaces_its_own():
  registry = Registry('tool')
  first, second = (type('Saw', (), {'__module__': 'shed'}) for _ in range(2))
  registry.register('saw')(first)
  registry.register('saw')(second)
  assert registry.get('saw') is second


@pytest.mark.parametrize('name', ('', 'a b', '1st', 'a.b', 'a/b'))
def test_a_name_is_a_word(name):
  with pytest.raises(ValueError, match='is not a word of letters, digits and _'):
    Registry('tool').register(name)


def test_what_is_not_registered_has_no_name():
  with pytest.raises(ValueError, match=r'^builtins.dict is not a registered tool.$'):
    Registry('tool').name_of(dict)


def test_an_installed_package_adds_a_type_by_entry_point(monkeypatch):
  point = importlib.metadata.EntryPoint('ordered', 'collections:OrderedDict', 'shop.tools')

  def found(*, group):
    return [point] if group == 'shop.tools' else []

  monkeypatch.setattr(importlib.metadata, 'entry_points', found)
  registry = Registry('tool', entry_points='shop.tools')
  assert registry.names() == ('ordered',)
  assert registry.get('ordered').__name__ == 'OrderedDict'


def _package(tmp_path, monkeypatch, name, modules):
  folder = tmp_path / name
  folder.mkdir()
  (folder / '__init__.py').write_text('')
  for module, text in modules.items():
    (folder / f'{module}.py').write_text(text)
  monkeypatch.syspath_prepend(str(tmp_path))
  return name


def test_the_modules_of_a_package_register_themselves_when_asked(tmp_path, monkeypatch):
  registry = Registry(
    'tool',
    package=_package(
      tmp_path,
      monkeypatch,
      'tools_a',
      {
        'saw': "import registry_under_test as r\nr.registry.register('saw')(dict)\n",
      },
    ),
  )
  holder = type(sys)('registry_under_test')
  holder.registry = registry
  monkeypatch.setitem(sys.modules, 'registry_under_test', holder)
  assert 'tools_a.saw' not in sys.modules
  assert registry.get('saw') is dict


def test_a_module_that_fails_is_not_forgotten(tmp_path, monkeypatch):
  package = _package(tmp_path, monkeypatch, 'tools_b', {'broken': '1 / 0\n'})
  registry = Registry('tool', package=package)
  for _ in range(2):
    with pytest.raises(ZeroDivisionError):
      registry.names()


def test_did_you_mean_is_empty_where_nothing_is_near():
  assert did_you_mean('lroa', ['lora', 'dora']) == "; did you mean 'lora'?"
  assert did_you_mean('LORA', ['lora', 'dora']) == "; did you mean 'lora'?"
  assert did_you_mean('qqq', ['lora']) == ''


def test_the_registered_adapters_and_appliers():
  assert 'lora' in peftlab.adapter_types()
  assert {'scan', 'sequential'} <= set(_registry.appliers.names())


def _broken(monkeypatch, *points):
  monkeypatch.setattr(importlib.metadata, 'entry_points', lambda *, group: list(points))
  return Registry('tool', entry_points='shop.tools')


def test_a_broken_package_leaves_the_others_usable(monkeypatch):
  good = importlib.metadata.EntryPoint('ordered', 'collections:OrderedDict', 'shop.tools')
  bad = importlib.metadata.EntryPoint('saw', 'no_such_shop:Saw', 'shop.tools')
  told = (
    "The tool 'saw' of an installed package (entry point saw = no_such_shop:Saw) cannot be loaded: "
    "ModuleNotFoundError: No module named 'no_such_shop'."
  )
  registry = _broken(monkeypatch, bad, good)
  with pytest.warns(UserWarning, match='no_such_shop') as warned:
    assert registry.names() == ('ordered',)
  assert [str(w.message) for w in warned] == [told]
  assert registry.get('ordered').__name__ == 'OrderedDict'
  with pytest.raises(ValueError, match='no_such_shop') as error:
    registry.get('saw')
  assert str(error.value) == told


def test_a_package_that_takes_a_name_leaves_it_to_the_first(monkeypatch):
  point = importlib.metadata.EntryPoint('saw', 'collections:OrderedDict', 'shop.tools')
  registry = _broken(monkeypatch, point)
  registry.register('saw')(dict)
  with pytest.warns(UserWarning, match='taken by builtins.dict, so collections.OrderedDict'):
    assert registry.names() == ('saw',)
  assert registry.get('saw') is dict


def test_a_name_that_differs_in_case_alone_is_the_nearest_and_the_same_is_none():
  assert did_you_mean('attn.Q', ['attn.v', 'attn.q']) == "; did you mean 'attn.q'?"
  assert did_you_mean('down', ['down']) == ''


def test_an_entry_point_has_the_name_that_its_type_has(monkeypatch):
  point = importlib.metadata.EntryPoint('wrong', 'collections:OrderedDict', 'shop.tools')
  monkeypatch.setattr(importlib.metadata, 'entry_points', lambda *, group: [point])
  registry = Registry('tool', entry_points='shop.tools')
  registry.register('ordered')(point.load())
  with pytest.warns(UserWarning, match="it is registered as 'ordered'; expected an entry point of"):
    assert registry.names() == ('ordered',)
