"""The model card: a `README.md` with the model's properties, its use and its training.

Everything in it is read from the model or given by the caller.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from tokenizers import models

from unmask.data.tokenizers import BaseTokenizer, Tokenizer
from unmask.diffusion.process import (
    BlockMasking,
    LeftToRight,
    Masking,
    NoiseProcess,
    PerTokenMasking,
    Process,
    UniformNoise,
    UniformRatios,
)
from unmask.model import LanguageModel
from unmask.objectives.base import Objective

TrainingFacts: TypeAlias = Mapping[str, str]
"""How a model was trained: values by name."""

_INDEX_KEY = "model-index"
_LICENSE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
_LANGUAGE_PATTERN = re.compile(r"[a-z]{2,3}(-[A-Za-z]+)?")


@dataclass(frozen=True)
class EvalResult:
    """An evaluation result with its standard error, as hubs list them."""

    dataset: str
    metric: str
    value: float
    standard_error: float | None = None
    description: str = ""


@dataclass(frozen=True)
class CardMetadata:
    """Metadata for hubs that cannot be read from the model."""

    license: str | None = None
    """An identifier such as apache-2.0."""
    datasets: tuple[str, ...] = ()
    """Names of datasets on the hub."""
    languages: tuple[str, ...] = ()
    """Codes such as en."""
    results: tuple[EvalResult, ...] = ()
    """Evaluation results."""

    def __post_init__(self) -> None:
        if self.license is not None and not _LICENSE_PATTERN.fullmatch(self.license):
            raise ValueError(f"a license must be an identifier such as apache-2.0 or mit; got {self.license!r}")
        for language in self.languages:
            if not _LANGUAGE_PATTERN.fullmatch(language):
                raise ValueError(f"a language must be a code such as en or de; got {language!r}")

    def added_to(self, card: str) -> str:
        """A card with this license, these data sets, languages and results as well; the rest of it stays as it is."""
        front, body = _split_card(card)
        for name, lines in self._entries().items():
            front[name] = front[name] + lines[3:] if name == _INDEX_KEY and name in front else lines
        if self.results:
            rows = _markdown_table("figure", "value", map(_result_row, self.results))
            heading = "## Results"
            if f"{heading}\n" in body:
                body = f"{body.rstrip()}\n" + "\n".join(rows.splitlines()[2:]) + "\n"
            else:
                body = f"{body.rstrip()}\n\n{heading}\n\n{rows}\n"
        return "\n".join(["---", *(line for lines in front.values() for line in lines), "---", body.lstrip("\n")])

    def _entries(self, name: str = "unmask", task: str = "text-generation") -> dict[str, list[str]]:
        """The lines of front matter, by their keys, that say what is given; `name` and `task` are those of results."""
        entries: dict[str, list[str]] = {}
        if self.license is not None:
            entries["license"] = [f"license: {json.dumps(self.license.lower())}"]
        for key, items in (("language", self.languages), ("datasets", self.datasets)):
            if items:
                entries[key] = _yaml_list(key, items)
        if self.results:
            results = [line for result in self.results for line in _model_index_entry(result, task)]
            entries[_INDEX_KEY] = [f"{_INDEX_KEY}:", f"- name: {_yaml_string(name)}", "  results:", *results]
        return entries


@dataclass(frozen=True)
class _ModelKind:
    """Title, tags and description of the models of one process."""

    title: str
    tag: str
    pipeline_tag: str
    description: str


_MODEL_KINDS: dict[type[Process], _ModelKind] = {
    Masking: _ModelKind(
        "Masked diffusion language model",
        "masked-diffusion",
        "fill-mask",
        "It predicts masked tokens, and so generates any part of a text in any order.",
    ),
    UniformNoise: _ModelKind(
        "Uniform diffusion language model",
        "uniform-diffusion",
        "text-generation",
        "It turns random tokens into text, all positions in parallel.",
    ),
    UniformRatios: _ModelKind(
        "Uniform diffusion language model with ratios (SEDD)",
        "uniform-diffusion",
        "text-generation",
        "It turns random tokens into text, all positions in parallel, by how likely other tokens would be.",
    ),
    PerTokenMasking: _ModelKind(
        "Masked diffusion language model with learned schedules",
        "masked-diffusion",
        "fill-mask",
        "It predicts masked tokens, and has learned which tokens of a text to reveal first.",
    ),
    BlockMasking: _ModelKind(
        "Block diffusion language model",
        "block-diffusion",
        "text-generation",
        "It generates blocks from left to right, and the tokens of a block in any order.",
    ),
    LeftToRight: _ModelKind(
        "Autoregressive language model",
        "autoregressive",
        "text-generation",
        "It generates from left to right, one token at a time.",
    ),
}


_OTHER_KIND = _ModelKind(
    "Diffusion language model",
    "diffusion",
    "text-generation",
    "It generates text by reversing a noise process.",
)
"""For processes from outside the package."""


def model_card(model: LanguageModel, facts: TrainingFacts | None = None, metadata: CardMetadata | None = None) -> str:
    """The card of a model, in Markdown with the front matter that hubs read."""
    kind = _MODEL_KINDS.get(type(model.denoiser.process), _OTHER_KIND)
    metadata = metadata or CardMetadata()
    parts = [
        _front_matter(kind, _objective_tag(model.objective), metadata),
        f"# {kind.title}",
        f"{kind.description} It is loaded with the Python library `unmask`.",
        _markdown_table("property", "value", _property_rows(model)),
        "## Use",
        _usage_section(model),
    ]
    if facts:
        _check_facts(facts)
        parts += ["## Training", _markdown_table("fact", "value", facts.items())]
    if metadata.results:
        parts += ["## Results", _markdown_table("figure", "value", map(_result_row, metadata.results))]
    return "\n\n".join(parts) + "\n"


def _objective_tag(objective: Objective) -> str:
    """The tag of an objective: its class name in kebab case; `autoregressive` for next-token prediction."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(objective).__name__).lower()
    return "autoregressive" if isinstance(objective.process, LeftToRight) else name


