"""How fast a run is and how much of the machine it uses: the counters of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from angle_llm.model.counters import FlopsPerToken, peak_flops
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.train.processes import Processes
from angle_llm.train.step import StepResult


@dataclass(frozen=True)
class StepMeter:
    """Turns what steps computed into rates and utilisation."""

    flops: FlopsPerToken
    peak: float
    """Operations a second a device can do."""
    devices: int = 1

    @classmethod
    def of(cls, encoder: SentenceEncoder, processes: Processes) -> StepMeter:
        """Counts the encoder's layers and asks the device."""
        peak = peak_flops(processes.device, encoder.dtype)
        return cls(FlopsPerToken.of(encoder.model.backbone), peak, processes.count)

    def counts(self, results: Sequence[StepResult], seconds: float) -> dict[str, float]:
        """What an optimizer step did: sums over its batches, and rates.

        `logical_tokens` are those of the batch's texts, `computed_tokens` went through the model; utilisation is the share
        of the devices' operations that the computed tokens needed. `imbalance` is how many times its even share the process
        with most tokens computed.
        """
        computed = sum(result.computed_tokens for result in results)
        twice = sum(result.computed_tokens for result in results if result.cached)
        pairs = sum(result.pairs for result in results)
        flops = computed * (self.flops.forward + self.flops.backward) + twice * self.flops.forward
        return {
            "texts": sum(result.texts for result in results),
            "pairs": pairs,
            "logical_tokens": sum(result.logical_tokens for result in results),
            "computed_tokens": computed,
            "pairs_per_second": pairs / seconds,
            "computed_tokens_per_second": computed / seconds,
            "utilisation": flops / seconds / (self.peak * self.devices),
            "imbalance": sum(result.largest_share for result in results) * self.devices / computed,
            "seconds": seconds,
        }

    @staticmethod
    def shown(counts: dict[str, float]) -> str:
        """For the progress bar."""
        share = counts["computed_tokens"] / counts["logical_tokens"]
        return f"{counts['pairs_per_second']:.1f} pairs/s, {share:.0%} of tokens computed, {counts['utilisation']:.0%} utilised"
