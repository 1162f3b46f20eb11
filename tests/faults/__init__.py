"""Every fault and bad input of the table, thrown at tiny runs: `python -m tests.faults`, `make test-faults`.

runner.py starts runs and watches them end, groups.py is the table, __main__.py counts. A sample of each group is in
tests/test_faults.py.
"""
