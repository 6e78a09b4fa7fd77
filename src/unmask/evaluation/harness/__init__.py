"""lm-evaluation-harness: `unmask` as one of its models, and the figures of its tasks.

Importing this package imports `lm_eval`; only `unmask eval --tasks` and `lm_eval` itself do.
"""

from __future__ import annotations

from unmask.evaluation.harness._model import HarnessModel
from unmask.evaluation.harness._tasks import TaskConfig, TaskFigure, TaskResults, evaluate_tasks, load_tasks

__all__ = ["HarnessModel", "TaskConfig", "TaskFigure", "TaskResults", "evaluate_tasks", "load_tasks"]
