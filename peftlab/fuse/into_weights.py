"""An adapter into weights: a plain model whose kernels compute what the adapted layers did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
import warnings

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _adapter, _attach, _kernel, _layer, _parts, _sites


def fuse(model: nnx.Module, *, name: str = 'default') -> nnx.Module:
  """A model with one adapter merged into its kernels and taken off; the one given is untouched.

  Every fused kernel is computed in float32 and rounded once to its own dtype. All other arrays,
  other adapters' included, are the very objects of the model given; to undo, keep that.

  A layer that shares its weight with another gets one of its own. Where the adapted layer is an
  embedding that is also the head (`model.tied`), the head is given a copy first (`model.untie()`),
  with a warning, so that the logits stay what they were. Of a model that does not say whether it
  is tied, an embedding with `attend` is warned about.

  An adapter that is switched off is merged all the same.

  Raises:
    ValueError: no such adapter, a type that cannot be merged, or NaN or infinity in its arrays.
  """
  _attach.require(model, name)
  chosen = [(s, a) for s in _sites.sites(model) if (a := _find(s, name)) is not None]
  for site, attached in chosen:
    _check(site, attached)
  fused = {site.path: _fused(site, attached) for site, attached in chosen}
  model = _parts.merge(_parts.split(model))
  _untie(model, [site for site, _ in chosen if not site.kind.linear])
  for site in _sites.sites(model):
    if site.path in fused:
      metadata = site.weight.get_metadata()
      own = type(site.weight)(fused[site.path])
      own.set_metadata(metadata)
      setattr(site.layer, site.kind.weight, own)
  return _attach.detach(model, name)


def _untie(model: Any, embeddings: list[_sites.Site]) -> None:
  tied = getattr(model, 'tied', None)
  if tied and embeddings:
    warnings.warn(
      'The embedding is also the head; the head gets a copy of its own before merging.',
      stacklevel=3,
    )
    model.untie()
  for site in embeddings:
    if tied is None and hasattr(site.layer, 'attend'):
      warnings.warn(
        f'{site.name} is merged as an embedding; where its attend() is the head too, the logits '
        'change, for the adapter was on the embedding alone.',
        stacklevel=3,
      )


def _find(site: _sites.Site, name: str) -> _layer.Attached | None:
  return next((a for a in getattr(site.layer, 'adapters', ()) if a.name == name), None)


def _check(site: _sites.Site, attached: _layer.Attached) -> None:
  kind = type(attached.adapter)
  if not kind.mergeable:
    raise ValueError(f'{kind.__name__} cannot be merged into a kernel ({site.name}).')
  for slot in attached.adapter.slots():
    if not bool(jnp.isfinite(getattr(attached, slot)[...]).all()):
      raise ValueError(
        f'Adapter {attached.name!r} of {site.name} holds NaN or infinity in {slot!r}; nothing was '
        'merged.'
      )


def _fused(site: _sites.Site, attached: _layer.Attached) -> jax.Array:
  """The weight of a site, its stack axes included, with the adapter merged in."""
  weight = site.weight.get_raw_value()
  words, shape, stack = site.layout.words, site.shape, site.stack

  def one(w: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
    values = _adapter.Values({n: a.astype(jnp.float32) for n, a in arrays.items()})
    matrix = _kernel.as_matrix(w, words).astype(jnp.float32)
    fused = attached.adapter.fuse(matrix, values)
    return _kernel.from_matrix(fused.astype(w.dtype), words, shape)

  def every(w: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
    run = one
    for _ in stack:
      run = jax.vmap(run)
    fused = run(_front(w, stack), {n: _front(a, axes[n]) for n, a in arrays.items()})
    return jnp.moveaxis(fused, range(len(stack)), stack)

  variables = {slot: getattr(attached, slot) for slot in attached.adapter.slots()}
  axes = {n: tuple(v.get_metadata().get('stack', ())) for n, v in variables.items()}
  arrays = {n: v[...] for n, v in variables.items()}
  return jax.jit(every, out_shardings=weight.sharding)(weight, arrays)


def _front(array: Any, axes: tuple[int, ...]) -> jax.Array:
  return jnp.moveaxis(array, axes, range(len(axes)))
