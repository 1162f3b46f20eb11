"""Tests of recipe/engine/."""

from types import SimpleNamespace

import torch

from recipe.config import BatchPlan, OptimizerConfig
from recipe.engine.device import Device
from recipe.engine.runtime import Runtime
from recipe.engine.strategy import Strategy
from recipe.utils.processes import Processes


def cpu_strategy(accelerator=None, processes: Processes | None = None, precision: str = "fp32", **facts) -> Strategy:
    """The strategy of a CPU, which computes with `accelerator`; `facts` are of the device."""
    device = Device("cpu", "CPU", precision, torch.device("cpu"), **facts)
    return Strategy(device, Runtime(processes or Processes()), accelerator)


def prepared_strategy(model, optimizer, config=None, scaler=None, processes=None) -> Strategy:
    """The strategy of a CPU that trains this model, which it does not wrap, by an Accelerator with this scaler."""
    strategy = cpu_strategy(SimpleNamespace(scaler=scaler, prepare=lambda model: model), processes)
    batch = BatchPlan(sequences=1, world_size=1, micro=1, accumulation=1)
    strategy.prepare(model, optimizer, batch, config or OptimizerConfig())
    return strategy
