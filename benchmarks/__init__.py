"""Measures the speed of the training step: one optimization after the other, and beside its peers."""
