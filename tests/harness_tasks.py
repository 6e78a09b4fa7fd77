"""Small tasks of lm-evaluation-harness in a folder, with no need of a network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
LAST_WORD = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "metric_list": [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ],
}
WHOLE_TEXT = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [
        {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
        {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
    ],
}
ANSWER = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["c"], "max_gen_toks": 6},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
TASKS: Mapping[str, Mapping[str, Any]] = {
    "tiny_choices": CHOICES,
    "tiny_last_word": LAST_WORD,
    "tiny_whole_text": WHOLE_TEXT,
    "tiny_answer": ANSWER,
}
DOCUMENTS = [
    {
        "question": "abcd dcba"[n % 3 : 4 + n],
        "choices": ["abcdabcda"[n % 2 :], "b", " dcab"],
        "answer": n % 3,
        "text": "abcd abba cd a" * (1 + n),
    }
    for n in range(5)
]


def write_tasks(folder: Path, documents: Sequence[Mapping[str, Any]] = DOCUMENTS) -> Path:
    """A folder for --include-path, with the tasks and the group tiny_group of two of them."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents))
    for name, task in TASKS.items():
        source = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
            "test_split": "test",
            "target_delimiter": "",
            "fewshot_delimiter": " ",
            **task,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(source))
    group = {
        "group": "tiny_group",
        "task": ["tiny_choices", "tiny_last_word"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    (folder / "tiny_group.yaml").write_text(yaml.safe_dump(group))
    return folder
