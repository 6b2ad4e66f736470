"""Different adapters, ranks and scales for different layers, in one call."""

import jax
import numpy as np
import pytest

import peftlab
from peftlab import testing
from peftlab.plugins.ia3 import IA3
from peftlab.plugins.lora import LoRA

pytestmark = pytest.mark.usefixtures('quick_compiles')


def model():
  return testing.StackModel()


def kinds(adapted):
  return {n: getattr(adapted.layers, n).adapters[0].adapter for n in ('up', 'down')}


def test_layers_get_the_adapter_of_the_first_pattern_that_names_them():
  with jax.numpy_rank_promotion('allow'):
    adapted, report = peftlab.attach(model(), {'up': LoRA(rank=2), r'layers\..*': IA3()})
  assert kinds(adapted) == {'up': LoRA(rank=2), 'down': IA3()}
  assert report.trainable == 2 * (2 * (16 + 24) + 16)
  with jax.numpy_rank_promotion('allow'):
    assert adapted(np.ones((2, 16), np.float32)).shape == (2, 16)


def test_each_field_has_patterns_of_its_own():
  fields = {'rank': {'up': 4}, 'alpha': {'down': 2.0}}
  adapted, _ = peftlab.attach(model(), LoRA(rank=2, alpha=16), fields=fields)
  found = kinds(adapted)
  assert {n: (a.rank, a.alpha) for n, a in found.items()} == {'up': (4, 16.0), 'down': (2, 2.0)}
  assert float(adapted.layers.up.adapters[0].scale[0]) == 4.0
  assert float(adapted.layers.down.adapters[0].scale[0]) == 1.0


def test_a_mesh_or_layout_changes_no_value():
  stacked, _ = peftlab.attach(model(), {'up': LoRA(rank=2), 'down': LoRA(rank=3)})
  listed, _ = peftlab.attach(testing.ListModel(), {'up': LoRA(rank=2), 'down': LoRA(rank=3)})
  for index in range(2):
    np.testing.assert_allclose(
      listed.layers[index].down.adapters[0].a[...],
      stacked.layers.down.adapters[0].a[...][index],
      rtol=1e-6,
    )


BAD = {
  'pattern': (
    lambda: peftlab.attach(model(), {'up': LoRA(), 'dwon': LoRA()}),
    "did you mean 'down'",
  ),
  'where too': (
    lambda: peftlab.attach(model(), {'up': LoRA()}, where='down'),
    'leave out `where`',
  ),
  'nothing': (lambda: peftlab.attach(model(), {}), '^attach is given no adapter; expected'),
  'not an adapter': (lambda: peftlab.attach(model(), {'up': LoRA}), r'write LoRA\(\)'),
  'field': (
    lambda: peftlab.attach(model(), LoRA(), fields={'rnak': {'up': 2}}),
    "did you mean 'rank'",
  ),
  'field pattern': (
    lambda: peftlab.attach(model(), LoRA(), fields={'rank': {'pu': 2}}),
    r"^fields\['rank'\]='pu' matches no layer",
  ),
  'value': (lambda: peftlab.attach(model(), LoRA(), fields={'rank': {'up': 0}}), 'at least 1'),
}


@pytest.mark.parametrize('case', BAD)
def test_patterns_are_strict(case):
  call, message = BAD[case]
  with pytest.raises(ValueError, match=message):
    call()


def test_layers_with_different_adapters_come_back_from_disk(tmp_path):
  with jax.numpy_rank_promotion('allow'):
    adapted, _ = peftlab.attach(
      model(), {'up': LoRA(rank=2), 'down': LoRA(rank=3, alpha=6)}, rngs=5
    )
    peftlab.save_adapter(adapted, tmp_path / 'ranks')
    back = peftlab.load_adapter(testing.ListModel(), tmp_path / 'ranks')
    assert back.layers[1].down.adapters[0].adapter == LoRA(rank=3, alpha=6)
    for name in ('up', 'down'):
      for slot in ('a', 'b', 'scale'):
        whole = getattr(getattr(adapted.layers, name).adapters[0], slot)[...]
        one = getattr(getattr(back.layers[1], name).adapters[0], slot)[...]
        np.testing.assert_array_equal(one, whole[1])
    mixed, _ = peftlab.attach(model(), {'up': LoRA(rank=2), 'down': IA3()})
    peftlab.save_adapter(mixed, tmp_path / 'mixed')
    back = peftlab.load_adapter(model(), tmp_path / 'mixed')
    assert kinds(back) == {'up': LoRA(rank=2), 'down': IA3()}
