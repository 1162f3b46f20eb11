"""Tests of recipe/engine/."""

import torch

from recipe.engine.device import Device
from recipe.engine.runtime import Runtime
from recipe.engine.strategy import Strategy
from recipe.utils.processes import Processes


def cpu_strategy(accelerator=None, processes: Processes | None = None, precision: str = "fp32", **facts) -> Strategy:
    """The strategy of a CPU, which computes with `accelerator`; `facts` are of the device."""
    device = Device("cpu", "CPU", precision, torch.device("cpu"), **facts)
    return Strategy(device, Runtime(processes or Processes()), accelerator)
