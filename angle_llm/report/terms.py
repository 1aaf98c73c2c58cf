"""The words of labels and columns, for whoever reads the page first."""

from __future__ import annotations

from angle_llm.report.document import Cell, Group, Table

TERMS = (
    (
        "in-batch",
        "The contrastive term: an anchor's positive against other texts of its batch (and its hard negative), by "
        "cosine / temperature. Symmetric: both texts of a pair are anchors, and every other text is a negative. "
        "Anchors alone (SimCSE-style, forward): first texts against second ones.",
    ),
    (
        "cosine",
        "The ranking term on cosines (CoSENT): of two pairs, the one with the higher score shall have the higher "
        "cosine.",
    ),
    (
        "angle",
        "The same ranking on an angle between the two vectors, read as complex numbers. Phase: this project's, "
        "symmetric and best at equal vectors; reference: that of angle-emb 0.6.1; paper: equations 7 and 8 of AnglE "
        "to the letter, which push similar pairs apart.",
    ),
    (
        "regression",
        "The squared error of the cosine against the score (SBERT).",
    ),
    (
        "published weights 1/35/1",
        "Cosine 1, in-batch 35, angle 1. 35 is 17.5 here: angle-emb divides by all rows of a batch, this project by "
        "those that have a positive, half of them on NLI.",
    ),
    (
        "LoRA r16",
        "Low-rank adapters of rank 16 on all linear layers; the weights of the backbone stay as they are.",
    ),
    (
        "prompts",
        "summarize_one_word: Summarize sentence “…” in one word:“, the vector read off the last token. prompteol: "
        "This sentence : “…” means in one word:“. plain: the bare sentence.",
    ),
    (
        "saturation",
        "Near ±1 the cosine is flat in the angle between two vectors, so a loss on cosines has little gradient there "
        "(what AnglE argues from).",
    ),
    (
        "raw, senteval",
        "Sentences as released, or Moses-tokenised and lower-cased as published tables have them.",
    ),
    (
        "zero-shot",
        "The backbone with its prompt, not trained.",
    ),
)


def terms_table() -> Table:
    """What the words mean."""
    rows = tuple((Cell(word), Cell(meaning)) for word, meaning in TERMS)
    return Table("Words", "Of labels and columns.", ("word", "meaning"), (Group(rows),), words=2)
