"""Opens a run's data: prepared shards, text that is prepared now, or a stream of shards that a builder makes."""

import logging
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from recipe.config import MIXTURE_PERIOD, BatchPlan, Config, DataConfig, MixtureEntry, data_sets
from recipe.data.builder import Builder
from recipe.data.dataset import TokenDataset, check_data, check_same_data
from recipe.data.mixed import Dataset, MixedDataset, windows_before
from recipe.data.prepare import must_prepare, prepare, texts_of
from recipe.data.producer import Producer, open_text
from recipe.data.shards import Manifest, Shard, check_tokenizer, find_shards
from recipe.data.stream import BuilderProcess, StreamedDataset, open_manifest
from recipe.data.tokenizer import open_tokenizer
from recipe.utils.errors import UserError
from recipe.utils.processes import Processes
from recipe.utils.units import plural, si

logger = logging.getLogger(__name__)


@contextmanager
def open_datasets(
    config: Config, batch: BatchPlan, processes: Processes, step: int = 0, state: dict | None = None
) -> Generator[tuple[Dataset, Dataset], None, None]:
    """Opens the training and validation data of a run that continues at `step`; `state` is their state in the
    checkpoint. A collective call: the main process prepares local text first. Raises UserError on all processes."""
    entries, run, states = data_sets(config.data), config.run, (state or {}).get("mixture")
    with processes.shared_error("the data cannot be opened"):
        streamed = [_is_streamed(entry.data) for entry in entries]
        for entry in entries:
            _check_validation(entry.data)
    streamed = [processes.anywhere(is_stream) for is_stream in streamed]  # one node may have all shards, another not
    first_windows = windows_before(step * batch.sequences, tuple(entry.count for entry in entries), run.seed)
    train_sets: list[TokenDataset] = []
    val_sets: list[TokenDataset] = []
    with ExitStack() as stack:
        saved_states = states or [state] * len(entries)
        for entry, is_stream, first_window, saved in zip(entries, streamed, first_windows, saved_states, strict=True):
            data = replace(entry.data, disk_budget_gb=entry.data.disk_budget_gb / max(1, sum(streamed)))
            settings = data.sequence_length, _share_of_batch(batch, entry), run.seed, config.model.vocab_size
            prepare_missing = partial(_prepare_missing, texts_of(data, streamed=is_stream))
            processes.in_turns(prepare_missing, "the data cannot be prepared")
            if is_stream:
                train, validation = _open_stream(data, settings, processes, first_window, saved, stack)
            else:
                sequences = 0 if config.undecided else config.optimizer.max_steps * batch.sequences * entry.share
                train, validation = _open_prepared(data, settings, sequences)
            train_sets.append(train)
            val_sets.append(validation)
        check_data(train_sets, val_sets)
        _check_same_on_all_nodes(train_sets + val_sets, processes)
        if len(entries) == 1:
            yield train_sets[0], val_sets[0]
            return
        train, val = (MixedDataset(entries, parts, batch.sequences, run.seed) for parts in (train_sets, val_sets))
        yield train, val


def _text_name(data: DataConfig) -> str:
    return " ".join(filter(None, (data.train_text, data.dataset_config)))


