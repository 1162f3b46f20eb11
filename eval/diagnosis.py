"""Does my loss look right? Plain sentences about a run: beside its reference curve, and by what needs none."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from eval.curves import NEAR, Reference, Run, find_reference, smooth, smoothing_width
from eval.known_data import SHOWN

# What a model that knows nothing loses on GPT-2's vocabulary, nats a token: 10.82.
LN_VOCABULARY = math.log(50257)
# First validation losses that are known: 10.81 to 10.83 (this project), 10.95 (build-nanogpt), 10.98 and 11.01 (llm.c).
FIRST_LOSS = (LN_VOCABULARY - 0.3, LN_VOCABULARY + 0.5)
# By step 200 every healthy run that is known has lost more than 3 nats of its first loss.
LEARNT = (200, 2.0)
# A validation loss is of the same tokens each time, so that a rise is no accident of the batch; at a high learning rate
# it still goes up and down by about 0.02 (llm.c's and build-nanogpt's curves never rise by more than 0.002).
RISE = 0.03
# Share of the tokens by which a curve may lie earlier or later than its reference.
SHIFT = 0.1
# Steps left out of which nothing is said but how many: fp16's loss scale begins at 65,536 and is halved at each.
SKIPPED = 10
# Of its speed and time, what a user would want to know of.
SLOWER, WAITING = 0.8, 0.05


@dataclass(frozen=True)
class Finding:
    """A sentence on a run; kind is good, bad or note."""

    kind: str
    text: str


def judge(run: Run, references: list[Reference]) -> list[Finding]:
    """What there is to say of a run, the comparison with its reference first."""
    found = [finding for check in CHECKS for finding in check(run)]
    if not any(finding.kind == "bad" for finding in found):
        looked_at = "Its first loss, spikes, steps left out, overfitting and speed were looked at: nothing stands out."
        found.append(Finding("good", "Nothing else stands out." if found else looked_at))
    return [beside_reference(run, references), *found]


def beside_reference(run: Run, references: list[Reference]) -> Finding:
    """Whether the validation loss, or before the first validation the training loss, follows the reference."""
    if run.config.get("init_from"):
        return Finding("note", "It goes on from other weights (init_from), for which no reference curve holds.")
    reference, differing = find_reference(run, references)
    if reference is None:
        if not run.config:
            return Finding(
                "note",
                "It has no checkpoint yet, so its settings are not known, nor is it called after a "
                "recipe that has a reference curve.",
            )
        model = f"{run.config.get('n_layer')} layers of {run.config.get('n_embd')}"
        data = SHOWN.get(run.dataset, "these data")
        return Finding("note", f"No reference curve ships for {data} and this model ({model}).")
    name = f"the reference ({reference.name}, {SHOWN[reference.dataset]})"
    guide = f" The comparison is only a guide: {'; '.join(differing)}." if differing else ""
    validation = distance(run.series("val_loss"), reference.val_loss, reference.noise)
    training = training_distance(run, reference)
    for label, d in (("validation", validation), ("training", training)):
        if not len(d.tokens):
            continue
        kind, text = _sentence(f"The {label} loss", d, name)
        if label == "validation" and kind == "good" and _departed(training, least=3) is not None:
            # between two validations, or where the validation data are not what they are there
            text += f" {_sentence('The training loss', training, 'it')[1]}"
            kind = "bad"
        return Finding("note" if differing and kind == "bad" else kind, text + guide)
    return Finding("note", f"It has not come to where {name} begins, {tokens(reference.val_loss[1, 0])} tokens.")


@dataclass(frozen=True)
class Distance:
    """A curve's distance from a reference: where, how far above (nats) and how far it may be; (n,) each."""

    tokens: np.ndarray
    above: np.ndarray
    tolerance: np.ndarray


def distance(curve: tuple[np.ndarray, np.ndarray], reference: np.ndarray, noise: float) -> Distance:
    """How far (tokens, loss) lies above a reference, (m, 2), at equal tokens, interpolated in their logarithm.

    The tolerance is `noise` and what a tenth of the tokens more or fewer bring: where a loss falls steeply, some more
    warm-up or another way to count is a large difference that means nothing.
    """
    known = reference[reference[:, 0] > 0]
    x, y = curve
    # A run may be a little longer than its reference: then its last points are held against the reference's end.
    keep = (x >= known[0, 0]) & (x <= known[-1, 0] * (1 + NEAR)) if len(known) > 1 else np.zeros(len(x), bool)
    x, y = x[keep], y[keep]
    if not len(x):
        return Distance(x, y, y)
    there, earlier, later = (
        np.interp(np.log(x * k), np.log(known[:, 0]), known[:, 1]) for k in (1, 1 - SHIFT, 1 + SHIFT)
    )
    return Distance(x, y - there, noise + np.maximum(np.abs(earlier - there), np.abs(later - there)))


