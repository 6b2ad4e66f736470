"""An adapter into weights: a plain model whose kernels compute what the adapted layers did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
import warnings

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _adapter, _attach, _kernel, _layer, _packed, _padded, _parts, _sites, _stack
from peftlab.quant.layer import dense_class


def fuse(model: nnx.Module, *, name: str = 'default') -> nnx.Module:
  """A model with one adapter merged into its kernels and taken off; the one given is untouched.

  Every fused kernel is computed in float32 and rounded once to its own dtype. All other arrays,
  other adapters' included, are the very objects of the model given; to undo, keep that. A quantized
  kernel is decoded in float32 first and comes out in the dtype that it had before it was quantized
  (see `fuse_quantized` for a quantized one).

  A layer that shares its weight with another gets one of its own. Where the adapted layer is an
  embedding that is also the head (`model.tied`), the head is given a copy first (`model.untie()`),
  with a warning, so that the logits stay what they were. Of a model that does not say whether it
  is tied, an embedding with `attend` is warned about.

  An adapter that is switched off is merged all the same.

  Raises:
    ValueError: no such adapter, a type that cannot be merged, or NaN or infinity in its arrays.
  """
  _attach.require(model, name)
  every = _sites.sites(model, norms=True, points=True)
  chosen = [(s, a) for s in every if (a := _find(s, name)) is not None]
  for site, attached in chosen:
    _check(site, attached)
  fused = {site.path: _fused(site, attached) for site, attached in chosen}
  biases = {site.path: _fused_bias(site, attached) for site, attached in chosen}
  model = _parts.merge(_parts.split(model))
  _untie(model, [site for site, _ in chosen if not site.kind.linear])
  for site in _sites.sites(model, norms=True):
    if site.path in fused:
      metadata = site.weight.get_metadata()
      own = type(site.weight)(fused[site.path])
      own.set_metadata(metadata)
      setattr(site.layer, site.kind.weight, own)
      site.layer.__class__ = dense_class(type(site.layer))
    if biases.get(site.path) is not None:
      assert site.bias is not None
      own = type(site.bias)(biases[site.path])
      own.set_metadata(site.bias.get_metadata())
      setattr(site.layer, str(site.kind.bias), own)
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
  for slot in attached.slots():
    if not bool(jnp.isfinite(getattr(attached, slot)[...]).all()):
      raise ValueError(
        f'Adapter {attached.name!r} of {site.name} holds NaN or infinity in {slot!r}; nothing was '
        'merged.'
      )


def _fused(site: _sites.Site, attached: _layer.Attached) -> jax.Array:
  """The weight of a site, its stack axes included, with the adapter merged in."""
  weight: Any = _padded.cut(site.weight.get_raw_value())
  words, shape, stack = site.layout.words, site.shape, site.stack
  dtype = weight.dtype
  if isinstance(weight, _packed.Packed):
    weight = weight.dense(jnp.float32)

  def one(w: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
    values = _values(site, attached, arrays)
    matrix = _kernel.as_matrix(w, words).astype(jnp.float32)
    fused = _adapter.fused(attached.adapter, 'fuse', matrix, values)
    return _kernel.from_matrix(fused.astype(dtype), words, shape)

  return _each_layer(one, weight, stack, site, attached)


def _fused_bias(site: _sites.Site, attached: _layer.Attached) -> jax.Array | None:
  """The bias of a site with the adapter merged in; None where the type leaves biases alone.

  Raises:
    ValueError: the layer has no bias, and needs one.
  """
  adapter = attached.adapter
  if type(adapter).fuse_bias is _adapter.Adapter.fuse_bias:
    return None
  outs, layers = site.sizes['out'], site.layers
  own = jnp.zeros((*layers, outs)) if site.bias is None else site.bias[...]
  rank = own.ndim - len(layers)
  stack = tuple(range(len(layers))) if site.bias is None else _stack.place_axes(site.stack, rank)

  def one(b: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
    flat, values = b.reshape(-1).astype(jnp.float32), _values(site, attached, arrays)
    fused = _adapter.fused(adapter, 'fuse_bias', flat, values)
    return fused.reshape(b.shape).astype(b.dtype)

  fused = _each_layer(one, own, stack, site, attached)
  if site.bias is not None:
    return fused
  if jnp.any(fused):
    raise ValueError(f'{site.name} has no bias, which {type(adapter).__name__} needs to be merged.')
  return None


def _values(
  site: _sites.Site, attached: _layer.Attached, arrays: Mapping[str, jax.Array]
) -> _adapter.Values:
  """What `fuse` gets: float32 but for integers, of shared arrays the site's part."""
  found = {}
  for name, slot in attached.slots().items():
    array = arrays[name]
    if slot.shared:
      shape = _adapter.slot_shape(slot, attached.adapter, sizes=site.sizes)
      array = _layer.part_of(array, shape)
    inexact = jnp.issubdtype(array.dtype, jnp.inexact)
    found[name] = array.astype(jnp.float32) if inexact else array
  return _adapter.Values(found)


def _each_layer(
  one: Callable[..., jax.Array],
  own: jax.Array,
  stack: tuple[int, ...],
  site: _sites.Site,
  attached: _layer.Attached,
) -> jax.Array:
  """`one(array of one layer, slots of it)` over the layer axes of an array; where it lies.

  Slots have all of these axes, or the first of them: what the experts or all layers share has less.
  """
  here = site.under(attached)
  axes = {name: here.slot_axes(slot) for name, slot in attached.slots().items()}
  slots = {name: getattr(attached, name)[...] for name in axes}

  def every(own: jax.Array, slots: dict[str, jax.Array]) -> jax.Array:
    run = one
    for depth in reversed(range(len(stack))):
      mapped = {name: 0 if depth < len(of) else None for name, of in axes.items()}
      run = jax.vmap(run, in_axes=(0, mapped))
    fused = run(_front(own, stack), {n: _front(a, axes[n]) for n, a in slots.items()})
    return jnp.moveaxis(fused, range(len(stack)), stack)

  return jax.jit(every, out_shardings=own.sharding)(own, slots)


def _front(array: Any, axes: tuple[int, ...]) -> jax.Array:
  return jnp.moveaxis(array, axes, range(len(axes)))
