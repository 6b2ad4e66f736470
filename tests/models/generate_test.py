"""Generation with a state of fixed size: prompts of other lengths do not disturb each other."""

import pytest

from peftlab.serve import generate
from tests.models import family_cases as cases

pytestmark = pytest.mark.usefixtures('quick_compiles')


def test_every_prompt_gets_what_it_would_get_alone():
  model = cases.model_of('qwen3_next_long')
  prompts = [[5, 9, 2, 7, 1, 8, 3], [4, 6]]
  together = generate(model, prompts, max_tokens=4)
  assert together == [generate(model, [prompt], max_tokens=4)[0] for prompt in prompts]
