"""A run: resumed equals uninterrupted, bitwise; divergence and damage are told and survived."""

import dataclasses
import json
import shutil
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peftlab import _parts, _specs
from peftlab.plugins.lora import LoRA
from peftlab.train import checkpoints, config, devices, loop, metrics, run, summary
from tests.train import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.fixture(autouse=True)
def opened():
  """The runs of a test, closed at its end."""
  RUNS.clear()
  yield
  for one in RUNS:
    one.close()


RUNS = []


def start(folder, experiment=None, *, model=None, text=None, **options):
  lines = []
  one = run.Run(
    experiment or tiny.experiment(),
    model or tiny.base_model(),
    text or tiny.text(),
    workdir=folder,
    say=lines.append,
    **options,
  )
  RUNS.append(one)
  return one, lines


def state(one):
  return {n: np.array(a) for n, a in checkpoints.named_arrays(one._tree()).items()}


def finished(folder, experiment=None):
  one, _ = start(folder, experiment)
  loop.train([one], say=lambda line: None)
  return one


def stop_after(folder, steps):
  """A run that ends like a killed one: nothing is said, saved or closed by it."""
  one, _ = start(folder)
  one.begin()
  for _ in range(steps):
    one.update()
  one.close()


def test_resumed_equals_uninterrupted_bitwise(tmp_path):
  whole = finished(tmp_path / 'whole')
  assert whole.status == 'ok'
  for steps in (3, 5):
    stop_after(tmp_path / str(steps), steps)
    again, lines = start(tmp_path / str(steps))
    assert lines == [f'tiny: continues from step {steps // 2 * 2} of 6']
    loop.train([again], say=lambda line: None)
    chex.assert_trees_all_equal(state(again), state(whole))
    assert losses(tmp_path / str(steps)) == losses(tmp_path / 'whole')


def test_a_continued_run_has_every_record_once(tmp_path):
  stop_after(tmp_path, 5)
  assert every_line(tmp_path)[-1]['step'] == 4
  shutil.rmtree(tmp_path / 'checkpoints' / '4')  # killed before it was written
  finished(tmp_path)
  found = [(r['kind'], r['step']) for r in every_line(tmp_path)]
  assert len(set(found)) == len(found)
  assert [step for kind, step in found if kind == 'train'] == [1, 2, 3, 4, 5, 6]


def every_line(folder):
  return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def losses(folder):
  return [(r['kind'], r['step'], r.get('loss')) for r in metrics.read_metrics(folder)]


def test_a_finished_run_that_is_started_again_trains_nothing(tmp_path):
  whole = finished(tmp_path)
  again, _ = start(tmp_path)
  assert again.done
  chex.assert_trees_all_equal(state(again), state(whole))


def test_the_loss_falls_and_the_base_is_shared(tmp_path):
  made = dataclasses.replace(tiny.experiment(steps=30), adapter=LoRA(rank=8))
  one = finished(tmp_path, made)
  found = summary.summarize(one)
  assert found['drop'] > 0.5
  assert found['base_identity'] == '12/12'
  assert found['compiles'] == 1
  assert found['bytes']['adapter'] == _parts.nbytes(one.parts.adapter)
  assert [r['step'] for r in one.record.read() if r['kind'] == 'samples'] == [0, 30]


@pytest.mark.parametrize(('alpha', 'times'), ((0.0, 1), (4.0, 0)))
def test_a_run_that_moves_nothing_says_so(tmp_path, alpha, times):
  adapter = LoRA(rank=2, alpha=alpha, dropout=0.25)
  one, lines = start(tmp_path, dataclasses.replace(tiny.experiment(steps=1), adapter=adapter))
  loop.train([one], say=lambda line: None)
  assert sum('no array moves: the first gradient is 0' in line for line in lines) == times


def test_a_nan_ends_the_run_with_the_last_good_checkpoint(tmp_path):
  one, lines = start(tmp_path)
  one.begin()
  for _ in range(3):
    one.update()
  good = one.compiled

  def broken(adapter, opt_state, base, batch):
    adapter, opt_state, values = good(adapter, opt_state, base, batch)
    return adapter, opt_state, values | {'loss': jnp.asarray(jnp.nan)}

  one.compiled = broken
  progress = []
  loop.train([one], say=progress.append)
  assert one.status == 'diverged'
  assert loop.EXIT_CODES[one.status] == 1
  assert lines[-1] == 'tiny: the loss is nan at step 4; the last good checkpoint is that of step 2'
  assert checkpoints.Checkpoints(tmp_path / 'checkpoints', config={}, base='').steps() == [2]


def damage(folder, step):
  for path in (folder / 'checkpoints' / str(step)).rglob('*'):
    if path.is_file() and path.parent.name == 'd':
      path.write_bytes(path.read_bytes()[:-5])


def test_a_damaged_checkpoint_is_refused_and_the_older_one_used_when_told_so(tmp_path):
  stop_after(tmp_path, 5)
  damage(tmp_path, 4)
  match = r"checkpoints/4' is damaged: .* --fallback moves it aside and continues from step 2\."
  with pytest.raises(ValueError, match=match):
    start(tmp_path)
  one, lines = start(tmp_path, fallback=True)
  assert one.step == 2
  assert f"It is moved to '{tmp_path}/damaged/4'; the one of step 2 is used." in lines[0]
  assert lines[1] == 'tiny: continues from step 2 of 6'
  assert (tmp_path / 'damaged' / '4' / 'sha256.json').exists()
  loop.train([one], say=lambda line: None)
  chex.assert_trees_all_equal(state(one), state(finished(tmp_path / 'whole')))


