"""Experiments: one file each, with get_config() and, for an ablation, sweep()."""
