"""Budgets are solved from below, for parameters and bytes; counts are arithmetic written out."""

from flax import nnx
import pytest

from peftlab.models.decoder import Decoder
from peftlab.sweep import budget
from tests.train import tiny

D = tiny.DECODER
_Q, _KV = D.q_heads * D.head_dim, D.kv_heads * D.head_dim
# in + out over q, k, v, o, gate, up, down of every layer: what one more rank adds.
PER_RANK = D.layers * (2 * (D.embed + _Q) + 2 * (D.embed + _KV) + 3 * (D.embed + D.mlp))
SCALES = D.layers * 7


@pytest.fixture(scope='module')
def outline():
  return nnx.eval_shape(lambda: Decoder(tiny.DECODER, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
  ('text', 'kind', 'limit'),
  (
    ('params:2.4M', 'params', 2_400_000),
    ('params:1856', 'params', 1856),
    ('bytes:1.5Ki', 'bytes', 1536),
    ('bytes:10M', 'bytes', 10_000_000),
  ),
)
def test_a_budget_is_read(text, kind, limit):
  assert budget.parse(text) == budget.Budget(kind=kind, limit=limit)


@pytest.mark.parametrize('text', ('2.4M', 'parms:1', 'params:', 'params:1.2.3', 'params:3X'))
def test_another_budget_is_refused(text):
  with pytest.raises(ValueError, match='--budget is'):
    budget.parse(text)


@pytest.mark.parametrize(
  ('limit', 'rank'),
  ((PER_RANK, 1), (2 * PER_RANK - 1, 1), (8 * PER_RANK, 8), (8 * PER_RANK + 9, 8)),
)
def test_the_largest_rank_within_a_budget_is_taken(outline, limit, rank):
  name, size, count = budget.solve(
    tiny.experiment(), outline, budget.Budget(kind='params', limit=limit)
  )
  assert (name, size, count) == ('rank', rank, rank * PER_RANK)


def test_bytes_count_the_scales_too(outline):
  limit = 4 * (3 * PER_RANK + SCALES)
  found = budget.solve(tiny.experiment(), outline, budget.Budget(kind='bytes', limit=limit))
  assert found == ('rank', 3, limit)


def test_settings_get_the_solved_size(outline, monkeypatch):
  monkeypatch.setattr(budget.load, 'outline', lambda source, dtype: outline)
  said = []
  found = budget.solve_settings(
    tiny.experiment(), [{'seed': 0}, {'seed': 1}], f'params:{8 * PER_RANK}', say=said.append
  )
  assert [setting['adapter.rank'] for setting in found] == [8, 8]
  assert said == [f'budget params:{8 * PER_RANK}: LoRA rank=8 has {8 * PER_RANK:,} params']
  with pytest.raises(ValueError, match=r'sets adapter\.rank, and --budget solves it'):
    budget.solve_settings(
      tiny.experiment(), [{'adapter.rank': 2}], f'params:{8 * PER_RANK}', say=said.append
    )


def test_what_cannot_be_solved_says_why(outline):
  with pytest.raises(ValueError, match=f'rank=1 has {PER_RANK} params; the budget is 100'):
    budget.solve(tiny.experiment(), outline, budget.Budget(kind='params', limit=100))
  from peftlab.sweep import space

  other = space.with_adapter(tiny.experiment(), 'ia3')
  with pytest.raises(ValueError, match='no single size'):
    budget.solve(other, outline, budget.Budget(kind='params', limit=10**6))
