from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unmask.backbones.dit import DiTConfig, TimeConditioning
from unmask.config import from_json, override, to_json
from unmask.diffusion import SCHEDULES
from unmask.diffusion.schedule import Cosine, IntegratedRate, LogLinear, Schedule
from unmask.diffusion.time_sampling import AnyTimes, HistogramTimes, PowerTimes, UniformTimes
from unmask.objectives import D3PM, MDLM, OBJECTIVES, SEDD, Objective
from unmask.training._trackers import TensorBoard
from unmask.training.config import TrainingConfig

WRITABLE = [schedule() for schedule in SCHEDULES.values() if schedule is not IntegratedRate]
PROPOSALS: list[AnyTimes] = [UniformTimes(), PowerTimes(3.5), HistogramTimes((1.0, 2.5))]


def through_a_file(kind: Any, value: Any) -> Any:
    return from_json(kind, json.loads(json.dumps(to_json(value))))


@pytest.mark.parametrize("schedule", WRITABLE, ids=lambda s: type(s).__name__)
def test_every_schedule_comes_back(schedule: Schedule) -> None:
    (name, default) = next(iter(vars(schedule).items()))
    changed = type(schedule)(**{name: default / 2})  # a default could come back without being read
    assert through_a_file(Schedule, changed) == changed != schedule


@pytest.mark.parametrize("objective", list(OBJECTIVES.values()), ids=lambda o: o.__name__)
def test_every_objective_comes_back(objective: type[Objective]) -> None:
    takes = {field.name for field in fields(objective)}
    for schedule, times in itertools.product(WRITABLE, PROPOSALS):
        given: dict[str, Any] = {"schedule": schedule, "times": times, "steps": 17, "carry_over": False}
        value = objective(**{name: part for name, part in given.items() if name in takes})
        back = through_a_file(Objective, value)
        assert back == value
        assert type(back) is type(value)


def test_none_comes_back() -> None:
    assert through_a_file(Objective, MDLM(steps=None)) == MDLM(steps=None)
    assert through_a_file(Objective, D3PM(steps=None)) == D3PM(steps=None) != D3PM()


@pytest.mark.parametrize(
    "config",
    [
        DiTConfig(),
        DiTConfig(width=64, depth=3, heads=4, max_length=32, dropout=0.0, tie_embeddings=True, qk_norm=True),
        DiTConfig(causal=True, rope_theta=500_000.0),
        DiTConfig(time_conditioning=TimeConditioning(width=32, scale=1.5)),
    ],
)
def test_every_network_comes_back(config: DiTConfig) -> None:
    assert through_a_file(DiTConfig, config) == config


def test_what_is_written() -> None:
    assert to_json(SEDD(schedule=Cosine(eps=0.25), times=HistogramTimes((1.0, 2.0)))) == {
        "kind": "SEDD",
        "schedule": {"kind": "Cosine", "eps": 0.25},
        "times": {"kind": "HistogramTimes", "weights": [1.0, 2.0]},
        "exact_mask_counts": False,
    }


def test_a_rate_is_code_and_cannot_be_written() -> None:
    rate = IntegratedRate(lambda t: torch.ones_like(t))
    for value in (rate, MDLM(schedule=rate)):
        with pytest.raises(ValueError, match=r"lambda.* cannot be written to a config file"):
            to_json(value)


def test_a_rate_cannot_be_read_either() -> None:
    with pytest.raises(ValueError, match=r"^config\.schedule\.beta must be .*; got '__import__'$"):
        from_json(Objective, {"kind": "MDLM", "schedule": {"kind": "IntegratedRate", "beta": "__import__"}})


def test_what_is_left_out_takes_its_default() -> None:
    assert from_json(Objective, {"kind": "MDLM", "schedule": {"kind": "LogLinear"}}) == MDLM()


def test_a_part_that_can_only_be_one_thing_need_not_say_its_kind() -> None:
    assert from_json(DiTConfig, {"width": 96, "heads": 2}) == DiTConfig(width=96, heads=2)


def test_a_whole_number_is_a_float_but_not_the_other_way_round() -> None:
    read = from_json(LogLinear, {"eps": 0})
    assert read == LogLinear(0.0)
    assert isinstance(read.eps, float)
    with pytest.raises(ValueError, match=r"^config\.width must be int; got 64\.0$"):
        from_json(DiTConfig, {"width": 64.0})


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^model\.objective has kind 'MDLMs'; known are MDLM, D3PM, SEDD") as error:
        from_json(Objective, {"kind": "MDLMs"}, "model.objective")
    assert str(error.value).endswith("(did you mean MDLM?)")


def test_a_kind_like_no_other_gets_no_hint() -> None:
    with pytest.raises(ValueError, match="has kind 'xyz'") as error:
        from_json(Objective, {"kind": "xyz"})
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("kind", [None, 3, ["MDLM"], {"MDLM": 1}])
def test_a_kind_that_is_no_word_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"^config has kind .*; known are MDLM"):
        from_json(Objective, {"kind": kind})


