"""Device: what the rest of the recipe must know about a process's device, here or, in a dry run, elsewhere."""

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from recipe.engine import hardware
from recipe.model.attention import block_attention
from recipe.utils.processes import Processes
from recipe.utils.units import plural

_ELSEWHERE = torch.device("meta")


@dataclass(frozen=True)
class Device:
    """Facts of a device, and its operations. Several devices behind one process are one Device, with their `count`."""

    type: str  # cuda, cpu, mps, tpu or xla, also of a device that is not here
    name: str  # to print: NVIDIA H100 80GB HBM3; CPU (2 threads a process); TPU v5e
    precision: str  # resolved: fp32, tf32, bf16 or fp16
    torch_device: torch.device = _ELSEWHERE  # this process's; meta for one that is not here
    chip: str = ""  # the hardware that the numerics of a run may depend on: `name`, or the name of the processor
    count: int = 1  # devices that this process drives: more than one only for the TPU cores behind one process
    memory: int | None = None  # bytes of each device's own memory; None if it has none or it is not known
    peak_flops: float | None = None  # of all `count` in FLOP/s, the mean over processes; None if not known
    attention: Callable | None = None  # replaces SDPA
    checkpoint: Callable | None = None  # replaces torch's activation checkpointing
    adamw: str = "fused"  # which of torch's implementations of AdamW
    pad_vocab_to: int = 1  # the head's row count is rounded up to a multiple of this
    eval_multiples: tuple[int, int, int] = (1, 1, 1)  # to which evaluations pad sequences, positions, scored tokens
    sum_dtype: torch.dtype = torch.float64  # for sums over many steps
    note: str = ""  # a hint for the user

    @property
    def model_options(self) -> dict:
        """Arguments of build_model that depend on the device."""
        return {"attention": self.attention, "checkpoint": self.checkpoint, "pad_vocab_to": self.pad_vocab_to}

    def optimizer_options(self, processes: Processes) -> dict:
        """Arguments of make_optimizer: how AdamW and Muon compute on this device."""
        use_bf16 = self.precision == "bf16" and self.type != "cpu"  # small bf16 products are slow on a CPU
        muon = {"dtype": torch.bfloat16 if use_bf16 else torch.float32, "rank": processes.rank}
        return {"muon": muon | {"world_size": processes.world_size}, self.adamw: True}

    @property
    def dtype(self) -> torch.dtype:
        """The type in which matrices are multiplied."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)

    def autocast(self) -> torch.autocast:
        """Context: the run's precision, for parts of the model that are called on their own."""
        enabled = self.dtype != torch.float32
        return torch.autocast(self.type, self.dtype if enabled else torch.bfloat16, enabled=enabled)

    def put(self, rows: torch.Tensor) -> torch.Tensor:
        """Moves a micro-batch (micro, ...) to the device, or shards its rows across those of this process."""
        return rows.to(self.torch_device, non_blocking=self.type == "cuda")

    def seed(self, seed: int) -> None:
        """Seeds the device's random number generator, which dropout uses."""
        torch.manual_seed(seed)

    def flush(self) -> None:
        """Makes a lazy device run the operations recorded so far."""

    def counters(self) -> dict[str, int | None]:
        """Columns of metrics.jsonl: peak_memory_bytes, which is hardware.peak_memory."""
        return {"peak_memory_bytes": hardware.peak_memory(self.torch_device)}


def local_device(device: torch.device, precision: str, processes: Processes) -> Device:
    """This process's device, set up to train in the (resolved) precision. A collective call."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    if device.type == "cuda":
        hardware.check_allocator(device)
        name, idle = torch.cuda.get_device_name(device), torch.cuda.device_count() - processes.local_world_size
        note = f"not used: {plural(idle, 'GPU')}; ddp.yaml, or more --num_processes, uses all" if idle > 0 else ""
        names = processes.gather_objects(name)
        if len(kinds := dict.fromkeys(names)) > 1:
            note = f"the GPUs differ ({', '.join(kinds)}): each step waits for the slowest"
        peaks = [hardware.peak_flops(name) or 0 for name in names]
        return Device(
            "cuda",
            name,
            precision,
            device,
            chip=name,
            memory=torch.cuda.get_device_properties(device).total_memory,
            peak_flops=statistics.fmean(peaks) if all(peaks) else None,
            pad_vocab_to=128,  # for tensor cores; on a CPU it costs 7 %, and a TPU gains nothing
            eval_multiples=(1, 64, 1),  # few lengths: cuDNN plans attention with a mask for each of them
            note=note,
        )
    if device.type == "cpu":
        hardware.use_deterministic_algorithms()
        hardware.tune_cpu(local_world_size=processes.local_world_size)
        name = f"CPU ({plural(torch.get_num_threads(), 'thread')} a process)"
        return Device(
            "cpu",
            name,
            precision,
            device,
            chip=f"{hardware.processor()}, {torch.backends.cpu.get_cpu_capability()}",
            attention=block_attention if precision == "bf16" else None,
        )
    return Device(device.type, device.type.upper(), precision, device, chip=device.type, sum_dtype=torch.float32)


def planned_device(name: str, precision: str, count: int = 1, memory: float = 0) -> Device:
    """A device that is not here, by its name in DEVICES, or `count` TPU cores behind one process. `memory`: GB, where
    it is not that of DEVICES. Raises UserError if it lacks the precision."""
    sheet = hardware.DEVICES[name]
    tpu_type = "xla" if name in ("TPU V2", "TPU V3") else "tpu"
    device_type = tpu_type if name.startswith("TPU") else "mps" if re.match(r"M\d( |$)", name) else "cuda"
    bf16 = sheet.bf16 and device_type != "mps"
    return Device(
        device_type,
        name,
        hardware.supported_precision(precision, name, gpu=device_type == "cuda", bf16=bf16),
        chip=name,
        count=count,
        memory=int(1e9 * (memory or sheet.memory)),
        peak_flops=sheet.peak * count,
    )
