"""`unmask serve`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unmask.cli._arguments import AllowCodeFlag, InlineLoadOptions, LoadOptions, ModelPaths, load_model
from unmask.cli._generate import compute_fastest
from unmask.hardware.onednn import limit_onednn_caches
from unmask.serve.limits import Limits

if TYPE_CHECKING:
    from unmask.classification import Classifier
    from unmask.model import LanguageModel
    from unmask.serve.workers import WorkerSeat


def serve(
    model: ModelPaths,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    allow_host: tuple[str, ...] = (),
    allow_origin: tuple[str, ...] = (),
    max_batch: int = 32,
    max_queue: int = 256,
    prefix_cache_mb: int = 256,
    workers: int = 1,
    shutdown_timeout: float = 30.0,
    both_strands: bool = False,
    weights: InlineLoadOptions = LoadOptions(),  # noqa: B008
    limits: Limits = Limits(),  # noqa: B008
    allow_code: AllowCodeFlag = False,
) -> None:
    """Serve models over HTTP: an OpenAI-compatible API, and a web page; classifiers, too.

    Requests choose one of several models by its name, `model`; the first one answers those that name none.

    Editors and other clients of llama.cpp, Ollama and Mistral find their routes as well: /infill, /api/generate,
    /v1/fim/completions. /docs lists all of them.

    For example:
      unmask serve runs/demo
      unmask serve small=runs/demo reviews=runs/reviews --workers 2
      UNMASK_TOKEN=secret unmask serve runs/demo --host 0.0.0.0 --allow-host my.machine

    Args:
        model: A model folder, of unmask or in a published format, a name on the hub, or a classifier's folder; with
            NAME= before it, requests call it by that name, and else by the folder's.
        host: The address to listen on; one that other machines can reach needs a token.
        port: The port to listen on; 0 takes a free one, and prints it.
        token: The token that clients must send (Authorization: Bearer TOKEN); by default the variable UNMASK_TOKEN.
        allow_host: Further host names under which clients may reach this server.
        allow_origin: Sites whose pages may use this server, as in https://my.site:3000; * allows all.
        max_batch: Texts that a model generates at the same time.
        max_queue: Texts that may wait for a model; further requests are answered with 429.
        prefix_cache_mb: Megabytes, for each model, for what was read of prompts, which later requests that begin alike
            do not read again; 0 keeps nothing. It is used by autoregressive and block diffusion models.
        workers: Processes behind the port, each with the models, its own batch, queue and prefixes, and its share of
            the cores; one that dies is started again.
        shutdown_timeout: Seconds after SIGTERM in which running requests may finish.
        both_strands: For DNA: average predictions over both strands, at twice the cost.
    """
    _check_numbers(
        port,
        shutdown_timeout,
        max_batch=max_batch,
        max_queue=max_queue,
        prefix_cache_mb=prefix_cache_mb,
        workers=workers,
    )
    token = token or os.environ.get("UNMASK_TOKEN")
    options = _Options(
        tuple(map(_split_name, model)), host, port, token, allow_host, allow_origin, max_batch, max_queue,
        prefix_cache_mb, shutdown_timeout, both_strands, weights, limits, allow_code,
    )  # fmt: skip
    if workers == 1:
        _serve(options)
        return
    from unmask.serve.workers import serve_workers

    title = ", ".join(name for name, _ in options.models)
    code = serve_workers(partial(_work, options), workers, host, port, token, shutdown_timeout, title, _log)
    if code:
        sys.exit(code)


@dataclass(frozen=True)
class _Options:
    """What the command was given."""

    models: tuple[tuple[str, Path], ...]
    host: str
    port: int
    token: str | None
    allow_host: tuple[str, ...]
    allow_origin: tuple[str, ...]
    max_batch: int
    max_queue: int
    prefix_cache_mb: int
    shutdown_timeout: float
    both_strands: bool
    weights: LoadOptions
    limits: Limits
    allow_code: bool

    def check(self, folder: Path) -> bool:
        """Whether a model is a classifier; raises what can be known to be missing before the server starts."""
        from unmask.classification import is_classifier
        from unmask.pretrained import resolve_model_folder

        if not resolve_model_folder(folder).exists():
            load_model(folder, allow_code=self.allow_code)
        classifies = is_classifier(folder)
        if classifies and self.weights.dtype not in ("auto", "float32"):
            raise ValueError(f"a classifier computes in float32: leave out --dtype {self.weights.dtype}")
        return classifies

    def load(self, index: int, classifies: bool, seat: WorkerSeat | None) -> LanguageModel | Classifier:
        """The model of that index, ready to compute as fast as this machine can.

        Workers have one copy of its weights, and all compute in the type that was the fastest for the first of them, so
        that they write the same texts.
        """
        from unmask.classification import load_classifier
        from unmask.serve.workers import share_weights

        name, folder = self.models[index]
        if classifies:
            classifier = load_classifier(folder, allow_code=self.allow_code)
            if seat is not None:
                share_weights(classifier.network, seat, index)
            return classifier
        lm = load_model(folder, require_tokenizer=True, allow_code=self.allow_code, options=self.weights)
        lm.denoiser.prepack(replace=seat is None)
        if seat is None:
            compute_fastest(lm, self.weights)
        else:
            measured = seat.measured.get(name)
            seat.measured[name] = compute_fastest(lm, self.weights, measured, replace=False)
            share_weights(lm.denoiser, seat, index)
            lm.denoiser.prepack(replace=False)  # what was reordered for the other copy is no longer used
        return lm.with_both_strands() if self.both_strands else lm


def _serve(options: _Options, seat: WorkerSeat | None = None) -> None:
    """Serve in this process."""
    limit_onednn_caches()
    try:
        from unmask.serve.models import ServedModels
        from unmask.serve.server import serve as run
        from unmask.serve.service import Service
    except ImportError as error:
        raise ValueError(
            f"serving needs the extra serve: pip install 'unmask[serve]' ({error.name} is missing)"
        ) from None
    services, loads = [], []
    for index, (name, folder) in enumerate(options.models):
        classifies = options.check(folder)
        services.append(
            Service(
                name,
                options.limits,
                options.max_batch,
                options.max_queue,
                classifies=classifies,
                prefix_cache_mb=options.prefix_cache_mb,
            )
        )
        loads.append(partial(options.load, index, classifies, seat))
    run(
        ServedModels(services),
        loads,
        options.host,
        options.port,
        options.token,
        options.allow_host,
        options.shutdown_timeout,
        options.allow_origin,
        log=_log if seat is None else lambda line: _log(f"worker {seat.index}: {line}"),
        seat=seat,
    )


def _work(options: _Options, seat: WorkerSeat) -> None:
    """Serve in one of several processes."""
    os.setpgid(0, 0)  # signals of the terminal are for the supervisor
    from unmask.cli import run_command

    run_command(lambda: _serve(options, seat))


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _split_name(path: Path) -> tuple[str, Path]:
    """Name and folder of `NAME=FOLDER`, or of a folder."""
    name, equals, folder = str(path).partition("=")
    if not equals or path.exists():
        return path.resolve().name, path
    if not name or not folder:
        raise ValueError(f"{path} must be a model's folder, or a name and its folder, as in small=runs/demo")
    return name, Path(folder)


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
