"""HellaSwag: llm.c-style by hand, lm-eval-style against the harness itself, shares of ranks, and the metric module."""

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast, GPTNeoXConfig, GPTNeoXForCausalLM

from eval import common, hellaswag
from eval.loglikelihood import Request, rows_of, score, sees
from tests.conftest import launch

BPE = Path(__file__).resolve().parents[2] / "recipe" / "data" / "gpt2_bpe"


@pytest.fixture(scope="module")
def tokenizer():
    return GPT2TokenizerFast(vocab=str(BPE / "encoder.json"), merges=str(BPE / "vocab.bpe"))


@pytest.fixture(scope="module")
def make_model(tokenizer):
    def make(n_positions: int) -> common.Loaded:
        torch.manual_seed(0)
        # The wide initialisation spreads the logits: nearly uniform ones would agree whatever the scorer did.
        config = GPT2Config(n_positions=n_positions, n_layer=2, n_embd=32, n_head=2, initializer_range=0.5)
        model = GPT2LMHeadModel(config).eval()
        return common.Loaded("tiny", None, model, tokenizer, torch.device("cpu"), torch.float32)

    return make


def letters(text: str) -> list[int]:
    """A toy encoding: one token a character."""
    return [ord(character) for character in text]


def bigram(probabilities: dict[tuple[str, str], float]):
    """logits_fn in which p(next | previous) is as given; pairs that are not given are impossible (e^-100)."""

    def logits_fn(ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        table = torch.full((128, 128), -100.0)
        for (previous, following), p in probabilities.items():
            table[ord(previous), ord(following)] = np.log(p)
        # The rest of each row's mass goes to token 0, which no text contains.
        table[:, 0] = (1 - table.exp().sum(1)).clamp(min=1e-9).log()
        return table[ids]

    return logits_fn


def test_way_a_by_hand():
    row = {"ctx": "c", "endings": ["x", "yy", "xz", "z"], "label": 1, "activity_label": "L", "ctx_a": "", "ctx_b": ""}
    # " x": .9 * .2 = .18; " yy": .9 * .3 * .6 = .162; " xz": .9 * .2 * .1 = .018; " z": .9 * .1 = .09
    p = {("c", " "): 0.9, (" ", "x"): 0.2, (" ", "y"): 0.3, ("y", "y"): 0.6, ("x", "z"): 0.1, (" ", "z"): 0.1}
    requests = hellaswag.encode_row(letters, row, "A")
    assert [r.tokens for r in requests] == [letters("c x"), letters("c yy"), letters("c xz"), letters("c z")]
    assert [r.n_scored for r in requests] == [r.length for r in requests] == [2, 3, 3, 2]

    scores = hellaswag.score_rows(bigram(p), letters, [row], device="cpu", max_length=50)[0]["A"]
    assert scores.log_likelihoods == pytest.approx(np.log([0.18, 0.162, 0.018, 0.09]), abs=1e-5)
    # By sum the first ending wins; per token the second: .162^(1/3) = .545 against .18^(1/2) = .424.
    assert scores.correct(label=0) == {"acc": 1, "acc_norm": 0}
    assert scores.correct(label=1) == {"acc": 0, "acc_norm": 1}


def test_way_a_encodes_context_and_ending_apart(tokenizer):
    row = {"ctx": "He sp", "endings": ["in", "lit.", "a", "b"], "activity_label": "", "ctx_a": "", "ctx_b": ""}
    first, second = hellaswag.encode_row(tokenizer.encode, row, "A")[:2]
    assert first.tokens == tokenizer.encode("He sp") + tokenizer.encode(" in")
    assert tokenizer.decode(second.tokens[-second.n_scored :]) == " lit."


def test_way_b_cleans_text_and_keeps_boundaries():
    row = {
        "activity_label": "Tidy",
        "ctx_a": " A [title] b [x]",
        "ctx_b": "tHEN",
        "ctx": "",
        "endings": ["a [step] b"] * 4,
    }
    request = hellaswag.encode_row(letters, row, "B")[0]
    # One pass over the double spaces: "A.  b  Then" with [x] gone.
    assert "".join(map(chr, request.tokens)) == "Tidy: A. b Then a b"
    assert (request.n_scored, request.length) == (4, 3)  # " a b", and "a b" in characters
    # A context that ends in a space: the space belongs to the continuation.
    spaced = hellaswag.encode_row(letters, row | {"ctx_b": "x [y]"}, "B")[0]
    assert "".join(map(chr, spaced.tokens[-spaced.n_scored :])) == "  a b"


@pytest.mark.parametrize(("n_positions", "limit"), [(1024, 8), pytest.param(52, 12, marks=pytest.mark.slow)])
def test_way_b_equals_lm_evaluation_harness(n_positions, limit, make_model):
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install -e '.[eval]')")
    from eval import harness

    rows = hellaswag.load_rows(limit)
    loaded = make_model(n_positions)
    theirs = harness.evaluate(loaded, ["hellaswag"], limit=limit, batch_size=8)
    samples = sorted(theirs["samples"]["hellaswag"], key=lambda sample: sample["doc_id"])
    expected = np.array([[choice[0] for choice in sample["filtered_resps"]] for sample in samples])

    options = {"device": "cpu", "batch_size": 7, "max_length": n_positions}
    body, head = common.body_and_head(loaded.model)
    ours = hellaswag.score_rows(body, loaded.encode, rows, head=head, **options)
    np.testing.assert_allclose([score["B"].log_likelihoods for score in ours], expected, atol=1e-3, rtol=0)
    if n_positions == 52:
        requests = [r for row in rows for r in hellaswag.encode_row(loaded.encode, row, "B")]
        assert sum(len(r.tokens) > n_positions + 1 for r in requests) > 5  # so truncation was at work
    else:
        assert expected.std() > 50  # far from uniform

    counts = hellaswag.score_hellaswag(body, loaded.encode, limit=limit, head=head, **options)
    for name in ("acc", "acc_norm"):
        assert counts["B"][name] / limit == pytest.approx(theirs["results"]["hellaswag"][f"{name},none"], abs=1e-12)


