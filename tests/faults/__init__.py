"""Faults injected into tiny runs from outside the product: plugin.py patches a process to fail at a named point, lab.py
starts runs and compares how they end."""
