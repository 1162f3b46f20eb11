"""HellaSwag accuracy from the log-likelihoods of each row's endings.

HellaSwag asks which of four endings continues a context. A language model answers with the ending that it gives the
highest log-likelihood, summed over the ending's tokens (acc) or divided by the ending's length (acc_norm). There are
two published ways to measure: token lengths as in llm.c and build-nanogpt, or character lengths as in
lm-evaluation-harness; they differ in the context's text too, so numbers of the two ways must not be compared.
"""

import datasets
import evaluate
import numpy as np

_INPUTS = """
Args:
    log_likelihoods: for each row, the summed log-likelihood of each of its four endings, in nats.
    lengths: for each row, the length of each ending: tokens, or characters (see the description).
    labels: for each row, the index of the right ending, 0 to 3.

Returns:
    acc: share of rows where the right ending has the largest log-likelihood.
    acc_norm: share of rows where it has the largest log-likelihood per unit of length.
    Ties go to the first ending.

Examples:
    >>> metric = evaluate.load("eval/metrics/hellaswag")
    >>> metric.add_batch(log_likelihoods=[[-4.0, -6.0, -9.0, -9.0]], lengths=[[1, 3, 1, 1]], labels=[1])
    >>> metric.compute()
    {'acc': 0.0, 'acc_norm': 1.0}
"""


class HellaSwag(evaluate.Metric):
    """Accuracy of choosing one of four endings; see the module."""

    def _info(self):
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Zellers et al. 2019, HellaSwag: Can a Machine Really Finish Your Sentence?",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "log_likelihoods": datasets.Sequence(datasets.Value("float64"), length=4),
                    "lengths": datasets.Sequence(datasets.Value("int32"), length=4),
                    "labels": datasets.Value("int32"),
                }
            ),
            reference_urls=["https://arxiv.org/abs/1905.07830"],
        )

    def _compute(self, log_likelihoods, lengths, labels):  # ty: ignore[incompatible-method-override]  named by the features
        scores, labels = np.asarray(log_likelihoods), np.asarray(labels)  # (rows, 4), (rows,)
        return {
            "acc": float(np.mean(scores.argmax(axis=1) == labels)),
            "acc_norm": float(np.mean((scores / np.asarray(lengths)).argmax(axis=1) == labels)),
        }
