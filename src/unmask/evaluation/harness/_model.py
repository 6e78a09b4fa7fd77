"""`unmask` as a model of lm-evaluation-harness: `lm_eval --model unmask --model_args pretrained=FOLDER,...`.

The random numbers of a request are a function of the seed and of its own tokens: a request has the same answer alone,
in a batch, and among other tasks.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from unmask.config import lookup
from unmask.diffusion.process import BlockMasking, Masking
from unmask.distributed import Distributed
from unmask.evaluation.harness._definitions import (
    Definition,
    generation_definition,
    likelihood_definition,
    rolling_definition,
)
from unmask.evaluation.harness._generation import GenerationSettings, Question, Usage, cut_answer, grouped, read_options
from unmask.evaluation.harness._greedy import Pair, writes_greedily
from unmask.hardware.dtypes import DtypeName
from unmask.likelihood.requests import ScoreConfig, ScoreRequest, score_requests
from unmask.likelihood.score import Score
from unmask.model import Completions, LanguageModel
from unmask.pretrained import load
from unmask.sampling import SAMPLERS
from unmask.sampling.ancestral import Ancestral
from unmask.sampling.base import Sampler
from unmask.sampling.factory import make_sampler

_GROUP_REQUESTS = 1024
"""Requests that are scored together: progress is shown, and results are cached, after each group."""
_AUTO_BATCH_SIZE = 16
"""Answers that are generated together, if the harness is to choose."""


@dataclass
class Record:
    """What results must say beside their figures, by what the harness asked for."""

    variances: dict[tuple[str, ...], float] = field(default_factory=dict)
    """The variance of the nats of each request, by its arguments: the error of drawing maskings."""
    usage: dict[str, Usage] = field(default_factory=lambda: defaultdict(Usage))
    """What generation took, by task."""
    definitions: dict[str, Definition] = field(default_factory=dict)
    """How figures are defined: by kind of request and, for answers, by task."""
    truncated: int = 0
    """Requests whose context lost its beginning."""


@register_model("unmask")
class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A language model of unmask that lm-evaluation-harness can ask."""

    def __init__(
        self,
        pretrained: str | Path | LanguageModel,
        *,
        folder: str | Path | None = None,
        mc_num: int = 128,
        greedy: bool = False,
        seed: int = 0,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: DtypeName = "auto",
        allow_code: bool = False,
        **generation: Any,
    ) -> None:
        """A model folder (or a name on the hub, or a loaded model, of which `folder` is the name).

        `mc_num` are the draws of each likelihood; `greedy` decodes greedily one by one for the flag `is_greedy`, which
        otherwise takes one network call; `generation` are fields of `GenerationSettings`. `batch_size` is the number of
        answers that are generated together; likelihoods are batched by their tokens; `dtype`: of the weights.
        """
        super().__init__()
        unknown = generation.keys() - GenerationSettings.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(GenerationSettings.__dataclass_fields__)
            raise ValueError(f"there is no setting {sorted(unknown)[0]!r}; those of generation are {known}")
        self.settings = GenerationSettings(**generation)
        lookup(self.settings.sampler, {"default": None, **SAMPLERS}, "sampler")
        self.scoring = ScoreConfig(mc_num, seed=seed, enumerate_short=True)
        self.greedy, self.seed = greedy, seed
        chosen = _AUTO_BATCH_SIZE if str(batch_size).startswith("auto") else int(batch_size)
        self.batch_size = chosen if max_batch_size is None else min(chosen, max_batch_size)
        self.folder = folder if isinstance(pretrained, LanguageModel) else pretrained
        self.lm = self._load(pretrained, device, dtype, allow_code)
        self.record = Record()

    @staticmethod
    def _load(
        pretrained: str | Path | LanguageModel, device: str | None, dtype: DtypeName, allow_code: bool
    ) -> LanguageModel:
        has_cuda = torch.cuda.is_available() and device != "cpu"
        if isinstance(pretrained, LanguageModel):
            lm = pretrained
        else:
            lm = load(pretrained, require_tokenizer=True, allow_code=allow_code, dtype=dtype)
            # The harness asks for "cuda:0" by itself, also where there is none.
            lm = lm.distribute(Distributed(device=torch.device(device or "cuda") if has_cuda else torch.device("cpu")))
        if lm.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it cannot be evaluated on tasks")
        lm.denoiser.prepack()
        return lm

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text, if the model has one."""
        return self.lm.vocab.eos_id

    @property
    def max_length(self) -> int | None:
        """The tokens that the model reads at once."""
        return self.lm.denoiser.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """The ids of a text; nothing is added to it."""
        return self.lm.encode(string)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        errors = [variance**0.5 for variance in self.record.variances.values()]
        return {
            "unmask": {
                "draws": self.scoring.draws,
                "seed": self.seed,
                "definitions": {name: asdict(each) for name, each in self.record.definitions.items()},
                "monte_carlo_error_nats": {"mean": sum(errors) / len(errors), "max": max(errors)} if errors else None,
                "tokens_per_call": {task: usage.tokens_per_call for task, usage in self.record.usage.items()},
                "truncated_contexts": self.record.truncated,
            }
        }

    # Likelihoods

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context) and whether greedy decoding writes it, of each request.

        Context and continuation are encoded together, as `TemplateLM` does; an empty context is none. A context that
        does not fit before its continuation loses its beginning.
        """
        self.record.definitions["loglikelihood"] = likelihood_definition(self.lm, self.scoring.draws, self.greedy)
        asked = [tuple(request.args) for request in requests]
        encoded = [((context, text), *self._encode_request(context, text)) for context, text in asked]
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = {key: self._fitted(prompt, ids) for key, prompt, ids in requests}
        found: dict[tuple[str, str], tuple[float, bool]] = {}
        for keys, scores in self._scored(pairs, "loglikelihood", disable_tqdm):
            flags = writes_greedily(self.lm, [pairs[key] for key in keys], one_by_one=self.greedy)
            for key, score, is_greedy in zip(keys, scores, flags, strict=True):
                found[key] = -score.nats, is_greedy
                self.cache_hook.add_partial("loglikelihood", key, found[key])
        return [found[key] for key, _, _ in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts, each token once, in windows of the model's length; 0 for an empty text."""
        self.record.definitions["loglikelihood_rolling"] = rolling_definition(self.lm, self.scoring.draws)
        asked = [(str(request.args[0]),) for request in requests]
        pairs: dict[tuple[str], Pair] = {key: ((), self.lm.encode(key[0])) for key in asked if key[0]}
        found: dict[tuple[str], float] = {("",): 0.0}
        for keys, scores in self._scored(pairs, "loglikelihood_rolling", disable_tqdm):
            for key, score in zip(keys, scores, strict=True):
                found[key] = -score.nats
                self.cache_hook.add_partial("loglikelihood_rolling", key, found[key])
        return [found[key] for key in asked]

    def _scored(
        self, pairs: Mapping[Any, Pair], what: str, disable_tqdm: bool
    ) -> Iterator[tuple[Sequence[Any], Sequence[Score]]]:
        """The scores of requests in groups of about the same length, the longest first."""
        order = sorted(pairs, key=lambda key: -sum(map(len, pairs[key])))
        with tqdm(total=len(order), desc=what, disable=disable_tqdm or None) as bar:
            for start in range(0, len(order), _GROUP_REQUESTS):
                keys = order[start : start + _GROUP_REQUESTS]
                group = [pairs[key] for key in keys]
                requests = [
                    ScoreRequest(ids, prompt, seed=_content_seed(self.seed, prompt, ids)) for prompt, ids in group
                ]
                with self.lm.inference_mode():
                    score = score_requests(
                        self.lm.predictor, self.lm.objective, requests, self.scoring, self.lm.distributed
                    )
                for key, each in zip(keys, score.per_text, strict=True):
                    self.record.variances[key] = each.variance
                bar.update(len(keys))
                yield keys, score.per_text

    def _encode_request(self, context: str, text: str) -> tuple[list[int], list[int]]:
        if not context:
            return [], self.tok_encode(text)
        prompt, ids = self._encode_pair(context, text)
        if ids:
            return prompt, ids
        # The tokenizer joined the end of the context and all of the continuation: that token is the target.
        whole = self.tok_encode(context + text)
        return whole[:-1], whole[-1:]

    def _fitted(self, prompt: Sequence[int], ids: Sequence[int]) -> Pair:
        """The pair, of whose prompt as much is left as fits before the text."""
        limit = self.max_length
        if limit is None or len(prompt) + len(ids) <= limit:
            return prompt, ids
        if len(ids) > limit:
            raise ValueError(f"a continuation has {len(ids):,} tokens, and the model reads {limit:,}")
        self.record.truncated += 1
        return prompt[len(prompt) + len(ids) - limit :], ids

    # Answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The model's answer to each request, up to a stop string or the end of the text."""
        seen: Counter[str] = Counter()
        questions = [self._question(number, request, seen) for number, request in enumerate(requests)]
        answers = [""] * len(requests)
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm or None) as bar:
            for batch in grouped(questions, self.batch_size):
                for question, answer in zip(batch, self._answers(batch), strict=True):
                    answers[question.number] = answer
                    self.cache_hook.add_partial("generate_until", requests[question.number].args, answer)
                bar.update(len(batch))
        return answers

    def _question(self, number: int, request: Any, seen: Counter[str]) -> Question:
        context, options = request.args
        length, params, until = read_options(options, self.settings)
        prompt = self._fitted_prompt(self.tok_encode(context), length)
        key = json.dumps([context, options], sort_keys=True, default=str)
        seed = _content_seed(self.seed, [seen[key]], prompt)  # repeats of a request draw other answers
        seen[key] += 1
        return Question(number, str(request.task_name), tuple(prompt), length, params, until, seed)

    def _fitted_prompt(self, prompt: list[int], length: int) -> list[int]:
        """The end of a prompt that leaves room for the answer, or for half of what the model reads."""
        if self.max_length is None:
            return prompt
        room = self.max_length - min(length, self.max_length // 2)
        self.record.truncated += len(prompt) > room
        return prompt[-room:]

    def _sampler(self, question: Question) -> Sampler:
        """The sampler of the settings, by default the family's.

        Where that takes masked positions in random order and nothing is drawn (temperature 0), the most confident
        ones come first instead, as in the published evaluations.
        """
        settings, denoiser, params = self.settings, self.lm.denoiser, question.params
        own_size = denoiser.process.block_size
        steps = settings.steps or min(settings.block_size or own_size or question.length, question.length)
        size = None if own_size is not None else settings.block_size
        sampler = make_sampler(denoiser, settings.sampler, steps, params, block_size=size)
        is_random = isinstance(sampler.inner or sampler, Ancestral) and settings.sampler == "default"
        if is_random and params.temperature == 0 and isinstance(denoiser.process, Masking | BlockMasking):
            return make_sampler(denoiser, "confidence", steps, params, block_size=size)
        return sampler

    def _answers(self, batch: Sequence[Question]) -> list[str]:
        sampler, tokenizer = self._sampler(batch[0]), self.lm.tokenizer
        assert tokenizer is not None
        self.record.definitions[batch[0].task] = generation_definition(sampler, batch[0].length)
        prompts, seeds = [list(each.prompt) for each in batch], [each.seed for each in batch]
        done: Completions = self.lm.complete(prompts, batch[0].length, sampler=sampler, seed=seeds)
        usage = self.record.usage[batch[0].task]
        usage.answers += len(batch)
        usage.tokens += sum(map(len, done.ids))
        usage.sequence_calls += done.num_sequence_calls
        return [cut_answer(text, each.until, tokenizer) for text, each in zip(done.texts, batch, strict=True)]

    # Chat templates

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's caches."""
        return str(self.folder or "unmask").replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template, which the harness writes beside its results."""
        if chat_template is False or chat_template is None:
            return None
        return self.lm.require_chat_template().source

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the text of a prompt; without a generation prompt, its last message is to be continued."""
        return self.lm.require_chat_template().render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )


def _content_seed(seed: int, prompt: Sequence[int], ids: Sequence[int]) -> int:
    """A seed of 62 bits that stands for the tokens of a request, so that its place and its company do not matter."""
    digest = hashlib.sha256(f"{seed}{list(prompt)}{list(ids)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2
