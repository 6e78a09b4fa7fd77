"""Fields of requests that belong to particular samplers, named as on the command line.

`min_tokens` is not among them: it is the least length of an answer in other servers.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from unmask.sampling.confidence import CONFIDENCE_MEASURES


class SamplerOptions(BaseModel):
    """What a sampler does with its confidence; a field that the sampler does not have is refused."""

    measure: str | None = Field(
        None,
        description="For `confidence`: what confidence is.",
        json_schema_extra={"enum": [*CONFIDENCE_MEASURES, None]},
    )
    threshold: float | None = Field(
        None,
        ge=0,
        le=1,
        description="For `threshold` and `joint-threshold`: tokens above this probability are written together.",
    )
    edit_threshold: float | None = Field(
        None,
        ge=0,
        le=1,
        description="For `joint-threshold`: a written token is replaced by another above this probability; 1 is never.",
    )
    max_post_steps: int | None = Field(
        None, ge=0, description="For `joint-threshold`: steps that only replace tokens, once all are written."
    )
    stop_entropy: float | None = Field(
        None,
        gt=0,
        description="For `confidence`: nats per token below which predictions that do not change are all written.",
    )
    stable_steps: int | None = Field(
        None, ge=1, description="For `confidence`: for so many steps predictions must not have changed (stop_entropy)."
    )
    factor: float | None = Field(
        None, ge=0, description="For `factor`: the larger, the more tokens are written together."
    )
    entropy_bound: float | None = Field(
        None, ge=0, description="For `entropy-bounded`: nats that may be lost by writing tokens together."
    )

    @property
    def sampler_options(self) -> dict[str, Any]:
        """Those that are given."""
        values = {name: getattr(self, name) for name in SamplerOptions.model_fields}
        return {name: value for name, value in values.items() if value is not None}
