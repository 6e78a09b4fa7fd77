from __future__ import annotations

import itertools
import json
from dataclasses import fields
from typing import Any, get_args

import pytest
import torch

from unmask.backbones.dit import DiTConfig, TimeConditioning
from unmask.config import from_json, to_json
from unmask.diffusion.schedule import AnySchedule, Cosine, FromRate, LogLinear
from unmask.diffusion.times import AnyTimes, PiecewiseTimes, PowerTimes, UniformTimes
from unmask.objectives import D3PM, MDLM, SEDD, AnyObjective

WRITABLE = [schedule() for schedule in get_args(AnySchedule) if schedule is not FromRate]
PROPOSALS: list[AnyTimes] = [UniformTimes(), PowerTimes(3.5), PiecewiseTimes((1.0, 2.5))]


def through_a_file(kind: Any, value: Any) -> Any:
    return from_json(kind, json.loads(json.dumps(to_json(value))))


@pytest.mark.parametrize("schedule", WRITABLE, ids=lambda s: type(s).__name__)
def test_every_schedule_comes_back(schedule: AnySchedule) -> None:
    (name, default) = next(iter(vars(schedule).items()))
    changed = type(schedule)(**{name: default / 2})  # a default could come back without being read
    assert through_a_file(AnySchedule, changed) == changed != schedule


@pytest.mark.parametrize("objective", get_args(AnyObjective), ids=lambda o: o.__name__)
def test_every_objective_comes_back(objective: type[AnyObjective]) -> None:
    takes = {field.name for field in fields(objective)}
    for schedule, times in itertools.product(WRITABLE, PROPOSALS):
        given: dict[str, Any] = {"schedule": schedule, "times": times, "steps": 17, "carry_over": False}
        value = objective(**{name: part for name, part in given.items() if name in takes})
        back = through_a_file(AnyObjective, value)
        assert back == value
        assert type(back) is type(value)  # D3PM is an MDLM too


def test_none_comes_back() -> None:
    assert through_a_file(AnyObjective, MDLM(steps=None)) == MDLM(steps=None)
    assert through_a_file(AnyObjective, D3PM(steps=None)) == D3PM(steps=None) != D3PM()


@pytest.mark.parametrize(
    "config",
    [
        DiTConfig(),
        DiTConfig(width=64, depth=3, heads=4, length=32, dropout=0.0, tied=True, qk_norm=True),
        DiTConfig(causal=True, rotary_base=500_000.0),
        DiTConfig(time=TimeConditioning(width=32, scale=1.5)),
    ],
)
def test_every_network_comes_back(config: DiTConfig) -> None:
    assert through_a_file(DiTConfig, config) == config


def test_what_is_written() -> None:
    assert to_json(SEDD(schedule=Cosine(eps=0.25), times=PiecewiseTimes((1.0, 2.0)))) == {
        "kind": "SEDD",
        "schedule": {"kind": "Cosine", "eps": 0.25},
        "times": {"kind": "PiecewiseTimes", "shares": [1.0, 2.0]},
    }


def test_a_rate_is_code_and_cannot_be_written() -> None:
    rate = FromRate(lambda t: torch.ones_like(t))
    for value in (rate, MDLM(schedule=rate)):
        with pytest.raises(ValueError, match=r"lambda.* cannot be written to a config file"):
            to_json(value)


def test_a_rate_cannot_be_read_either() -> None:
    with pytest.raises(ValueError, match=r"^config\.schedule\.beta must be .*; got '__import__'$"):
        from_json(AnyObjective, {"kind": "MDLM", "schedule": {"kind": "FromRate", "beta": "__import__"}})


def test_what_is_left_out_takes_its_default() -> None:
    assert from_json(AnyObjective, {"kind": "MDLM", "schedule": {"kind": "LogLinear"}}) == MDLM()


def test_a_part_that_can_only_be_one_thing_need_not_say_its_kind() -> None:
    assert from_json(DiTConfig, {"width": 96, "heads": 2}) == DiTConfig(width=96, heads=2)


def test_a_whole_number_is_a_float_but_not_the_other_way_round() -> None:
    read = from_json(LogLinear, {"eps": 0})
    assert read == LogLinear(0.0)
    assert isinstance(read.eps, float)
    with pytest.raises(ValueError, match=r"^config\.width must be int; got 64\.0$"):
        from_json(DiTConfig, {"width": 64.0})


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"^model\.objective has kind 'MLDM'; known are MDLM, D3PM, SEDD"
    ) as error:
        from_json(AnyObjective, {"kind": "MLDM"}, "model.objective")
    assert str(error.value).endswith("(did you mean 'MDLM'?)")


def test_a_kind_like_no_other_gets_no_hint() -> None:
    with pytest.raises(ValueError, match="has kind 'xyz'") as error:
        from_json(AnyObjective, {"kind": "xyz"})
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("kind", [None, 3, ["MDLM"], {"MDLM": 1}])
def test_a_kind_that_is_no_word_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"^config has kind .*; known are MDLM"):
        from_json(AnyObjective, {"kind": kind})


def test_a_union_must_be_told_apart() -> None:
    with pytest.raises(ValueError, match=r"^config has kind None; known are MDLM"):
        from_json(AnyObjective, {"steps": 3})


def test_an_unknown_field_says_where_and_what_was_meant() -> None:
    with pytest.raises(
        ValueError, match=r"^config\.schedule has an unknown field 'epz'; LogLinear has eps"
    ) as error:
        from_json(AnyObjective, {"kind": "MDLM", "schedule": {"kind": "LogLinear", "epz": 0.1}})
    assert str(error.value).endswith("(did you mean 'eps'?)")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"kind": "MDLM", "steps": "ten"}, r"config\.steps must be int or NoneType; got 'ten'"),
        ({"kind": "MDLM", "steps": True}, r"config\.steps must be int or NoneType; got True"),
        ({"kind": "MDLM", "zero_masking": 1}, r"config\.zero_masking must be bool; got 1"),
        (
            {"kind": "MDLM", "schedule": "LogLinear"},
            r"config\.schedule must be LogLinear or .*; got 'LogLinear'",
        ),
        (
            {"kind": "SEDD", "schedule": {"kind": "Cosine", "eps": "x"}},
            r"config\.schedule\.eps must be float; got 'x'",
        ),
        (
            {"kind": "SEDD", "times": {"kind": "PiecewiseTimes", "shares": [1.0, None]}},
            r"config\.times\.shares\[1\] must be float; got None",
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
        from_json(AnyObjective, data)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match=r"^config\.times is incomplete: .*'shares'"):
        from_json(AnyObjective, {"kind": "MDLM", "times": {"kind": "PiecewiseTimes"}})


def test_values_are_checked_as_in_python() -> None:
    with pytest.raises(ValueError, match=r"^config: eps, .* must be in \[0, 1\); got 2\.0$"):
        from_json(AnySchedule, {"kind": "LogLinear", "eps": 2.0})