def training_distance(run: Run, reference: Reference) -> Distance:
    """The training loss' distance, at the tokens of the logged lines.

    A line is the mean of the steps since the one before it, in which an early loss falls by more than its tolerance:
    it is held against the reference's mean over the same steps, not against its value at the last of them. Lines of
    fewer steps than a point of the reference are put together, so that they are not noisier than `loss_noise` is for.
    """
    known, (x, y) = reference.loss, run.series("loss")
    if run.records[0]["step"] == 0:
        x, y = np.insert(x, 0, 0.0), np.insert(y, 0, 0.0)
    if not len(known) or len(x) < 2:  # without its beginning, the first line's own first step is not known
        return Distance(x[:0], x[:0], x[:0])
    width = np.diff(known[:, 0], prepend=0.0)
    needed = width[np.minimum(np.searchsorted(known[:, 0], x), len(known) - 1)]
    ends = [0]
    for i in range(1, len(x)):
        if x[i] - x[ends[-1]] >= needed[i]:
            ends.append(i)
    first, last = x[ends[:-1]], x[ends[1:]]
    sums = np.cumsum(y * np.diff(x, prepend=x[0]))
    # A mean stands for the middle of its steps; before the first middle, the loss of the untrained model.
    middles, means = known[:, 0] - width / 2, known[:, 1]
    if len(reference.val_loss) and reference.val_loss[0, 0] == 0:
        middles, means = np.insert(middles, 0, 0.0), np.insert(means, 0, reference.val_loss[0, 1])
    inside = first[:, None] + (last - first)[:, None] * (np.arange(32) + 0.5) / 32
    there, earlier, later = (np.interp(inside * k, middles, means).mean(1) for k in (1, 1 - SHIFT, 1 + SHIFT))
    above = np.diff(sums[ends]) / (last - first) - there
    tolerance = reference.loss_noise + np.maximum(np.abs(earlier - there), np.abs(later - there))
    keep = last <= known[-1, 0] * (1 + NEAR)
    return Distance(last[keep], above[keep], tolerance[keep])


def _departed(d: Distance, least: int = 1) -> int | None:
    """Index from which on every point is out of its tolerance, if they are `least` or more."""
    outside = np.abs(d.above) > d.tolerance
    if not len(outside) or not outside[-1]:
        return None
    inside = np.flatnonzero(~outside)
    first = int(inside[-1]) + 1 if len(inside) else 0
    return first if len(outside) - first >= least else None


def _sentence(subject: str, d: Distance, name: str) -> tuple[str, str]:
    since = _departed(d, least=3 if "training" in subject else 1)
    last, way = d.above[-1], "above" if d.above[-1] > 0 else "below"
    if since is None:
        text = f"{subject} follows {name}: {_nats(last)}{' ' + way if abs(last) >= 0.005 else ' away'} at "
        text += f"{tokens(d.tokens[-1])} tokens"
        outside = np.flatnonzero(np.abs(d.above) > d.tolerance)
        if not len(outside):
            return "good", f"{text}, and never more than {max(0.01, np.abs(d.above).max()):.2f} away."
        worst = outside[np.abs(d.above[outside]).argmax()]
        return "good", f"{text}, after it was {_nats(d.above[worst])} away at {tokens(d.tokens[worst])}."
    text = f"{subject} departs from {name} since {tokens(d.tokens[since])} tokens: {_nats(last)} {way} at "
    text += f"{tokens(d.tokens[-1])}, where {d.tolerance[-1]:.2f} would be usual."
    if last > 0:
        text += " Usual causes: other data or tokens than meant, a learning rate, warm-up or batch that is not the "
        return "bad", f"{text}recipe's, or a change to the model."
    return "bad", f"{text} Lower is suspicious too: other or easier validation data, or validation text in training."


def begins(run: Run) -> Iterator[Finding]:
    steps, losses = run.series("val_loss", "step")
    if run.config.get("init_from") or not len(steps) or steps[0] != 0:
        return
    if not FIRST_LOSS[0] <= losses[0] <= FIRST_LOSS[1]:
        text = f"The loss begins at {losses[0]:.2f}; a model that knows nothing has ln 50,257 = {LN_VOCABULARY:.2f}. "
        yield Finding("bad", text + "Look at the initial weights, and at whether the targets are shifted by one.")


def learns(run: Run) -> Iterator[Finding]:
    steps, losses = run.series("loss", "step")
    if len(steps) and steps[-1] >= LEARNT[0] and np.median(losses[-5:]) > LN_VOCABULARY - LEARNT[1]:
        text = f"It hardly learns: a training loss of {losses[-1]:.2f} after {steps[-1]:,.0f} steps. "
        yield Finding("bad", text + "Look at learning_rate and warmup_steps, and at the data.")


