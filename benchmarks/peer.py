"""A peer of recipe/train.py as a program: the same tokens, initial weights, clipping and AdamW. A step is a single
micro-batch; metrics.jsonl has a line every logging_steps steps.

    python -m benchmarks.peer KIND [--tuned] FLAGS of recipe/train.py

KIND is transformers (its model in a bare loop), trainer (transformers' Trainer with that model) or a checkout of
nanoGPT (its model and optimizer in a bare loop).
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import torch
import transformers

from benchmarks.runs import device
from recipe.config import Config, parse_config
from recipe.data.dataset import TokenDataset
from recipe.data.shards import find_shards
from recipe.engine import hardware
from recipe.model.build import build_model
from recipe.optim.optimizer import make_optimizer

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # inputs and targets, (B, T) each -> mean loss in nats


class Log:
    """Writes a line at step 1 and every logging_steps steps, with the mean loss and the speed since the last line."""

    def __init__(self, config: Config):
        directory = Path(config.run.output_dir)
        directory.mkdir(parents=True)
        self._file = open(directory / "metrics.jsonl", "w", buffering=1)  # noqa: SIM115  open while the program runs
        self._logging_steps, self._step_tokens = config.run.logging_steps, config.optimizer.total_batch_tokens
        self._step, self._last_step = 0, 0
        self._loss_sum, self._line_start = torch.zeros((), device=device()), time.perf_counter()

    def end_step(self, loss: torch.Tensor) -> None:
        """Counts a step. Waits for the device at a logged one, as recipe/train.py does."""
        self._step += 1
        self._loss_sum += loss.detach()
        if self._step > 1 and self._step % self._logging_steps:
            return
        steps, total_loss, now = self._step - self._last_step, self._loss_sum.item(), time.perf_counter()
        line = {"step": self._step, "loss": total_loss / steps}
        line["tokens_per_second"] = steps * self._step_tokens / (now - self._line_start)
        line["peak_memory_bytes"] = hardware.peak_memory(device())
        self._file.write(json.dumps(line) + "\n")
        self._loss_sum.zero_()
        self._last_step, self._line_start = self._step, now


def bare_loop(config: Config, kind: str) -> None:
    """The minimal training loop: batches, forward, backward, clip, AdamW. Never returns."""
    opt, run, target = config.optimizer, config.run, device()
    if kind == "transformers":
        model, loss_function = transformers_model(config)
        optimizer = make_optimizer(model.to(target), opt, fused=True)
    else:
        model, loss_function, optimizer = nanogpt(config, kind, target)
    if run.torch_compile:
        hardware.compile_in_place(model, run.torch_compile_mode)
    autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.precision)
    scaler = torch.amp.GradScaler(target.type, enabled=run.precision == "fp16")
    data, log = dataset(config), Log(config)
    for step in count():
        windows = torch.from_numpy(data.sequences(step, 0, data.batch_size))  # (B, T + 1)
        pinned = target.type == "cuda"  # as recipe/train.py does
        windows = windows.pin_memory().to(target, non_blocking=True) if pinned else windows.to(target)
        with torch.autocast(target.type, autocast_dtype) if autocast_dtype else nullcontext():
            loss = loss_function(windows[:, :-1], windows[:, 1:])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), opt.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        log.end_step(loss)


def dataset(config: Config) -> TokenDataset:
    """The data of recipe/train.py in its order."""
    length = config.data.sequence_length
    sequences = config.optimizer.total_batch_tokens // length
    return TokenDataset(find_shards(config.data.dataset_name, "train"), length, sequences, config.run.seed)


def transformers_model(config: Config) -> tuple[torch.nn.Module, Loss]:
    """transformers' GPT2LMHeadModel, on the CPU, with the initial weights of recipe/train.py."""
    initial = build_model(config)
    gpt2_config = initial.config
    gpt2_config.use_cache = False
    gpt2_config._attn_implementation = "sdpa"
    model = transformers.GPT2LMHeadModel(gpt2_config)
    model.transformer.load_state_dict(initial.transformer.state_dict())
    model.loss_type = "ForCausalLM"  # None makes each loss warn, which breaks a compiled graph
    return model.train(), lambda x, y: model(input_ids=x, labels=y, shift_labels=y.contiguous()).loss