def _result_row(result: EvalResult) -> tuple[str, str]:
    error = "" if result.standard_error is None else f" ± {result.standard_error:.2g}"
    about = f" ({result.description})" if result.description else ""
    return f"{result.metric} on {result.dataset}{about}", f"{result.value:.4g}{error}"


def _check_facts(facts: TrainingFacts) -> None:
    for name, value in facts.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(f"facts must be texts by name, as in {{'steps': '1000'}}; got {{{name!r}: {value!r}}}")


def _front_matter(kind: _ModelKind, objective: str, metadata: CardMetadata) -> str:
    """YAML; its strings are written as JSON, so that any text is valid."""
    entries = metadata._entries(f"unmask-{objective}", kind.pipeline_tag)
    index = entries.pop(_INDEX_KEY, [])
    entries["tags"] = _yaml_list("tags", tuple(dict.fromkeys((kind.tag, objective, "language-model"))))
    lines = ["---", "library_name: unmask", f"pipeline_tag: {kind.pipeline_tag}"]
    return "\n".join([*lines, *chain(*entries.values()), *index, "---"])


def _yaml_list(key: str, items: Iterable[str]) -> list[str]:
    return [f"{key}:", *(f"- {_yaml_string(item)}" for item in items)]


def _split_card(card: str) -> tuple[dict[str, list[str]], str]:
    """The lines of a card's front matter by their top-level keys, and the text after it."""
    lines = card.splitlines()
    if not lines or lines[0] != "---" or "---" not in lines[1:]:
        return {}, card
    end = lines.index("---", 1)
    front: dict[str, list[str]] = {}
    name = ""
    for line in lines[1:end]:
        is_key = line[:1].isalpha() and ":" in line
        name = line.partition(":")[0] if is_key else name
        front.setdefault(name, []).append(line)
    return front, "\n".join(lines[end + 1 :]) + "\n"


def _model_index_entry(result: EvalResult, task: str) -> list[str]:
    """An entry of the model index."""
    name = f"{result.metric} ({result.description})" if result.description else result.metric
    error = {} if result.standard_error is None else {"standard_error": result.standard_error}
    metric = {"type": result.metric, "value": result.value, "name": name}
    return [
        f"  - task: {json.dumps({'type': task})}",
        f"    dataset: {json.dumps({'name': result.dataset, 'type': result.dataset})}",
        f"    metrics: {json.dumps([metric | ({'args': error} if error else {})])}",
    ]