def test_too_long_requests_lose_their_context_first():
    seen = []

    def uniform(ids, positions, mask):
        seen.append((ids.tolist(), positions.tolist()))
        assert mask.tolist() == [[torch.ones(3, 3).tril().bool().tolist()]] * 2
        return torch.zeros(*ids.shape, 128)

    request = Request(tokens=[1, 2, 3, 4, 5, 6], n_scored=2)
    long_ending = Request(tokens=[1, 2, 3, 4, 5, 6], n_scored=5)
    rows = rows_of([request, long_ending], max_length=3)  # each by itself: what they see is not the same
    sums = score(uniform, rows, device="cpu", share=True, max_length=3)
    assert seen == [([[3, 4, 5], [3, 4, 5]], [[0, 1, 2], [0, 1, 2]])]
    assert sums == pytest.approx([-2 * np.log(128), -3 * np.log(128)], abs=1e-5)


def test_a_shared_context_is_computed_once():
    """Context 1 2 3; the continuations 4 5, 4 6 7 and, encoded as one text with another end of the context, 8."""
    requests = [Request([1, 2, 3, 4, 5], 2), Request([1, 2, 3, 4, 6, 7], 3), Request([1, 2, 8, 9], 1)]
    (row,) = rows_of(requests, max_length=50)
    assert row.ids.tolist() == [1, 2, 3, 4, 3, 4, 6, 8]
    assert row.positions.tolist() == [0, 1, 2, 3, 2, 3, 4, 2]
    assert row.segments.tolist() == [0, 0, 1, 1, 2, 2, 2, 3]
    assert row.columns.tolist() == [2, 3, 4, 5, 6, 7]  # 4 and 5 after 3 and 4; 4, 6, 7 after 3, 4, 6; 9 after 8
    assert row.targets.tolist() == [4, 5, 4, 6, 7, 9]
    assert row.counts == [2, 3, 1]
    mask = sees(torch.from_numpy(row.segments)[None])[0, 0]
    for i, j in itertools.product(range(8), repeat=2):
        own = row.segments[i] == row.segments[j]
        assert mask[i, j] == (j <= i and (own or row.segments[j] == 0))


