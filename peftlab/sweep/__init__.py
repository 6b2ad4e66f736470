"""Ablation sweeps: the space, trials that own their rows, engines, packs, statistics, report."""
