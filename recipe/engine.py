"""The only file that knows Accelerate's ways: builds the Accelerator, prepares, and checks what came out.

Accelerate decides which device and how many processes; the recipe decides everything else. What Accelerate would do
silently and wrongly (unconnected processes, a model without its wrapper) is refused here with what to run instead.
"""

import ctypes
import os
import platform
import resource
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, broadcast_object_list

from recipe.config import Batch, UserError

# Dense bf16 (fp16 where there is no bf16) peak in FLOP/s, from the vendors' data sheets; the first name contained in
# the device's name counts. What is not listed has no MFU rather than a guessed one.
PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12,
    "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "V100": 125e12, "T4": 65e12, "4090": 165e12,
    "3090": 71e12,
}  # fmt: skip

_TRACKER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Engine:
    """Device, processes, precision and the calls whose right form depends on them.

    Attributes: device, rank, local_rank, world, is_main, precision (resolved: fp32, tf32, bf16 or fp16).
    Raises UserError for a launch that would train something else than what was asked for.
    """

    def __init__(self, precision: str = "auto", *, tracker: str = "", output_dir: str = "."):
        if tracker and tracker not in _TRACKER_PACKAGES:
            raise UserError(f"tracker {tracker!r} is not known; choose from {', '.join(_TRACKER_PACKAGES)}")
        if tracker and not find_spec(_TRACKER_PACKAGES[tracker]):  # Accelerate would drop it without a word
            raise UserError(f"tracker {tracker} is not installed: pip install -e '.[trackers]'")
        _check_launch()
        self.precision = _resolve_precision(precision)
        self.accelerator = Accelerator(
            mixed_precision=self.precision if self.precision in ("bf16", "fp16") else "no",
            # No buffers to broadcast; views save one copy of the gradients.
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
            log_with=tracker or None,
            project_dir=output_dir,
        )
        self._tracker = tracker
        acc = self.accelerator
        self.device, self.rank, self.world = acc.device, acc.process_index, acc.num_processes
        self.local_rank, self.is_main = acc.local_process_index, acc.is_main_process
        if (expected := int(os.environ.get("WORLD_SIZE", 1))) != self.world:
            raise UserError(
                f"{expected} processes were launched, but each would train alone: no GPU for each of them was found. "
                "For processes on the CPU set ACCELERATE_USE_CPU=true before `accelerate launch`"
            )
        if acc.distributed_type not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
            raise UserError(
                f"distributed_type {acc.distributed_type.value} is not supported; use a file of accelerate_configs/"
            )
        # The train loop owns the accumulation boundary; a second owner would divide the loss twice.
        if acc.gradient_accumulation_steps != 1:
            raise UserError(
                "unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS: accumulation follows from total_batch_tokens"
            )
        torch.set_float32_matmul_precision("highest" if self.precision == "fp32" else "high")
        self._stop = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if self.device.type == "cpu":
            _tune_cpu(local_world=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

    # What the device is

    @property
    def name(self) -> str:
        wrapper = "" if self.world == 1 else f", DDP over {self.world} processes"
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device) + wrapper
        if self.device.type == "cpu":
            return f"CPU ({torch.get_num_threads()} threads a process)" + wrapper
        return self.device.type.upper() + wrapper

    @property
    def idle_gpus(self) -> int:
        """GPUs of this machine that the launch leaves unused."""
        return max(0, torch.cuda.device_count() - self.world) if self.device.type == "cuda" else 0

    @property
    def peak_flops(self) -> float | None:
        """Peak of one device in FLOP/s, or None where it is not known."""
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)

    @property
    def pad_vocab_to(self) -> int:
        """Tensor cores like round shapes; on a CPU the padding was measured to cost 7 %, on a TPU to gain nothing."""
        return 128 if self.device.type == "cuda" else 1

    @property
    def fused_optimizer(self) -> bool:
        return self.device.type in ("cuda", "cpu", "mps")

    def peak_memory(self) -> int:
        """Bytes: the most the device's allocator has held, or the process's largest resident set on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    # Preparing and stepping

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        """Accelerate's prepare, and the check that more than one process really is wrapped."""
        prepared, optimizer = self.accelerator.prepare(model, optimizer)
        if self.world > 1 and not isinstance(prepared, torch.nn.parallel.DistributedDataParallel):
            raise UserError(f"{self.world} processes, but the model came back without DDP: replicas would drift apart")
        return prepared, optimizer

    def gradients_stay_local(self, model: torch.nn.Module, local: bool):
        """Context of a micro-step: only the last one of a step (local=False) averages gradients over processes."""
        return self.accelerator.no_sync(model) if local else nullcontext()

    def autocast(self):
        """Context: the run's arithmetic, for parts of the model called by themselves."""
        return self.accelerator.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def clip_gradients(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Global gradient norm before clipping, on the device; max_norm 0 measures only."""
        return self.accelerator.clip_grad_norm_(model.parameters(), max_norm or float("inf"))

    def scaler_state(self) -> dict | None:
        return self.accelerator.scaler.state_dict() if self.accelerator.scaler else None

    def load_scaler_state(self, state: dict | None) -> None:
        if state and self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state)

    # Stopping

    def _on_signal(self, number: int, _frame) -> None:
        if self._stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.is_main and not self._stop:  # os.write: print is not safe in a signal handler
            os.write(2, b"\nstopping after this step, with a checkpoint; Ctrl-C again leaves at once\n")
        self._stop = True

    def stop_requested(self, poll: bool) -> bool:
        """Whether SIGINT or SIGTERM has reached any process. Several processes agree, a collective, where `poll` is
        true, and go on elsewhere; one process knows at every step."""
        if self.world == 1:
            return self._stop
        return poll and self.sum(torch.tensor(float(self._stop), device=self.device)).item() > 0

    # Batches

    def batches(self, source, batch: Batch, start: int, stop: int) -> Iterator[torch.Tensor]:
        """This process's micro-batches of steps [start, stop) in order, (micro, T + 1) int64 on the device.

        One thread reads ahead, so that a shard's first use (when it is verified) and the copy hide behind the step.
        """
        cuda = self.device.type == "cuda"

        def load(step: int, micro_step: int) -> torch.Tensor:
            rows = torch.from_numpy(source.rows(step, *batch.slice(micro_step, self.rank)))
            return rows.pin_memory() if cuda else rows

        with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
            indices = ((step, m) for step in range(start, stop) for m in range(batch.accumulation))
            pending = [pool.submit(load, *i) for i in islice(indices, 2)]
            while pending:
                rows = pending.pop(0).result()
                if (following := next(indices, None)) is not None:
                    pending.append(pool.submit(load, *following))
                yield rows.to(self.device, non_blocking=cuda)

    def to_device(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows).to(self.device)

    # Talking between processes

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(value, reduction="mean")

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(value, reduction="sum")

    def from_main(self, value):
        """The main process's `value` (any small picklable object) on every process."""
        return broadcast_object_list([value])[0]

    def main_first(self):
        """Context: the first process of each machine goes through before the others."""
        return self.accelerator.local_main_process_first()

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    # Trackers

    def start_tracker(self, project: str, run_name: str, config: dict) -> None:
        if not self._tracker:
            return
        if self._tracker == "wandb" and not (os.environ.get("WANDB_API_KEY") or Path("~/.netrc").expanduser().exists()):
            os.environ.setdefault("WANDB_MODE", "offline")  # without a key wandb stops the run
        init = {"wandb": {"name": run_name}, "trackio": {"name": run_name}}.get(self._tracker, {})
        self.accelerator.init_trackers(project, config=config, init_kwargs={self._tracker: init})

    def track(self, record: dict, step: int) -> None:
        if self._tracker:
            values = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
            self.accelerator.log(values, step=step)

    def close(self) -> None:
        self.accelerator.end_training()


def _check_launch() -> None:
    """Refuses what can be seen to be wrong before a process group exists."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == "tpu" and find_spec("torch_xla") is None:
        raise UserError("this TPU's PyTorch has no torch_xla: each process would train a copy of its own")
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if processes > 1 and not cpu and 0 < gpus < processes:
        raise UserError(f"{processes} processes for {gpus} GPU{'s' if gpus > 1 else ''}: pass --num_processes {gpus}")


def _resolve_precision(precision: str) -> str:
    """`auto` becomes the fastest arithmetic that the device does natively. UserError where it lacks what is named."""
    cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    cuda, mps = torch.cuda.is_available() and not cpu, torch.backends.mps.is_available() and not cpu
    if cuda:
        native_bf16 = torch.cuda.get_device_capability() >= (8, 0)  # is_bf16_supported() counts emulation
    if precision == "auto":
        if cuda:
            return "bf16" if native_bf16 else "fp16"
        # MPS stays in fp32 until its autocast has been tested here.
        return "bf16" if not mps and _cpu_has_bf16() else "fp32"
    if precision == "fp16" and not cuda:
        raise UserError("precision fp16 needs a CUDA GPU (Accelerate would silently run fp32); use auto, bf16 or fp32")
    if precision == "tf32" and not (cuda and native_bf16):
        raise UserError("precision tf32 needs an Ampere or newer GPU; use auto or fp32")
    if precision == "bf16" and cuda and not native_bf16:
        raise UserError(f"precision bf16 is only emulated on {torch.cuda.get_device_name()}; use auto or fp16")
    return precision


def _cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 natively (AMX or AVX512-BF16); emulated, it is slower than fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def _tune_cpu(local_world: int) -> None:
    """Threads and allocator for training on a CPU.

    `accelerate launch` sets OMP_NUM_THREADS=1 where nobody set it, which would leave all cores but one idle.
    glibc gives large blocks back to the kernel on every free and takes fresh, zeroed pages on every malloc; keeping
    them made the loss on a 50,257-word vocabulary 1.7 (fp32) and 2.4 (bf16) times as fast (recipe/LOG.md).
    """
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = min(cores, len(os.sched_getaffinity(0)))
        torch.set_num_threads(max(1, cores // local_world))
    if platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # malloc.h
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_top_pad, 64 * 2**20)
