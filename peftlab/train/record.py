"""What a run records: its training losses, its held-out losses, its samples."""

from __future__ import annotations

from collections.abc import Callable
import pathlib
import time
from typing import Any

import jax

from peftlab import _parts, _processes, _specs
from peftlab.serve import decoding
from peftlab.train import devices, evaluate, metrics
from peftlab.train.text import Text


class Record:
  """The record of one run. What an earlier start of it has written is not made again.

  Attributes:
    name: of the run.
    folder: its workdir.
    text: what it is evaluated on.
  """

  def __init__(
    self,
    name: str,
    folder: pathlib.Path,
    text: Text,
    *,
    mesh: jax.sharding.Mesh | None,
    step: int | None = None,
    say: Callable[[str], None],
  ):
    """Opens the files, for appending; see `metrics.MetricsLog` for `step`."""
    self.name, self.folder, self.text = name, folder, text
    self._mesh, self._say = mesh, say
    # Read once: of several processes one writes on while the others would still look.
    self._has = {(r['kind'], r['step']) for r in self.read() if step is None or r['step'] <= step}
    first = _processes.is_first()
    self._log = metrics.MetricsLog(folder, step=step) if first else metrics.Unwritten()
    self._started = time.monotonic()

  def has(self, kind: str, step: int) -> bool:
    """Whether there is a record of a kind and a step."""
    return (kind, step) in self._has

  def read(self) -> list[metrics.Record]:
    """All of it, see `metrics.read_metrics`."""
    return metrics.read_metrics(self.folder)

  def train(self, step: int, values: dict[str, float]) -> None:
    """The metrics of one update, with the seconds since the start of this process's run."""
    seconds = round(time.monotonic() - self._started, 3)
    self._write('train', step, **values, seconds=seconds)

  def evaluate(self, parts: _parts.Parts, step: int) -> None:
    """The held-out loss."""
    if not self.has('eval', step):
      self.held_out(held_out_loss(parts, self.text, self._mesh), step)

  def held_out(self, value: float, step: int) -> None:
    """A held-out loss that was found elsewhere."""
    self._write('eval', step, loss=value)
    self._say(f'{self.name}: held-out loss {value:.4f} at step {step}')

  def sample(self, parts: _parts.Parts, step: int, *, tokens: int) -> None:
    """What the model makes of the held-out beginnings, if there are any."""
    prompts, tokenizer = self.text.prompts, self.text.tokenizer
    if not prompts or not tokens or self.has('samples', step):
      return
    model, stop = _parts.merge(parts), {tokenizer.eos_id}
    made = decoding.generate(model, prompts, max_tokens=tokens, stop=stop)
    pairs = zip(prompts, made, strict=True)
    texts = [{'prompt': tokenizer.decode(p), 'text': tokenizer.decode(ids)} for p, ids in pairs]
    self._write('samples', step, texts=texts)

  def _write(self, kind: str, step: int, **values: Any) -> None:
    self._log.write(kind, step, **values)
    self._has.add((kind, step))

  def close(self) -> None:
    """Closes the files."""
    self._log.close()


def held_out_loss(parts: _parts.Parts, text: Text, mesh: jax.sharding.Mesh | None) -> float:
  """The loss of a model on the held-out batches of a text, nats per token."""
  batches = [devices.place_batch(batch, mesh) for batch in text.held_out]
  with _specs.using(mesh):
    return evaluate.held_out_loss(parts, batches)