@pytest.mark.parametrize("n_positions", [1024, pytest.param(60, marks=pytest.mark.slow)])
def test_sharing_the_context_changes_no_score(n_positions, make_model):
    """At 60 positions some rows are cut, and stand alone; others do not share all of the context."""
    loaded = make_model(n_positions)
    body, head = common.body_and_head(loaded.model)
    shapes = []

    def counted(ids, *rest):
        shapes.append(ids.numel())
        return body(ids, *rest)

    def run(share):
        shapes.clear()
        options = {"device": "cpu", "batch_size": 6, "max_length": n_positions, "head": head, "share": share}
        return hellaswag.score_rows(counted, loaded.encode, hellaswag.load_rows(40)[::2], **options), sum(shapes)

    (together, few), (apart, many) = run(True), run(False)
    assert common.shares_prefixes(loaded.model)
    for a, b in zip(together, apart, strict=True):
        for way in hellaswag.WAYS:
            assert a[way].log_likelihoods == pytest.approx(b[way].log_likelihoods, abs=2e-3)
            assert a[way].lengths == b[way].lengths
    assert few < (0.6 if n_positions == 1024 else 0.8) * many


@pytest.mark.slow
def test_own_module_scores_as_transformers_does(make_model):
    """The trainer's module with positions and a mask, in the place of transformers'."""
    from recipe.model.gpt2 import GPT2LMHeadModel as OwnModel

    loaded = make_model(128)
    own = OwnModel(loaded.model.config)
    own.load_weights(loaded.model.state_dict(), "test")
    own.eval()
    options = {"device": "cpu", "batch_size": 4, "max_length": 128}
    rows = hellaswag.load_rows(8)
    body, head = common.body_and_head(loaded.model)
    theirs = hellaswag.score_rows(body, loaded.encode, rows, head=head, **options)
    ours = hellaswag.score_rows(own.transformer, loaded.encode, rows, head=own.head, **options)
    for a, b in zip(ours, theirs, strict=True):
        assert a["B"].log_likelihoods == pytest.approx(b["B"].log_likelihoods, abs=1e-3)


def test_one_operation_for_gelu_changes_no_logit(make_model):
    model = make_model(32).model
    ids = torch.arange(60).view(2, 30)
    with torch.no_grad():
        before = model(ids).logits
        common.fuse_activations(model)
        assert sum(isinstance(module, torch.nn.GELU) for module in model.modules()) == 2
        torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-5)  # logits as large as 30
    assert model.config.activation_function == "gelu_new"


@pytest.mark.slow
def test_processes_share_the_rows_and_models_are_compared(whole_run, tmp_path):
    """Under accelerate launch with two processes, 13 rows; at 64 positions some are cut."""
    run = whole_run[0]
    arguments = ["eval/hellaswag.py", str(run), "--limit", "13", "--compare", str(run / "step_00000010")]
    two = launch("ddp", 2, *arguments, "--output", str(tmp_path / "two.json"))
    assert two.returncode == 0, two.stdout + two.stderr
    assert two.stdout.count("this model") == 2  # one process alone is heard
    rows, scores = hellaswag.load_rows(13), {}
    for step in ("step_00000020", "step_00000010"):
        loaded = common.load(common.parser("").parse_args([str(run / step), "--device", "cpu"]))
        scores[step] = hellaswag.score_loaded(loaded, rows, batch_size=16)
    found = json.loads((tmp_path / "two.json").read_text())["hellaswag"]
    expected = hellaswag.accuracies(scores["step_00000020"], rows)
    assert {key: found[key] for key in expected} == expected
    differences = hellaswag.compare(*scores.values(), rows)
    assert found["compared_with"] == {"model": str(run / "step_00000010")} | differences
    assert f"{differences['B']['acc']['difference']:+.4f}" in two.stdout


@pytest.mark.slow
def test_blocks_compiled_by_themselves_are_not_compiled_for_an_evaluation(make_model):
    from recipe.evaluation import whole_model
    from recipe.model.gpt2 import GPT2LMHeadModel as OwnModel

    own = OwnModel(make_model(32).model.config)
    for block in own.transformer.h:
        block.compile(backend="eager", dynamic=False)
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    own(torch.zeros(1, 8, dtype=torch.long))
    before = graphs["unique_graphs"]
    with whole_model(SimpleNamespace(whole_weights=lambda model: None), own) as model:
        for length in (5, 6, 7):
            model.transformer(torch.zeros(1, length, dtype=torch.long))
    assert graphs["unique_graphs"] == before
    own(torch.zeros(1, 9, dtype=torch.long))
    assert graphs["unique_graphs"] > before  # and are compiled again for training


