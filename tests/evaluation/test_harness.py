"""lm-evaluation-harness: likelihoods are the enumerated ones, and a request has one answer in any company."""

from __future__ import annotations

import itertools
import math
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model, model_registry
from lm_eval.tasks import TaskManager

import tiny_models
import unmask
import unmask_lm_eval
from harness_tasks import TASKS, write_tasks
from unmask import MDLM, SEDD, BlockDiffusion, LanguageModel, NextToken, Tokenizer, UniformDiffusion
from unmask.diffusion.categorical import SamplingParams
from unmask.evaluation.harness import HarnessModel
from unmask.evaluation.harness._generation import GenerationSettings, cut_answer, read_options
from unmask.evaluation.harness._greedy import writes_greedily
from unmask.objectives import Objective

ROOT = Path(__file__).parents[2]
LETTERS = Tokenizer.characters("abcd")


def model_of(objective: Objective, **options: Any) -> HarnessModel:
    """In float64; ids 0 to 3 are the letters, 4 is the mask."""
    return HarnessModel(LanguageModel(tiny_models.tiny_denoiser(objective), LETTERS), **options)


def asked(kind: str, *arguments: tuple[Any, ...], task: str = "task") -> list[Instance]:
    return [Instance(kind, {}, each, 0, (task, number, 1)) for number, each in enumerate(arguments)]


def log_p(lm: LanguageModel, tokens: Sequence[int], masked: Sequence[int]) -> torch.Tensor:
    """log p [masked, V] of the masked positions, from the network itself."""
    z = torch.tensor([tokens])
    z[0, list(masked)] = lm.vocab.mask_id
    where = torch.zeros_like(z, dtype=torch.bool)
    where[0, list(masked)] = True
    return lm.denoiser(z, torch.ones(1, 1, dtype=torch.float64), where)


def mean_over_orders(lm: LanguageModel, prompt: Sequence[int], ids: Sequence[int]) -> float:
    """What LLaDA's estimate converges to: -log p of the target, token by token, in a uniformly random order."""
    tokens, start = [*prompt, *ids], len(prompt)
    orders = list(itertools.permutations(range(start, start + len(ids))))
    nats = 0.0
    for order in orders:
        for done, place in enumerate(order):
            rest = sorted(order[done:])
            nats -= float(log_p(lm, tokens, rest)[rest.index(place), tokens[place]])
    return nats / len(orders)


def sum_over_maskings(lm: LanguageModel, prompt: Sequence[int], ids: Sequence[int]) -> float:
    """The same as a sum over all maskings, with LLaDA's weights: k is uniform, and counts L/k."""
    start, n = len(prompt), len(ids)
    maskings = [each for k in range(1, n + 1) for each in itertools.combinations(range(start, start + n), k)]
    clean = torch.tensor([[*prompt, *ids]] * len(maskings))
    where = torch.zeros_like(clean, dtype=torch.bool)
    for row, places in enumerate(maskings):
        where[row, list(places)] = True
    z = clean.masked_fill(where, lm.vocab.mask_id)
    log_x = lm.denoiser(z, torch.ones(len(z), 1, dtype=torch.float64), where)
    ce = torch.zeros_like(clean, dtype=torch.float64)
    ce[where] = -log_x.gather(1, clean[where][:, None])[:, 0]
    weights = torch.tensor([(n / len(each)) / (n * math.comb(n, len(each))) for each in maskings])
    return float((ce.sum(1) * weights).sum())


def test_the_two_enumerations_agree() -> None:
    lm = model_of(MDLM()).lm
    assert mean_over_orders(lm, [0, 1], [2, 3, 1]) == pytest.approx(sum_over_maskings(lm, [0, 1], [2, 3, 1]))


@pytest.mark.parametrize("context", ["", "ab", "dcba"])
def test_likelihoods_of_short_targets_are_exact(context: str) -> None:
    model = model_of(MDLM())
    targets = ["a", "bc", "dda", "abcd"]
    found = model.loglikelihood(asked("loglikelihood", *((context, target) for target in targets)))
    for target, (nats, _) in zip(targets, found, strict=True):
        exact = mean_over_orders(model.lm, LETTERS.encode(context), LETTERS.encode(target))
        assert -nats == pytest.approx(exact, rel=1e-9)
    assert set(model.record.variances.values()) == {0.0}


