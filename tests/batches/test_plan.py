"""The plan of batches: every sequence once, with bounded tokens and padding, whatever the requests are."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from unmask.batches import Item, plan_batches

ITEMS = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 300), st.sampled_from("ab")),
    max_size=80,
).map(
    lambda rows: [
        Item(line, 0, length, min(work, length), group, None) for line, (length, work, group) in enumerate(rows)
    ]
)


@given(items=ITEMS, max_tokens=st.integers(1, 2000))
def test_every_sequence_is_in_one_batch_with_little_padding(items: list[Item], max_tokens: int) -> None:
    plan = plan_batches(items, max_tokens)
    assert sorted(number for batch in plan for number in batch) == list(range(len(items)))
    for batch in plan:
        lengths = [items[number].length for number in batch]
        assert len(batch) == 1 or max(lengths) * len(batch) <= max_tokens
        assert max(lengths) - min(lengths) <= max(8, max(lengths) / 8)
        assert len({items[number].group for number in batch}) == 1


@given(items=ITEMS, max_tokens=st.integers(1, 2000))
def test_batches_are_as_full_as_their_neighbours_allow(items: list[Item], max_tokens: int) -> None:
    """The longest sequence of the next batch of a group did not fit into this one."""
    by_group: dict[str, list[list[int]]] = {}
    for batch in plan_batches(items, max_tokens):
        by_group.setdefault(items[batch[0]].group, []).append(batch)
    for batches in by_group.values():
        ordered = sorted(batches, key=lambda batch: (-items[batch[0]].length, -items[batch[0]].work, batch[0]))
        for one, following in itertools.pairwise(ordered):
            longest, other = items[one[0]].length, items[following[0]].length
            assert (len(one) + 1) * longest > max_tokens or longest - other > max(8, longest / 8)


def test_ten_thousand_short_requests_are_few_batches() -> None:
    items = [Item(line, 0, 10 + line % 30, 5, None, None) for line in range(10_000)]
    plan = plan_batches(items, 4096)
    padded = sum(max(items[i].length for i in batch) * len(batch) for batch in plan)
    assert len(plan) < 80
    assert padded < 1.05 * sum(item.length for item in items)
