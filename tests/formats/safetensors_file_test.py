"""One safetensors file: agrees with the reference implementation, every lie is refused."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from peftlab.formats.safetensors_file import DTYPES, SafetensorsFile, write_safetensors


def _some_tensors():
  rng = np.random.default_rng(0)
  return {
    'f32': rng.normal(size=(3, 5)).astype(np.float32),
    'bf16': rng.normal(size=(7,)).astype(ml_dtypes.bfloat16),
    'f16': rng.normal(size=(2, 1, 3)).astype(np.float16),
    'u8': rng.integers(0, 255, (5,)).astype(np.uint8),
    'flags': np.array([True, False, True]),
    'scalar': np.array(3, np.int64),
    'none': np.zeros((0, 4), np.float32),
  }


def _assert_same(found, expected):
  assert set(found) == set(expected)
  for name, array in expected.items():
    assert found[name].dtype == array.dtype
    assert found[name].shape == array.shape
    assert found[name].tobytes() == array.tobytes()


def test_reads_what_the_reference_library_writes(tmp_path):
  path = tmp_path / 'a.safetensors'
  safetensors.numpy.save_file(_some_tensors(), path, metadata={'format': 'pt'})
  file = SafetensorsFile(path)
  _assert_same(file, _some_tensors())
  assert file.metadata == {'format': 'pt'}


def test_the_reference_library_reads_what_we_write(tmp_path):
  path = tmp_path / 'a.safetensors'
  write_safetensors(path, _some_tensors(), metadata={'format': 'pt', 'é': '"ü"'})
  with safetensors.safe_open(path, 'np') as file:
    _assert_same({name: file.get_tensor(name) for name in file.keys()}, _some_tensors())  # noqa: SIM118
    assert file.metadata() == {'format': 'pt', 'é': '"ü"'}


def test_every_dtype_survives_a_round_trip(tmp_path):
  tensors = {word: np.arange(6).reshape(2, 3).astype(dtype) for word, dtype in DTYPES.items()}
  write_safetensors(tmp_path / 'a.safetensors', tensors)
  _assert_same(SafetensorsFile(tmp_path / 'a.safetensors'), tensors)


def test_a_transposed_array_is_written_in_its_own_order(tmp_path):
  array = np.arange(6, dtype=np.float32).reshape(2, 3).T
  write_safetensors(tmp_path / 'a.safetensors', {'x': array})
  np.testing.assert_array_equal(SafetensorsFile(tmp_path / 'a.safetensors')['x'], array)


def test_arrays_are_read_only_views(tmp_path):
  write_safetensors(tmp_path / 'a.safetensors', _some_tensors())
  array = SafetensorsFile(tmp_path / 'a.safetensors')['f32']
  with pytest.raises(ValueError, match='read-only'):
    array[0, 0] = 1


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
  path = tmp_path / 'a.safetensors'
  write_safetensors(path, {'x': np.ones(3, np.float32)})
  before = path.read_bytes()
  with pytest.raises(ValueError, match=r"Tensor 'z' for '.*' has dtype complex64"):
    write_safetensors(path, {'y': np.ones(3, np.float32), 'z': np.ones(3, np.complex64)})

  class Failing(dict):
    def __getitem__(self, name):
      raise OSError('disk full')

  with pytest.raises(OSError, match='disk full'):
    write_safetensors(path, Failing(y=np.ones(3, np.float32)))
  assert path.read_bytes() == before
  assert [file.name for file in tmp_path.iterdir()] == ['a.safetensors']


def test_writing_into_no_folder_is_refused(tmp_path):
  with pytest.raises(ValueError, match='No folder'):
    write_safetensors(tmp_path / 'no' / 'a.safetensors', {})


def _file(path: pathlib.Path, header, buffer=bytes(8), length=None):
  content = header if isinstance(header, bytes) else json.dumps(header).encode()
  length = len(content) if length is None else length
  path.write_bytes(length.to_bytes(8, 'little') + content + buffer)
  return path


def _entry(dtype='F32', shape=(2,), offsets=(0, 8)):
  return {'dtype': dtype, 'shape': list(shape), 'data_offsets': list(offsets)}


LIES = {
  'empty': (b'', 'claims a header of 0|not valid JSON'),
  'huge_header': (
    (b'{}', bytes(8), 10**15),
    'has 18 bytes and claims a header of 1000000000000000',
  ),
  'not_json': ((b'{"x": ',), 'is not valid JSON'),
  'not_utf8': ((b'{"\xff": 1}',), 'is not valid JSON'),
  'nested': ((b'[' * 100_000,), 'is not valid JSON'),
  'not_an_object': ((b'[1]',), 'expected an object'),
  'twice': ((b'{"x": {}, "x": {}}',), "the key 'x' is there twice"),
  'metadata': (({'__metadata__': {'a': 1}, 'x': _entry()},), 'expected strings by name'),
  'entry': (({'x': {'dtype': 'F32'}},), "Tensor 'x' of .* expected dtype, shape and data_offsets"),
  'dtype': (({'x': _entry('F23')},), "Tensor 'x' of .* has dtype 'F23'; did you mean 'F32'"),
  'dtype_list': (({'x': _entry(['F32'])},), 'has dtype'),
  'negative': (({'x': _entry(shape=(-2,))},), 'expected lists of whole numbers'),
  'float_shape': (({'x': _entry(shape=(2.0,))},), 'expected lists of whole numbers'),
  'offsets': (({'x': _entry(offsets=(8,))},), 'expected lists of whole numbers'),
  'shape_lie': (({'x': _entry(shape=(3,))},), r"Tensor 'x' .* \(3,\) of F32, which is 12 bytes"),
  'giant': (({'x': _entry(shape=(10**6, 10**6))},), 'which is 4000000000000 bytes'),
  'giant_offsets': (
    ({'x': _entry(shape=(10**6, 10**6), offsets=(0, 4 * 10**12))},),
    "Tensor 'x' .* ends at byte .* the file has .* it is cut short",
  ),
  'backwards': (({'x': _entry(offsets=(8, 0))},), 'its offsets'),
  'cut': (({'x': _entry()}, bytes(7)), 'it is cut short'),
  'behind': (({'x': _entry()}, bytes(9)), 'its header accounts for'),
  'hole': (({'x': _entry(offsets=(4, 12))}, bytes(12)), 'leaves a hole behind the header'),
  'overlap': (
    ({'x': _entry(), 'y': _entry(offsets=(4, 12))}, bytes(12)),
    "tensor 'y' starts at byte .* and overlaps tensor 'x'",
  ),
}


@pytest.mark.parametrize('case', LIES)
def test_a_lying_file_is_refused_by_name(case, tmp_path):
  content, message = LIES[case]
  path = tmp_path / 'lie.safetensors'
  if content:
    _file(path, *content)
  else:
    path.write_bytes(b'')
  with pytest.raises(ValueError, match=message) as error:
    SafetensorsFile(path)
  assert 'lie.safetensors' in str(error.value)
  assert str(error.value).endswith('.')


def test_a_file_cut_anywhere_is_refused(tmp_path):
  write_safetensors(tmp_path / 'a.safetensors', _some_tensors())
  content = (tmp_path / 'a.safetensors').read_bytes()
  for length in range(len(content)):
    (tmp_path / 'cut.safetensors').write_bytes(content[:length])
    with pytest.raises(ValueError, match=r'cut\.safetensors'):
      SafetensorsFile(tmp_path / 'cut.safetensors')


@pytest.mark.parametrize('name', ('x.bin', 'x.pt', 'x.ckpt'))
def test_a_pickle_is_refused_by_its_name(name, tmp_path):
  (tmp_path / name).write_bytes(b'anything')
  with pytest.raises(ValueError, match='is a pickle, which can run code'):
    SafetensorsFile(tmp_path / name)


@pytest.mark.parametrize('start', (b'PK\x03\x04', b'\x80\x02}', b'\x80\x04\x95'))
def test_a_pickle_is_refused_by_its_content(start, tmp_path):
  (tmp_path / 'x.safetensors').write_bytes(start + bytes(100))
  with pytest.raises(ValueError, match='is a pickle, which can run code'):
    SafetensorsFile(tmp_path / 'x.safetensors')


def test_an_absent_tensor_is_named_with_the_nearest(tmp_path):
  write_safetensors(tmp_path / 'model.safetensors', {'model.norm.weight': np.ones(2, np.float32)})
  file = SafetensorsFile(tmp_path / 'model.safetensors')
  with pytest.raises(ValueError, match=r"'model\.norm'.*; did you mean 'model\.norm\.weight'\?"):
    file['model.norm']
  assert 'model.norm' not in file
  with pytest.raises(
    ValueError, match=r"No file '.*modle\.safetensors'; did you mean '.*/model\.safetensors'"
  ):
    SafetensorsFile(tmp_path / 'modle.safetensors')