def test_likelihoods_of_long_targets_agree_within_their_error() -> None:
    """Eight tokens have 255 maskings, of which 128 are drawn; the errors are honest."""
    lm = model_of(MDLM()).lm
    targets = ["abcdabcd", "ddddaaaa", "cbadcbad"]
    exact = {t: sum_over_maskings(lm, [0, 3], LETTERS.encode(t)) for t in targets}
    deviations = []
    for seed in range(6):
        model = HarnessModel(lm, seed=seed)
        found = model.loglikelihood(asked("loglikelihood", *(("ad", target) for target in targets)))
        for target, (nats, _) in zip(targets, found, strict=True):
            deviations.append((-nats - exact[target]) / math.sqrt(model.record.variances["ad", target]))
    assert max(map(abs, deviations)) < 6
    assert 0.4 < math.sqrt(sum(d * d for d in deviations) / len(deviations)) < 2


@pytest.mark.parametrize("objective", [MDLM(), SEDD(), BlockDiffusion(block_size=4), NextToken()], ids=str)
def test_a_request_has_one_answer_in_any_company(objective: Objective) -> None:
    """Alone, among forty others, backwards, and asked again: the noise belongs to its own tokens."""
    pairs = [("abcd"[: n % 4], "dcbaabcdd"[: 1 + n % 9]) for n in range(40)]
    pairs = list(dict.fromkeys(pairs))
    together = model_of(objective).loglikelihood(asked("loglikelihood", *pairs))
    backwards = model_of(objective).loglikelihood(asked("loglikelihood", *pairs[::-1]))[::-1]
    for one, other in zip(together, backwards, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-9)
        assert one[1] == other[1]
    for number in (0, 7, 8, 35):
        (alone,) = model_of(objective).loglikelihood(asked("loglikelihood", pairs[number]))
        assert alone[0] == pytest.approx(together[number][0], rel=1e-9)
        assert alone[1] == together[number][1]


def test_the_seed_changes_what_is_drawn_and_nothing_else_does() -> None:
    pairs = [("ab", "abcdabcd"), ("", "abcdabcdabc")]
    first, again, other = (model_of(MDLM(), seed=seed).loglikelihood(asked("x", *pairs)) for seed in (0, 0, 1))
    assert first == again
    assert all(one[0] != two[0] for one, two in zip(first, other, strict=True))


def test_autoregressive_likelihoods_and_greedy_targets_are_exact() -> None:
    model = model_of(NextToken())
    lm = model.lm
    texts = ["".join(each) for each in itertools.product("abcd", repeat=3)]
    found = model.loglikelihood(asked("loglikelihood", *(("ab", text) for text in texts)))
    tokens = torch.tensor([[*LETTERS.encode("ab"), *LETTERS.encode(text)] for text in texts])
    shifted = torch.cat([torch.full((len(texts), 1), lm.vocab.mask_id), tokens[:, :-1]], 1)
    log_x = lm.denoiser(shifted, torch.zeros(len(texts), 1), torch.ones_like(tokens, dtype=torch.bool))
    log_x = log_x.view(*tokens.shape, -1)[:, 2:]
    exact = log_x.gather(-1, tokens[:, 2:, None]).sum((1, 2))
    assert [nats for nats, _ in found] == pytest.approx(exact.tolist(), rel=1e-9)
    assert [flag for _, flag in found] == (log_x.argmax(-1) == tokens[:, 2:]).all(1).tolist()
    assert set(model.record.variances.values()) == {0.0}
    assert model.record.definitions["loglikelihood"].name == "exact"


def greedy_text(lm: LanguageModel, prompt: list[int], length: int, per_step: int) -> list[int]:
    """Highest confidence first, `per_step` tokens for each network call."""
    tokens, rest = [*prompt, *[0] * length], list(range(len(prompt), len(prompt) + length))
    while rest:
        best = log_p(lm, tokens, rest)[:, :4].max(-1)
        order = best.values.argsort(descending=True)[:per_step].tolist()
        for row in order:
            tokens[rest[row]] = int(best.indices[row])
        rest = [place for row, place in enumerate(rest) if row not in order]
    return tokens[len(prompt) :]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_greedy_targets_are_those_that_greedy_decoding_writes(one_by_one: bool) -> None:
    lm = model_of(MDLM()).lm
    prompts = [[0], [1, 2, 3], [3, 0], []]
    truth = [greedy_text(lm, prompt, 4, 1 if one_by_one else 4) for prompt in prompts]
    wrong = [[(text[0] + 1) % 4, *text[1:]] for text in truth]
    pairs = [*zip(prompts, truth, strict=True), *zip(prompts, wrong, strict=True), ([0, 1], [2])]
    flags = writes_greedily(lm, pairs, one_by_one=one_by_one)
    assert flags[:8] == [True] * 4 + [False] * 4
    model = HarnessModel(lm, greedy=one_by_one)
    ((_, flag),) = model.loglikelihood(asked("x", ("bcd", LETTERS.decode(truth[1]))))
    assert flag
    assert ("one token per" in model.record.definitions["loglikelihood"].sentence) == one_by_one


