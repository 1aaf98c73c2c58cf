"""What the sets of a mixture say for themselves: how their texts are worded, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from angle_llm.config import ObjectiveSettings, TrainSettings, settings_from_dict, settings_to_dict
from angle_llm.data.batching import TextBatch
from angle_llm.data.mixture import Mixture, sets_of
from angle_llm.losses.nested import Objective, objective_for
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.prompts import load_prompt

Tokenize = Callable[[Sequence[str]], list[list[int]]]


def objectives_of(settings: TrainSettings) -> list[Objective]:
    """One for each set: the run's, with what the set has otherwise.

    Raises:
        SettingsError, ValueError: for settings that cannot be meant.
    """
    common = settings_to_dict(settings.objective)
    own = [
        settings_from_dict(ObjectiveSettings, common | each.objective, where=f"objective of {each.path}")
        for each in sets_of(settings.data)
    ]
    return [objective_for(one, settings.nested) for one in own]


class Wordings:
    """The different prompts of a run, numbered; 0 is the encoder's own. Prompts that word alike are one."""

    def __init__(self, encoder: SentenceEncoder, data: Mixture) -> None:
        self.tokenizers: list[Tokenize] = [encoder.sentences]
        known = {encoder.prompt.fingerprint: 0}
        self.of_set: list[int] = []
        """The number of each set's prompt."""
        for each in data.sets:
            prompt = encoder.prompt if each.prompt is None else load_prompt(each.prompt)
            if prompt.fingerprint not in known:
                known[prompt.fingerprint] = len(self.tokenizers)
                self.tokenizers.append(encoder.with_prompt(prompt).sentences)
            self.of_set.append(known[prompt.fingerprint])

    def ids(self, texts: Sequence[str], prompts: Sequence[int]) -> list[list[int]]:
        """Ids of texts, each under its prompt."""
        ids: list[list[int]] = [[] for _ in texts]
        for prompt in set(prompts):
            places = [place for place, one in enumerate(prompts) if one == prompt]
            for place, made in zip(places, self.tokenizers[prompt]([texts[place] for place in places]), strict=True):
                ids[place] = made
        return ids

    def batch(self, data: Mixture, indices: Sequence[int]) -> TextBatch:
        """Examples of a mixture as a batch."""
        return TextBatch.from_examples(
            [data[index] for index in indices], [self.of_set[data.set_of(index)] for index in indices]
        )
