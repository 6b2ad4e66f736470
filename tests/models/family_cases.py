"""The goldens of the families, loaded once; how their logits are compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import peftlab
from peftlab import appliers
from peftlab.models.load import load_model
from tests.models import goldens

# The family of each golden.
FAMILIES = {
  'deepseek_v3': ('deepseek_v3', 'deepseek_v3_plain'),
  'gemma2': ('gemma2', 'gemma2_plain'),
  'gemma3': ('gemma3', 'gemma3_caps', 'gemma3_wrapped'),
  'gemma4': ('gemma4', 'gemma4_moe', 'gemma4_ple', 'gemma4_wrapped'),
  'gpt_oss': ('gpt_oss', 'gpt_oss_clamped', 'gpt_oss_mxfp4'),
  'llama': ('llama', 'llama31', 'llama32', 'llama_bias', 'llama_tied'),
  'mixtral': ('mixtral', 'mixtral_window'),
  'qwen3': ('qwen3', 'qwen3_window'),
  'qwen3_moe': ('qwen3_moe', 'qwen3_moe_mixed'),
  'qwen3_next': ('qwen3_next', 'qwen3_next_long'),
}
GOLDENS = tuple(name for names in FAMILIES.values() for name in names)
# Each program that is compiled costs seconds, so each claim is made of a golden or two per family.
HERE = ('llama', 'llama_tied', 'llama31', 'llama_bias', 'gemma3', 'gemma3_caps')  # load_test's
SCANNED = (
  *HERE,
  'deepseek_v3_plain',
  'gemma2_plain',
  'gemma3_wrapped',
  'gemma4',
  'gemma4_ple',
  'gemma4_wrapped',
  'gpt_oss_clamped',
  'gpt_oss_mxfp4',
  'mixtral',
  'qwen3',
  'qwen3_moe',
  'qwen3_next_long',
)
UNROLLED = (
  'deepseek_v3',
  'gemma2',
  'gemma3_caps',
  'gemma4_moe',
  'gpt_oss',
  'llama32',
  'mixtral_window',
  'qwen3_window',
  'qwen3_moe_mixed',
  'qwen3_next',
)
CACHED = (
  'deepseek_v3',
  'gemma2',
  'gemma3_caps',
  'gemma4_ple',
  'gpt_oss',
  'llama32',
  'mixtral_window',
  'qwen3',
  'qwen3_moe',
  'qwen3_next',
)
PIPED = (
  'deepseek_v3',
  'gemma2',
  'gemma3_caps',
  'gemma4_ple',
  'gpt_oss',
  'llama32',
  'mixtral',
  'qwen3',
  'qwen3_moe',
  'qwen3_next',
)
PACKED = ('deepseek_v3', 'gpt_oss', 'qwen3_next_long')
WITH_EXPERTS = (
  'deepseek_v3_plain',
  'gemma4_wrapped',
  'gpt_oss_clamped',
  'mixtral',
  'qwen3_moe',
  'qwen3_next_long',
)


@functools.cache
def loaded(name):
  """The parts of a golden's model; nobody may write to its arrays."""
  return peftlab.split(load_model(goldens.HF / name))


def model_of(name, applier=appliers.Scan()):  # noqa: B008, it is frozen
  """A golden's model with an applier."""
  model = peftlab.merge(loaded(name))
  model.applier = applier
  return model


@jax.jit
def logits_of(parts, tokens):
  """Logits of parts of a model."""
  return peftlab.merge(parts)(tokens)


def golden(name):
  """(tokens [texts, length], logits [texts, length, vocab]), made by transformers."""
  held = np.load(goldens.HF / name / 'logits.npz')
  tokens = jnp.asarray(np.atleast_2d(held['tokens']))
  return tokens, held['logits'].reshape(*tokens.shape, -1)


def distance(found, expected):
  """The largest difference, relative to the scale of the logits."""
  return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()
