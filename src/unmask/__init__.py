"""unmask: masked diffusion language models, exact and readable.

lm = unmask.load(folder)
lm.sample(n=4, length=128).texts
lm.infill("a template with <mask:12> holes").text
lm.score(["some text"]).nats_per_token
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unmask.backbones import BACKBONES as BACKBONES
from unmask.baselines import BASELINES as BASELINES
from unmask.data.loader import ROW_LAYOUTS as ROW_LAYOUTS
from unmask.diffusion import SCHEDULES as SCHEDULES
from unmask.objectives import OBJECTIVES as OBJECTIVES
from unmask.registry import LazyExports as _LazyExports
from unmask.sampling import PROCESS_SAMPLERS as PROCESS_SAMPLERS
from unmask.sampling import SAMPLERS as SAMPLERS

if TYPE_CHECKING:  # written by `make exports`
    from unmask.backbones.base import Backbone as Backbone
    from unmask.backbones.base import BackboneConfig as BackboneConfig
    from unmask.backbones.caduceus import CaduceusConfig as CaduceusConfig
    from unmask.backbones.dimamba import DiMambaConfig as DiMambaConfig
    from unmask.backbones.dit import DiTConfig as DiTConfig
    from unmask.backbones.dit import LlamaBlock as LlamaBlock
    from unmask.backbones.dit import TimeConditioning as TimeConditioning
    from unmask.backbones.hf import HFBackboneConfig as HFBackboneConfig
    from unmask.backbones.mamba import MambaConfig as MambaConfig
    from unmask.backbones.mosaic_bert import MosaicBERTConfig as MosaicBERTConfig
    from unmask.baselines import SSDLM as SSDLM
    from unmask.baselines import Plaid as Plaid
    from unmask.classification import load_classifier as load_classifier
    from unmask.data.chat import ChatTemplate as ChatTemplate
    from unmask.data.loader import RowLayout as RowLayout
    from unmask.data.loader.genome import GenomeWindows as GenomeWindows
    from unmask.data.loader.layouts import PerDocument as PerDocument
    from unmask.data.loader.layouts import Wrapped as Wrapped
    from unmask.data.loader.prompt_completion import PromptCompletionRows as PromptCompletionRows
    from unmask.data.tokenizers import Tokenizer as Tokenizer
    from unmask.diffusion.categorical import SamplingParams as SamplingParams
    from unmask.diffusion.schedule import Cosine as Cosine
    from unmask.diffusion.schedule import CosineSquared as CosineSquared
    from unmask.diffusion.schedule import Geometric as Geometric
    from unmask.diffusion.schedule import Hyperbolic as Hyperbolic
    from unmask.diffusion.schedule import IntegratedRate as IntegratedRate
    from unmask.diffusion.schedule import LinearSigma as LinearSigma
    from unmask.diffusion.schedule import LogLinear as LogLinear
    from unmask.diffusion.schedule import Polynomial as Polynomial
    from unmask.diffusion.schedule import Schedule as Schedule
    from unmask.guidance import Guidance as Guidance
    from unmask.model import Denoiser as Denoiser
    from unmask.model import LanguageModel as LanguageModel
    from unmask.model import ModelConfig as ModelConfig
    from unmask.model import Samples as Samples
    from unmask.objectives.base import Objective as Objective
    from unmask.objectives.block_diffusion import BlockDiffusion as BlockDiffusion
    from unmask.objectives.d3pm import D3PM as D3PM
    from unmask.objectives.flexmdm import FlexMDM as FlexMDM
    from unmask.objectives.genmd4 import GenMD4 as GenMD4
    from unmask.objectives.mdlm import MDLM as MDLM
    from unmask.objectives.mlm import MLM as MLM
    from unmask.objectives.next_token import NextToken as NextToken
    from unmask.objectives.sedd import SEDD as SEDD
    from unmask.objectives.uniform_diffusion import UniformDiffusion as UniformDiffusion
    from unmask.pretrained import load as load
    from unmask.pretrained import save as save
    from unmask.run import train as train
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
    from unmask.sampling.uniform import UniformAncestral as UniformAncestral
    from unmask.types import Batch as Batch
    from unmask.types import Vocab as Vocab

__version__ = "0.1.0"

if not TYPE_CHECKING:
    __getattr__ = _LazyExports(
        __name__,
        BACKBONES,
        OBJECTIVES,
        BASELINES,
        ROW_LAYOUTS,
        SAMPLERS,
        PROCESS_SAMPLERS,
        SCHEDULES,
        Backbone="backbones.base",
        BackboneConfig="backbones.base",
        Batch="types",
        Denoiser="model",
        Guidance="guidance",
        LanguageModel="model",
        LlamaBlock="backbones.dit",
        ModelConfig="model",
        Objective="objectives.base",
        RowLayout="data.loader",
        Sampler="sampling.base",
        Samples="model",
        SamplingParams="diffusion.categorical",
        Schedule="diffusion.schedule",
        TimeConditioning="backbones.dit",
        ChatTemplate="data.chat",
        Tokenizer="data.tokenizers",
        Vocab="types",
        load="pretrained",
        load_classifier="classification",
        save="pretrained",
        train="run",
    )


def __dir__() -> list[str]:
    from sys import modules

    return [*modules[__name__].__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"]
