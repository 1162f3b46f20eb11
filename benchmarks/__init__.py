"""Measures the speed of the training step, one optimization at a time and against peers."""
