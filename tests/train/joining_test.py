"""Where a process stands among the others: flags before the environment, all of it or nothing."""

import re

import jax
import pytest

from peftlab.train import joining

ENVIRONMENT = {
  'JAX_COORDINATOR_ADDRESS': 'host-0:8476',
  'JAX_NUM_PROCESSES': '4',
  'JAX_PROCESS_ID': '3',
}


def test_flags_come_before_the_environment():
  found = joining.place(ENVIRONMENT)
  assert (found.coordinator, found.count, found.id) == ('host-0:8476', 4, 3)
  assert found.environment() == ENVIRONMENT
  found = joining.place(ENVIRONMENT, coordinator='[::1]:99', count=2, number=0)
  assert (found.coordinator, found.count, found.id) == ('[::1]:99', 2, 0)
  assert joining.place({}) is None


@pytest.mark.parametrize(
  ('changes', 'message'),
  (
    ({'JAX_PROCESS_ID': None}, '--coordinator, --num_processes without --process_id: of several'),
    (
      {'JAX_PROCESS_ID': '4'},
      '--process_id is 4 and --num_processes 4; expected an id from 0 to 3',
    ),
    ({'JAX_PROCESS_ID': 'two'}, "--process_id is 'two'; expected a whole number."),
    ({'JAX_COORDINATOR_ADDRESS': 'host-0'}, "--coordinator is 'host-0'; expected HOST:PORT."),
    ({'JAX_COORDINATOR_ADDRESS': ':80'}, "--coordinator is ':80'; expected HOST:PORT."),
    ({'JAX_COORDINATOR_ADDRESS': 'a:99999'}, "--coordinator is 'a:99999'; expected HOST:PORT."),
  ),
)
def test_what_is_no_place_is_refused(changes, message):
  told = {k: v for k, v in (ENVIRONMENT | changes).items() if v is not None}
  with pytest.raises(ValueError, match=re.escape(message)):
    joining.place(told)


def test_a_coordinator_that_is_not_there_is_said_in_one_line():
  with pytest.raises(ValueError, match=r'Process 1 of 2 finds no coordinator at 127.0.0.1:1 ') as e:
    joining.join(joining.Place(coordinator='127.0.0.1:1', count=2, id=1), timeout=1)
  assert 'Connection refused' in str(e.value)
  assert not jax.distributed.is_initialized()


def test_an_error_of_one_process_alone_is_its_own():
  assert not joining.of_another(
    jax.errors.JaxRuntimeError('UNAVAILABLE: Connection closed by peer')
  )
