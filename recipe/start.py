"""What stands before the first step: the data opened, the checkpoint found, the model built."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from transformers import GPT2Config

from recipe.checkpoint import Checkpoint, check_same_run, load_checkpoint, move_aside, newest_valid
from recipe.config import Batch, Config, UserError
from recipe.data import tokenizer
from recipe.data.prepare import prepare_for_training
from recipe.data.shards import Shard, find_shards
from recipe.data.source import check_data
from recipe.engine import Engine
from recipe.model import GPT2LMHeadModel


def open_data(
    config: Config, batch: Batch, engine: Engine, say: Callable[[str], None]
) -> tuple[list[Shard], list[Shard]]:
    """Training and validation shards; a source on this disk is prepared now, if it was not before."""
    with engine.main_first():
        prepare_for_training(config.data, say)
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
    if engine.anywhere(not chosen.exists()):
        raise UserError(f"{chosen} is not on every machine: output_dir must be on a file system that all of them see")
    checkpoint = load_checkpoint(chosen)
    for line in check_same_run(checkpoint.state, config.flat(), run_dir):
        say(line)
    if checkpoint.step < config.optimizer.max_steps:
        say(f"resume     from step {checkpoint.step} ({chosen})")
    return checkpoint


def build_model(config: Config, engine: Engine, *, resuming: bool) -> GPT2LMHeadModel:
    """The recipe's model with its first weights, random or `init_from`'s; `resuming`, others will replace them."""
    m = config.model
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), m.dropout)
    options = {
        "recompute": config.run.recompute,
        "loss_chunk_size": config.run.loss_chunk_size,
        "pad_vocab_to": engine.pad_vocab_to,
        "seed": config.run.seed,
        "attention": engine.attention,
        "checkpoint": engine.checkpoint,
    }
    sizes = {k: v for k, v in dataclasses.asdict(m).items() if k.startswith("n_")}
    wanted = GPT2Config(vocab_size=tokenizer.VOCAB_SIZE, **sizes, **dropout)
    model = GPT2LMHeadModel(wanted, **options)
    if m.init_from and not resuming:
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
