"""Run by tests: several runs one after the other on one engine, which takes longer to start than a run.

python -m tests.engine.several_runs "OUTPUT_DIR [FLAG ...],OUTPUT_DIR ..." FLAGS_OF_ALL
"""

import gc
import sys

import torch

from recipe.config import parse_config
from recipe.engine.factory import open_strategy
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.train import run
from recipe.utils.log import set_up_logging
from recipe.utils.processes import exit_process

runs, *arguments = sys.argv[1:]
configs = [
    parse_config([*arguments, *run_flags, f"--output_dir={directory}"])
    for directory, *run_flags in map(str.split, runs.split(","))
]
strategy = open_strategy(configs[0].run.precision)
set_up_logging(main=strategy.runtime.processes.is_main)
for config in configs:
    assert run(config, strategy) == 0
    # The next run may need all of the device's memory. DeepSpeed 0.19 itself keeps a model under ZeRO-3.
    kept = [o for o in gc.get_objects() if issubclass(type(o), GPT2LMHeadModel | torch.optim.Optimizer)]
    assert strategy.runtime.sharding == "zero3" or not kept
strategy.runtime.close()
exit_process(0)
