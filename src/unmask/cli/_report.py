"""`unmask report`."""

from __future__ import annotations

from pathlib import Path

from unmask.cli._arguments import AllowCodeFlag, ModelPath, allow_imports


def report(
    run: ModelPath,
    out: Path | None = None,
    windows: int = 80,
    samples: int = 4,
    steps: int = 64,
    seed: int = 0,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Write the report of a run, also of a classifier: an HTML page with figures, curves, samples and settings.

    For example:
      unmask report runs/demo

    Args:
        run: The folder of a run, finished or not.
        out: The folder to write; RUN/report by default.
        windows: Held-out windows to evaluate.
        samples: Samples to generate; the page shows the order in which their tokens were unmasked.
        steps: Sampling steps.
        seed: The seed of the evaluation and the samples.
    """
    from unmask.cli._progress import progress
    from unmask.report import ReportConfig, write_report

    allow_imports(allow_code)
    config = ReportConfig(windows=windows, samples=samples, steps=steps, seed=seed)
    print(write_report(run, out, config, progress, allow_code=allow_code))