@pytest.mark.slow
def test_filled_up_shapes_are_few_and_change_no_score(make_model):
    """For a device that compiles for each shape."""
    loaded = make_model(130)
    shapes, scored = set(), set()

    def logits_fn(ids, positions, mask):
        shapes.add(tuple(ids.shape))
        return loaded.model(ids, position_ids=positions, attention_mask=mask).logits

    def head(logits):
        scored.add(len(logits))
        return logits

    def run(multiples):
        options = {"device": "cpu", "batch_size": 3, "max_length": 130, "head": head, "multiples": multiples}
        shapes.clear()
        scored.clear()
        return hellaswag.score_rows(logits_fn, loaded.encode, hellaswag.load_rows(12), **options)

    plain = run((1, 1, 1))
    assert len(shapes) == 4
    filled = run((8, 64, 128))
    assert shapes <= {(8, 64), (8, 128), (8, 192)}
    assert scored == {128}  # eval.common cuts what it scores on a CPU into pieces of this size
    for a, b in zip(plain, filled, strict=True):
        for way in hellaswag.WAYS:
            assert a[way].log_likelihoods == pytest.approx(b[way].log_likelihoods, abs=1e-3)


def test_other_architectures_are_given_each_ending_apart(make_model):
    loaded, rows = make_model(128), hellaswag.load_rows(6)
    together = hellaswag.score_loaded(loaded, rows, batch_size=4)
    loaded.model.config._attn_implementation = "eager"
    assert not common.shares_prefixes(loaded.model)
    apart = hellaswag.score_loaded(loaded, rows, batch_size=4)
    for a, b in zip(together, apart, strict=True):
        assert a["A"].log_likelihoods == pytest.approx(b["A"].log_likelihoods, abs=1e-3)

    config = GPTNeoXConfig(
        vocab_size=50257,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    other = dataclasses.replace(loaded, model=GPTNeoXForCausalLM(config).eval())
    (scored,) = hellaswag.score_loaded(other, rows[:1], batch_size=4)
    request = hellaswag.encode_row(loaded.encode, rows[0], "A")[2]
    with torch.no_grad():
        logits = other.model(torch.tensor([request.tokens])).logits[0].log_softmax(-1)
    wanted = range(len(request.tokens) - request.n_scored, len(request.tokens))
    expected = sum(logits[t - 1, request.tokens[t]].item() for t in wanted)
    assert scored["A"].log_likelihoods[2] == pytest.approx(expected, abs=1e-3)


def test_shares_of_ranks_add_up(make_model):
    loaded = make_model(128)
    calls = []

    def logits_fn(ids, positions, mask):
        calls.append(ids.shape)
        return loaded.model(ids, position_ids=positions, attention_mask=mask).logits

    def run(rank, world):
        calls.clear()
        options = {"limit": 8, "device": "cpu", "batch_size": 2, "max_length": 128, "rank": rank, "world": world}
        return hellaswag.score_hellaswag(logits_fn, loaded.encode, **options), len(calls)

    whole, _ = run(0, 1)
    assert whole["rows"] == 8
    assert 0 < whole["A"]["acc"] < 8
    for world in (3,):
        counts, n_calls = zip(*(run(rank, world) for rank in range(world)), strict=True)
        assert len(set(n_calls)) == 1  # a forward pass may be collective
        assert sum(c["rows"] for c in counts) == 8
        for way in ("A", "B"):
            for name in ("acc", "acc_norm"):
                assert sum(c[way][name] for c in counts) == whole[way][name]


def test_command_and_counts_agree(make_model):
    loaded = make_model(128)
    rows = hellaswag.load_rows(12)
    result = hellaswag.accuracies(hellaswag.score_loaded(loaded, rows, batch_size=5), rows)
    body, head = common.body_and_head(loaded.model)
    options = {"limit": 12, "device": "cpu", "batch_size": 2, "max_length": 128, "head": head}
    counts = hellaswag.score_hellaswag(body, loaded.encode, **options)
    for way in ("A", "B"):
        for name in ("acc", "acc_norm"):
            p = counts[way][name] / 12
            assert result[way][name] == pytest.approx(p, abs=1e-12)
            assert result[way][f"{name}_ci95"] == pytest.approx(1.96 * np.sqrt(p * (1 - p) / 12), abs=1e-12)
    text = hellaswag.table(result)
    a, b = text.split("\nB. ")
    b, gpt3 = b.split("GPT-3's paper")
    assert all(
        number in a for number in ("0.2859", "0.2955", "0.3752", "0.4320", "0.4893", "0.2990", "0.3100", "0.2962")
    )
    assert "0.3114" in b
    assert "0.3114" not in a
    assert all(number in gpt3 for number in ("0.3370", "0.4360", "0.5100", "0.5470"))
    assert "all 10,042 rows" in gpt3


def test_paired_bootstrap():
    """Against the same thing done the long way, and where the answer is known."""
    rng = np.random.default_rng(1)
    ours = rng.random(400) < 0.4
    theirs = np.where(rng.random(400) < 0.8, ours, rng.random(400) < 0.3)  # they agree on most rows
    found = hellaswag.paired_bootstrap(ours.astype(int), theirs.astype(int))
    difference = ours.astype(int) - theirs.astype(int)
    assert found["difference"] == pytest.approx(difference.mean())
    drawn = np.array([difference[rng.integers(0, 400, 400)].mean() for _ in range(20_000)])
    assert found["ci95"] == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=0.004)
    coins = rng.binomial(found["only_ours"] + found["only_theirs"], 0.5, 200_000)
    fewer = min(found["only_ours"], found["only_theirs"])
    assert found["p"] == pytest.approx(2 * (coins <= fewer).mean(), abs=0.005)
    assert (found["only_ours"], found["only_theirs"]) == ((ours & ~theirs).sum(), (theirs & ~ours).sum())
    # Unpaired intervals of these two would be twice as wide, and overlap.
    assert found["ci95"][1] - found["ci95"][0] < 0.75 * 2 * 1.96 * np.sqrt(2 * 0.4 * 0.6 / 400)

    same = hellaswag.paired_bootstrap([1, 0, 1], [1, 0, 1])
    assert same == {"difference": 0.0, "ci95": [0.0, 0.0], "p": 1.0, "only_ours": 0, "only_theirs": 0}
    always = hellaswag.paired_bootstrap([1] * 50, [0] * 50, samples=1000)
    assert (always["difference"], always["ci95"], always["p"]) == (1.0, [1.0, 1.0], 2 / 2**50)
    few = hellaswag.paired_bootstrap([1] * 4 + [0] * 96, [0] * 100)  # four rows to none: a coin does that, 1 in 8
    assert few["p"] == 0.125
    text = hellaswag.comparison({way: {"acc": few} for way in "AB"}, "a", "b")
    assert text.count("not to be told from 0") == 2
    swapped = hellaswag.paired_bootstrap(theirs.astype(int), ours.astype(int))
    assert swapped["difference"] == -found["difference"]
    assert swapped["ci95"] == pytest.approx([-x for x in reversed(found["ci95"])], abs=0.003)


