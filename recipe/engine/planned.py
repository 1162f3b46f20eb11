"""Devices that are not here: what a plan of a run on them asks of an engine, without their processes."""

import json
import os
from pathlib import Path

import torch

from recipe.config import ROOT
from recipe.engine import device as hardware
from recipe.engine.base import Engine
from recipe.engine.fsdp import supported_precision, take_settings
from recipe.engine.launch import wants_deepspeed, wants_fsdp
from recipe.engine.shutdown import Agreement, StopSignal


class PlannedEngine(Engine):
    """So many GPUs or TPU devices of a kind, sharded as the launch asks; nothing of it computes. Each process of the
    launch makes the whole plan, and the first one prints it."""

    def __init__(self, precision: str, devices: str):
        """`devices` as in dry_run. Raises UserError where they lack the precision."""
        count, kind = hardware.named_devices(devices)
        its, is_tpu = hardware.DEVICES[kind], kind.startswith("TPU")
        self._kind, self._memory = kind, its.memory
        self.world_size, self.devices = (1, count) if is_tpu else (count, 1)
        self.sharding = "" if is_tpu else _sharding()
        self.precision = (
            hardware.tpu_precision(precision) if is_tpu else hardware.gpu_precision(precision, kind, its.bf16)
        )
        if self.sharding.startswith("fsdp"):
            supported_precision(self.precision)
        if is_tpu or self.sharding == "zero3":
            self.no_compile = "XLA itself compiles whole steps" if is_tpu else "ZeRO-3 is not compiled"
        self.optimizers = ("adamw",) if self.sharding == "zero3" else None
        self.device, self.peak_flops = torch.device("meta"), its.peak * self.devices
        self.rank = self.local_rank = int(os.environ.get("RANK", 0))
        self.local_world_size, self.is_main, self.idle_gpus = min(self.world_size, 8), self.rank == 0, 0
        self.stop, self._hosts = StopSignal(), None
        self._agreement = Agreement(self.stop, None)

    @property
    def name(self) -> str:
        """As that of the engine which is planned."""
        if self.devices > 1:
            return f"{self._kind}, {self.devices} devices behind one process"
        how = {"z": f"ZeRO-{self.sharding[-1:]}", "f": "FSDP"}.get(self.sharding[:1], "DDP")
        return self._kind if self.world_size == 1 else f"{self._kind}, {how} over {self.world_size} processes"

    @property
    def memory(self) -> int | None:
        """As Engine's, from the data sheet."""
        return int(1e9 * self._memory) if self._memory else None

    def close(self) -> None:
        """There is no process group to leave."""


def _sharding() -> str:
    if wants_fsdp():
        return "fsdp" if take_settings() else "fsdp_gathered"
    if not wants_deepspeed():
        return ""
    file = ROOT / Path(os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"])
    return f"zero{json.loads(file.read_text())['zero_optimization']['stage']}"
