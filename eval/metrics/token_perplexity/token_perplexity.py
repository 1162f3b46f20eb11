"""Loss, perplexity and bits per byte from summed negative log-likelihoods."""

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """\
The mean negative log-likelihood that a language model gives to tokens (the validation loss of its training), its
exponential, and the same information per byte of text. Loss and perplexity compare models of one tokenizer only;
bits per byte compares across tokenizers.
"""

_CITATION = """\
@article{gao2020pile,
    title={The Pile: An 800GB Dataset of Diverse Text for Language Modeling},
    author={Gao, Leo and others},
    journal={arXiv preprint arXiv:2101.00027},
    year={2020}
}
"""

_INPUTS = """
Args:
    nlls: for each window, the summed negative log-likelihood of its predicted tokens, in nats.
    token_counts: for each window, how many tokens were predicted.
    byte_counts: for each window, how many bytes of text those tokens stand for.

Returns:
    loss: nats per token, over all tokens of all windows.
    perplexity: exp(loss).
    bits_per_byte: sum of nlls / (ln 2 * sum of bytes), as in section 3.1 of arXiv:2101.00027.

Examples:
    >>> metric = evaluate.load("eval/metrics/token_perplexity")
    >>> metric.add_batch(nlls=[2.0, 4.0], token_counts=[1, 2], byte_counts=[2, 6])
    >>> metric.compute()
    {'loss': 2.0, 'perplexity': 7.38905609893065, 'bits_per_byte': 1.0820212806667227}
"""


class TokenPerplexity(evaluate.Metric):
    """Loss, perplexity and bits per byte of token log-likelihoods; see _DESCRIPTION."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "nlls": datasets.Value("float64"),
                    "token_counts": datasets.Value("int64"),
                    "byte_counts": datasets.Value("int64"),
                }
            ),
            reference_urls=["https://arxiv.org/abs/2101.00027"],
        )

    def _compute(self, nlls, token_counts, byte_counts):
        total = float(np.sum(nlls))
        loss = total / int(np.sum(token_counts))
        return {
            "loss": loss,
            "perplexity": float(np.exp(loss)),
            "bits_per_byte": total / (float(np.log(2)) * int(np.sum(byte_counts))),
        }
