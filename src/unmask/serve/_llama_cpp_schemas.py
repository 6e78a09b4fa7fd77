"""What the clients of llama.cpp's server send."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from unmask.guidance.structure.structure import Structure
from unmask.serve._compat import Dialect, field_error
from unmask.serve._fim import Gap
from unmask.serve._schemas import TextRequest, check_lengths

IGNORED_BY_INFILL = (
    "samplers",
    "t_max_prompt_ms",
    "t_max_predict_ms",
    "n_indent",
    "id_slot",
    "n_keep",
    "n_discard",
    "min_keep",
    "n_cache_reuse",
    "timings_per_token",
    "return_progress",
    "repeat_last_n",
    "penalize_nl",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_threshold",
    "dynatemp_exponent",
    "mirostat_tau",
    "mirostat_eta",
)
"""Fields of llama.cpp's clients that are accepted and ignored."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1, 0),
    "post_sampling_probs": (False,),
    "lora": ([],),
}


class ExtraText(BaseModel):
    """A piece of another file."""

    model_config = ConfigDict(extra="ignore")

    text: str = Field(description="Its text.")
    filename: str = Field("", description="Its name, which is read before it.")


class LlamaCppRequest(TextRequest):
    """A request of llama.cpp's clients; `min_tokens`, `steps`, `sampler` and others are additions."""

    dialect = Dialect(IGNORED_BY_INFILL, _NEUTRAL, {"max_tokens": "n_predict"}, ("grammar",))

    n: int = Field(1, ge=1, le=1, description="One completion.")
    prompt: str = Field("", description="The text before the hole, after `input_prefix`.")
    input_prefix: str = Field("", description="The text before `prompt`.")
    input_suffix: str = Field("", description="The text after the hole.")
    input_extra: list[ExtraText] = Field(
        default_factory=list, description="Pieces of other files, which are read first, with their names."
    )
    n_predict: int = Field(
        -1,
        ge=-1,
        description="The most tokens: before `input_suffix` 32 at most unless `min_tokens` is given; else -1 is 256, or"
        " what the model has room for. 0 generates nothing. max_tokens is the same.",
    )
    min_tokens: int | None = Field(None, ge=0, description="The fewest tokens before `input_suffix`; 0 if not given.")
    json_schema: dict[str, Any] | None = Field(None, description="A JSON schema of the text.")
    n_probs: int = Field(0, ge=0, le=20, description="The number of most probable tokens to list with each token.")
    return_tokens: bool = Field(False, description="Whether `tokens` of the response has the token ids.")
    response_fields: list[str] | None = Field(
        None, description="The fields of the response that are wanted; a/b is the field b of a."
    )

    @property
    def length_field(self) -> str:
        return "n_predict"

    @property
    def may_end(self) -> bool:
        return not self.input_suffix

    @property
    def num_alternatives(self) -> int:
        return self.n_probs

    @property
    def structure(self) -> Structure | tuple[Structure | None, ...] | None:
        return super().structure if self.json_schema is None else Structure.json_schema(self.json_schema)

    @property
    def gap(self) -> Gap:
        """The text with its hole."""
        extra = "".join(f"{each.filename}\n{each.text}\n" if each.filename else each.text for each in self.input_extra)
        most = None if self.n_predict < 0 else self.n_predict
        prefix = f"{extra}{self.input_prefix}{self.prompt}"
        return Gap(prefix, self.input_suffix, self.min_tokens, most, "n_predict")

    @model_validator(mode="after")
    def _check(self) -> LlamaCppRequest:
        check_lengths("min_tokens", self.min_tokens, "n_predict", None if self.n_predict < 0 else self.n_predict)
        if self.json_schema is not None and super().structure is not None:
            raise field_error("json_schema", "json_schema and another field both say what the text is: send one")
        return self
