"""What a figure of lm-evaluation-harness means for a model, in a word or two and in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.model import LanguageModel
from unmask.objectives.mdlm import MDLM
from unmask.sampling.base import Sampler


@dataclass(frozen=True)
class Definition:
    """The name of a definition, as a table shows it, and the definition."""

    name: str
    sentence: str


def likelihood_definition(lm: LanguageModel, draws: int, one_by_one: bool) -> Definition:
    """How log p(target | context) is defined, and what a greedy target is."""
    likelihood = _conditional_likelihood(lm, draws)
    return Definition(likelihood.name, f"{likelihood.sentence}; a target is greedy if {_greedy(lm, one_by_one)}")


def _greedy(lm: LanguageModel, one_by_one: bool) -> str:
    process = lm.denoiser.process
    if process.is_left_to_right:
        return "each of its tokens is the most probable one after those before it"
    if not process.has_masks:
        return "a model has a greedy order, which this one has not: none is"
    if one_by_one:
        return "the order of highest confidence writes it, one token per network call"
    return "each of its tokens is the most probable one where the whole target is masked (one network call)"


def _conditional_likelihood(lm: LanguageModel, draws: int) -> Definition:
    if lm.denoiser.process.is_left_to_right:
        return Definition("exact", "log p(target | context) is exact: the sum of log p(token | all tokens before it)")
    if not _is_any_order(lm):
        kind = type(lm.objective.bound).__name__
        return Definition(
            f"{kind} bound, {draws} draws",
            f"-log p(target | context) is the bound of {kind}: only the target is noised, by the model's own process;"
            f" the mean of {draws} stratified draws, in nats of the whole target",
        )
    return Definition(
        f"LLaDA, {draws} draws",
        "log p(target | context) as LLaDA defines it: the context is visible, exactly k of the target's L tokens are"
        " masked, k uniform from 1 to L; minus the mean of L/k times the summed cross-entropy of the masked tokens, in"
        f" nats of the whole target; {draws} stratified draws with a control variate, or all 2^L - 1 maskings, without"
        " an error, where they are no more",
    )


def rolling_definition(lm: LanguageModel, draws: int) -> Definition:
    """How the log-likelihood of a whole text is defined."""
    limit = lm.denoiser.max_length
    windows = "as a whole" if limit is None else f"in windows of {limit:,} tokens, each by itself and every token once"
    if lm.denoiser.process.is_left_to_right:
        return Definition("exact", f"log p of a document is exact; it is read {windows}")
    bound = f"the bound of {type(lm.objective.bound).__name__}"
    return Definition(f"bound, {draws} draws", f"-log p of a document is {bound}, {draws} draws; it is read {windows}")


def generation_definition(sampler: Sampler, max_tokens: int) -> Definition:
    """How answers are generated."""
    inner = sampler.inner or sampler
    name = type(inner).__name__
    return Definition(
        f"{name}, {max_tokens} tokens" if inner is sampler else f"{name} in blocks, {max_tokens} tokens",
        f"answers of at most {max_tokens} tokens by {sampler}, up to the end of the text or a stop string;"
        " tokens/call are tokens up to the end of the text for each network call that a sequence takes part in",
    )


def _is_any_order(lm: LanguageModel) -> bool:
    """Whether the bound is that of LLaDA: a mean over the number of masked tokens, whatever the schedule."""
    bound = lm.objective.bound
    steps = getattr(bound, "steps", None)
    return isinstance(bound, MDLM) and steps is None and bound.carry_over and lm.denoiser.time_independent