def test_the_two_greedy_definitions_differ() -> None:
    lm = model_of(MDLM()).lm
    texts = [(greedy_text(lm, p, 4, 1), greedy_text(lm, p, 4, 4)) for p in ([0], [1, 2, 3], [3, 0], [], [2, 2])]
    assert any(one != other for one, other in texts)


def test_models_without_a_greedy_order_have_no_greedy_targets() -> None:
    (found,) = model_of(UniformDiffusion(steps=6)).loglikelihood(asked("x", ("ab", "cd")))
    assert found[1] is False


def test_spaces_at_the_end_of_a_context_belong_to_the_target() -> None:
    tokenizer = Tokenizer.characters("abc ")
    model = HarnessModel(LanguageModel(tiny_models.tiny_denoiser(MDLM()), tokenizer))
    one, other = model.loglikelihood(asked("x", ("ab  ", "c"), ("ab", "  c")))
    assert one == other


def test_context_and_target_are_encoded_together() -> None:
    tokenizer = Tokenizer.train_bpe(iter(["abab abab abab"] * 9), 262)
    whole = tokenizer.encode("abab")
    assert len(whole) < 4  # letters are joined
    denoiser = tiny_models.tiny_denoiser(MDLM(), size=300, mask=299)
    model = HarnessModel(LanguageModel(denoiser, tokenizer))
    prompt, ids = model._encode_request("aba", "b")
    assert prompt + ids == whole or len(ids) == len(whole) - len(tokenizer.encode("aba"))
    joined = model._encode_request("a", "b")
    assert joined[0] + joined[1] == tokenizer.encode("ab")
    assert joined[1]  # never nothing to score


def test_a_long_context_loses_its_beginning_and_a_long_target_is_refused() -> None:
    model = model_of(MDLM())
    long, short = model.loglikelihood(asked("x", ("d" * 30 + "abca", "bcda"), ("dddd" + "abca", "bcda")))
    assert long == pytest.approx(short)
    assert model.record.truncated == 1
    (whole,) = model.loglikelihood(asked("x", ("dddd", "abcdabcdabcd")))
    (alone,) = model.loglikelihood(asked("x", ("", "abcdabcdabcd")))
    assert whole == alone  # there is no room for any of it
    with pytest.raises(ValueError, match="a continuation has 13 tokens, and the model reads 12"):
        model.loglikelihood(asked("x", ("a", "abcdabcdabcda")))


@pytest.mark.parametrize("objective", [MDLM(), NextToken(), BlockDiffusion(block_size=4)], ids=str)
def test_whole_texts_are_scored_in_windows(objective: Objective) -> None:
    model = model_of(objective)
    texts = ["abcd" * 7, "", "bad"]
    found = model.loglikelihood_rolling(asked("loglikelihood_rolling", *((text,) for text in texts)))
    assert found[1] == 0
    for text, nats in ((texts[0], found[0]), (texts[2], found[2])):
        scored = model.lm.score([text], draws=1024)
        assert -nats == pytest.approx(scored.nats, abs=6 * math.sqrt(scored.variance * 9) + 1e-6)
        error = model.record.variances[(text,)]
        assert (error == 0) == (objective.process.is_left_to_right or (text == "bad" and objective == MDLM()))
    (alone,) = model_of(objective).loglikelihood_rolling(asked("x", (texts[0],)))
    assert alone == pytest.approx(found[0], rel=1e-9)


def test_a_mask_token_in_a_text_is_refused() -> None:
    model = HarnessModel(LanguageModel(tiny_models.tiny_denoiser(MDLM()), Tokenizer.characters("abcde")))  # e is 4
    for ask in (model.loglikelihood, model.generate_until):
        with pytest.raises(ValueError, match=r"'aeb?' contains the mask token e"):
            ask(asked("x", ("ae", {} if ask == model.generate_until else "b")))