def _share_of_batch(batch: BatchPlan, entry: MixtureEntry) -> int:
    """The most sequences of a data set in a step."""
    return -(-batch.sequences * entry.count // MIXTURE_PERIOD)


def _prepare_missing(texts: list[DataConfig]) -> None:
    for text in filter(must_prepare, texts):
        prepare(text)


def _check_same_on_all_nodes(datasets: list[TokenDataset], processes: Processes) -> None:
    """Raises UserError, on all processes, if one has other shards than rank 0: each node may have its own disk. A
    collective call."""
    states = [dataset.state_dict() for dataset in datasets]
    rank0_states = processes.broadcast_object(states)
    with processes.shared_error("the shards differ"):
        for dataset, rank0_state, state in zip(datasets, rank0_states, states, strict=True):
            directory = dataset.shards[0].path.parent
            try:
                check_same_data(rank0_state, state, "")
            except UserError:
                problem = f"{directory} holds other shards here than on rank 0's node"
                raise UserError(f"{problem}; copy that directory from there") from None


def training_windows(config: Config) -> int:
    """Sequences per epoch of a run's data; prepares local text. Raises UserError if the number is not known."""
    data, is_mixture = data_sets(config.data)[0].data, len(data_sets(config.data)) > 1
    if is_mixture or _is_streamed(data):
        kind = "a mixture" if is_mixture else f"a stream ({data.dataset_name})"
        raise UserError(f"num_train_epochs needs one prepared data set, but the data are {kind}; set max_steps")
    if data.train_text and must_prepare(data):
        if config.run.dry_run:
            raise UserError(
                f"num_train_epochs: the length of {data.dataset_name} is not known before the text is prepared; run "
                "python -m recipe.data.prepare with the same flags, or set max_steps"
            )
        _check_validation(data)
        prepare(data)
    return TokenDataset(_shards(data, data.dataset_name, "train"), data.sequence_length, 1, config.run.seed).windows


def state_on_disk(data: DataConfig) -> dict:
    """The state_dict of a run's training data, from the shards on this disk. Raises UserError if there are none."""
    entries, vocab_size = data_sets(data), open_tokenizer(data.tokenizer).vocab_size
    shards = [find_shards(entry.data.dataset_name, "train", vocab_size) for entry in entries]
    states = [TokenDataset(part, 1, 1, 0).state_dict() for part in shards]
    return {"mixture": [{"name": ""} | state for state in states]} if len(entries) > 1 else states[0]


def check_dataset(entry: MixtureEntry, batch: BatchPlan, steps: int) -> None:
    """For a dry run of `steps` steps: logs how a data set would be read; prepares and downloads nothing. Raises
    UserError if it cannot be opened, and Unreachable if only the Hub knows that and does not answer."""
    data, is_stream = entry.data, _is_streamed(entry.data)
    _check_validation(data)
    if is_stream:
        logger.info("data       %s, streamed into %s", _text_name(data), data.dataset_name)
        Builder(data, readers=1).producer.source.newest()
    missing = [*filter(must_prepare, texts_of(data, streamed=is_stream))]
    for text in missing:
        _check_holds_text(text)
        logger.info("data       %s, to be prepared as shards in %s", _text_name(text), text.dataset_name)
    if not is_stream and not missing:
        settings = data.sequence_length, _share_of_batch(batch, entry), 0
        train, validation = _open_prepared(data, settings, steps * batch.sequences * entry.share)
        check_data([train], [validation])


def _is_streamed(data: DataConfig) -> bool:
    """Whether shards must be made during training, because not all of them are on this disk."""
    return data.streaming and Producer(data).finished() is None


def _open_prepared(data: DataConfig, settings: tuple[int, ...], sequences: float) -> tuple[TokenDataset, TokenDataset]:
    """`settings` are TokenDataset's arguments after `shards`; the run reads `sequences` sequences (0: unknown)."""
    train, val = _shards(data, data.dataset_name, "train"), _validation_shards(data)
    sizes = [f"{sum(s.tokens for s in shards):,} tokens in {plural(len(shards), 'shard')}" for shards in (train, val)]
    manifest = Manifest.load(Path(data.dataset_name))
    kind = f" of {data.val_text or data.val_data}" if data.val_data else manifest.validation if manifest else ""
    logger.info("data       %s: %s; validation %s%s", data.dataset_name, *sizes, kind)
    datasets = TokenDataset(train, *settings), TokenDataset(val, *settings)
    if sequences and (windows := datasets[0].windows):
        level, note, epochs = logging.INFO, "", sequences / windows
        if epochs >= 4:  # Muennighoff et al. (2023)
            level, note = logging.WARNING, "; from four on, more text helps more than more steps"
        logger.log(level, "epochs     %s over %s%s", si(epochs), data.dataset_name, note)
    return datasets


def _validation_shards(data: DataConfig) -> list[Shard]:
    if not data.val_data and not Path(data.dataset_name).is_dir():
        raise UserError(
            f"dataset_name {data.dataset_name} names files, which are all used for training; name validation files in "
            "val_data, or give only the directory"
        )
    return _shards(data, data.val_data or data.dataset_name, "val")


def _check_validation(data: DataConfig) -> None:
    """For text, which takes long to prepare: raises UserError if the run will have no validation data."""
    if data.val_text:
        _check_holds_text(texts_of(data)[0])
    elif data.train_text and data.val_data:
        _validation_shards(data)
    elif data.train_text and not data.val_fraction and not Producer(data).val_documents:
        problem = f"val_fraction 0 holds out nothing of {data.train_text} for validation"
        raise UserError(f"{problem}; set it above 0, or name other text or shards in val_data")


def _check_holds_text(data: DataConfig) -> None:
    source = open_text(data)
    if next(source.pieces(), None) is None:  # raises if the text cannot be read
        raise UserError(f"{source}: holds no text")


def _shards(data: DataConfig, name: str, split: str) -> list[Shard]:
    shards = find_shards(name, split, (tokenizer := open_tokenizer(data.tokenizer)).vocab_size)
    check_tokenizer(name, shards, tokenizer)
    return shards


def _open_stream(
    data: DataConfig, settings: tuple[int, ...], processes: Processes, window: int, state: dict | None, stack: ExitStack
) -> tuple[StreamedDataset, TokenDataset]:
    """Starts this node's builder and waits for its first shards; the run reads from window `window` on."""
    out, commit = Path(data.dataset_name), None
    # The main process's builder chooses the data set's commit; the builders of the other nodes receive it.
    # No process goes on before all builders have started: it could read the status file of an earlier run.
    with processes.with_long_timeout() as waiting:
        for starts_now in (processes.is_main, processes.local_rank == 0 and not processes.is_main):
            with waiting.shared_error("the stream did not start"):
                if starts_now:
                    builder = BuilderProcess(data, processes.local_world_size, commit, (state or {}).get("manifest"))
                    stack.callback(builder.close)
                    message = "data       streaming %s into %s, at most %g GB"
                    logger.info(message, _text_name(data), out, data.disk_budget_gb)
                    commit = open_manifest(out).source.get("commit")
            commit = waiting.broadcast_object(commit)
    if data.val_data:
        val_shards = _validation_shards(data)
    elif not (val_shards := open_manifest(out).shards_in(out, "val")):
        raise UserError(f"{data.train_text} has no validation shards; name some with val_data")
    train = StreamedDataset(out, *settings, rank=processes.local_rank, first_window=window)
    return train, TokenDataset(val_shards, *settings)
