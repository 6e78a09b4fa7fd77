"""Antibody sequences from germline genes: texts of proteins, and a task with labels.

The variable part of an antibody is one V gene joined with one J gene. The package anarci lists these genes of several
species, as IMGT numbers them. Each V gene here is joined with one J gene of its species and chain; what D genes and
random insertions add between the two in heavy chains is missing. Genes, and with them all of their alleles, are either
learned, validated on, or tested on.
"""

from __future__ import annotations

import ast
import csv
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SPECIES = ("human", "mouse", "rabbit", "rat", "rhesus")
"""Those with at least 60 V genes: the classes of the task."""
_CHAINS = ("H", "K", "L")
_RESIDUES = frozenset("ACDEFGHIKLMNPQRSTVWY")
_PARTS = (("train", 0.7), ("valid", 0.8), ("test", 1.0))
"""Which genes are in a part, as the upper end of their hashes."""


class _Antibody(NamedTuple):
    sequence: str
    species: str
    part: str


def write_antibodies(germlines: Path, folder: Path) -> None:
    """Write train.txt and test.txt, a sequence a line, and train, valid and test.csv with their species."""
    antibodies = list(_join_genes(_read_germlines(germlines)))
    for part, _ in _PARTS:
        rows = [(each.sequence, each.species) for each in antibodies if each.part == part]
        with (folder / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("sequence", "label"), *rows])
        (folder / f"{part}.txt").write_text("".join(f"{sequence}\n" for sequence, _ in rows), encoding="utf-8")


def _read_germlines(file: Path) -> Mapping[str, Any]:
    """Segment -> chain -> species -> gene -> residues with gaps: a literal in Python, which is not run."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "all_germlines":
            genes: Mapping[str, Any] = ast.literal_eval(node.value)
            return genes
    raise ValueError(f"{file} does not list germline genes as the package anarci 2026.2.13.2 does")


def _join_genes(germlines: Mapping[str, Any]) -> Iterator[_Antibody]:
    """Every V gene once, in a fixed order; alleles that read alike only once."""
    seen: set[str] = set()
    for chain in _CHAINS:
        for species in SPECIES:
            joining = sorted(set(germlines["J"][chain].get(species, {}).values()))
            for allele, residues in sorted(germlines["V"][chain].get(species, {}).items()):
                if not joining or residues in seen:
                    continue
                seen.add(residues)
                chosen = joining[int(_share(f"{species} {allele}") * len(joining))]
                sequence = (residues + chosen).replace("-", "")
                if _RESIDUES.issuperset(sequence):
                    yield _Antibody(sequence, species, _part(f"{species} {allele.partition('*')[0]}"))


def _part(gene: str) -> str:
    share = _share(gene)
    return next(part for part, end in _PARTS if share < end)


def _share(name: str) -> float:
    """A number in [0, 1) that a name always has."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) / 2**48