def nanogpt(config: Config, checkout: str, target: torch.device) -> tuple[torch.nn.Module, Loss, torch.optim.Optimizer]:
    """nanoGPT's GPT and its optimizer from the checkout, with its default vocabulary of 50,304: the first 50,257 rows
    have recipe/train.py's initial weights, the others nanoGPT's own."""
    sys.path.insert(0, checkout)
    module = importlib.import_module("model")
    m, opt = config.model, config.optimizer
    sizes = {"n_layer": m.n_layer, "n_head": m.n_head, "n_embd": m.n_embd, "block_size": m.n_positions}
    torch.manual_seed(config.run.seed)
    model = module.GPT(module.GPTConfig(vocab_size=50304, dropout=m.dropout, bias=True, **sizes))
    state = model.state_dict()
    with torch.no_grad():
        for name, weight in build_model(config).state_dict().items():
            # Conv1D's weights are (in, out), nn.Linear's (out, in).
            weight = weight.t() if weight.ndim == 2 and ".h." in name else weight
            state[name][: weight.shape[0]].copy_(weight)
    betas = opt.adam_beta1, opt.adam_beta2
    optimizer = model.to(target).configure_optimizers(opt.weight_decay, opt.learning_rate, betas, target.type)
    return model.train(), lambda x, y: model(x, y.contiguous())[1], optimizer


def hf_trainer(config: Config) -> None:
    """Trains with transformers' Trainer as run_clm uses it, with its fastest settings. Never returns."""
    data, log = dataset(config), Log(config)
    windows = torch.from_numpy(data.sequences(0, 0, 64 * data.batch_size))  # more steps than peers.py compares
    examples = [{"input_ids": window[:-1], "labels": window[1:], "shift_labels": window[1:]} for window in windows]
    # Repeated, since a new epoch would restart the data loader's workers.
    train_dataset = torch.utils.data.ConcatDataset([examples] * 10_000)  # ty: ignore[invalid-argument-type]  a list will do

    class LoggingTrainer(transformers.Trainer):
        def training_step(self, *arguments, **kwargs):
            loss = super().training_step(*arguments, **kwargs)
            log.end_step(loss)  # before the optimizer's step, each time: a line's time is that of as many steps
            return loss

    opt, run, on_cpu = config.optimizer, config.run, device().type == "cpu"
    shared_fields = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm")
    arguments = transformers.TrainingArguments(
        output_dir=run.output_dir,
        max_steps=10**6,
        per_device_train_batch_size=data.batch_size,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        **{name: getattr(opt, name) for name in shared_fields},
        optim="adamw_torch_fused",
        bf16=run.precision == "bf16",
        fp16=run.precision == "fp16",
        torch_compile=run.torch_compile,
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
    model, _ = transformers_model(config)
    LoggingTrainer(model, arguments, train_dataset=train_dataset).train()


def main() -> None:
    """Trains the peer given on the command line until the process is killed."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("kind", help="transformers, trainer, or a checkout of karpathy/nanoGPT")
    parser.add_argument("--tuned", action="store_true", help="use the allocator and thread settings of recipe/train.py")
    arguments, flags = parser.parse_known_args()
    config = parse_config(flags)
    if arguments.tuned and device().type == "cpu":
        hardware.tune_cpu(local_world_size=1)
    torch.set_float32_matmul_precision("highest" if config.run.precision == "fp32" else "high")
    torch.manual_seed(config.run.seed)
    if arguments.kind == "trainer":
        hf_trainer(config)
    else:
        bare_loop(config, arguments.kind)


if __name__ == "__main__":
    main()