def test_a_union_must_be_told_apart() -> None:
    with pytest.raises(ValueError, match=r"^config has kind None; known are MDLM"):
        from_json(Objective, {"steps": 3})


def test_an_unknown_field_says_where_and_what_was_meant() -> None:
    with pytest.raises(ValueError, match=r"^config\.schedule has an unknown field 'epz'; LogLinear has eps") as error:
        from_json(Objective, {"kind": "MDLM", "schedule": {"kind": "LogLinear", "epz": 0.1}})
    assert str(error.value).endswith("(did you mean eps?)")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"kind": "MDLM", "steps": "ten"}, r"config\.steps must be int or None; got 'ten'"),
        ({"kind": "MDLM", "steps": True}, r"config\.steps must be int or None; got True"),
        ({"kind": "MDLM", "carry_over": 1}, r"config\.carry_over must be bool; got 1"),
        (
            {"kind": "MDLM", "schedule": "LogLinar"},
            r"config\.schedule must be LogLinear or .*; got 'LogLinar' \(did you mean LogLinear\?\)",
        ),
        (
            {"kind": "SEDD", "schedule": {"kind": "Cosine", "eps": "x"}},
            r"config\.schedule\.eps must be float; got 'x'",
        ),
        (
            {"kind": "SEDD", "times": {"kind": "HistogramTimes", "weights": [1.0, None]}},
            r"config\.times\.weights\[1\] must be float; got None",
        ),
        (
            {"kind": "MDLM", "schedule": {"kind": "Cosine", "eps": True}},
            r"config\.schedule\.eps must be .*True",
        ),
        (["MDLM"], r"config must be MDLM or .*; got \['MDLM'\]"),
    ],
)
def test_a_wrong_type_says_where_and_what_would_be_right(data: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        from_json(Objective, data)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match=r"^config\.times is incomplete: .*'weights'"):
        from_json(Objective, {"kind": "MDLM", "times": {"kind": "HistogramTimes"}})


def test_values_are_checked_as_in_python() -> None:
    with pytest.raises(ValueError, match=r"^config: eps, .* must be in \[0, 1\); got 2\.0$"):
        from_json(Schedule, {"kind": "LogLinear", "eps": 2.0})


# Changes


@dataclass(frozen=True)
class Part:
    share: float = 0.5
    pair: tuple[float, int] = (0.5, 1)
    names: tuple[str, ...] = ("a",)
    word: str = "bytes"
    flag: bool | None = None
    time: TimeConditioning | None = None


@dataclass(frozen=True)
class Whole:
    """`low` must be below `high`, so some changes can only be made together."""

    objective: Objective = MDLM()
    part: Part = Part()
    low: int = 1
    high: int = 2

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low must be below high; got {self.low} and {self.high}")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("low=-3", Whole(low=-3)),
        (" part.share = 1 ", Whole(part=Part(share=1.0))),
        ("part.share=1e-4", Whole(part=Part(share=1e-4))),
        ("part.pair=0.9,3", Whole(part=Part(pair=(0.9, 3)))),
        ("part.pair=[0.9, 3]", Whole(part=Part(pair=(0.9, 3)))),
        ("part.names=x, y=z", Whole(part=Part(names=("x", "y=z")))),
        ('part.names=["x, y"]', Whole(part=Part(names=("x, y",)))),
        ("part.names=", Whole(part=Part(names=()))),
        ("part.word=bpe:17", Whole(part=Part(word="bpe:17"))),
        ("part.word=17", Whole(part=Part(word="17"))),
        ("part.word=none", Whole(part=Part(word="none"))),
        ('part.word="17"', Whole(part=Part(word="17"))),
        ("part.word=", Whole(part=Part(word=""))),
        ("part.flag=true", Whole(part=Part(flag=True))),
        ("part.flag=False", Whole(part=Part(flag=False))),
        ("part.time=TimeConditioning", Whole(part=Part(time=TimeConditioning()))),
        ("objective=D3PM", Whole(objective=D3PM())),
        ("objective.schedule=Cosine", Whole(objective=MDLM(schedule=Cosine()))),
        ("objective.steps=7", Whole(objective=MDLM(steps=7))),
        (
            'objective.schedule={"kind": "Cosine", "eps": 0.25}',
            Whole(objective=MDLM(schedule=Cosine(0.25))),
        ),
    ],
)
def test_one_change(change: str, expected: Whole) -> None:
    changed = override(Whole(), change)
    assert changed == expected
    assert to_json(changed) == to_json(expected)  # 1 == 1.0 == True, but not in a file


def test_no_change() -> None:
    assert override(Whole(low=0)) == Whole(low=0)