def test_where_no_checkpoint_is_sound_nothing_is_moved(tmp_path):
  stop_after(tmp_path, 5)
  damage(tmp_path, 4)
  damage(tmp_path, 2)
  for fallback in (False, True):
    with pytest.raises(ValueError, match=r"4' is damaged: .* No older one is sound; --overwrite"):
      start(tmp_path, fallback=fallback)
  assert sorted(f.name for f in (tmp_path / 'checkpoints').iterdir()) == ['2', '4']


def other_text(**changes):
  rows = dataclasses.replace(tiny.text().rows, **changes.pop('rows', {}))
  return dataclasses.replace(tiny.text(), rows=rows, **changes)


FOREIGN = {
  'another text': (
    {'text': other_text(rows={'stream': tiny.text().rows.stream[::-1]})},
    r"data\.corpus 'chitchat' does not give .* saved with fingerprint '\w+'; this run has '\w+'",
  ),
  'another held-out text': (
    {'text': other_text(held_out_id='b')},
    "saved with held_out ''; this run has 'b'",
  ),
  'another base': ({'model': tiny.base_model(seed=1)}, 'trained on another base'),
}


@pytest.mark.parametrize('fallback', (False, True))
@pytest.mark.parametrize('name', FOREIGN)
def test_a_sound_checkpoint_is_never_fallen_back_from(tmp_path, name, fallback):
  stop_after(tmp_path, 5)
  before = tree(tmp_path)
  changes, match = FOREIGN[name]
  with pytest.raises(ValueError, match=match) as told:
    start(tmp_path, fallback=fallback, **changes)
  assert f"Checkpoint '{tmp_path}/checkpoints/4'" in str(told.value)
  assert 'fallback' not in str(told.value)
  assert tree(tmp_path) == before


def tree(folder):
  return {f: f.read_bytes() for f in sorted(folder.rglob('*')) if f.is_file()}


def test_a_checkpoint_on_another_base_is_refused(tmp_path):
  stop_after(tmp_path, 3)
  with pytest.raises(ValueError, match='trained on another base'):
    start(tmp_path, model=tiny.base_model(seed=1))


def test_two_runs_share_the_base_and_the_compiled_step(tmp_path):
  runs = [
    start(tmp_path / str(seed), tiny.experiment(learning_rate=0.01 * (seed + 1)))[0]
    for seed in range(2)
  ]
  loop.train(runs, say=lambda line: None)
  assert runs[0].compiled is runs[1].compiled
  pairs = zip(jax.tree.leaves(runs[0].parts.base), jax.tree.leaves(runs[1].parts.base), strict=True)
  assert all(a is b for a, b in pairs)
  both = _parts.nbytes([one.parts for one in runs])
  alone = _parts.nbytes(runs[0].parts)
  assert both - alone == _parts.nbytes((runs[1].parts.adapter, runs[1].parts.state))


def test_a_stop_saves_and_is_told(tmp_path):
  one, _ = start(tmp_path)
  one.begin()
  for _ in range(3):
    one.update()
  one.finish(preempted=True)
  assert one.status == 'preempted'
  assert loop.EXIT_CODES[one.status] == 42
  again, _ = start(tmp_path)
  assert again.step == 3


@pytest.mark.parametrize('times', (1, 2))
def test_ctrl_c_saves_and_a_second_one_ends_at_once(tmp_path, times, capfd):
  one, _ = start(tmp_path)
  update = one.update

  def interrupted():
    ended = update()
    if one.step == 3:
      for _ in range(times):
        signal.raise_signal(signal.SIGINT)
    return ended

  one.update = interrupted
  before = signal.getsignal(signal.SIGINT)
  with pytest.raises(KeyboardInterrupt):
    loop.train([one], say=lambda line: None)
  assert signal.getsignal(signal.SIGINT) is before
  assert 'Ctrl-C again ends at once' in capfd.readouterr().err
  one.close()
  again, _ = start(tmp_path)
  assert again.step == {1: 3, 2: 2}[times]


def test_a_run_goes_on_on_another_mesh(tmp_path):
  whole = finished(tmp_path / 'whole')
  stop_after(tmp_path / 'moved', 3)
  moved = dataclasses.replace(tiny.experiment(), mesh=config.MeshConfig(fsdp=2))
  mesh = devices.make_mesh(moved.mesh)
  model, _ = _specs.place(tiny.base_model(), mesh)
  one, lines = start(tmp_path / 'moved', moved, model=model, mesh=mesh)
  assert lines == ['tiny: continues from step 2 of 6']
  loop.train([one], say=lambda line: None)
  expected = state(whole)
  for name, array in state(one).items():
    if not name.startswith('opt_state.inner'):
      np.testing.assert_allclose(array, expected[name], rtol=1e-2, atol=1e-3, err_msg=name)