QUESTIONS = [("abcd"[: 1 + n % 4] * (1 + n % 2), {"until": ["zz"], "max_gen_toks": 5}) for n in range(7)]


@pytest.mark.parametrize("objective", [MDLM(), BlockDiffusion(block_size=4), NextToken(), UniformDiffusion()], ids=str)
@pytest.mark.parametrize("temperature", [None, 0.8])
def test_an_answer_is_the_same_in_any_batch(objective: Objective, temperature: float | None) -> None:
    one, many = (
        model_of(objective, batch_size=size, temperature=temperature, steps=4).generate_until(
            asked("generate_until", *QUESTIONS)
        )
        for size in (1, 4)
    )
    assert one == many
    assert all(len(answer) <= 5 and set(answer) <= set("abcd") for answer in one)
    others = model_of(objective, batch_size="auto", temperature=temperature, steps=4)
    assert others.generate_until(asked("x", *QUESTIONS[3:]))[0] == one[3]


def test_answers_are_those_of_greedy_decoding() -> None:
    """By default one token for each call, the most confident first; a stop string ends the text."""
    model = model_of(MDLM())
    prompt = LETTERS.encode("abc")
    whole = LETTERS.decode(greedy_text(model.lm, prompt, 6, 1))
    questions = [
        ("abc", {"max_gen_toks": 6}),
        ("abc", {"max_gen_toks": 6, "until": whole[2]}),
        ("abc", {"until": ["z"]}),
    ]
    first, cut, _ = HarnessModel(model.lm, max_gen_toks=4).generate_until(asked("generate_until", *questions))
    assert first == whole
    assert cut == whole[: whole.index(whole[2])]


def test_the_first_stop_string_ends_an_answer() -> None:
    assert cut_answer("abcdab", ("d", "zz", "bc"), LETTERS) == "a"
    assert cut_answer("abcdab", (), LETTERS) == "abcdab"
    assert cut_answer("ab<|endoftext|>", (), Tokenizer.train_bpe(iter(["ab"]), 260)) == "ab"
    length, params, until = read_options({"until": "d", "temperature": 0.5, "do_sample": True}, GenerationSettings())
    assert (length, params, until) == (256, SamplingParams(0.5), ("d",))
    _, params, _ = read_options({"temperature": 0.5, "do_sample": False}, GenerationSettings())
    assert params == SamplingParams(0.0)


def test_repeats_of_a_question_are_drawn_apart() -> None:
    model = model_of(MDLM(), batch_size=8)
    question = ("ab", {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0})
    answers = model.generate_until(asked("generate_until", *[question] * 6))
    assert len(set(answers)) > 1
    assert answers == model_of(MDLM()).generate_until(asked("generate_until", *[question] * 6))


@pytest.mark.parametrize(
    ("settings", "tokens_per_call"), [({}, 1.0), ({"steps": 2}, 4.0), ({"steps": 1, "block_size": 2}, 2.0)]
)
def test_tokens_per_call(settings: dict[str, Any], tokens_per_call: float) -> None:
    model = model_of(MDLM(), batch_size=3, **settings)
    model.generate_until(asked("generate_until", *[(text, {"max_gen_toks": 8}) for text in ("a", "bc", "abd", "d")]))
    assert model.record.usage["task"].tokens_per_call == tokens_per_call
    assert model.get_model_info()["unmask"]["tokens_per_call"] == {"task": tokens_per_call}


def test_long_prompts_leave_room_for_the_answer() -> None:
    model = model_of(MDLM())
    long, short = model.generate_until(
        asked("x", *[(text, {"max_gen_toks": 6}) for text in ("dddd" + "abcd" * 2, "cd" + "abcd")])
    )
    assert model.record.truncated == 1
    assert long == short


def test_settings_that_do_not_exist_are_named() -> None:
    with pytest.raises(ValueError, match="there is no setting 'stepz'; those of generation are sampler, steps"):
        model_of(MDLM(), stepz=3)


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}dd{% endif %}"


def test_chat_templates_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = unmask.save(model_of(MDLM()).lm, tmp_path / "model")
    with pytest.raises(ValueError, match="has no chat template"):
        HarnessModel(folder).apply_chat_template([{"role": "user", "content": "a"}])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    model = HarnessModel(folder)
    chat = [{"role": "user", "content": "ab"}]
    assert model.apply_chat_template(chat) == "abdd"
    assert model.apply_chat_template(chat, add_generation_prompt=False) == "ab"
    assert model.chat_template(True) == TEMPLATE
    assert model.tokenizer_name == str(folder).replace("/", "__")
    with pytest.raises(ValueError, match="this model has no chat template"):
        model_of(MDLM()).apply_chat_template(chat)


