"""Run by tests: one run after the other on one engine, since starting it takes longer than the runs.

python -m tests.engine.several_runs "OUTPUT_DIR [flags of its own],OUTPUT_DIR ..." flags of recipe/train.py
"""

import sys

from recipe.config import parse_config
from recipe.engine.factory import open_strategy
from recipe.train import run
from recipe.utils.log import set_up_logging

runs, *arguments = sys.argv[1:]
configs = [
    parse_config([*arguments, *own, f"--output_dir={directory}"]) for directory, *own in map(str.split, runs.split(","))
]
strategy = open_strategy(configs[0].run.precision)
set_up_logging(main=strategy.runtime.processes.is_main)
for config in configs:
    assert run(config, strategy) == 0
strategy.runtime.close()
