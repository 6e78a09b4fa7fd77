"""Reverse loops: a sampler is a frozen dataclass whose `run` yields the canvas after each step.

`SAMPLERS` is the table of unmasking orders, which commands and requests choose by name; the samplers in
`PROCESS_SAMPLERS` follow from the model's process or from options such as a block size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unmask.registry import Family, LazyExports

if TYPE_CHECKING:  # written by `make exports`
    from unmask.sampling.ancestral import Ancestral as Ancestral
    from unmask.sampling.ancestral import FirstHitting as FirstHitting
    from unmask.sampling.ancestral import RandomOrder as RandomOrder
    from unmask.sampling.autoregressive import Autoregressive as Autoregressive
    from unmask.sampling.base import Sampler as Sampler
    from unmask.sampling.blockwise import Blockwise as Blockwise
    from unmask.sampling.confidence import Confidence as Confidence
    from unmask.sampling.confidence import EntropyBounded as EntropyBounded
    from unmask.sampling.confidence import Factor as Factor
    from unmask.sampling.confidence import Threshold as Threshold
    from unmask.sampling.insertion import Insertion as Insertion
    from unmask.sampling.joint_threshold import JointThreshold as JointThreshold
    from unmask.sampling.remdm import ReMDM as ReMDM
    from unmask.sampling.semi_autoregressive import SemiAutoregressive as SemiAutoregressive
    from unmask.sampling.uniform import RatioAncestral as RatioAncestral
    from unmask.sampling.uniform import UniformAncestral as UniformAncestral

SAMPLERS: Family[Sampler] = Family(
    "unmask.sampling.base:Sampler",
    {
        "ancestral": "unmask.sampling.ancestral:Ancestral",
        "first-hitting": "unmask.sampling.ancestral:FirstHitting",
        "random-order": "unmask.sampling.ancestral:RandomOrder",
        "confidence": "unmask.sampling.confidence:Confidence",
        "threshold": "unmask.sampling.confidence:Threshold",
        "factor": "unmask.sampling.confidence:Factor",
        "entropy-bounded": "unmask.sampling.confidence:EntropyBounded",
        "joint-threshold": "unmask.sampling.joint_threshold:JointThreshold",
        "remdm": "unmask.sampling.remdm:ReMDM",
    },
)

PROCESS_SAMPLERS: Family[Sampler] = Family(
    "unmask.sampling.base:Sampler",
    {
        "autoregressive": "unmask.sampling.autoregressive:Autoregressive",
        "insertion": "unmask.sampling.insertion:Insertion",
        "blockwise": "unmask.sampling.blockwise:Blockwise",
        "semi-autoregressive": "unmask.sampling.semi_autoregressive:SemiAutoregressive",
        "uniform-ancestral": "unmask.sampling.uniform:UniformAncestral",
        "ratio-ancestral": "unmask.sampling.uniform:RatioAncestral",
    },
    extends=SAMPLERS,
)

if not TYPE_CHECKING:
    __getattr__ = LazyExports(__name__, SAMPLERS, PROCESS_SAMPLERS, Sampler="base")
