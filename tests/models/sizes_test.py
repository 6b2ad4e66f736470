"""Named sizes have as many parameters as were published, and the configs that were published."""

import json

import jax
import pytest

from peftlab import _parts
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import sizes
from tests.models import goldens

PUBLISHED = json.loads((goldens.HF / 'published_sizes.json').read_text())


def test_every_published_size_has_a_name():
  assert set(sizes.names()) == set(PUBLISHED)


@pytest.mark.parametrize('name', PUBLISHED)
def test_parameters_are_the_published_ones(name):
  model = sizes.outline(name)
  assert sizes.parameters(model) == PUBLISHED[name]['parameters']
  arrays = [v.get_raw_value() for v in _parts.variables(model).values()]
  assert all(isinstance(a, jax.ShapeDtypeStruct) for a in arrays)


@pytest.mark.parametrize('name', PUBLISHED)
def test_configs_are_the_published_ones(name, tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(PUBLISHED[name]['config']))
  reader = object.__new__(HfWeights)  # a folder without weights
  reader.directory, reader.config = tmp_path, PUBLISHED[name]['config']
  family = sizes._families()[name]
  assert sizes.config(name) == family.formats['hf'].config(reader)


def test_an_unknown_size_is_named():
  with pytest.raises(ValueError, match="No size 'llama3-7b'; did you mean 'llama3-"):
    sizes.config('llama3-7b')
