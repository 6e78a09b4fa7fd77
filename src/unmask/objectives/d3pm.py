"""D3PM with an absorbing state: MDLM before SUBS.

On masked tokens, with x_m and x_x the network's mass on the mask and on the clean token:

    T [ (a_s - a_t)/(1 - a_t) log((a_t x_m + 1 - a_t)/((1 - a_t) x_x))
        + (1 - a_s)/(1 - a_t) log((1 - a_s)(a_t x_m + 1 - a_t)/((1 - a_t)(a_s x_m + 1 - a_s))) ]

and -log x_theta(x | z_0) for the reconstruction. It is what the shared formula gives for `absorbing`.
"""

from __future__ import annotations

from dataclasses import dataclass

from unmask.objectives.mdlm import MDLM


@dataclass(frozen=True, kw_only=True)
class D3PM(MDLM):
    """MDLM in T steps with neither zero masking nor carry-over."""

    steps: int | None = 1000
    zero_masking: bool = False
    carry_over: bool = False
