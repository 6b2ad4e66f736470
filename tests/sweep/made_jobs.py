"""Jobs for engines, and programs in the place of peftlab."""

import sys

from peftlab.sweep.engines import engine


def job(tmp_path, *argv, name='t0123456789ab', processes=1):
  return engine.Job(name=name, ids=(name,), argv=argv, root=tmp_path, processes=processes)


def program(code):
  """An option of the local engine: a Python program in the place of peftlab."""
  return f'program={sys.executable} -c "{code}"'
