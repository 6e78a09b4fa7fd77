"""From texts to rows of ids, and from rows to batches: special tokens, cutting, padding, the other strand of DNA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.context import Context
from unmask.data.tokenizers import BaseTokenizer, Tokenizer
from unmask.types import Batch

TOO_LONG = ("cut", "refuse")
"""What becomes of rows that are longer than the classifier reads."""

_Ids: TypeAlias = NDArray[np.int64]
_PAD_TOKENS = ("[PAD]", "<pad>")
_PROBES = ("A", "a", "0")
"""Short texts; one of them has a token in every vocabulary that is known."""


@dataclass(frozen=True)
class _Template:
    """The special tokens of a row, as (id, segment): prefix a suffix, or prefix a separator b suffix."""

    prefix: tuple[tuple[int, int], ...] = ()
    separator: tuple[tuple[int, int], ...] = ()
    suffix: tuple[tuple[int, int], ...] = ()
    segments: tuple[int, int] = (0, 0)
    """The segments of a and b."""


@dataclass(frozen=True)
class EncodedRows:
    """Rows of ids with their segments. `texts` is where the text is in a row, without special tokens."""

    ids: tuple[_Ids, ...]
    segments: tuple[_Ids, ...]
    texts: tuple[slice, ...]
    num_cut: int = 0
    """Rows that lost tokens because they were too long."""

    def __len__(self) -> int:
        return len(self.ids)

    def other_strand(self, complement: _Ids, rows: Sequence[int]) -> list[_Ids]:
        """The ids of some rows, their texts reversed and complemented: rc(x)_l = complement[x_(L-1-l)]."""
        strands = []
        for row in rows:
            ids = self.ids[row].copy()
            ids[self.texts[row]] = complement[ids[self.texts[row]][::-1]]
            strands.append(ids)
        return strands


class RowEncoder:
    """Encodes one or two texts of a row as the tokenizer's own template says, such as [CLS] a [SEP] b [SEP].

    A tokenizer without a template gets the end-of-text token after every text, where it has one; a single text of DNA
    gets none, as it would be at the other end of the other strand.
    """

    def __init__(self, tokenizer: BaseTokenizer, max_length: int | None) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length

    def encode(self, texts: Sequence[tuple[str, ...]], too_long: str = "cut") -> EncodedRows:
        """The rows of some texts; of two texts, the longer one is cut first."""
        num_texts = len(texts[0]) if texts else 1
        flat, stats = self.tokenizer.encode_batch_with_stats([text for row in texts for text in row])
        if stats.exceeds_limit:
            raise ValueError(self.tokenizer.unknown_text_message(stats))
        template = self._template(num_texts == 2)
        rows = [flat[i : i + num_texts] for i in range(0, len(flat), num_texts)]
        built = [self._build(template, [np.asarray(part, np.int64) for part in row]) for row in rows]
        num_cut = sum(was_cut for *_, was_cut in built)
        if num_cut and too_long == "refuse":
            raise ValueError(
                f"{num_cut:,} of {len(rows):,} rows have more than the {self.max_length} tokens that are read:"
                " raise --max-length, or cut them (--too-long cut)"
            )
        ids, segments, spans, _ = zip(*built, strict=True) if built else ((), (), (), ())
        return EncodedRows(ids, segments, spans, num_cut)

    @cached_property
    def pad_id(self) -> int:
        """An id for padding, which no network attends to."""
        known = (self.tokenizer.vocab.get(name) for name in _PAD_TOKENS)
        return next((id_ for id_ in known if id_ is not None), self.tokenizer.eos_id or 0)

    @property
    def has_prefix(self) -> bool:
        """Whether a row begins with a special token, such as [CLS]."""
        return bool(self._template(is_pair=False).prefix)

    @cached_property
    def complement(self) -> _Ids | None:
        """The id of the complementary base of each id, if the tokenizer is one of DNA; other ids are their own."""
        known = self.tokenizer.complement_ids
        return None if known is None else np.array(known, np.int64)

    def _build(self, template: _Template, parts: list[_Ids]) -> tuple[_Ids, _Ids, slice, bool]:
        """Ids, segments, the place of the first text, and whether anything was cut."""
        joints = [template.prefix, template.separator if len(parts) == 2 else (), template.suffix]
        lengths = self._lengths([len(part) for part in parts], sum(map(len, joints)))
        was_cut = any(length < len(part) for length, part in zip(lengths, parts, strict=True))
        ids: list[_Ids | list[int]] = [[id_ for id_, _ in template.prefix]]
        segments: list[_Ids | list[int]] = [[segment for _, segment in template.prefix]]
        for part, length, after, segment in zip(parts, lengths, joints[-len(parts) :], template.segments, strict=False):
            ids += [part[:length], [id_ for id_, _ in after]]
            segments += [np.full(length, segment), [each for _, each in after]]
        first = len(template.prefix)
        whole = np.concatenate([np.asarray(part, np.int64) for part in ids])
        types = np.concatenate([np.asarray(part, np.int64) for part in segments])
        return whole, types, slice(first, first + lengths[0]), was_cut

    def _lengths(self, lengths: list[int], num_special: int) -> list[int]:
        """How many tokens of each text fit: tokens are taken from the longer one, as long as there are too many."""
        if self.max_length is None or sum(lengths) + num_special <= self.max_length:
            return lengths
        room = self.max_length - num_special
        if room < len(lengths):
            raise ValueError(
                f"max_length {self.max_length} leaves no room for text beside {num_special} special tokens"
            )
        if len(lengths) == 1:
            return [room]
        half = room // 2
        if min(lengths) <= half:
            return [room - lengths[1], lengths[1]] if lengths[1] <= half else [lengths[0], room - lengths[0]]
        return [room - half, half]

    def _template(self, is_pair: bool) -> _Template:
        known = self._pair_template if is_pair else self._single_template
        if is_pair and not known.separator:
            raise ValueError("this tokenizer has no token to put between two texts: join them into one column")
        return known

    @cached_property
    def _single_template(self) -> _Template:
        return self._probe(is_pair=False) or _Template(suffix=() if self.complement is not None else self._end)

    @cached_property
    def _pair_template(self) -> _Template:
        return self._probe(is_pair=True) or _Template(separator=self._end, suffix=self._end)

    @property
    def _end(self) -> tuple[tuple[int, int], ...]:
        return () if self.tokenizer.eos_id is None else ((self.tokenizer.eos_id, 0),)

    def _probe(self, is_pair: bool) -> _Template | None:
        """The template of the tokenizer's post-processor, found by a trial; None if it adds nothing."""
        if not isinstance(self.tokenizer, Tokenizer):
            return None
        backend = self.tokenizer.backend
        if not backend.num_special_tokens_to_add(is_pair):
            return None
        for text in _PROBES:
            encoding = backend.encode(text, text if is_pair else None)
            owners = encoding.sequence_ids
            places = [[i for i, owner in enumerate(owners) if owner == number] for number in range(1 + is_pair)]
            if not all(places):
                continue
            pairs = list(zip(encoding.ids, encoding.type_ids, strict=True))
            return _Template(
                prefix=tuple(pairs[: places[0][0]]),
                separator=tuple(pairs[places[0][-1] + 1 : places[1][0]]) if is_pair else (),
                suffix=tuple(pairs[places[-1][-1] + 1 :]),
                segments=(encoding.type_ids[places[0][0]], encoding.type_ids[places[-1][0]]),
            )
        return None


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """Rows with their targets: ids of classes, or numbers. Rows that are not `counted` fill up a last batch."""

    targets: Tensor = torch.empty(0)
    """float64 [B]."""
    counted: Tensor = torch.empty(0, dtype=torch.bool)
    """bool [B]."""
    segment_ids: Tensor | None = None
    """int64 [B, L], for networks that tell two texts apart."""

    @property
    def context(self) -> Context:
        return Context(valid=self.valid, segment_ids=self.segment_ids)


