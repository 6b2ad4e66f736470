"""Merging an adapter into the weights it adapts."""

from peftlab.fuse.into_weights import fuse as fuse
