"""`lm_eval --model unmask`: adds the model to lm-evaluation-harness, which has no list of models from other packages.

torch loads what packages register as `torch.backends` when it is imported (pyproject.toml). Where `lm_eval` imports it,
the model is added, and nothing is done anywhere else. This is a module of its own, with nothing but the standard
library, so that importing torch does not import `unmask` and cannot fail because of it.
"""

from __future__ import annotations

import sys
from contextlib import suppress

_MODEL = "unmask.evaluation.harness._model:HarnessModel"


def register() -> None:
    """Called by torch when it is imported, as if it registered a device, which it does not."""
    if "lm_eval" not in sys.modules:
        return
    with suppress(ImportError, AttributeError):  # an older version, and no reason to stop the import of torch
        import lm_eval.models  # noqa: F401  # its own models, which it adds only while there are no others
        from lm_eval.api.registry import model_registry

        if "unmask" not in model_registry:
            model_registry.register("unmask", target=_MODEL)
