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
    (b'{"a": 1,}', r'is not valid JSON: .*line 1 column [89]'),
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


@pytest.mark.parametrize(
  ('given', 'meant'),
  (
    ('god.jsonl', 'good.jsonl'),
    ('GOOD.jsonl', 'good.jsonl'),
    ('good.txt', 'good.jsonl'),
    ('texts/mise.txt', 'texts/mice.txt'),
    ('txets/mice.txt', 'texts/mice.txt'),
    ('txets/mise.txt', 'texts/mice.txt'),
    ('text', 'texts'),
    ('other.jsonl', ''),
    ('texts/none.txt', ''),
    ('texts/mice/x', ''),
    ('hidden', ''),
    ('good.jsonl', ''),
  ),
)
def test_a_missing_path_has_the_nearest_one_part_by_part(given, meant, tmp_path, monkeypatch):
  (tmp_path / 'texts').mkdir()
  for name in ('good.jsonl', 'texts/mice.txt', '.hidden'):
    (tmp_path / name).touch()
  monkeypatch.chdir(tmp_path)
  assert files.near_path(given) == (f"; did you mean '{meant}'?" if meant else '')
  whole = f"; did you mean '{tmp_path / meant}'?" if meant else ''
  assert files.near_path(tmp_path / given) == whole


def test_only_files_of_the_suffixes_that_would_do_are_proposed(tmp_path):
  for name in ('demos.txt', 'dema.py'):
    (tmp_path / name).touch()
  assert files.near_path(tmp_path / 'demo.py', suffixes=('.py',)).endswith("dema.py'?")
  assert files.near_path(tmp_path / 'demo.py').endswith("demos.txt'?")


@pytest.mark.parametrize(
  ('given', 'said'),
  (
    ('', "Folder is ''; expected the path of a file or folder."),
    (None, 'Folder is None; expected the path of a file or folder.'),
    ('file', "Folder 'file' is a file; expected a folder."),
    ('file/x', "Folder 'file/x' cannot be made: 'file' is a file."),
    ('fodler/x', "'fodler' does not exist; did you mean 'folder'?"),
    ('none/x', "Folder 'none/x' cannot be made: 'none' does not exist."),
  ),
)
def test_where_nothing_can_be_written_is_told_before_it_is_tried(
  given, said, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'file').touch()
  (tmp_path / 'folder').mkdir()
  with pytest.raises(ValueError, match='Folder') as error:
    files.writable_folder(given, subject='Folder')
  assert str(error.value).endswith(said)
  assert {f.name for f in tmp_path.iterdir()} == {'file', 'folder'}


def test_a_folder_or_one_to_be_made_is_writable(tmp_path):
  for path in (tmp_path, tmp_path / 'new'):
    assert files.writable_folder(path, subject='Folder') == path
  assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('given', ('', None, 3, ['a']))
def test_what_is_no_path_is_told(given):
  for existing in (files.existing_file, files.existing_folder):
    with pytest.raises(ValueError, match=r'The path is .*; expected the path of a file or folder'):
      existing(given)
