"""Measures the step: one optimisation after the other, beside its peers, and beside what the device can do."""