def finite(run: Run) -> Iterator[Finding]:
    """Losses that are no number, and steps left out. fp16's loss scaling leaves out some at the start, and one now and
    then: a line all of whose steps were left out has no loss, and nothing is wrong with it."""
    steps, read, left_out = [], 0, 0.0
    for record, rate, loss, skipped in zip(
        run.records, *map(run.column, ("tokens_per_second", "loss", "skipped_steps")), strict=True
    ):
        if math.isfinite(rate):  # a line that has read the loss; others hold an evaluation alone
            if not math.isfinite(loss) and not skipped - left_out >= record["step"] - read:
                steps.append(record["step"])
            read, left_out = record["step"], skipped
    if steps:
        more = f" and at {len(steps) - 1} later lines" if steps[1:] else ""
        text = f"The training loss was not finite by step {steps[0]:,}{more}. "
        yield Finding("bad", text + "Lower learning_rate, or take another precision than fp16.")
    skipped, done = run.last("skipped_steps"), run.records[-1]["step"]
    if skipped > 0:
        text = f"{skipped:,.0f} of {done:,} steps were left out, for a loss or gradient that was not finite or a spike."
        yield Finding("bad" if skipped > max(SKIPPED, 0.01 * done) else "note", text)


def rises(run: Run) -> Iterator[Finding]:
    """Overfitting, or a divergence: the validation loss above its own lowest."""
    x, val = run.series("val_loss")
    if len(x) < 3:
        return
    low = int(val.argmin())
    if val[-1] - val[low] <= RISE:
        return
    at, loss = run.series("loss")
    loss = smooth(loss, smoothing_width(len(loss)))
    change = np.interp(x[-1], at, loss) - np.interp(x[low], at, loss) if len(at) else 0.0
    text = f"The validation loss rises since {tokens(x[low])} tokens, from {val[low]:.2f} to {val[-1]:.2f}, "
    if change < 0:
        text += "while the training loss falls: overfitting. Fewer steps (max_steps), more data or dropout would help."
    else:
        text += "and the training loss does not fall: it diverges. A lower learning_rate or more warm-up would help."
    yield Finding("bad", text)


def spikes(run: Run) -> Iterator[Finding]:
    """Points of the training loss far above the ten before them, by a spread that spikes do not widen."""
    x, loss = run.series("loss")
    if len(loss) < 20:
        return
    before = np.array([np.median(loss[i - 10 : i]) for i in range(10, len(loss))])
    above = loss[10:] - before
    spread = 1.4826 * np.median(np.abs(above - np.median(above)))
    high = np.flatnonzero(above > max(0.3, 8 * spread))
    if not len(high):
        return
    starts = high[np.diff(high, prepend=-10) > 5]  # a spike is several points wide
    worst = high[above[high].argmax()]
    recovered = np.median(loss[-3:]) <= before[high[-1]] + 0.05
    times = "once" if len(starts) == 1 else f"{len(starts)} times"
    text = f"The training loss spikes {times}, by {above[worst]:.2f} at {tokens(x[10 + worst])} tokens, and "
    text += "comes back" if recovered else "has not come back"
    text += ". --skip_loss_z 5 leaves such steps out; a lower learning_rate or more warm-up prevents them."
    yield Finding("note" if recovered else "bad", text)


def speed(run: Run) -> Iterator[Finding]:
    rates = run.series("tokens_per_second")[1][2:]  # the first lines compile and warm up
    if len(rates) >= 16:
        quarter = len(rates) // 4
        first, last = np.median(rates[:quarter]), np.median(rates[-quarter:])
        if last < SLOWER * first:
            text = f"It slows down: {last:,.0f} tokens/s in its last quarter, {first:,.0f} in its first. "
            yield Finding("note", text + "Look for other work on the machine, heat, and the wait for data.")
    waits = run.series("data_wait")[1]
    if len(waits) and waits.mean() > WAITING:
        text = f"{waits.mean():.0%} of its time it waits for data: "
        yield Finding("note", text + "prepare the shards before (make data), or put them on a faster disk.")
    if run.last("save_wait") > WAITING:
        text = f"{run.last('save_wait'):.0%} of its time it waits for checkpoints: "
        yield Finding("note", text + "a larger save_steps, or a faster disk, would help.")


def whole(run: Run) -> Iterator[Finding]:
    done, planned = run.records[-1]["step"], run.config.get("max_steps")
    if isinstance(planned, int) and done < planned:
        yield Finding("note", f"It is at step {done:,} of {planned:,}.")
    if not len(run.series("loss")[0]) + len(run.series("val_loss")[0]):
        yield Finding("note", "Not a loss is in its log yet.")
    if run.damaged:
        lines = "1 line" if run.damaged == 1 else f"{run.damaged} lines"
        yield Finding("note", f"{lines} of metrics.jsonl could not be read, and left out.")


CHECKS: list[Callable[[Run], Iterator[Finding]]] = [begins, learns, finite, rises, spikes, speed, whole]


def tokens(n: float) -> str:
    """0.78 M, 3.1 B."""
    for size, unit in ((1e9, " B"), (1e5, " M")):
        if n >= size:
            return f"{n / (1e6 if unit == ' M' else size):.3g}{unit}"
    return f"{n:,.0f}"


def _nats(value: float) -> str:
    return f"{abs(value):.2f} nats" if abs(value) >= 0.005 else "less than 0.01 nats"
