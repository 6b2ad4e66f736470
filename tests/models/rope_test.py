"""Rotary embedding: arithmetic written out, and the scaling of Llama 3.1."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from peftlab.models import rope
from peftlab.models.config import Rope


def test_frequencies_are_a_geometric_series():
  found = rope.inverse_frequencies(Rope(theta=10_000.0), 8)
  np.testing.assert_allclose(found, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
  assert found.dtype == np.float32


def test_linear_scaling_and_factors_divide():
  plain = rope.inverse_frequencies(Rope(), 8)
  linear = rope.inverse_frequencies(Rope(scaling='linear', factor=4.0), 8)
  factors = rope.inverse_frequencies(Rope(scaling='factors', factors=(1.0, 2.0, 4.0, 8.0)), 8)
  np.testing.assert_allclose(linear, plain / 4, rtol=1e-6)
  np.testing.assert_allclose(factors, plain / np.array([1, 2, 4, 8]), rtol=1e-6)


def test_llama3_keeps_short_wavelengths_stretches_long_ones_and_blends_between():
  # Wavelengths 2 pi / f in a context of 1000 tokens: below 1000 / 4 kept, above 1000 / 1 divided.
  options = dict(scaling='llama3', factor=8.0, original_length=1000)
  theta = 10_000.0 ** (4 / 3)  # frequencies of 8 dimensions: 1, 10^-4/3, 10^-8/3, 10^-4
  plain = rope.inverse_frequencies(Rope(theta=theta), 8)
  found = rope.inverse_frequencies(Rope(theta=theta, **options), 8)
  blend = (1000 * plain[2] / (2 * math.pi) - 1) / (4 - 1)
  assert found[0] == plain[0]
  assert found[3] == pytest.approx(plain[3] / 8, rel=1e-6)
  assert 2 * math.pi / plain[1] < 250  # kept
  assert found[1] == plain[1]
  assert blend < 0  # 2 pi / f is 2916: stretched
  assert found[2] == pytest.approx(plain[2] / 8, rel=1e-6)


def test_llama3_blends_by_the_turns_made_in_the_context():
  # f = 1: the wavelength is 2 pi; a context of 4 pi tokens holds 2 turns, a third of the way 1..4.
  found = rope.inverse_frequencies(
    Rope(scaling='llama3', factor=8.0, original_length=round(4 * math.pi)), 2
  )
  turns = round(4 * math.pi) / (2 * math.pi)
  kept = (turns - 1) / 3
  assert found[0] == pytest.approx(kept + (1 - kept) / 8, rel=1e-6)


@pytest.mark.parametrize(
  ('layout', 'pairs'), (('half', ((0, 2), (1, 3))), ('interleaved', ((0, 1), (2, 3))))
)
def test_each_pair_is_turned_by_its_own_angle(layout, pairs):
  frequencies, positions = jnp.asarray([1.0, 0.1]), jnp.asarray([[0, 3]])
  cos, sin = rope.angles(positions, frequencies)
  x = np.random.default_rng(0).normal(size=(1, 2, 1, 4)).astype(np.float32)
  y = np.asarray(rope.rotate(jnp.asarray(x), cos, sin, layout=layout))
  np.testing.assert_allclose(y[0, 0], x[0, 0], rtol=1e-6)  # position 0
  for (a, b), angle in zip(pairs, (3.0, 0.3), strict=True):
    turned = complex(*x[0, 1, 0, [a, b]]) * complex(math.cos(angle), math.sin(angle))
    np.testing.assert_allclose(y[0, 1, 0, [a, b]], [turned.real, turned.imag], rtol=1e-5)


def test_rotation_keeps_the_dtype():
  cos, sin = rope.angles(jnp.asarray([[1]]), jnp.asarray([1.0]))
  for layout in ('half', 'interleaved'):
    x = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
    assert rope.rotate(x, cos, sin, layout=layout).dtype == jnp.bfloat16


def test_yarn_keeps_what_turns_often_and_divides_what_turns_seldom():
  # 4 pairs with theta 10^4: 1, 0.1, 0.01, 0.001. In a context of 628.3 tokens they turn 100, 10, 1
  # and 0.1 times; t turns are those of pair 2 - log10(t): 50 of pair 0.30, half a turn of 2.30.
  options = dict(scaling='yarn', factor=4.0, original_length=628, beta_fast=50.0, beta_slow=0.5)
  plain = np.array([1, 0.1, 0.01, 0.001])
  found = rope.inverse_frequencies(Rope(truncate=False, **options), 8)
  low, high = (math.log(628 / (t * 2 * math.pi)) / math.log(10) for t in (50, 0.5))
  stretched = np.clip((np.arange(4) - low) / (high - low), 0, 1)
  assert 0 < stretched[1] < stretched[2] < 1
  np.testing.assert_allclose(found, plain * (1 - stretched) + plain / 4 * stretched, rtol=1e-6)
  whole = rope.inverse_frequencies(Rope(**options), 8)  # from pair 0 to pair 3
  np.testing.assert_allclose(whole[[0, 3]], [1, 0.001 / 4], rtol=1e-6)
  np.testing.assert_allclose(whole[1], 0.1 * (2 / 3 + 1 / 3 / 4), rtol=1e-6)


def test_the_first_part_of_the_pairs_turns_where_it_is_proportional():
  found = rope.inverse_frequencies(Rope(scaling='proportional', fraction=0.5), 8)
  np.testing.assert_allclose(found, [1, 0.1, 0, 0], rtol=1e-6)


def test_dimensions_behind_the_rotated_ones_pass():
  x = jnp.arange(12.0).reshape(1, 2, 1, 6)
  cos, sin = rope.angles(jnp.arange(2)[None, :], jnp.asarray([0.5, 0.25]))
  turned = rope.rotate(x, cos, sin, layout='half')
  np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
  np.testing.assert_allclose(turned[..., :4], rope.rotate(x[..., :4], cos, sin, layout='half'))


def test_the_amplitude_multiplies_cosine_and_sine():
  places, frequencies = jnp.arange(3)[None, :], jnp.asarray([0.5])
  plain = rope.angles(places, frequencies)
  for a, b in zip(rope.angles(places, frequencies, 1.5), plain, strict=True):
    np.testing.assert_allclose(a, 1.5 * b, rtol=1e-6)
