"""A variant in a process of its own, which takes as many steps as it is asked for and reports how long they took."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.variants import OPTIMIZER, SEED, Variant, loss_of, nanogpt_model, transformers_model
from recipe.data.dataset import TokenDataset
from recipe.data.prefetch import BatchLoader
from recipe.data.shards import find_shards
from recipe.engine import device as hardware
from recipe.engine.base import Engine
from recipe.optim.optimizer import make_optimizer


class Gate:
    """Stands before every step: lets through as many as the parent asks for, and times them."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._losses: list[torch.Tensor] = []
        self._turns = self._take_turns()

    def step_begins(self) -> None:
        """Waits until the parent wants another step."""
        next(self._turns)
        self._losses.append(torch.zeros((), device=_device()))

    def record(self, loss: torch.Tensor) -> None:
        """A micro-step's share of the step's mean loss, on the device."""
        self._losses[-1] += loss.detach()

    def _take_turns(self) -> Iterator[None]:
        """A step to warm up, then so many that are timed; each `yield` is a step. What the other worker has displaced
        from caches and memory comes back in the first."""
        while True:
            steps = self._wait_for_parent()
            yield
            _synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                yield
            _synchronize()
            seconds = (time.perf_counter() - begin) / steps
            losses = [loss.item() for loss in self._losses]
            peak = hardware.peak_memory(_device())
            self._losses.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # for the other worker
            self._connection.send({"seconds": seconds, "losses": losses, "peak_memory": peak})

    def _wait_for_parent(self) -> int:
        try:
            return self._connection.recv()
        except EOFError:  # the parent has no more use for this process
            os._exit(0)


def _device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def work(variant: Variant, rank: int, port: int, connection: Connection, directory: Path) -> None:
    """Takes the variant's steps, as process `rank` of its processes, until the parent hangs up. `directory`, beside the
    shards, takes what is written, also what the variant and its libraries print."""
    _set_environment(rank, variant.processes, port)
    tempfile.tempdir = str(directory)  # this process ends without cleaning up
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system's, which would be left behind
    file = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        torch.manual_seed(SEED)
        kinds = {"recipe": _recipe, "hf-trainer": _trainer}
        kinds.get(variant.kind, _loop)(variant, directory, Gate(connection))
        raise RuntimeError("the variant ended by itself")
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        why = "out of memory" if hardware.out_of_memory(error) else f"{type(error).__name__}: {error}".splitlines()[0]
        connection.send({"error": why})


def _set_environment(rank: int, processes: int, port: int) -> None:
    """Sets the environment as torchrun does; as many GPUs as processes, since transformers' Trainer would use all."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(processes)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.split(",")[:processes])
    if processes > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if not torch.accelerator.is_available():
            shared["ACCELERATE_USE_CPU"] = "true"
        os.environ |= {name: str(value) for name, value in (ranks | shared).items()}


def _source_of(variant: Variant, directory: Path) -> TokenDataset:
    return TokenDataset(
        find_shards(directory.parent / "shards", "train"), variant.sequence_length, variant.sequences, SEED
    )


def _recipe(variant: Variant, directory: Path, gate: Gate) -> None:
    """recipe/train.py as a user starts it, with the gate before each step."""
    from recipe.train import main

    gate_batches(gate, variant.accumulation)
    fields = {k: v for k, v in asdict(variant.model).items() if k != "vocab_size"} | asdict(OPTIMIZER)
    fields |= {
        "dataset_name": directory.parent / "shards",
        "train_text": "",
        "sequence_length": variant.sequence_length,
        "micro_batch_size": variant.micro_batch,
        "total_batch_tokens": variant.tokens,
        "precision": variant.precision,
        "torch_compile": bool(variant.compile),
        "torch_compile_mode": variant.compile or "default",
        "gradient_checkpointing": variant.gradient_checkpointing,
        "loss_chunk_size": variant.loss_chunk_size,
        "fused_loss": variant.fused_loss,
        "seed": SEED,
        "logging_steps": OPTIMIZER.max_steps,
        "eval_steps": 0,
        "save_steps": 0,
        "output_dir": directory / "run",
    }
    code = main([f"--{k}={v}" for k, v in fields.items()])
    output = (directory / "log").read_text(errors="replace").strip().rpartition("\n")[2]
    raise RuntimeError(f"recipe/train.py ended with exit code {code}: {output}")


def gate_batches(gate: Gate, accumulation: int) -> None:
    """Puts the gate before the first micro-batch of each step that the trainer takes, and records each step's loss.

    Nothing else of the trainer knows of it: its batches wait, and what goes into backward is recorded.
    """
    taken = count()
    next_batch, backward = BatchLoader.__next__, Engine.backward

    def gated(batches: BatchLoader) -> torch.Tensor:
        if next(taken) % accumulation == 0:
            gate.step_begins()
        return next_batch(batches)

    def recorded(engine: Engine, loss: torch.Tensor) -> None:
        gate.record(loss)
        backward(engine, loss)

    BatchLoader.__next__, Engine.backward = gated, recorded


def _loop(variant: Variant, directory: Path, gate: Gate) -> None:
    """The least that trains a peer's model: batches, forward, backward, clip, AdamW."""
    on = _device()
    _tune(variant)
    if variant.kind == "nanogpt":
        model = nanogpt_model(variant).to(on)
        betas = OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2
        optimizer = model.configure_optimizers(OPTIMIZER.weight_decay, OPTIMIZER.learning_rate, betas, on.type)
    else:
        model = transformers_model(variant).to(on)
        optimizer = make_optimizer(model, OPTIMIZER, fused=True)
    parameters = list(model.parameters())
    if variant.compile:
        hardware.compile_model(model, variant.compile)
    loss_function = loss_of(variant, model)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(variant.precision)
    scaler = torch.amp.GradScaler(on.type, enabled=variant.precision == "fp16")
    rows = _rows(variant, _source_of(variant, directory), on)
    while True:
        gate.step_begins()
        for _ in range(variant.accumulation):
            x = next(rows)
            with torch.autocast(on.type, half) if half else nullcontext():
                loss = loss_function(x[:, :-1], x[:, 1:]) / variant.accumulation
            scaler.scale(loss).backward()
            gate.record(loss)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


