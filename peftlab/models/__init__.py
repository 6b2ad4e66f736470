"""Decoders: one model, families as a config and a map of weight names, loaders."""
