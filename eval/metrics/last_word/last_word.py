"""Accuracy and perplexity of last words, as LAMBADA is scored."""

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """\
LAMBADA asks for the last word of a passage. A language model is right where each of the word's tokens is its likeliest
one given the passage and the word's tokens before; its perplexity is that of words, not of tokens.
"""

_CITATION = """\
@inproceedings{paperno2016lambada,
    title={The LAMBADA dataset: Word prediction requiring a broad discourse context},
    author={Paperno, Denis and others},
    booktitle={Proceedings of the 54th Annual Meeting of the Association for Computational Linguistics},
    year={2016}
}
"""

_INPUTS = """
Args:
    log_likelihoods: for each passage, the summed log-likelihood of its last word's tokens, in nats.
    greedy: for each passage, whether every one of them is the model's likeliest token.

Returns:
    acc: share of passages where greedy is true.
    perplexity: exp(-mean of log_likelihoods).

Examples:
    >>> metric = evaluate.load("eval/metrics/last_word")
    >>> metric.add_batch(log_likelihoods=[-1.0, -3.0], greedy=[True, False])
    >>> metric.compute()
    {'acc': 0.5, 'perplexity': 7.38905609893065}
"""


class LastWord(evaluate.Metric):
    """Accuracy and perplexity of a text's last word; see _DESCRIPTION."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"log_likelihoods": datasets.Value("float64"), "greedy": datasets.Value("bool")}
            ),
            reference_urls=[
                "https://arxiv.org/abs/1606.06031",
                "https://github.com/EleutherAI/lm-evaluation-harness/tree/main/lm_eval/tasks/lambada",
            ],
        )

    def _compute(self, log_likelihoods, greedy):
        return {"acc": float(np.mean(greedy)), "perplexity": float(np.exp(-np.mean(log_likelihoods)))}
