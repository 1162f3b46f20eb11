"""The faults of the table in `make test-faults`, injected into tiny runs from outside the product.

plugin.py patches a process to fail at a named point, lab.py starts runs and compares how they end, test_faults.py is
the table. `make test` runs a sample of each group.
"""