def test_none_is_a_value_where_it_may_be() -> None:
    start = Whole(part=Part(flag=True, time=TimeConditioning()))
    assert override(start, "part.flag=None", "part.time=null") == Whole()


def test_changes_are_made_in_order_and_checked_together() -> None:
    assert override(Whole(), "low=5", "high=6", "low=4") == Whole(low=4, high=6)
    with pytest.raises(ValueError, match=r"^whole: low must be below high; got 5 and 2$"):
        override(Whole(), "low=5")


def test_a_kind_starts_from_its_defaults_and_is_then_changed() -> None:
    start = Whole(objective=MDLM(schedule=LogLinear(0.25), steps=3))
    changed = override(start, "objective=SEDD", "objective.schedule=Cosine", "objective.schedule.eps=0.5")
    assert changed == Whole(objective=SEDD(schedule=Cosine(0.5)))


def test_a_kind_without_defaults_can_be_chosen_and_completed() -> None:
    changed = override(Whole(), "objective.times=HistogramTimes", "objective.times.weights=1,2")
    assert changed == Whole(objective=MDLM(times=HistogramTimes((1.0, 2.0))))
    with pytest.raises(ValueError, match=r"objective\.times is incomplete: HistogramTimes needs 'weights'$"):
        override(Whole(), "objective.times=HistogramTimes")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("low", r"a change is written field=value or part\.field=value; got 'low'"),
        ("=3", r"a change is written .*; got '=3'"),
        ("lwo=3", r"whole has an unknown field 'lwo'; Whole has .* \(did you mean low\?\)"),
        ("part.shar=3", r"part has an unknown field 'shar'; Part has .* \(did you mean share\?\)"),
        ("prat.share=3", r"whole has an unknown field 'prat'; .* \(did you mean part\?\)"),
        ("part..share=3", r"part has an unknown field ''; .*"),
        ("part.kind=Whole", r"part has an unknown field 'kind'; .*"),
        ("low=x", r"low must be int; got 'x'"),
        ("low=1.5", r"low must be int; got 1\.5"),
        ("low=", r"low must be int; got ''"),
        ("part.share=True", r"part\.share must be float; got True"),
        ("part.flag=perhaps", r"part\.flag must be bool or None; got 'perhaps'"),
        ("part.pair=1", r"part\.pair must have 2 items; got 1"),
        ("part.pair=1,x", r"part\.pair\[1\] must be int; got 'x'"),
        ("part=3", r"part must be Part; got 3"),
        ("low.x=3", r"low is 1 and has no field 'x'"),
        (
            "part.time.width=3",
            r"part\.time is None and has no field 'width'; choose one first, .*=TimeConditioning",
        ),
        ("objective=sedd", r"objective must be MDLM or .*; got 'sedd' \(did you mean SEDD\?\)"),
        ("objective.schedule.eps=2", r"whole\.objective\.schedule: eps, .* got 2\.0"),
    ],
)
def test_a_wrong_change_names_the_field_the_value_and_what_would_be_right(change: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        override(Whole(), change)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a config's JSON, inner ones and outer ones."""
    for name, value in tree.items():
        if name != "kind":
            yield f"{path}{name}", value
            if isinstance(value, dict):
                yield from leaves(value, f"{path}{name}.")


FILLED = Whole(
    SEDD(schedule=Cosine(0.25), times=HistogramTimes((1.0, 2.0))),
    Part(flag=True, time=TimeConditioning(8, 2.0)),
)


@pytest.mark.parametrize(("path", "value"), list(leaves(to_json(FILLED))))
def test_every_field_is_within_reach(path: str, value: Any) -> None:
    assert override(FILLED, f"{path}={json.dumps(value)}") == FILLED


@given(
    st.builds(
        Part,
        share=st.floats(allow_nan=False, allow_infinity=False),
        pair=st.tuples(st.floats(0, 1), st.integers()),
        names=st.lists(st.text()).map(tuple),
        word=st.text(),
        flag=st.none() | st.booleans(),
        time=st.none() | st.just(TimeConditioning(width=16)),
    )
)
def test_any_config_can_be_reached_field_by_field(part: Part) -> None:
    changes = [f"part.{name}={json.dumps(value)}" for name, value in to_json(part).items() if name != "kind"]
    assert override(Whole(), *changes) == Whole(part=part)


@given(st.text())
def test_any_text_is_a_change_or_told_to_be_none(text: str) -> None:
    for start in ("", "part.", "part.share=", "objective=", "part.pair="):
        with contextlib.suppress(ValueError):
            assert isinstance(override(Whole(), start + text), Whole)


@pytest.mark.parametrize("value", ['["TensorBoard"]', "TensorBoard", '[{"kind": "TensorBoard"}]'])
def test_names_of_kinds_stand_for_their_defaults_in_lists_too(value: str) -> None:
    assert override(TrainingConfig(), f"trackers={value}").trackers == (TensorBoard(),)
