"""recipe/train.py on a CPU that pretends to be a device with little memory.

FIT_MEMORY is its memory in bytes, 140e6, or that of each rank, 140e6,90e6. PyTorch's profiler measures the trial steps
in place of CUDA's allocator. Without FIT_PARAMETERS the device is a GPU, and only its memory size is pretended.
"""

import os
import sys
from functools import partial

from recipe.engine import hardware
from recipe.engine.device import Device
from recipe.estimate import micro_batch
from recipe.model.build import build_model
from recipe.train import main
from tests.estimate.memory_probe import profiled

PARAMETERS = 4 * int(os.environ.get("FIT_PARAMETERS", 0))  # bytes on the device before a trial
BYTES = [int(float(part)) for part in os.environ["FIT_MEMORY"].split(",")]


def peak_while(_, work) -> int:
    peak = PARAMETERS + profiled(work)
    print(f"trial {peak}", file=sys.stderr, flush=True)
    return peak


def build(*arguments, **options):
    model = build_model(*arguments, **options)
    model.loss = partial(model.loss, by_rows=False)  # as on a GPU
    return model


def memory(_) -> int:
    return BYTES[int(os.environ.get("RANK", 0))]


Device.memory = property(memory, lambda device, value: None)
if PARAMETERS:
    micro_batch.build_model = build
    hardware.free_memory, hardware.peak_while = memory, peak_while

if __name__ == "__main__":
    sys.exit(main())
