"""A noise schedule of your own: a frozen dataclass that subclasses `Schedule`.

python -m examples.custom_schedule
unmask train examples.custom_recipe:tiny --out runs/sine --set objective.schedule=examples.custom_schedule:Sine
unmask sample runs/sine --allow-code
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from examples.custom_recipe import tiny, train
from unmask import MDLM, Schedule


@dataclass(frozen=True)
class Sine(Schedule):
    """alpha = 1 - sin(pi t / 2): most tokens are masked early."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - torch.sin(t * (math.pi / 2))

    def dalpha(self, t: Tensor) -> Tensor:
        return -(math.pi / 2) * torch.cos(t * (math.pi / 2))

    def weight(self, t: Tensor) -> Tensor:
        return (math.pi / 2) / torch.tan(t.clamp(min=1e-6) * (math.pi / 2)).clamp(min=1e-6)


if __name__ == "__main__":
    lm = train(replace(tiny(), objective=MDLM(schedule=Sine())))
    print(lm.objective, lm.score(["def tiny()"]).nats_per_token)