def _tune(variant: Variant) -> None:
    """Sets for a peer what the recipe sets for the whole process."""
    if variant.tuned and _device().type == "cpu":
        hardware.tune_cpu(local_world_size=1)
    torch.set_float32_matmul_precision("highest" if variant.precision == "fp32" else "high")


def _rows(variant: Variant, source: TokenDataset, on: torch.device) -> Iterator[torch.Tensor]:
    """Micro-batches in the trainer's order, (micro_batch, T + 1), copied to the device without waiting for it."""
    pinned = on.type == "cuda"  # as the trainer
    for step in count():
        for m in range(variant.accumulation):
            rows = torch.from_numpy(source.rows(step, m * variant.micro_batch, (m + 1) * variant.micro_batch))
            yield rows.pin_memory().to(on, non_blocking=True) if pinned else rows.to(on)


@dataclass
class Rows(torch.utils.data.Dataset):
    """The windows of an epoch, (n, T + 1), again and again; a GPU's data loaders take it into other processes."""

    windows: torch.Tensor

    def __len__(self) -> int:
        return 10**6 * len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index % len(self.windows)]
        return {"input_ids": window[:-1], "labels": window[1:], "shift_labels": window[1:]}


def _trainer(variant: Variant, directory: Path, gate: Gate) -> None:
    """transformers' Trainer, as run_clm uses it, with the settings that make it fastest."""
    _tune(variant)
    source = _source_of(variant, directory)
    epoch = max(1, source.windows // variant.sequences)  # steps
    windows = torch.cat([torch.from_numpy(source.rows(step, 0, variant.sequences)) for step in range(epoch)])

    class Gated(TrainerCallback):
        def on_step_begin(self, *_, **__) -> None:
            gate.step_begins()

    class Recorded(Trainer):
        """Keeps each step's loss, and reads the rows in order."""

        def training_step(self, *arguments, **named):
            loss = super().training_step(*arguments, **named)
            gate.record(loss)
            return loss

        def _get_train_sampler(self, *_, **__):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = _training_arguments(variant, directory)
    Recorded(transformers_model(variant), arguments, train_dataset=Rows(windows), callbacks=[Gated()]).train()


def _training_arguments(variant: Variant, directory: Path) -> TrainingArguments:
    on_cpu = _device().type == "cpu"
    same = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm")
    return TrainingArguments(
        output_dir=str(directory),
        max_steps=10**6,
        per_device_train_batch_size=variant.micro_batch,
        gradient_accumulation_steps=variant.accumulation,
        lr_scheduler_type="constant",
        **{name: getattr(OPTIMIZER, name) for name in same},
        optim="adamw_torch_fused",
        bf16=variant.precision == "bf16",
        fp16=variant.precision == "fp16",
        torch_compile=bool(variant.compile),
        use_cpu=on_cpu,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_nan_inf_filter=False,
        dataloader_num_workers=0 if on_cpu else 4,
        dataloader_pin_memory=not on_cpu,
    )
