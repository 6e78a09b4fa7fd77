"""Folders of the transformers library: read, written back, and kept in our own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import models, pre_tokenizers
from torch import Tensor

import unmask
from backbones.test_hf import CAUSAL, VOCAB, config, denoiser, every, every_causal, theirs, tokens
from unmask import MDLM, BlockDiffusion, LanguageModel, ModelConfig, Tokenizer, Vocab
from unmask.backbones.hf import HFBackboneConfig
from unmask.diffusion.schedule import Cosine
from unmask.hardware import memory
from unmask.pretrained import export_onnx
from unmask.pretrained.formats import _hf as huggingface
from unmask.pretrained.formats._hf import _resize_embeddings

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "der", "mond", "##e", "ist", "auf", "##gegangen"]
LETTERS = Tokenizer.characters("abcdefghijk")


def log_x(lm: LanguageModel) -> Tensor:
    z = tokens()
    with torch.no_grad():
        said: Tensor = lm.denoiser(z, torch.full((len(z), 1), 0.5), torch.ones_like(z, dtype=torch.bool))
    return said


def auto(name: str) -> Any:
    return transformers.AutoModelForCausalLM if name in CAUSAL else transformers.AutoModelForMaskedLM


def read_by_transformers(name: str, folder: Path) -> Any:
    network, report = auto(name).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return network


def logits(network: Any, name: str) -> Tensor:
    """In windows of four where there are any: what an open network says, where it says it."""
    z, place = tokens(), torch.arange(tokens().shape[1])
    near = (place - place[:, None]).abs() < (4 if name in ("mistral", "gemma3_text") else 99)
    with torch.no_grad():
        if name not in CAUSAL:
            return network(z, attention_mask=torch.ones_like(z)).logits
        said = network(z, attention_mask=near[None, None]).logits
        return torch.cat([said[:, :1], said[:, :-1]], 1)


def our_logits(lm: LanguageModel) -> Tensor:
    z, backbone = tokens(), lm.denoiser.backbone
    with torch.no_grad():
        hidden = backbone.encode(backbone.embed(z), torch.zeros(len(z), 1))
        return backbone.lm_head(hidden)


@every
def test_models_come_back_in_our_format(name: str, tmp_path: Path) -> None:
    lm = LanguageModel(denoiser(name).float(), LETTERS)
    loaded = unmask.load(unmask.save(lm, tmp_path / "m"))
    assert loaded.denoiser.config == lm.denoiser.config
    assert torch.equal(log_x(loaded), log_x(lm))
    card = (tmp_path / "m" / "README.md").read_text()
    assert name.replace("_", r"\_") + " of the transformers library" in card


@every
def test_models_are_written_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    lm = LanguageModel(denoiser(name).float(), LETTERS)
    folder = unmask.save(lm, tmp_path / "m", upstream_format=True)
    said = our_logits(lm)
    if name == "roberta":  # there, padding in a text has no place
        said = said[:0]
    assert torch.equal(logits(read_by_transformers(name, folder), name)[: len(said)], said)
    again = unmask.load(folder)
    assert torch.equal(log_x(again), log_x(lm))
    assert again.denoiser.config.vocab == VOCAB
    assert again.denoiser.config.objective == MDLM()
    written = transformers.AutoTokenizer.from_pretrained(folder)
    assert written("cab", add_special_tokens=False).input_ids == LETTERS.encode("cab")
    unmask.save(again, folder, upstream_format=True, overwrite=True)  # the second time changes nothing
    assert torch.equal(log_x(unmask.load(folder)), log_x(lm))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_what_transformers_has_no_words_for_is_kept(name: str, tmp_path: Path) -> None:
    opened = 0.25 if name == "llama" else None
    backbone = HFBackboneConfig(config(name).config, opened, max_length=17)
    objective = BlockDiffusion(block_size=5, schedule=Cosine())
    lm = LanguageModel(ModelConfig(Vocab(11, 6, 2), backbone, objective).build().eval())
    again = unmask.load(unmask.save(lm, tmp_path / "m", upstream_format=True)).denoiser.config
    assert (again.vocab, again.objective) == (Vocab(11, 6, 2), objective)
    assert isinstance(again.backbone, HFBackboneConfig)
    assert (again.backbone.future_visibility, again.backbone.max_length) == (opened, 17)


def test_what_does_not_fit_is_said_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bert_folder(tmp_path)
    monkeypatch.setattr(memory, "_free_memory", lambda _: 1000)
    with pytest.raises(ValueError, match="with the dtype float32, and 0 MB are free"):
        unmask.load(folder)


@every
def test_folders_that_transformers_wrote_are_read(name: str, tmp_path: Path) -> None:
    theirs(name).float().save_pretrained(tmp_path)
    try:
        lm = unmask.load(tmp_path)
        expected = logits(theirs(name), name)
    finally:
        theirs(name).double()
    assert lm.tokenizer is None
    assert lm.vocab.mask_id == 11  # nobody says which one it is, so there is a new one
    assert lm.vocab.size == 12
    assert lm.objective == MDLM()
    if name != "roberta":
        torch.testing.assert_close(our_logits(lm)[..., :11], expected, rtol=1e-5, atol=1e-5)


@every_causal
def test_a_new_mask_is_the_mean_of_the_others(name: str, tmp_path: Path) -> None:
    theirs(name).save_pretrained(tmp_path)
    network: Any = unmask.load(tmp_path).denoiser.backbone
    for table in (network.model.get_input_embeddings().weight, network.lm_head.weight):
        torch.testing.assert_close(table[11], table[:11].mean(0))
    assert network.model.get_input_embeddings().weight.shape[0] == 12


def test_a_masked_network_grows_too() -> None:
    network = config("bert")._build_hf_model(VOCAB)
    torch.nn.init.normal_(network.cls.predictions.bias)
    _resize_embeddings(network, 13)
    bias = network.get_output_embeddings().bias
    assert len(bias) == 13
    torch.testing.assert_close(bias[11:], bias[:11].mean().expand(2))
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight


def bert_folder(folder: Path, **files: str) -> Path:
    theirs("bert").save_pretrained(folder)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_list_of_words_is_a_tokenizer(tmp_path: Path) -> None:
    lm = unmask.load(bert_folder(tmp_path, vocab__txt="\n".join(WORDS)))
    assert lm.tokenizer is not None
    assert lm.tokenizer.encode("Der Mond ist aufgegangen") == [5, 6, 8, 9, 10]
    assert lm.vocab == Vocab(11, 4)
    assert {"der mond ist auf"} <= set(lm.infill("der <mask> ist auf", n=99).texts)


def test_the_mask_is_the_one_that_the_tokenizer_names(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "HOLE": 1, "[MASK]": 2}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = bert_folder(tmp_path, tokenizer__json=inner.to_str())
    assert unmask.load(folder).vocab.mask_id == 2
    (folder / "tokenizer_config.json").write_text('{"mask_token": {"content": "HOLE"}}')
    assert unmask.load(folder).vocab.mask_id == 1
    given = unmask.load(folder, LETTERS)
    assert given.tokenizer is LETTERS


@pytest.mark.parametrize("architectures", [None, ["BertForPreTraining"], ["BertForMaskedLM"]])
def test_a_type_that_may_be_both_is_a_masked_one(architectures: list[str] | None, tmp_path: Path) -> None:
    stated = json.loads((bert_folder(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | {"architectures": architectures}))
    assert not unmask.load(tmp_path).denoiser.shift_logits


def test_unless_it_says_that_it_is_causal(tmp_path: Path) -> None:
    stated = json.loads((bert_folder(tmp_path) / "config.json").read_text())
    stated |= {"architectures": ["BertLMHeadModel"], "is_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    lm = unmask.load(tmp_path)
    assert lm.denoiser.shift_logits
    assert lm.denoiser.config.backbone.future_visibility == 1.0
    assert bool(log_x(lm)[:, :11].isfinite().all())


def test_weights_may_be_in_many_files_or_in_a_pickle(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path, vocab__txt="\n".join(WORDS))
    expected = log_x(unmask.load(folder))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert torch.equal(log_x(unmask.load(folder)), expected)
    (folder / "pytorch_model.bin").unlink()
    theirs("bert").save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert torch.equal(log_x(unmask.load(folder)), expected)


def test_nothing_that_comes_with_a_model_is_executed(tmp_path: Path) -> None:
    folder, proof = bert_folder(tmp_path / "m"), tmp_path / "proof"
    stated = json.loads((folder / "config.json").read_text())
    stated["auto_map"] = {"AutoModelForMaskedLM": "evil.Evil", "AutoConfig": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(stated))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(proof)!r})\n")
    assert unmask.load(folder).denoiser.max_length == 24
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(f"cos\nmkdir\n(S'{proof}'\ntR.".encode())
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        unmask.load(folder)
    assert not proof.exists()


def test_incomplete_models_are_refused(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path)
    transformers.BertModel(theirs("bert").config).save_pretrained(folder)
    with pytest.raises(ValueError, match="lacks weights that its config asks for: cls"):
        unmask.load(folder)


OTHERS = {
    '{"model_type": "bart", "is_encoder_decoder": true}': "an encoder-decoder",
    '{"model_type": "vit"}': "neither a masked nor a causal LM",
    '{"model_type": "nobody"}': "has an unknown format",
}


@pytest.mark.parametrize("stated", OTHERS)
def test_other_networks_are_refused(stated: str, tmp_path: Path) -> None:
    bert_folder(tmp_path, config__json=stated)
    with pytest.raises(ValueError, match=OTHERS[stated]):
        unmask.load(tmp_path)


def test_a_folder_of_many_packed_models_is_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"holds 2 \.gguf files; name one"):
        unmask.load(tmp_path)
    with pytest.raises(ValueError, match=r"a\.gguf cannot be read by transformers"):
        unmask.load(tmp_path / "a.gguf")


def test_other_programs_export_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ONNX export does not support networks of transformers.*upstream_format"):
        export_onnx(LanguageModel(denoiser("bert")), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_networks_of_ours_are_not_written_like_this() -> None:
    plain = unmask.DiTConfig(width=8, depth=1, heads=1, max_length=4)
    lm = LanguageModel(ModelConfig(Vocab(5, 4), plain, MDLM()).build())
    assert not huggingface.can_export(lm)
    assert huggingface.can_export(LanguageModel(denoiser("bert")))


def test_special_tokens_can_be_written(tmp_path: Path) -> None:
    """By who uses the model; not by who wrote a document, and not through a server."""
    inner = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.add_special_tokens(WORDS[:5])
    tokenizer = Tokenizer(inner)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    lm = unmask.load(tmp_path)
    assert lm.encode_template("[CLS] der [MASK] ist <mask:2>[SEP]").tolist() == [[2, 5, 4, 8, 4, 4, 3]]
    assert lm.blank_canvas(1, 4, "[CLS] mond").tolist() == [[2, 6, 4, 4]]
    for refused in (lambda: lm.score("der [MASK] ist"), lambda: lm.complete(["der [MASK]"], 2)):
        with pytest.raises(ValueError, match=r"contains the mask token \[MASK\], .*infill"):
            refused()
    assert lm.score("[CLS] der mond [SEP]").tokens == 4
    assert lm.tokenizer is not None
    assert 2 not in lm.tokenizer.encode("[CLS] der", allow_unknown=True)
    assert 2 not in lm.tokenizer.encode_batch(["[CLS] der"])[0]
