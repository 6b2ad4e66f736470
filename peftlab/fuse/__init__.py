"""Merging adapters: into the weights they adapt, or several into one."""

from peftlab.fuse.combined import Combined as Combined
from peftlab.fuse.into_quantized import fuse_quantized as fuse_quantized
from peftlab.fuse.into_weights import fuse as fuse
from peftlab.fuse.weighted import combine as combine