def test_a_broken_template_is_told(tmp_path: Path) -> None:
    folder = unmask.save(model_of(MDLM()).lm, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only users may speak') }}")
    with pytest.raises(ValueError, match="refuses these messages: only users may speak"):
        HarnessModel(folder).apply_chat_template([{"role": "user", "content": "a"}])


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = write_tasks(tmp_path_factory.mktemp("tasks"))
    return TaskManager(include_path=folder, include_defaults=False)


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness lists packages and devices beside its results, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)


@pytest.mark.usefixtures("no_environment")
def test_the_harness_evaluates_by_name(tasks: TaskManager, tmp_path: Path) -> None:
    """As a user of the harness would: a registered name and a string of arguments."""
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM(), size=8, mask=5), Tokenizer.characters("abc d"))
    folder = unmask.save(lm, tmp_path / "model")
    found = [
        simple_evaluate(
            model="unmask",
            model_args=f"pretrained={folder},mc_num=32,steps=3",
            tasks=list(TASKS),
            task_manager=tasks,
            batch_size=2,
            bootstrap_iters=0,
        )
        for _ in range(2)
    ]
    assert found[0]["results"] == found[1]["results"]
    assert found[0]["results"].keys() == TASKS.keys()
    told = found[0]["config"]["unmask"]
    assert told["draws"] == 32
    assert told["monte_carlo_error_nats"]["max"] > 0
    assert told["tokens_per_call"] == {"tiny_answer": 2.0}
    assert told["definitions"]["loglikelihood"]["name"] == "LLaDA, 32 draws"


@pytest.mark.usefixtures("no_environment")
def test_results_can_be_cached(tasks: TaskManager, tmp_path: Path) -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM(), size=8, mask=5), Tokenizer.characters("abc d"))
    options: dict[str, Any] = {
        "tasks": ["tiny_choices"],
        "task_manager": tasks,
        "bootstrap_iters": 0,
        "use_cache": str(tmp_path / "cache"),
    }
    first = simple_evaluate(model=HarnessModel(lm), **options)
    cached = HarnessModel(lm)
    assert simple_evaluate(model=cached, **options)["results"] == first["results"]
    assert not cached.record.variances  # nothing was asked again


def test_lm_eval_finds_the_model_when_it_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that torch calls is the one that is registered, and the harness keeps its own models."""
    registered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    assert registered == {"unmask": "unmask_lm_eval:register"}
    monkeypatch.setattr(model_registry, "_objs", {})
    unmask_lm_eval.register()
    assert get_model("unmask") is HarnessModel
    assert "hf" in model_registry
    unmask_lm_eval.register()  # once is enough
    monkeypatch.setattr(model_registry, "_objs", {})
    monkeypatch.delitem(sys.modules, "lm_eval")
    unmask_lm_eval.register()
    assert not model_registry._objs  # other programs that import torch are left alone


def test_a_thousand_requests_cost_little_more_than_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generous bound for a busy machine and a tiny network; benchmarks/harness.py measures it on a real one."""
    backbone = unmask.DiTConfig(width=128, depth=2, heads=2, max_length=64, dropout=0.0)
    lm = LanguageModel.from_config(backbone, MDLM(), Tokenizer.bytes())
    model = HarnessModel(lm, mc_num=16)
    generator = torch.Generator().manual_seed(0)

    def text(low: int, high: int) -> str:
        length = int(torch.randint(low, high, (), generator=generator))
        return bytes(torch.randint(97, 123, (length,), generator=generator).tolist()).decode()

    requests = asked("loglikelihood", *((text(20, 40), text(4, 12)) for _ in range(200)))
    inside = 0.0

    def timed(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*arguments: Any, **options: Any) -> torch.Tensor:
            nonlocal inside
            start = time.process_time()
            try:
                return call(*arguments, **options)
            finally:
                inside += time.process_time() - start

        return run

    model.loglikelihood(requests[:20])
    monkeypatch.setattr(type(lm.denoiser), "__call__", timed(type(lm.denoiser).__call__))
    start = time.process_time()
    model.loglikelihood(requests)
    assert time.process_time() - start < 2.0 * inside
