"""Opens the strategy that the launch asked for, or one that stands for devices that are not here."""

import os

from accelerate.utils import is_torch_xla_available

from recipe.engine import hardware
from recipe.engine.device import planned_device
from recipe.engine.launch import check_launch, has_torch_tpu, wants_deepspeed, wants_fsdp, wants_tpu
from recipe.engine.runtime import Runtime
from recipe.engine.strategy import Strategy
from recipe.utils.processes import Processes


def open_strategy(precision: str = "auto", planned: str = "", *, deterministic: bool = False) -> Strategy:
    """The strategy of this process: XLA, DeepSpeed or FSDP where the launch chose it, else one device or DDP; or one
    that stands for the devices `planned`. `deterministic`: on a GPU too; on a CPU it always is. A collective call.
    Raises UserError for a launch that would not train what the recipe describes."""
    if planned:
        return _planned(precision, planned)
    hardware.set_up_allocator()
    if deterministic:
        hardware.use_deterministic_algorithms()
    check_launch()
    # Kaggle's images set this to "local", which libtpu takes for a host's name and waits for.
    if os.environ.get("TPU_PROCESS_ADDRESSES") == "local":
        del os.environ["TPU_PROCESS_ADDRESSES"]
    if wants_deepspeed():
        from recipe.engine.deepspeed import ZeroStrategy as strategy
    elif wants_tpu() and has_torch_tpu():
        from recipe.engine.tpu import TpuStrategy as strategy
    elif wants_fsdp():
        from recipe.engine.fsdp import FsdpStrategy as strategy
    elif is_torch_xla_available():
        from recipe.engine.xla import XlaStrategy as strategy
    else:
        strategy = Strategy
    opened = strategy.open(precision)
    opened.runtime.stop.listen()
    return opened


def _planned(precision: str, devices: str) -> Strategy:
    """What stands for `devices` (as in dry_run), sharded as the launch asks. Each process of the launch makes the whole
    plan, and the first one prints it. Raises UserError for devices that are not known or lack the precision."""
    count, name = hardware.named_devices(devices)
    rank = int(os.environ.get("RANK", 0))
    if name in ("TPU V2", "TPU V3"):  # by torch_xla, all behind one process
        how = f"{count} devices behind one process" if count > 1 else ""
        runtime = Runtime(Processes(rank, is_main=rank == 0), how=how)
        return Strategy(planned_device(name, precision, runtime, count), runtime)
    sharding = ""
    if wants_fsdp():
        from recipe.engine.fsdp import take_settings

        sharding = "fsdp"
        take_settings(planned_device(name, precision, Runtime(Processes())).precision)
    elif wants_deepspeed():
        from recipe.engine.deepspeed import zero_stage

        sharding = f"zero{zero_stage()}"
    runtime = Runtime(Processes(rank, count, rank, min(count, 8), is_main=rank == 0), sharding)
    return Strategy(planned_device(name, precision, runtime), runtime)
