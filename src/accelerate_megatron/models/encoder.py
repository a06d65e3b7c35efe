"""What a bidirectional encoder such as BERT has besides its layers. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Head = Literal["none", "masked_lm", "pretraining", "classification"]
"""What stands on the encoder: nothing, a masked language model, that and next-sentence
prediction, or a classifier of whole sequences (a regression with one label)."""

ProblemType = Literal[
    "regression", "single_label_classification", "multi_label_classification", None
]
"""Hugging Face's `problem_type`; None: number and dtype of the labels decide."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The parts of an encoder model that a decoder has not."""

    token_types: int
    """Rows of the token-type embedding."""
    norm_after: bool
    """Whether each norm stands after its residual sum, as in BERT, and one on the embeddings.

    Otherwise each stands before attention and MLP, and one after the last layer.
    """
    head: Head
    num_labels: int = 2
    """Outputs of the classifier; without effect on the other heads."""
    problem_type: ProblemType = None
    classifier_dropout: float | None = None
    """Dropout before the classifier; None: the model's hidden dropout."""

    @property
    def has_vocabulary_head(self) -> bool:
        """Whether the model predicts tokens."""
        return self.head in ("masked_lm", "pretraining")

    @property
    def has_pooler(self) -> bool:
        """Whether the first token's hidden state goes through a layer of its own."""
        return self.head != "masked_lm"
