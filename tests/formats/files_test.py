"""Atomic writing and strict JSON."""

import json
import stat

import pytest

from peftlab.formats import files


def test_a_written_file_is_whole_and_readable_by_all(tmp_path):
  files.replace_file(tmp_path / 'a', lambda file: file.write(b'content'))
  assert (tmp_path / 'a').read_bytes() == b'content'
  (tmp_path / 'plain').touch()
  modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ('a', 'plain')]
  assert modes[0] == modes[1]


def test_a_failed_check_leaves_the_old_content_and_no_temporary_file(tmp_path):
  (tmp_path / 'a').write_bytes(b'old')

  def check(written):
    assert written.read_bytes() == b'new'
    raise OSError('not what was meant')

  with pytest.raises(OSError, match='not what was meant'):
    files.replace_file(tmp_path / 'a', lambda file: file.write(b'new'), check=check)
  assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [('a', b'old')]


def test_json_comes_back(tmp_path):
  value = {'a': [1, 2.5, None, 'ü'], 'b': {'c': True}}
  files.write_json(tmp_path / 'a.json', value)
  assert files.read_json(tmp_path / 'a.json') == value
  assert json.loads((tmp_path / 'a.json').read_text()) == value


def test_a_nan_is_not_written_as_json(tmp_path):
  with pytest.raises(ValueError, match='not JSON compliant'):
    files.write_json(tmp_path / 'a.json', {'a': float('nan')})
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ('content', 'message'),
  (
    (b'', 'is not valid JSON'),
    (b'{"a": 1,}', r'is not valid JSON: .*line 1 column 8'),
    (b'\xff\xfe\x00', 'is not valid JSON'),
    (b'3', r'holds a int; expected an object'),
    (b'{"a": {"b": 1, "b": 2}}', "the key 'b' is there twice"),
    (b'{"a": ' * 100_000, 'is not valid JSON'),
  ),
)
def test_bad_json_is_named(content, message, tmp_path):
  (tmp_path / 'bad.json').write_bytes(content)
  with pytest.raises(ValueError, match=message) as error:
    files.read_json(tmp_path / 'bad.json')
  assert str(error.value).startswith(f"JSON file '{tmp_path / 'bad.json'}'")