def pad_rows(ids: Sequence[_Ids], pad_id: int, width: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Tokens [B, L] and which are not padding, which is on the right; None where nothing is padded."""
    lengths = torch.tensor([len(row) for row in ids])
    width = int(lengths.max()) if width is None else width
    tokens = torch.full((len(ids), width), pad_id)
    for row, values in enumerate(ids):
        tokens[row, : len(values)] = torch.from_numpy(values)
    valid = torch.arange(width) < lengths[:, None]
    return tokens, None if bool(valid.all()) else valid


@dataclass(frozen=True)
class TrainingBatches:
    """The batches of a training set, epoch by epoch, each in a random order of its own.

    An epoch ends with a smaller batch, as in most published code: it is filled up with rows that do not count. With
    `complement`, every second row, at random, is read on the other strand.
    """

    rows: EncodedRows
    targets: NDArray[np.float64]
    batch_size: int
    seed: int
    pad_id: int
    with_segments: bool = False
    complement: _Ids | None = None

    @property
    def steps_per_epoch(self) -> int:
        """BatchSource of an epoch."""
        return -(-len(self.rows) // self.batch_size)

    def batch(self, step: int, row_offset: int, count: int) -> LabelledBatch:
        """Rows row_offset, ... of the global batch of a step."""
        epoch, number = divmod(step, self.steps_per_epoch)
        random = np.random.default_rng([self.seed, 3, epoch])
        order = random.permutation(len(self.rows))
        strands = random.random(len(self.rows)) < 0.5 if self.complement is not None else None
        places = np.arange(number * self.batch_size, (number + 1) * self.batch_size)
        chosen = order[places % len(order)]  # those past the end do not count
        width = max(len(self.rows.ids[row]) for row in chosen)  # of the global batch, whatever the ranks
        mine = chosen[row_offset : row_offset + count]
        tokens, valid = pad_rows(self._ids(mine, strands), self.pad_id, width)
        segments = pad_rows([self.rows.segments[row] for row in mine], 0, width)[0] if self.with_segments else None
        return LabelledBatch(
            tokens,
            valid,
            row_offset=row_offset,
            global_batch_size=max(self.batch_size, row_offset + count),
            targets=torch.from_numpy(self.targets[mine]),
            counted=torch.from_numpy(places[row_offset : row_offset + count] < len(order)),
            segment_ids=segments,
        )

    def _ids(self, rows: _Ids, strands: NDArray[np.bool_] | None) -> list[_Ids]:
        if strands is None or self.complement is None:
            return [self.rows.ids[row] for row in rows]
        return [
            self.rows.other_strand(self.complement, [row])[0] if strands[row] else self.rows.ids[row] for row in rows
        ]
