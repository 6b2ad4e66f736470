"""Training: configs, the step, the loop, checkpoints, metrics, the page."""
