"""Benchmarks of the training step: by optimization, and against peers."""