def test_all_rows_are_there():
    rows = hellaswag.load_rows()
    assert len(rows) == 10042
    assert {len(row["endings"]) for row in rows} == {4}
    assert {row["label"] for row in rows} == {0, 1, 2, 3}


def test_metric_by_hand():
    metric = common.load_metric("hellaswag")
    # Row 1: sum picks 0, per length picks 1 (-6/3). Row 2: both pick 2. Row 3: a tie goes to the first.
    metric.add_batch(
        log_likelihoods=[[-4, -6, -9, -9], [-9, -9, -1, -9]], lengths=[[1, 3, 1, 1], [2, 2, 2, 2]], labels=[1, 2]
    )
    metric.add_batch(log_likelihoods=[[-3, -3, -3, -3]], lengths=[[1, 1, 1, 1]], labels=[0])
    assert metric.compute() == {"acc": pytest.approx(2 / 3), "acc_norm": 1.0}


@pytest.mark.slow
def test_metrics_in_two_processes_leave_nothing_behind(tmp_path):
    repository = Path(__file__).resolve().parents[2]
    before = sorted(repository.glob("eval/metrics/**/*"))
    code = (
        "from eval import common\n"
        "for _ in range(2):\n"
        "    m, q = common.load_metric('hellaswag'), common.load_metric('token_perplexity')\n"
        "    m.add_batch(log_likelihoods=[[-1, -2, -3, -4]], lengths=[[1, 1, 1, 1]], labels=[0])\n"
        "    q.add_batch(nlls=[2.0], token_counts=[2], byte_counts=[1])\n"
        "    print(m.compute()['acc'], q.compute()['loss'])\n"
    )
    environment = {"PATH": "", "HF_HOME": "/proc/not/writable", "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    options = {
        "cwd": repository,
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    processes = [subprocess.Popen([sys.executable, "-B", "-c", code], **options) for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert out.split() == ["1.0", "1.0"] * 2, err
    assert sorted(repository.glob("eval/metrics/**/*")) == before
    assert not list(tmp_path.glob("metrics-*"))
