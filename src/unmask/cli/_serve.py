"""`unmask serve`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from unmask.cli._arguments import AllowCodeFlag, InlineLoadOptions, LoadOptions, ModelPath, load_model
from unmask.cli._generate import compute_fastest
from unmask.hardware.onednn import limit_onednn_caches
from unmask.serve.limits import Limits

if TYPE_CHECKING:
    from unmask.classification import Classifier
    from unmask.model import LanguageModel


def serve(
    model: ModelPath,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    allow_host: tuple[str, ...] = (),
    allow_origin: tuple[str, ...] = (),
    max_batch: int = 32,
    max_queue: int = 256,
    prefix_cache_mb: int = 256,
    shutdown_timeout: float = 30.0,
    both_strands: bool = False,
    weights: InlineLoadOptions = LoadOptions(),  # noqa: B008
    limits: Limits = Limits(),  # noqa: B008
    allow_code: AllowCodeFlag = False,
) -> None:
    """Serve a model over HTTP: an OpenAI-compatible API, and a web page; or a classifier.

    Editors and other clients of llama.cpp, Ollama and Mistral find their routes as well: /infill, /api/generate,
    /v1/fim/completions. /docs lists all of them.

    For example:
      unmask serve runs/demo
      UNMASK_TOKEN=secret unmask serve runs/demo --host 0.0.0.0 --allow-host my.machine

    Args:
        model: A model folder, of unmask or in a published format, a name on the hub, or a classifier's folder.
        host: The address to listen on; one that other machines can reach needs a token.
        port: The port to listen on; 0 takes a free one, and prints it.
        token: The token that clients must send (Authorization: Bearer TOKEN); by default the variable UNMASK_TOKEN.
        allow_host: Further host names under which clients may reach this server.
        allow_origin: Sites whose pages may use this server, as in https://my.site:3000; * allows all.
        max_batch: Texts that are generated at the same time.
        max_queue: Texts that may wait; further requests are answered with 429.
        prefix_cache_mb: Megabytes for what was read of prompts, which later requests that begin alike do not read
            again; 0 keeps nothing. It is used by autoregressive and block diffusion models.
        shutdown_timeout: Seconds after SIGTERM in which running requests may finish.
        both_strands: For DNA: average predictions over both strands, at twice the cost.
    """
    limit_onednn_caches()
    try:
        from unmask.serve.server import serve as run
        from unmask.serve.service import Service
    except ImportError as error:
        raise ValueError(
            f"serving needs the extra serve: pip install 'unmask[serve]' ({error.name} is missing)"
        ) from None
    _check_numbers(port, shutdown_timeout, max_batch=max_batch, max_queue=max_queue, prefix_cache_mb=prefix_cache_mb)
    from unmask.pretrained import resolve_model_folder

    if not resolve_model_folder(model).exists():
        load_model(model, allow_code=allow_code)  # raises with what is missing, before the server starts
    from unmask.classification import is_classifier, load_classifier

    classifies = is_classifier(model)
    if classifies and weights.dtype not in ("auto", "float32"):
        raise ValueError(f"a classifier computes in float32: leave out --dtype {weights.dtype}")
    service = Service(
        model.resolve().name, limits, max_batch, max_queue, classifies=classifies, prefix_cache_mb=prefix_cache_mb
    )

    def load() -> LanguageModel | Classifier:
        if classifies:
            return load_classifier(model, allow_code=allow_code)
        lm = load_model(model, require_tokenizer=True, allow_code=allow_code, options=weights)
        lm.denoiser.prepack()
        compute_fastest(lm, weights)
        return lm.with_both_strands() if both_strands else lm

    run(
        service,
        load,
        host,
        port,
        token or os.environ.get("UNMASK_TOKEN"),
        allow_host,
        shutdown_timeout,
        allow_origin,
        log=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _check_numbers(port: int, shutdown_timeout: float, **sizes: int) -> None:
    """ValueError for numbers with which no server can be started."""
    for name, value in sizes.items():
        smallest = 0 if name == "prefix_cache_mb" else 1
        if value < smallest:
            raise ValueError(f"{name} must be at least {smallest}; got {value}")
    if not 0 <= port < 65536:
        raise ValueError(f"port must be from 0 to 65535; got {port}")
    if not 0 <= shutdown_timeout < float("inf"):
        raise ValueError(f"shutdown_timeout must be 0 seconds or more; got {shutdown_timeout}")
