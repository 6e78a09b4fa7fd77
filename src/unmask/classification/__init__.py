"""Fine-tuning on labels: a backbone of any model folder, a head, and classes or numbers of one or two texts."""

from __future__ import annotations

from unmask.classification._classifier import Classifier
from unmask.classification._experiment import ClassificationExperiment, LabelledData, make_experiment, task_data
from unmask.classification._folder import is_classifier, load_classifier, save_classifier
from unmask.classification._labels import Labels
from unmask.classification._metrics import Evaluation, Metric, Summary, evaluate
from unmask.classification._network import POOLINGS, ClassifierConfig, SequenceClassifier, pool
from unmask.classification._predictions import check_output, write_predictions
from unmask.classification._run import RESULTS_FILE, Results, RunResult, load_encoder, run_classification, run_many
from unmask.classification._table import Table, column_options, read_table
from unmask.classification._tasks import OWN_DATA, TASKS, Protocol, Split, Task, find_task

__all__ = [
    "OWN_DATA",
    "POOLINGS",
    "RESULTS_FILE",
    "TASKS",
    "ClassificationExperiment",
    "Classifier",
    "ClassifierConfig",
    "Evaluation",
    "LabelledData",
    "Labels",
    "Metric",
    "Protocol",
    "Results",
    "RunResult",
    "SequenceClassifier",
    "Split",
    "Summary",
    "Table",
    "Task",
    "check_output",
    "column_options",
    "evaluate",
    "find_task",
    "is_classifier",
    "load_classifier",
    "load_encoder",
    "make_experiment",
    "pool",
    "read_table",
    "run_classification",
    "run_many",
    "save_classifier",
    "task_data",
    "write_predictions",
]
