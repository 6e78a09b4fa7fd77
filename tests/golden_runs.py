"""Golden runs: everything that golden_scenes.py does, written down to the last bit.

    python tests/golden_runs.py tests/golden/runs.json             # record all of it anew
    python tests/golden_runs.py tests/golden/runs.json scores      # one part of it; the others stay

Floats are written as `float.hex` writes them. The fingerprint says how the machine rounds: where another one
is found, numbers are compared to a tolerance only (see test_golden_runs.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from torch.nn import functional as F

import golden_scenes as scenes

Found = Iterator[tuple[str, dict[str, Any]]]


def fingerprint() -> str:
    """The same on machines that round alike: of the torch version, and of results of its main kernels."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(48, 48, generator=generator, requires_grad=True) for _ in range(2))
    c = F.layer_norm(F.gelu(a @ b) + F.silu(a), (48,))
    d = F.scaled_dot_product_attention(*(x.view(1, 2, 24, 48) for x in (a @ c, b, c)))
    e = [c.softmax(-1), d, c.exp(), c.abs().log(), c.cos(), c.tanh(), c.double().log_softmax(-1).cumsum(-1)]
    sum(x.double().square().sum() for x in e).backward()  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW([a, b], fused=True)
    optimizer.step()
    digest = hashlib.sha256(torch.__version__.encode())
    for x in (*e, a.grad, b.grad, a, b):
        assert x is not None
        digest.update(x.detach().numpy().tobytes())
    return digest.hexdigest()


def training(folder: Path) -> Found:
    scenes.begun(folder)
    for name, experiment in scenes.training(folder):
        yield name, scenes.trained(experiment, folder / "runs" / name, scenes.Distributed())


def ranks(folder: Path) -> Found:
    """Each rank is a fork, so that everything is imported once."""
    scenes.begun(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            _rank(folder)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if codes != [0, 0]:
        raise RuntimeError(f"ranks ended with {codes}")
    yield from json.loads((folder / "found.json").read_text()).items()


def _rank(folder: Path) -> None:
    try:
        with scenes.init_distributed() as where:
            found = {
                name: scenes.trained(experiment, folder / "runs" / name, where)
                for name, experiment in scenes.ranks(folder)
            }
        if where.is_main:
            (folder / "found.json").write_text(json.dumps(found))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # what is to be done at the end is the parent's


PARTS: dict[str, Callable[[Path], Found]] = {
    "ranks": ranks,
    "training": training,
    "samples": scenes.samples,
    "scores": scenes.scores,
    "report": scenes.report,
}


def exact(value: Any) -> Any:
    """Plain data with floats to the last bit."""
    if isinstance(value, dict):
        return {key: exact(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [exact(each) for each in value]
    return value.hex() if isinstance(value, float) else value


def main() -> None:
    """Write what the parts find, all or those that are named, to a file."""
    torch.set_num_threads(1)
    path, *wanted = sys.argv[1:]
    before = json.loads(Path(path).read_text()) if Path(path).exists() and wanted else {}
    parts = dict(before.get("parts", {}))
    for part in wanted or PARTS:
        with tempfile.TemporaryDirectory() as scratch:
            parts[part] = {name: exact(found) for name, found in PARTS[part](Path(scratch))}
    lines = ["{", f'"fingerprint": "{fingerprint()}",', f'"torch": "{torch.__version__}",', '"parts": {']
    for part, found in parts.items():
        entries = (f"{json.dumps(name)}: {json.dumps(figures)}" for name, figures in found.items())
        lines += [f'"{part}": {{', ",\n".join(entries), "}," if part != [*parts][-1] else "}"]
    Path(path).write_text("\n".join([*lines, "}", "}", ""]))


if __name__ == "__main__":
    main()
