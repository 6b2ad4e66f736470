"""What is measured: one LoRA step on the same weights, by peftlab and by hand-written JAX."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import os
import time
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax
import plain_jax

import peftlab
from peftlab import _specs, appliers
from peftlab.models.config import DecoderConfig, Rope
from peftlab.models.decoder import Decoder
from peftlab.plugins.lora import LoRA
from peftlab.train.opt_state import OptState, StepOptions, init_opt_state, training_parts
from peftlab.train.step import step_for

P = PartitionSpec
LEARNING_RATE = 1e-4
# Of plain JAX on a mesh: [..., in, out] by the two axes, as peftlab's default rules place them.
PLAIN_SPECS = dict.fromkeys(('q', 'k', 'v', 'gate', 'up', 'head'), ('fsdp', 'tensor'))
PLAIN_SPECS |= dict.fromkeys(('o', 'down', 'embed'), ('tensor', 'fsdp'))


@dataclasses.dataclass
class Candidate:
  """A step with its arguments at hand.

  Attributes:
    lower: the step, lowered for its arguments.
    moving: the arguments that a step takes and gives back.
    fixed: the others.
    facts: bytes, for the report.
  """

  lower: Callable[[], Any]
  moving: tuple
  fixed: tuple
  facts: dict[str, int]
  compiled: Any = None

  def compile(self) -> float:
    """Traces and compiles; CPU seconds it took."""
    start = time.process_time()
    self.compiled = self.lower().compile()
    return time.process_time() - start

  def run(self) -> float:
    """One step; its loss."""
    *moving, last = self.compiled(*self.moving, *self.fixed)
    self.moving = tuple(moving)
    jax.block_until_ready((moving, last))
    return float(last['loss'] if isinstance(last, dict) else last)


def mesh_of(devices: int) -> jax.sharding.Mesh | None:
  """fsdp 4 x tensor 2 for 8 devices; None for one."""
  return None if devices == 1 else _specs.make_mesh({'fsdp': 4, 'tensor': 2})


def decoder(sizes: dict[str, Any], applier: appliers.Applier) -> Decoder:
  """peftlab's decoder with the weights of `plain_jax.weights`."""
  config = DecoderConfig(
    family='llama',
    layers=sizes['layers'],
    embed=sizes['embed'],
    q_heads=sizes['heads'],
    kv_heads=sizes['heads'],
    head_dim=sizes['head_dim'],
    mlp=sizes['mlp'],
    vocab=sizes['vocab'],
    tied=False,
    norm_eps=sizes['eps'],
    rope=Rope(theta=sizes['theta']),
    max_length=sizes['length'],
  )
  model = Decoder(config, rngs=nnx.Rngs(0), applier=applier)
  weights = plain_jax.weights(sizes)
  layers = {f'attn.{n}': n for n in 'qkvo'} | {f'mlp.{n}': n for n in ('gate', 'up', 'down')}
  for path, name in layers.items():
    group, _, layer = path.partition('.')
    kernel = getattr(getattr(model.layers, group), layer).kernel
    kernel[...] = jnp.asarray(weights['layers'][name].reshape(kernel.shape))
  model.embed.table[...] = jnp.asarray(weights['embed'])
  head: Any = model.head
  head.kernel[...] = jnp.asarray(weights['head'])
  return model


def ours(
  sizes: dict[str, Any], devices: int, *, applier: str = 'scan', remat: str = 'outputs'
) -> Candidate:
  """The training step of peftlab."""
  mesh = mesh_of(devices)
  model = decoder(sizes, appliers.get_applier(applier, remat=remat))
  if mesh is not None:
    model, _ = _specs.place(model, mesh)
  model, report = peftlab.attach(model, LoRA(rank=sizes['rank'], alpha=sizes['alpha']))
  parts = training_parts(model)
  options = StepOptions(steps=10**6)
  state: OptState = init_opt_state(parts, options, learning_rate=LEARNING_RATE)
  step = step_for(parts, state, options)
  tokens = plain_jax.tokens(sizes)
  mask = np.ones(tokens.shape, np.float32)
  mask[:, -1] = 0
  batch = {'tokens': tokens, 'targets': np.roll(tokens, -1, 1), 'loss_mask': mask}
  batch = {name: _rows(array, mesh) for name, array in batch.items()}
  facts = {
    'base_bytes': peftlab.nbytes(parts.base),
    'adapter_bytes': report.nbytes,
    'adapter_bytes_on_devices': peftlab.nbytes(parts.adapter),
  }
  arguments = ((parts.adapter, state), (parts.base, batch))
  return Candidate(lambda: step.lower(*arguments[0], *arguments[1]), *arguments, facts)


def plain(sizes: dict[str, Any], devices: int, *, scan: bool = False) -> Candidate:
  """The same step in plain JAX: unrolled over layers, or scanned."""
  mesh = mesh_of(devices)

  def put(name: str, array: Any) -> jax.Array:
    spec = P(*(None,) * (array.ndim - 2), *PLAIN_SPECS[name]) if name in PLAIN_SPECS else P()
    where = None if mesh is None else NamedSharding(mesh, spec)
    return jax.device_put(jnp.asarray(array), where)

  base = plain_jax.weights(sizes)
  lora = plain_jax.factors(sizes, base['layers'])
  if not scan:
    base['layers'] = plain_jax.unstack(base['layers'], sizes['layers'])
    lora = plain_jax.unstack(lora, sizes['layers'])
  base = jax.tree.map_with_path(lambda path, a: put(path[-1].key, a), base)
  lora = jax.tree.map(lambda a: put('', a), lora)
  optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.0)
  state = jax.tree.map(lambda a: a if a.ndim else put('', a), optimizer.init(lora))
  keep = None if mesh is None else (lora, state)
  step = plain_jax.make_step(sizes, optimizer, scan=scan, like=keep)
  arguments = ((lora, state), (base, _rows(plain_jax.tokens(sizes), mesh)))
  return Candidate(lambda: step.lower(*arguments[0], *arguments[1]), *arguments, {})


def _rows(array: np.ndarray, mesh: jax.sharding.Mesh | None) -> jax.Array:
  return jax.device_put(array, None if mesh is None else NamedSharding(mesh, P('fsdp')))


def force_devices(count: int) -> None:
  """That many CPU devices; called before jax touches a device."""
  os.environ['JAX_PLATFORMS'] = 'cpu'
  jax.config.update('jax_num_cpu_devices', count)
