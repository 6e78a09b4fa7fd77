"""Published checkpoint formats, by the `model_type` of their config; one module per format.

A format from outside is added to the table: `FORMATS["my_type"] = my_format`.
"""

from __future__ import annotations

from unmask.pretrained.formats.a2d import A2D_LLAMA_FORMAT, A2D_QWEN2_FORMAT, A2D_QWEN3_FORMAT
from unmask.pretrained.formats.base import Format
from unmask.pretrained.formats.bd3lm import BD3LM_FORMAT
from unmask.pretrained.formats.caduceus import CADUCEUS_FORMAT
from unmask.pretrained.formats.dimamba import DIMAMBA_FORMAT
from unmask.pretrained.formats.dream import DREAM_FORMAT
from unmask.pretrained.formats.duo import DUO_FORMAT
from unmask.pretrained.formats.fast_dllm import FAST_DLLM_FORMAT
from unmask.pretrained.formats.llada import LLADA_FORMAT
from unmask.pretrained.formats.llada2 import LLADA2_FORMAT
from unmask.pretrained.formats.llada_moe import LLADA_MOE_FORMAT
from unmask.pretrained.formats.mamba import MAMBA_FORMAT, MAMBA_SSM_FORMAT
from unmask.pretrained.formats.mdlm import MDLM_FORMAT
from unmask.pretrained.formats.mosaic_bert import MOSAIC_BERT_FORMAT
from unmask.pretrained.formats.sdar import SDAR_FORMAT
from unmask.pretrained.formats.sdtt import SDTT_FORMAT
from unmask.pretrained.formats.sedd import SEDD_FORMAT
from unmask.pretrained.formats.transformers import TRANSFORMERS_FORMAT

FORMATS: dict[str, Format] = {
    format_.model_type: format_
    for format_ in (
        TRANSFORMERS_FORMAT,  # before all others, whose types it may write
        BD3LM_FORMAT,
        LLADA_MOE_FORMAT,  # before LLaDA, whose type its published configs have
        LLADA_FORMAT,
        LLADA2_FORMAT,
        DREAM_FORMAT,
        SDAR_FORMAT,
        A2D_QWEN3_FORMAT,
        A2D_QWEN2_FORMAT,
        A2D_LLAMA_FORMAT,
        FAST_DLLM_FORMAT,
        MDLM_FORMAT,
        DUO_FORMAT,
        SEDD_FORMAT,
        SDTT_FORMAT,
        CADUCEUS_FORMAT,
        MAMBA_FORMAT,
        MAMBA_SSM_FORMAT,
        DIMAMBA_FORMAT,
        MOSAIC_BERT_FORMAT,
    )
}

__all__ = ["FORMATS", "Format"]
