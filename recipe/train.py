"""Trains GPT-2: `accelerate launch --config_file accelerate_configs/single.yaml recipe/train.py`, or plain python.

`main` is the table of contents; `train` is the loop, the only one, to be read from top to bottom.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):  # run as a script: import from the repository, not from recipe/ with its `data`, `optim`...
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from tqdm import tqdm
from transformers import GPT2Config

from recipe import optim
from recipe.checkpoint import (
    Checkpoint,
    check_same_run,
    load_checkpoint,
    move_aside,
    newest_valid,
    prune,
    save_checkpoint,
    step_of,
)
from recipe.config import Batch, Config, UserError, batch_arithmetic, parse_config
from recipe.data import tokenizer
from recipe.data.prepare import prepare_for_training
from recipe.data.shards import Shard, find_shards, unigram_loss
from recipe.data.source import LocalSource, check_data
from recipe.engine import Engine
from recipe.loss import IGNORE_INDEX
from recipe.metrics import MetricsLog, Progress, RunningLoss, Throughput
from recipe.model import GPT2LMHeadModel
from recipe.plan import describe, flops_per_token, si


def main(argv: list[str] | None = None) -> int:
    """Runs a training from the command line; returns the exit code: 0 done, 2 a mistake of the user's."""
    try:
        config = parse_config(argv)
        engine = Engine(config.run.precision, tracker=config.run.tracker, output_dir=config.run.output_dir)
        say = print if engine.is_main else lambda *_: None
        batch = batch_arithmetic(config, engine.world)
        announce(config, batch, engine, say)
        if config.run.dry_run:
            return 0
        train_shards, val_shards = open_data(config, batch, engine)
        checkpoint = find_checkpoint(config, engine, say)
        if checkpoint and checkpoint.step >= config.optimizer.max_steps:
            say(f"run complete: {checkpoint.path} is at step {checkpoint.step}. Train longer with --max_steps, or start over with --fresh")
            return 0
        model = build_model(config, engine)
        val_loss = train(config, batch, engine, model, train_shards, val_shards, checkpoint)
        conclude(config, val_loss, train_shards, val_shards, say)
        engine.close()
        return 0
    except UserError as e:
        if is_first_process():
            print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if is_first_process():
            print("\ninterrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130


def train(
    config: Config,
    batch: Batch,
    engine: Engine,
    raw_model: GPT2LMHeadModel,
    train_shards: list[Shard],
    val_shards: list[Shard],
    checkpoint: Checkpoint | None,
) -> float:
    """Trains to max_steps, from `checkpoint` if there is one; returns the last validation loss in nats a token."""
    opt, run = config.optimizer, config.run
    run_dir = Path(run.output_dir)
    source = LocalSource(train_shards, config.data.sequence_length, batch.sequences, run.seed)
    validation = LocalSource(val_shards, config.data.sequence_length, batch.sequences, run.seed)
    state = checkpoint.state if checkpoint else {}
    step = checkpoint.step if checkpoint else 0  # optimizer steps done

    # Weights go in before prepare and moments after it: then every engine and world size can take them.
    if checkpoint:
        raw_model.load_weights(checkpoint.weights, str(checkpoint.path))
    raw_model.to(engine.device)
    if run.compile:
        raw_model.compile(dynamic=False)  # in place: torch.compile(model) would put _orig_mod. into every name
    model, optimizer = engine.prepare(raw_model, optim.make_optimizer(raw_model, opt, fused=engine.fused_optimizer))
    if checkpoint:
        optim.load_moments(raw_model, optimizer, checkpoint.moments, step)
        engine.load_scaler_state(state["grad_scaler"])

    running_loss = RunningLoss(engine.device, state.get("running_loss"))
    throughput = Throughput(state.get("seconds", 0.0))
    log = MetricsLog(run_dir / "metrics.jsonl", step) if engine.is_main else None
    progress = Progress(opt.max_steps * opt.total_batch_tokens, step * opt.total_batch_tokens, show=engine.is_main)
    flops = flops_per_token(config.model, config.data.sequence_length)
    engine.start_tracker("gpt2-recipe", run.run_name, config.flat())
    batches = engine.batches(source, batch, step, opt.max_steps)
    start, logged_at = step, step
    grad_norm, val_loss = None, None
    model.train()

    while True:
        last = step == opt.max_steps

        def due(every: int, step=step, last=last) -> bool:
            return last or (every > 0 and step % every == 0)

        # once in a while: read what the device has gathered (the only place where the loop waits for it)
        record = None
        if due(run.log_every) or due(run.eval_every):
            record = new_record(step, opt)
            if step > logged_at:
                record["loss"] = running_loss.read(engine.mean)
                record["grad_norm"] = grad_norm.item()
                record["learning_rate"] = optim.lr_at(step - 1, opt)
                seconds = throughput.window()
                rate = (step - logged_at) * opt.total_batch_tokens / seconds
                record["tokens_per_second"] = rate
                record["mfu"] = rate * flops / (engine.peak_flops * engine.world) if engine.peak_flops else None
                if record["loss"] != record["loss"]:
                    raise UserError(f"the loss is not a number at step {step}; the last checkpoint is intact. "
                                    "Lower learning_rate or lengthen warmup_steps")  # fmt: skip
                logged_at = step

        # once in a while: a checkpoint, committed before anything that could fail takes its time
        if step > start and due(run.save_every):
            with throughput.paused():
                state = {
                    "config": config.flat(),
                    "tokens": step * opt.total_batch_tokens,
                    "seconds": throughput.seconds,
                    "running_loss": running_loss.state(engine.mean),
                    "grad_scaler": engine.scaler_state(),
                    "data": source.fingerprint(),
                }
                if engine.is_main:
                    moments = optim.named_moments(raw_model, optimizer)
                    path = save_checkpoint(run_dir, step, raw_model.state_dict(), moments, state, model_files(raw_model))
                    prune(run_dir, run.keep_last, run.milestone_every)
                    progress.say(f"step {step}: saved {path}")
                engine.barrier()

        # once in a while: validation loss, HellaSwag, a sample, all on the live model
        if due(run.eval_every):
            with throughput.paused():
                val_loss = record["val_loss"] = validate(config, batch, engine, model, validation)
        if run.hellaswag_every and due(run.hellaswag_every) and step > start:
            with throughput.paused():
                record = record or new_record(step, opt)
                record |= hellaswag(config, engine, raw_model, progress.say)
        if run.sample_every and due(run.sample_every) and step > start:
            with throughput.paused():
                progress.say(f"step {step}: {sample(config, engine, raw_model)!r}")

        if record is not None:
            record["seconds"] = round(throughput.seconds, 3)
            record["peak_memory_bytes"] = engine.peak_memory()
            if log:
                log.write(record)
            progress.report(record)
            engine.track(record, step)
        if last:
            break

        # a single training step
        optim.set_lr(optimizer, optim.lr_at(step, opt))
        if config.model.dropout:
            torch.manual_seed(hash((run.seed, step, engine.rank)))  # integers hash alike in every process
        for micro_step in range(batch.accumulation):
            rows = next(batches)  # (micro, T + 1)
            with engine.gradients_stay_local(model, local=micro_step < batch.accumulation - 1):
                loss = model(rows[:, :-1], rows[:, 1:]) / batch.accumulation
                engine.backward(loss)
            running_loss.sum += loss.detach()
        running_loss.count += 1
        grad_norm = engine.clip_gradients(model, opt.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        progress.advance(opt.total_batch_tokens)

    progress.close()
    return val_loss


def new_record(step: int, opt) -> dict:
    """A line of metrics.jsonl; null is what was not measured at this step."""
    unknown = dict.fromkeys(("loss", "val_loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu"))
    return {"step": step, "tokens": step * opt.total_batch_tokens} | unknown | {"learning_rate": optim.lr_at(step, opt)}


@torch.no_grad()
def validate(config: Config, batch: Batch, engine: Engine, model: torch.nn.Module, source: LocalSource) -> float:
    """Mean loss in nats a token over the same first eval_tokens of the validation shards, whatever the world size.

    Every process runs the same number of batches of one shape: the last ones are filled up with ignored targets.
    """
    length = config.data.sequence_length
    windows = min(source.windows, max(1, config.run.eval_tokens // length))
    total = torch.zeros(2, device=engine.device)
    model.eval()
    starts = range(engine.rank * batch.micro, -(-windows // (batch.micro * engine.world)) * batch.micro * engine.world,
                   batch.micro * engine.world)  # fmt: skip
    for lo in tqdm(starts, desc="validation", leave=False, disable=not (engine.is_main and sys.stderr.isatty())):
        rows = torch.zeros(batch.micro, length + 1, dtype=torch.int64)
        targets = torch.full((batch.micro, length), IGNORE_INDEX)
        if lo < windows:
            real = torch.from_numpy(source.validation_rows(lo, min(lo + batch.micro, windows)))
            rows[: len(real)], targets[: len(real)] = real, real[:, 1:]
        count = (targets != IGNORE_INDEX).sum() / length  # sequences
        loss = model(rows[:, :-1].to(engine.device), targets.to(engine.device))
        total += torch.stack((loss.float(), torch.ones_like(total[0]))) * count.to(engine.device)
    model.train()
    loss_sum, sequences = engine.sum(total).tolist()
    return loss_sum / sequences


def hellaswag(config: Config, engine: Engine, model: GPT2LMHeadModel, say: Callable[[str], None]) -> dict:
    """HellaSwag of the live model over all processes: accuracies both ways, as columns of metrics.jsonl."""
    from eval.hellaswag import score_hellaswag

    with eager(model) as logits_fn:
        counts = score_hellaswag(
            logits_fn, tokenizer.encoding().encode_ordinary, limit=config.run.hellaswag_limit or None,
            device=engine.device, rank=engine.rank, world=engine.world, max_length=config.model.n_positions,
        )  # fmt: skip
    names = [(way, kind) for way in ("A", "B") for kind in ("acc", "acc_norm")]
    values = torch.tensor([counts["rows"], *(counts[way][kind] for way, kind in names)], device=engine.device)
    rows, *correct = engine.sum(values).tolist()
    scores = {f"hellaswag_{way}_{kind}": n / rows for (way, kind), n in zip(names, correct, strict=True)}
    say("HellaSwag (" + f"{rows} rows): " + ", ".join(f"{k[10:]} {v:.4f}" for k, v in scores.items()))
    return scores


def sample(config: Config, engine: Engine, model: GPT2LMHeadModel) -> str:
    from eval.sample import sample_live

    prompt = tokenizer.encoding().encode_ordinary(config.run.sample_prompt) or [tokenizer.END_OF_TEXT]
    with eager(model) as logits_fn:
        ids = sample_live(logits_fn, prompt, max_new_tokens=48, n_positions=config.model.n_positions,
                          seed=config.run.seed, device=engine.device)  # fmt: skip
    return tokenizer.encoding().decode(ids)


class eager:
    """Context: the live model as a callable of (N, T) ids, in evaluation mode and never compiled for its odd shapes."""

    def __init__(self, model: GPT2LMHeadModel):
        self.model, self.no_grad = model, torch.no_grad()

    def __enter__(self):
        self.no_grad.__enter__()
        self.model.eval()
        return self.model.forward  # not __call__, which model.compile() replaces; prepare's autocast wraps forward

    def __exit__(self, *_):
        self.model.train()
        self.no_grad.__exit__(None, None, None)


def announce(config: Config, batch: Batch, engine: Engine, say: Callable[[str], None]) -> None:
    say(f"run        {config.run.run_name} ({config.run.config})")
    lines = describe(config, batch, device=engine.name, precision=engine.precision, peak_flops=engine.peak_flops)
    say("\n".join(lines))
    if engine.idle_gpus:
        say(f"note       {engine.idle_gpus} more GPUs are idle; accelerate_configs/ddp.yaml uses them")
    if config.run.dry_run:
        say("\n" + "\n".join(f"{k}: {v!r}" for k, v in config.flat().items()))


def open_data(config: Config, batch: Batch, engine: Engine) -> tuple[list[Shard], list[Shard]]:
    """Training and validation shards; a source on this disk is prepared now, if it was not before."""
    with engine.main_first():
        prepare_for_training(config.data)
    train_shards = find_shards(config.data.data, "train")
    val_shards = find_shards(config.data.val_data or config.data.data, "val")
    check_data(train_shards, val_shards, config.data.sequence_length, batch.sequences)
    return train_shards, val_shards


def find_checkpoint(config: Config, engine: Engine, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint of this run, chosen and verified by the main process for all of them."""
    run_dir, chosen = Path(config.run.output_dir), None
    if engine.is_main:
        if config.run.fresh and run_dir.exists():
            say(f"fresh      the earlier run is kept in {move_aside(run_dir)}")
        chosen = newest_valid(run_dir, say)
    chosen = engine.from_main(chosen)
    if chosen is None:
        return None
    checkpoint = load_checkpoint(chosen)
    for line in check_same_run(checkpoint.state, config.flat(), run_dir):
        say(line)
    if checkpoint.step < config.optimizer.max_steps:
        say(f"resume     from step {checkpoint.step} ({chosen})")
    return checkpoint


def build_model(config: Config, engine: Engine) -> GPT2LMHeadModel:
    m = config.model
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), m.dropout)
    options = {
        "recompute": config.run.recompute,
        "loss_chunk_size": config.run.loss_chunk_size,
        "pad_vocab_to": engine.pad_vocab_to,
        "seed": config.run.seed,
    }
    sizes = {k: v for k, v in dataclasses.asdict(m).items() if k.startswith("n_")}
    wanted = GPT2Config(vocab_size=tokenizer.VOCAB_SIZE, **sizes, **dropout)
    model = GPT2LMHeadModel(wanted, **options)
    if m.init_from:
        pretrained = GPT2LMHeadModel.from_pretrained(m.init_from)
        found = {k: getattr(pretrained.config, k) for k in (*sizes, "vocab_size")}
        if wrong := [f"{k} {v} (recipe: {getattr(wanted, k)})" for k, v in found.items() if v != getattr(wanted, k)]:
            raise UserError(f"init_from {m.init_from} has {', '.join(wrong)}; set the recipe's fields to match")
        model.load_weights(pretrained.state_dict(), m.init_from)
    return model


def model_files(model: GPT2LMHeadModel) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        model.save_config(directory)
        tokenizer.save_tokenizer(directory)

    return write


def conclude(config: Config, val_loss: float, train_shards, val_shards, say: Callable[[str], None]) -> None:
    run = Path(config.run.output_dir)
    final = run / f"step_{config.optimizer.max_steps:08d}"
    tokens = config.optimizer.max_steps * config.optimizer.total_batch_tokens
    say(f"\ndone       {si(tokens)}tokens; validation loss {val_loss:.4f} (unigram baseline {unigram_loss(train_shards, val_shards):.4f})")
    say(f"model      {final}: transformers.AutoModelForCausalLM.from_pretrained({str(final)!r})")
    say(f"next       make sample MODEL={final} PROMPT='...'   make eval-hellaswag MODEL={final} LIMIT=500")


def is_first_process() -> bool:
    import os

    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
