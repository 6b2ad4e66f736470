"""Serving: texts continued by a base model or by one with adapters, with a KV cache."""

from peftlab.serve.decoding import generate as generate
from peftlab.serve.decoding import stream as stream
from peftlab.serve.pool import Pool as Pool
from peftlab.serve.sampling import Sampling as Sampling