def _yaml_string(text: str) -> str:
    """A plain word unquoted, anything else quoted."""
    return text if re.fullmatch(r"[a-z][a-z0-9-]*", text) and text not in ("no", "yes") else json.dumps(text)


def _property_rows(model: LanguageModel) -> list[tuple[str, str]]:
    denoise = model.denoiser
    process, vocab = denoise.process, denoise.vocab
    parameters = sum(parameter.numel() for parameter in denoise.parameters())
    rows = [("objective", type(denoise.objective).__name__)]
    if isinstance(process, NoiseProcess | PerTokenMasking):
        rows += [
            ("schedule", repr(process.schedule)),
            ("time conditioning", "yes" if denoise.backbone.capabilities.time_conditioned else "no"),
        ]
    return [
        *rows,
        *model.describe_learned().items(),
        *((name, str(value)) for name, value in denoise.backbone.describe().items()),
        ("parameters", f"{parameters:,}"),
        ("vocabulary", f"{vocab.size:,} ids; the mask is {vocab.mask_id}"),
        ("tokenizer", _describe_tokenizer(model.tokenizer)),
        ("longest text", "no limit" if denoise.max_length is None else f"{denoise.max_length:,} tokens"),
    ]


def _describe_tokenizer(tokenizer: BaseTokenizer | None) -> str:
    if tokenizer is None:
        return "none: ids in, ids out"
    return f"{_token_unit(tokenizer)}, {tokenizer.vocab_size:,} tokens"


def _token_unit(tokenizer: BaseTokenizer) -> str:
    """The kind of its tokens."""
    if tokenizer.digest == Tokenizer.bytes().digest:
        return "bytes"
    if tokenizer.digest == Tokenizer.dna().digest:
        return "DNA bases"
    if not isinstance(tokenizer, Tokenizer):
        return type(tokenizer).__name__
    inner = tokenizer.backend.model
    if not isinstance(inner, models.WordLevel):
        return type(inner).__name__
    return "characters" if all(len(token) == 1 for token in tokenizer.vocab) else "words"


def _usage_section(model: LanguageModel) -> str:
    """Python code and commands that run in the model's folder."""
    text, output = _example_text(model), "tokens" if model.tokenizer is None else "texts"
    template = f"{text}<mask>"
    python, shell, note = [f"print(lm.sample(n=2).{output})"], ["unmask sample . --n 2"], ""
    if not model.denoiser.process.is_continuous:
        python.append(f"print(lm.infill({template!r}).{output})")
        shell.append(f"unmask infill . {shlex.quote(template)}")
        note = " (`<mask:12>` stands for twelve masked tokens)"
    if model.objective.why_no_likelihood is None:
        python.append(f"print(lm.score([{text!r}]).nats_per_token)")
        shell.append(f"unmask score . {shlex.quote(text)}")
    return f"""In this folder, with Python:

```python
import unmask

lm = unmask.load(".")
{chr(10).join(python)}
```

or on the command line{note}:

```bash
{chr(10).join(shell)}
```"""


def _example_text(model: LanguageModel) -> str:
    """A text for examples that the model can encode, with room for a hole after it."""
    tokenizer, mask = model.tokenizer, model.vocab.mask_id
    if tokenizer is None:
        return "0 " if mask else "1 "
    common = ["ACGT"] if _token_unit(tokenizer) == "DNA bases" else ["The ", "the "]
    known = sorted(set(tokenizer.vocab.values()) - {mask})
    single_tokens = (tokenizer.decode([i]) for i in known[:100])
    return next((text for text in chain(common, single_tokens) if _can_encode(text, tokenizer, model)), "...")


def _can_encode(text: str, tokenizer: BaseTokenizer, model: LanguageModel) -> bool:
    try:
        length = len(tokenizer.encode(text))
    except ValueError:  # the tokenizer does not know a character or word
        return False
    return text.isprintable() and 0 < length < (model.denoiser.max_length or length + 1)


def _markdown_table(name: str, value: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {_escape_markdown(left)} | {_escape_markdown(right)} |" for left, right in rows]
    return "\n".join([f"| {name} | {value} |", "|---|---|", *lines])


def _escape_markdown(text: str) -> str:
    """Text for one table cell without markup, HTML, links or line breaks."""
    return re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", " ".join(text.split()))
