"""unmask: masked diffusion language models, exact and readable.

lm = unmask.load(folder)
lm.sample(n=4, length=128).texts
lm.infill("a template with <mask:12> holes").text
lm.score(["some text"]).nats_per_token
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unmask.backbones.dit import DiTConfig as DiTConfig
    from unmask.backbones.dit import LlamaBlock as LlamaBlock
    from unmask.backbones.dit import TimeConditioning as TimeConditioning
    from unmask.data.tokenizers import Tokenizer as Tokenizer
    from unmask.diffusion.categorical import SamplingParams as SamplingParams
    from unmask.guidance import Guidance as Guidance
    from unmask.model import Denoiser as Denoiser
    from unmask.model import LanguageModel as LanguageModel
    from unmask.model import ModelConfig as ModelConfig
    from unmask.model import Samples as Samples
    from unmask.objectives import D3PM as D3PM
    from unmask.objectives import MDLM as MDLM
    from unmask.objectives import SEDD as SEDD
    from unmask.objectives import BlockDiffusion as BlockDiffusion
    from unmask.objectives import NextToken as NextToken
    from unmask.objectives import UniformDiffusion as UniformDiffusion
    from unmask.pretrained import load as load
    from unmask.pretrained import save as save
    from unmask.sampling import Ancestral as Ancestral
    from unmask.sampling import Autoregressive as Autoregressive
    from unmask.sampling import Blockwise as Blockwise
    from unmask.sampling import Confidence as Confidence
    from unmask.sampling import EntropyBounded as EntropyBounded
    from unmask.sampling import Factor as Factor
    from unmask.sampling import FirstHitting as FirstHitting
    from unmask.sampling import RandomOrder as RandomOrder
    from unmask.sampling import ReMDM as ReMDM
    from unmask.sampling import SemiAutoregressive as SemiAutoregressive
    from unmask.sampling import Threshold as Threshold
    from unmask.sampling import UniformAncestral as UniformAncestral
    from unmask.types import Batch as Batch
    from unmask.types import Vocab as Vocab

__version__ = "0.1.0"

_EXPORTS = {
    "unmask.backbones.dit": ["DiTConfig", "LlamaBlock", "TimeConditioning"],
    "unmask.data.tokenizers": ["Tokenizer"],
    "unmask.diffusion.categorical": ["SamplingParams"],
    "unmask.guidance": ["Guidance"],
    "unmask.model": ["Denoiser", "LanguageModel", "ModelConfig", "Samples"],
    "unmask.objectives": ["D3PM", "MDLM", "SEDD", "NextToken", "BlockDiffusion", "UniformDiffusion"],
    "unmask.pretrained": ["load", "save"],
    "unmask.sampling": [
        "Ancestral",
        "Autoregressive",
        "Blockwise",
        "Confidence",
        "EntropyBounded",
        "Factor",
        "FirstHitting",
        "RandomOrder",
        "ReMDM",
        "SemiAutoregressive",
        "Threshold",
        "UniformAncestral",
    ],
    "unmask.types": ["Batch", "Vocab"],
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_MODULE_OF)


if not TYPE_CHECKING:  # which would take any name for one of ours, misspelt ones too

    def __getattr__(name):
        """Import a public name when it is first used: torch takes seconds, `unmask --help` needs none."""
        from importlib import import_module

        if name not in _MODULE_OF:
            raise AttributeError(f"module 'unmask' has no attribute {name!r}")
        return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"]
