"""An engine for devices that are not here: what planning a run on them needs, without their processes."""

import json
import os
from pathlib import Path

import torch

from recipe.config import ROOT
from recipe.engine import device as hardware
from recipe.engine.base import Engine
from recipe.engine.fsdp import take_settings
from recipe.engine.launch import wants_deepspeed, wants_fsdp
from recipe.utils.processes import Processes


class PlannedEngine(Engine):
    """A number of GPUs or TPU devices of one kind, sharded as the launch asks. It computes nothing. Each process of the
    launch makes the whole plan, and the first one prints it."""

    def __init__(self, precision: str, devices: str):
        """`devices` as in dry_run. Raises UserError where they lack the precision."""
        count, self.device_name = hardware.named_devices(devices)
        sheet = hardware.DEVICES[self.device_name]
        world_size, rank = count, int(os.environ.get("RANK", 0))
        if self.device_name.startswith("TPU"):
            self.precision = hardware.tpu_precision(precision)
            self.no_compile = "XLA itself compiles whole steps"
            world_size, self.devices = 1, count
            if count > 1:
                self.device_name += f", {count} devices behind one process"
        else:
            self.precision = hardware.gpu_precision(precision, self.device_name, sheet.bf16)
            self._plan_sharding()
        self.processes = Processes(rank, world_size, rank, min(world_size, 8), is_main=rank == 0)
        self.device, self.peak_flops = torch.device("meta"), sheet.peak * self.devices
        self.memory = int(1e9 * sheet.memory)

    def _plan_sharding(self) -> None:
        if wants_fsdp():
            self.method, self.sharding = "FSDP", take_settings(self.precision)
        elif wants_deepspeed():
            file = ROOT / Path(os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"])
            stage = json.loads(file.read_text())["zero_optimization"]["stage"]
            self.method, self.sharding = f"ZeRO-{stage}", f"zero{stage}"
            if stage == 3:
                self.no_compile, self.optimizers = "ZeRO-3 is not compiled", ("adamw",)

    def close(self) -> None:
        """There is no process group to leave."""
