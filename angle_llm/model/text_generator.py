"""A language model that answers: chat messages in, texts out, many at a time.

An answer is drawn with random numbers of its own, from its own seed: one number for each token, put through the inverse of
the distribution's cumulative sum. So it does not depend on what else is in the batch, but for the rounding of sums that a
batch's shape decides; the same batch gives the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from angle_llm.model.backbone import load_tokenizer, locate, open_pretrained
from angle_llm.model.tokenizer import plain_ids

CANDIDATES = 256
"""A token is drawn from the likeliest ones, so many at most: a vocabulary is not sorted for each token."""
_MARK = "TEXT"


@dataclass(frozen=True)
class Written:
    """What was written for one message."""

    text: str
    finished: bool
    """False: it was cut at the token limit."""
    read_tokens: int
    """Of the worded message."""
    new_tokens: int


class TextGenerator:
    """A causal language model with its head and its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        from transformers import GenerationConfig

        self.model = model.eval()
        self.tokenizer = tokenizer
        generation = self.model.generation_config
        ends = generation.eos_token_id if generation.eos_token_id is not None else tokenizer.eos_token_id
        self.ends: list[int] = ends if isinstance(ends, list) else [] if ends is None else [ends]
        """Ids that end an answer."""
        # What a model's file wants of beams, penalties and the like would be mixed into what is asked for.
        self.model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        pad = tokenizer.pad_token_id
        self.pad: int = pad if pad is not None else (self.ends or [0])[0]

    @classmethod
    def open(
        cls, name: str, *, dtype: str = "auto", device: str | None = None, revision: str | None = None
    ) -> TextGenerator:
        """Opens a model folder, a .gguf file, a hub id, or package:NAME/path/inside.

        Raises:
            FileNotFoundError, ArtifactError: if there is none, or it has no language-model head.
        """
        location = locate(name)
        tokenizer = load_tokenizer(location, revision)
        model = open_pretrained("AutoModelForCausalLM", location, dtype=dtype, revision=revision)
        return cls(model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")), tokenizer)

    def message_ids(self, message: str) -> list[int]:
        """Ids of a message of the user's in the tokenizer's chat template, or of the bare message if it has none.

        Names of special tokens in the message are plain characters: no sentence can end its own turn.
        """
        if not self.tokenizer.chat_template:
            ids: list[int] = self.tokenizer(message, split_special_tokens=True)["input_ids"]
            return ids
        turn = [{"role": "user", "content": _MARK}]
        worded: str = self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        head, _, tail = worded.rpartition(_MARK)
        before, after = self.tokenizer([head, tail], add_special_tokens=False)["input_ids"]
        return [*before, *plain_ids(self.tokenizer, [message])[0], *after]

    def lacks_room(self, message: str, max_new_tokens: int) -> str | None:
        """Why a message and its answer do not fit the model's positions; None if they do."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        needed = len(self.message_ids(message)) + max_new_tokens
        if positions is None or needed <= positions:
            return None
        return f"the message and {max_new_tokens} new tokens need {needed} positions, the model has {positions}"

    @torch.inference_mode()
    def write(
        self,
        messages: Sequence[str],
        seeds: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> list[Written]:
        """An answer of at most `max_new_tokens` to each message, drawn with the seed of the same place.

        Logits are divided by `temperature`; 0 takes the likeliest token. Tokens are drawn from the fewest likely ones that have
        the probability `top_p` together. A message that `lacks_room` is written to past the positions the model was made for.
        """
        from transformers import GenerationConfig, LogitsProcessorList

        asked = [self.message_ids(message) for message in messages]
        longest = max(map(len, asked))
        device = self.model.device
        ids_BT = torch.tensor([[self.pad] * (longest - len(ids)) + ids for ids in asked], device=device)
        mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in asked], device=device)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=self.pad,
            eos_token_id=self.ends or None,
        )
        drawing = LogitsProcessorList()
        if temperature:
            drawing.append(_Drawing(seeds, longest, max_new_tokens, temperature, top_p))
        out_BT = self.model.generate(
            input_ids=ids_BT, attention_mask=mask_BT, generation_config=config, logits_processor=drawing
        )
        return [
            self._written(ids, len(question)) for ids, question in zip(out_BT[:, longest:].tolist(), asked, strict=True)
        ]

    def _written(self, ids: list[int], read_tokens: int) -> Written:
        end = next((place for place, token in enumerate(ids) if token in self.ends), None)
        text: str = self.tokenizer.decode(ids[:end], skip_special_tokens=True)
        return Written(text, end is not None, read_tokens, len(ids) if end is None else end + 1)


class _Drawing:
    """Leaves one token possible in each row: the one the row's next random number falls on."""

    def __init__(self, seeds: Sequence[int], start: int, max_new_tokens: int, temperature: float, top_p: float) -> None:
        self.start = start
        self.temperature = temperature
        self.top_p = top_p
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.numbers_BT = torch.stack([torch.rand(max_new_tokens, generator=draw) for draw in draws])

    def __call__(self, ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        logits_BV = logits_BV.float() / self.temperature
        likely_BK, tokens_BK = logits_BV.topk(min(CANDIDATES, logits_BV.shape[1]))
        chance_BK = (likely_BK - logits_BV.logsumexp(1, keepdim=True)).exp()
        before_BK = chance_BK.cumsum(1) - chance_BK
        chance_BK = chance_BK.where(before_BK < self.top_p, 0.0)  # the likeliest always stays
        sums_BK = chance_BK.cumsum(1)
        number_B = self.numbers_BT[:, ids_BT.shape[1] - self.start].to(sums_BK.device)
        chosen_B1 = torch.searchsorted(sums_BK, (number_B * sums_BK[:, -1])[:, None], right=True)
        last_B1 = (chance_BK > 0).sum(1, keepdim=True) - 1  # rounding may fall behind it
        token_B1 = tokens_BK.gather(1, chosen_B1.minimum(last_B1))
        return torch.full_like(logits_BV, -torch.inf).scatter(1, token_B1, 0.0)
