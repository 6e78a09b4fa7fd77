"""Judges: the right nats of every text, alone and in a batch, and nothing read that could run or mislead."""

from __future__ import annotations

import json
import logging.handlers
import pickle
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_models import CONTEXT, VOCAB_SIZE, write_model, write_reference_model, write_tokenizer
from unmask.evaluation import reference_model as judging
from unmask.evaluation.reference_model import CausalReferenceModel
from unmask.evaluation.sample_metrics import sample_metrics

TEXTS = [
    "Flat is better than nested.",
    "",
    "a",
    "zz",
    "a text that is much longer than the judge can read" * 2,
]
KINDS = ["gpt2", "llama"]
TRAP = Path("trap")


@pytest.fixture(scope="module", params=KINDS)
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalReferenceModel:
    return CausalReferenceModel.load(
        write_reference_model(tmp_path_factory.mktemp("judges") / request.param, request.param)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A judge that a test may spoil."""
    return write_reference_model(tmp_path / "judge", "gpt2")


def token_by_token(judge: CausalReferenceModel, text: str, context: int) -> tuple[float, int]:
    """The documented convention, in a plain loop over tokens, each with a call of its own, in float64."""
    import copy

    model = copy.deepcopy(judge.model).double()
    ids = judge.tokenizer(text, add_special_tokens=False).input_ids
    past = [] if judge.bos_id is None else [judge.bos_id]
    room = context + 1 - len(past)
    nats, count = 0.0, 0
    for i, token in enumerate(ids):
        # token i is first seen by the window that ends at room, room + stride, room + 2 stride ... or the end
        late = max(0, i + 1 - room)
        end = min(len(ids), room + -(-late // (room // 2)) * (room // 2))
        before = past + ids[max(0, end - room) : i]
        if before:
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([before])).logits[0, -1]
            nats -= float(logits.double().log_softmax(-1)[token])
            count += 1
    return nats, count


def test_the_nats_are_those_of_a_plain_loop(judge: CausalReferenceModel) -> None:
    for text, (nats, count) in zip(TEXTS, judge.nll(TEXTS), strict=True):
        expected, tokens = token_by_token(judge, text, CONTEXT)
        assert count == tokens
        assert nats == pytest.approx(expected, abs=1e-4, rel=1e-6)


def test_a_shorter_context_is_another_convention(judge: CausalReferenceModel) -> None:
    short = CausalReferenceModel(judge.model, judge.tokenizer, judge.label, judge.bos_id, context_length=7)
    for text, (nats, count) in zip(TEXTS, short.nll(TEXTS), strict=True):
        expected, tokens = token_by_token(judge, text, 7)
        assert (nats, count) == (pytest.approx(expected, abs=1e-4, rel=1e-6), tokens)
    assert short.nll(TEXTS)[-1][0] != pytest.approx(judge.nll(TEXTS)[-1][0], abs=0.1)


def test_a_text_costs_the_same_alone_and_in_any_batch(
    judge: CausalReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = judge.nll(TEXTS)
    assert [judge.nll([text])[0] for text in TEXTS] == [(pytest.approx(n, abs=1e-4), c) for n, c in together]
    monkeypatch.setattr(judging, "_MAX_BATCH_LOGITS", 3 * CONTEXT * VOCAB_SIZE)
    assert judge.nll(TEXTS[::-1]) == [(pytest.approx(n, abs=1e-4), c) for n, c in together[::-1]]


def test_batches_keep_to_their_size(judge: CausalReferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_MAX_BATCH_LOGITS", 3 * (CONTEXT + 1) * VOCAB_SIZE)
    sizes = [len(batch) * len(batch[0].tokens) for batch in judge._batches(TEXTS * 3)]
    assert len(sizes) > 2
    assert max(sizes) <= 3 * (CONTEXT + 1)


def test_the_first_token_is_charged_only_if_something_predicts_it(judge: CausalReferenceModel) -> None:
    charged = judge.label == "llama"
    assert [count for _, count in judge.nll(["", "a", "ab"])] == ([0, 1, 2] if charged else [0, 0, 1])
    told = "predicted from BOS" if charged else "not scored"
    assert judge.name == f"{judge.label} (context {CONTEXT}, first token {told})"
    assert judge.nll([]) == []


@pytest.mark.parametrize("past", [[], [99]])
@pytest.mark.parametrize("context", [2, 3, 8, 9])
def test_windows_charge_every_token_once_and_keep_half_a_context(past: list[int], context: int) -> None:
    room = context + 1 - len(past)
    for length in range(2, 40):
        ids, charged = list(range(length)), []
        for window in judging._windows(5, ids, past, context):
            assert (window.text_index, window.tokens[: len(past)]) == (5, past)
            assert len(window.tokens) <= context + 1
            first = len(window.tokens) - window.num_scored
            charged += window.tokens[first:]
            before = window.tokens[len(past) : first]
            assert not charged[: -window.num_scored] or len(before) >= room - room // 2
        assert charged == ids[1 - len(past) :]


def test_without_a_context_there_is_one_window() -> None:
    windows = list(judging._windows(0, [3, 4, 5], [], None))
    assert [(window.tokens, window.num_scored) for window in windows] == [([3, 4, 5], 2)]


def test_weights_are_read_as_they_are_and_used_in_float32(folder: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(
        {name: tensor.float() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    before = CausalReferenceModel.load(folder)
    expected = before.nll(TEXTS)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    judge = CausalReferenceModel.load(folder)
    assert {parameter.dtype for parameter in judge.model.parameters()} == {torch.float32}
    assert judge.nll(TEXTS) == expected
    assert judge.digest() == before.digest()
    with torch.no_grad():
        next(judge.model.parameters()).view(-1)[0] += 1
    assert judge.digest() != before.digest()


def test_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": CONTEXT}))
    advice = logging.handlers.BufferingHandler(capacity=100)
    logging.getLogger("transformers").addHandler(advice)
    capfd.readouterr()
    try:
        CausalReferenceModel.load(folder).nll(["a" * 5000])
    finally:
        logging.getLogger("transformers").removeHandler(advice)
    assert capfd.readouterr() == ("", "")
    assert advice.buffer == []


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (TRAP,)


def test_a_pickle_is_not_opened(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"cannot be loaded as a reference model: .*safetensors"):
        CausalReferenceModel.load(folder)
    assert not TRAP.exists()


def test_code_in_the_folder_is_not_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "code.py").write_text("from pathlib import Path\nPath('trap').touch()\nclass C: ...\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.C"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="cannot be loaded as a reference model"):
        CausalReferenceModel.load(folder)
    assert not TRAP.exists()


def test_a_config_cannot_name_a_kernel_to_fetch(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    named = {"attn_implementation": "someone/kernel", "_attn_implementation": "someone/kernel"}
    (folder / "config.json").write_text(json.dumps({**config, **named}))
    config = CausalReferenceModel.load(folder).model.config
    assert config._attn_implementation in ("sdpa", "eager")  # type: ignore[union-attr]


def test_weights_that_are_absent_are_not_made_up(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights that its config requires: .*c_fc.weight"):
        CausalReferenceModel.load(folder)


def test_damaged_weights_give_no_verdict(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.ln_f.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="not finite"):
        CausalReferenceModel.load(folder).nll(["abc"])


def test_a_model_that_looks_ahead_is_no_judge(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not causal"):
        CausalReferenceModel.load(write_reference_model(tmp_path / "bert", "bert"))


def test_a_judge_needs_its_own_tokenizer(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer"):
        CausalReferenceModel.load(folder)


def test_a_tokenizer_of_another_model_is_told(tmp_path: Path) -> None:
    from transformers import GPT2Config

    write_model(tmp_path, GPT2Config(vocab_size=100, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    write_tokenizer(tmp_path, bos=False)
    with pytest.raises(ValueError, match="ids beyond its model's 100"):
        CausalReferenceModel.load(tmp_path)


@pytest.mark.parametrize("context", [1, 0, -3, CONTEXT + 1])
def test_a_context_must_fit_the_model(folder: Path, context: int) -> None:
    with pytest.raises(ValueError, match=f"must be 2 to {CONTEXT} tokens; got {context}"):
        CausalReferenceModel.load(folder, context_length=context)


def test_a_given_context_is_used(folder: Path) -> None:
    assert CausalReferenceModel.load(folder, context_length=7).context_length == 7


def test_where_a_judge_is_found(tmp_path: Path) -> None:
    locate = judging._locate
    one = tmp_path / "one"
    one.mkdir()
    with pytest.raises(ValueError, match=r"config\.json or one \.gguf file"):
        locate(one, None)
    (one / "a.gguf").touch()
    assert locate(one, None) == locate(one / "a.gguf", None) == (str(one), "a.gguf")
    (one / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"holds 2 \.gguf files"):
        locate(one, None)
    assert locate(one, "b.gguf") == (str(one), "b.gguf")
    (one / "config.json").touch()
    assert locate(one, None) == (str(one), None)
    assert locate("someone/model", None) == ("someone/model", None)
    assert locate("someone/model-GGUF", "c.gguf") == ("someone/model-GGUF", "c.gguf")
    for bad in (one / "config.json", one / "absent.gguf"):
        with pytest.raises(ValueError, match="is not a model; a reference model is"):
            locate(bad, None)


@pytest.mark.parametrize(("file", "absent", "extra"), [("", "transformers", "hf"), ("a.gguf", "gguf", "gguf")])
def test_what_is_not_installed_is_named(
    tmp_path: Path, file: str, absent: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "find_spec", lambda name: None if name == absent else find_spec(name))
    with pytest.raises(ValueError, match=rf"needs the extra {extra}: pip install 'unmask\[{extra}\]'"):
        CausalReferenceModel.load("someone/model", file or None)


def test_a_name_that_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="someone/model is neither here nor on the hub"):
        CausalReferenceModel.load("someone/model")


PROSE = (
    "The old mill stood at the end of the lane, where the road gave up and became a footpath. Nobody had"
    " ground corn there for sixty years, but the wheel still turned when the river was high, and on quiet"
    " evenings you could hear it from the village. Children were told to keep away from it, and so every"
    " child in the village knew exactly how to get in.",
    "Bread is made from flour, water, salt and yeast, and the most important ingredient is time. If the dough"
    " is left to rise slowly in a cool place, it develops a flavour that no amount of sugar or butter can"
    " replace. A loaf that was made in an hour tastes of very little, while a loaf that was left overnight"
    " has a crust that crackles when it comes out of the oven.",
    "When the committee met again in the autumn, most of its members had changed their minds. The bridge"
    " would cost more than anyone had expected, and the town on the other side of the river had begun to lose"
    " its people. In the end they decided to repair the ferry instead, and to ask the government for money to"
    " build a better road along the southern bank.",
    "Light from the sun takes about eight minutes to reach the earth. This means that we never see the sun as"
    " it is, but only as it was a short while ago. With the stars the delay is far longer: some of the light"
    " that we see at night left its star before there were any people to look at it, and the star itself may"
    " no longer exist.",
)


def shuffled(text: str) -> str:
    words = text.split()
    random.Random(0).shuffle(words)
    return " ".join(words)


@pytest.fixture
def smollm2() -> Path:
    (found,) = list(Path(__file__).parents[2].glob(".reference-model/*.gguf")) or [None]
    if found is None:
        pytest.skip("the real reference model is not here: `make reference-model` fetches it")
    return found


@pytest.mark.slow
def test_a_real_judge_tells_sense_from_nonsense(smollm2: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """SmolLM2-135M-Instruct, which takes about a minute to load."""
    judge = CausalReferenceModel.load(smollm2)
    told = {"sampler": "by hand", "seconds": 0.0, "nfe": 0}
    rows = [list(text.encode()) for text in PROSE]
    sense = sample_metrics(PROSE, rows, judge, **told)  # type: ignore[arg-type]
    nonsense = sample_metrics([shuffled(text) for text in PROSE], rows, judge, **told)  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "")
    assert sense.perplexity is not None
    assert nonsense.perplexity is not None
    assert 10 < sense.perplexity < 40
    assert nonsense.perplexity > 600
    alone = [judge.nll([text])[0] for text in PROSE]
    assert judge.nll(PROSE) == [(pytest.approx(nats, abs=1e-3), count) for nats, count in alone]
