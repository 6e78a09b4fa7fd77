from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from unmask.data.tokenizers import Tokenizer, get_tokenizer
from unmask.data.tokenizers._backends import BPE_EOS_TOKEN
from unmask.data.tokenizers._unknown_stats import UnknownStats
from unmask.types import Vocab

WHITE = " two  spaces\ttab\nline\r\n\n  indented \u00a0 end \n"
BYTES = Tokenizer.bytes()
PROSE = "The quick brown fox's den isn't far; they'll see 42 foxes.\n\n  naïve über 漢字 — done\t" * 20
BPE = Tokenizer.train_bpe(iter([PROSE]), 400)
TRICKY = st.text(alphabet=" \n\t'stlREfoé漢—12²½Ⅷ\x1c\x85\u3000\u0301_<|endoftext>.,🙂", max_size=60)


@settings(deadline=None)
@given(text=st.text(max_size=60))
@example(WHITE)
@example("naïve Ω 漢字 🙂 \x00\x7f")
def test_bytes_are_their_own_ids(text: str) -> None:
    ids = BYTES.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert BYTES.decode(ids) == text


def test_every_byte_has_an_id() -> None:
    assert BYTES.vocab_size == 256
    known = BYTES.backend.get_vocab()
    assert sorted(known.values()) == list(range(256))


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0xFF], "\ufffd"),
        ([ord("a"), 0xC3, ord("b")], "a\ufffdb"),  # a character cut after its first byte
        ([0x80, ord("a")], "\ufffda"),
    ],
)
def test_bytes_that_are_no_text_are_shown_as_such(ids: list[int], text: str) -> None:
    assert BYTES.decode(ids) == text


@settings(deadline=None)
@given(text=st.text(min_size=1, max_size=60))
@example(WHITE)
@example("a\u0301e\u0300")  # an accent is a character of its own
def test_characters_round_trip(text: str) -> None:
    tokenizer = Tokenizer.characters(text)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode(ids) == text


def test_characters_are_numbered_in_order() -> None:
    tokenizer = Tokenizer.characters("cab bac")
    assert tokenizer.encode(" abc") == [0, 1, 2, 3]
    assert tokenizer.encode("") == []


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"^1 of 4 characters is unknown to the tokenizer \('ß' 1\) and cannot be wri",
    ) as error:
        Tokenizer.characters("abc").encode("abßc")
    assert "; it has 'abc': give it such a text, or take another tokenizer" in str(error.value)


def test_an_alphabet_is_not_empty() -> None:
    with pytest.raises(ValueError, match=r"^an alphabet needs at least one character$"):
        Tokenizer.characters("")


@pytest.mark.parametrize("tokenizer", [BYTES, Tokenizer.characters(WHITE)], ids=["bytes", "characters"])
def test_a_file_gives_the_tokenizer_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    back = Tokenizer.from_file(path)
    assert back.vocab_size == tokenizer.vocab_size
    assert back.encode(WHITE) == tokenizer.encode(WHITE)
    assert back.decode(back.encode(WHITE)) == WHITE
    assert back.to_json() == tokenizer.to_json()


@pytest.mark.parametrize(
    "contents",
    ["", "{", "[]", json.dumps({"model": {"type": "Nonsense"}}), BYTES.to_json()[:-200]],
    ids=["empty", "brace", "list", "nonsense", "cut"],
)
def test_a_broken_file_is_named(contents: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(contents, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer\.json that can be read: ") as error:
        Tokenizer.from_file(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json is missing$"):
        Tokenizer.from_file(tmp_path / "absent.json")


def prefixed() -> Tokenizer:
    """A BPE whose words are not GPT-2's: the library has to encode it."""
    inner = tokenizers.Tokenizer.from_str(BPE.to_json())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return Tokenizer(inner)


@pytest.mark.parametrize(
    "tokenizer",
    [BYTES, BPE, Tokenizer.dna(), Tokenizer.protein(), prefixed()],
    ids=["bytes", "bpe", "dna", "protein", "other"],
)
@settings(deadline=None, max_examples=60)
@given(texts=st.lists(TRICKY | st.text(max_size=40), max_size=4))
@example(texts=[PROSE, "", WHITE])
@example(texts=["x\x1cy \x1c z\u200b \u200b", "a" * 100 + "é " + "b" * 100, "'sé 'llama don'T \n"])
def test_arrays_hold_the_ids_of_encode(tokenizer: Tokenizer, texts: list[str]) -> None:
    arrays = tokenizer.encode_batch(texts)
    assert [array.tolist() for array in arrays] == [tokenizer.encode(text, True) for text in texts]
    assert all(array.dtype == tokenizer.dtype for array in arrays)


@settings(deadline=None)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=4).filter(any))
def test_arrays_of_characters(texts: list[str]) -> None:
    tokenizer = Tokenizer.characters("".join(texts))
    assert [array.tolist() for array in tokenizer.encode_batch(texts)] == [tokenizer.encode(t) for t in texts]


@settings(deadline=None)
@given(text=TRICKY | st.text(max_size=60))
@example(PROSE)
def test_bpe_loses_nothing(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


def test_a_word_is_remembered_only_if_it_is_short_and_room_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unmask.data.tokenizers._fast_encoders._MAX_CACHED_WORDS", 5)
    tokenizer = Tokenizer(BPE.backend)
    for text in ["the quick brown fox jumps over it", "x" * 500, "the lazy dog", "x" * 500]:
        assert tokenizer.encode_batch([text])[0].tolist() == tokenizer.encode(text)
        known = tokenizer._fast_encoder._cache  # type: ignore[union-attr]
        assert len(known) <= 5 + len(text.split())
        assert max(map(len, known), default=0) <= 64


def test_unknown_characters_are_named_by_arrays_too() -> None:
    for text in ("abßc", "ab\ud800", "ab\U0010ffff"):
        with pytest.raises(ValueError, match=r"^1 of \d characters is unknown to the tokenizer \('.*' 1\) and"):
            Tokenizer.characters("abc").encode_batch(["abc", text])


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, prefixed()], ids=["bytes", "bpe", "other"])
def test_half_a_character_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="ud800"):
        tokenizer.encode_batch(["fine", "not \ud800 fine"])


def test_dna() -> None:
    """Caduceus' ids; the examples are those of its own tokenizer, without the [SEP] that ends a document here."""
    dna = Tokenizer.dna()
    special = ["[CLS]", "[SEP]", "[BOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]"]
    assert dna.vocab == {token: i for i, token in enumerate([*special, *"ACGTN"])}
    assert dna.special_tokens == {*special}
    assert (dna.vocab_size, dna.eos_id, dna.mask_id, dna.unk_token) == (12, 1, 3, "[UNK]")
    assert dna.encode("ACGTN") == [7, 8, 9, 10, 11]
    assert dna.encode("acgtnRX", allow_unknown=True) == [7, 8, 9, 10, 11, 6, 6]
    assert dna.decode(dna.encode("acgtnRYx-\né", allow_unknown=True)) == "ACGTN" + "[UNK]" * 6
    assert dna.encode("[CLS]" + "A" * 95, allow_unknown=True)[:5] == [6, 8, 6, 6, 6]  # nothing in a text fakes a token
    assert dna.encode("[CLS]ACG[SEP]", parse_special_tokens=True) == [0, 7, 8, 9, 1]


def test_a_dna_model_has_caduceus_vocabulary() -> None:
    dna = get_tokenizer("dna")
    assert dna.complement_ids == (0, 1, 2, 3, 4, 5, 6, 10, 9, 8, 7, 11, 12, 13, 14, 15)
    assert dna.model_vocab == Vocab(size=16, mask_id=3, eos_id=1, context_ids=(0, 2, 4, 5, 11))
    bases = Tokenizer.characters("ACGTRY")
    assert bases.complement_ids == (4, 2, 1, 5, 0, 3, 6)  # A C G R T Y, and the mask
    assert bases.context_ids == (3, 5)
    for other in ("protein", "text8", "bytes"):
        assert get_tokenizer(other).complement_ids is None
        assert get_tokenizer(other).context_ids == ()
        assert get_tokenizer(other).mask_id is None


def test_a_tokenizer_with_a_mask_gives_it_to_the_model() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[MASK]": 1, "b": 2}, unk_token="a"))
    assert Tokenizer(words).model_vocab == Vocab(size=4, mask_id=3)  # a word like any other
    words.add_special_tokens(["[MASK]"])
    assert Tokenizer(words).model_vocab == Vocab(size=3, mask_id=1)


@given(st.text("ACGTNacgtn", max_size=60))
def test_dna_comes_back_in_upper_case(text: str) -> None:
    dna = Tokenizer.dna()
    ids = dna.encode(text)
    assert dna.decode(ids) == text.upper()
    assert dna.encode_batch([text])[0].tolist() == ids
    again = Tokenizer(tokenizers.Tokenizer.from_str(dna.to_json()))
    assert (again.encode(text), again.complement_ids, again.digest) == (ids, dna.complement_ids, dna.digest)


@given(st.text("ACGTN", max_size=60))
def test_the_complement_of_the_complement_is_the_text(text: str) -> None:
    dna = Tokenizer.dna()
    complement = dna.complement_ids
    assert complement is not None
    assert all(complement[complement[i]] == i for i in range(16))
    strand = [complement[i] for i in reversed(dna.encode(text))]
    assert dna.decode(strand) == text.translate(str.maketrans("ACGT", "TGCA"))[::-1]
    assert [complement[i] for i in reversed(strand)] == dna.encode(text)


def test_protein() -> None:
    protein = Tokenizer.protein()
    assert protein.vocab_size == 28
    assert protein.eos_id is None
    assert protein.decode(protein.encode("ACDEFGHIKLMNPQRSTVWYBZXUOJ*-")) == "ACDEFGHIKLMNPQRSTVWYBZXUOJ*-"
    assert protein.decode(protein.encode("mkvx" * 10 + "?")) == "MKVX" * 10 + "X"
    assert get_tokenizer("protein").digest == protein.digest


WORDPIECE = Tokenizer(tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]")))
WORDPIECE.backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
UNIGRAM = Tokenizer(tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -1.5)], unk_id=0)))
DROPS = Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])))


@pytest.mark.parametrize(
    ("tokenizer", "text", "counts", "ambiguous"),
    [
        (Tokenizer.dna(), "ACGTNacgtn", {}, 0),
        (Tokenizer.dna(), "ACRYgtk\nX-", {"\n": 1, "-": 1, "X": 1}, 3),
        (Tokenizer.protein(), "MKVb?1", {"?": 1, "1": 1}, 0),
        (WORDPIECE, "a ab c  [UNK] é", {"c": 1, "é": 1, "U": 1, "N": 1, "K": 1, "[": 1, "]": 1}, 0),
        (UNIGRAM, "abba c", {" ": 1, "c": 1}, 0),
        (DROPS, "abc\nab c", {"c": 2}, 0),
        (BYTES, "é\ud7ff?", {}, 0),
        (BPE, "漢字 é", {}, 0),
        (prefixed(), "漢字 é", {}, 0),
    ],
    ids=["dna", "codes", "protein", "words", "unigram", "dropped", "bytes", "bpe", "prefixed"],
)
def test_what_is_unknown_is_counted(tokenizer: Tokenizer, text: str, counts: dict[str, int], ambiguous: int) -> None:
    slow = UnknownStats(len(text))
    if not tokenizer._covers_all_text:
        slow = tokenizer._count_unknown([text], [tokenizer.backend.encode(text, add_special_tokens=False)])
    _, fast = tokenizer.encode_batch_with_stats(
        [text[:2], text[2:]] if tokenizer.vocab_size < 30 and " " not in text else [text]
    )
    for unknown in (fast, slow):
        assert (dict(unknown.most_frequent), unknown.num_unknown) == (counts, sum(counts.values()))
        assert (unknown.num_ambiguous, unknown.num_chars) == (ambiguous, len(text))


@pytest.mark.parametrize(
    ("tokenizer", "text", "sentence"),
    [
        (
            Tokenizer.dna(),
            "hello world",
            r"^7 of 11 characters are unknown .*\('l' 3, 'o' 2, .*would become \[UNK\], more than 5%; it has 'ACGNT'",
        ),
        (Tokenizer.dna(), "ACGUUGCA", r"^2 of 8 characters are unknown to the tokenizer \('U' 2\)"),
        (
            Tokenizer.protein(),
            "to be, or not",
            r"^4 of 13 .*would become X, more than 5%; it has '\*-ABCDEFG",
        ),
        (
            get_tokenizer("text8"),
            "Hello",
            r"^1 of 5 characters is unknown .*\('H' 1\).* it has ' abcdefghijklmnopq",
        ),
        (
            WORDPIECE,
            "a good one",
            r"^7 of 10 characters are unknown .* would become \[UNK\], more .* 3 tokens",
        ),
        (DROPS, "abc", r"^1 of 3 characters is unknown .*'c' 1"),
    ],
    ids=["english", "rna", "prose", "text8", "words", "dropped"],
)
def test_a_text_of_another_alphabet_is_refused(tokenizer: Tokenizer, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        tokenizer.encode(text)
    assert "give it such a text, or take another tokenizer, as bytes or bpe:4096" in str(error.value)


def test_a_few_unknown_characters_are_told(caplog: pytest.LogCaptureFixture) -> None:
    dna = Tokenizer.dna()
    assert dna.encode("ACGT" * 10 + "X") == [7, 8, 9, 10] * 10 + [6]
    assert caplog.messages == ["1 of 41 characters is unknown to the tokenizer ('X' 1) and becomes [UNK]"]
    caplog.clear()
    dna.encode("ACGTRYN")
    (note,) = caplog.messages
    assert note.startswith("2 of 7 characters are codes for several bases (R, Y, S, ")
    caplog.clear()
    dna.encode("hello", allow_unknown=True)
    dna.encode("ACGTN")
    BYTES.encode("hello")
    assert not caplog.messages


def test_counts_add_up() -> None:
    texts = ["ACX" * 3, "GTRX-", "", "YYé"]
    dna = Tokenizer.dna()
    parts = sum((dna.encode_batch_with_stats([text])[1] for text in texts), UnknownStats())
    assert parts == dna.encode_batch_with_stats(texts)[1]
    assert parts == UnknownStats(17, 6, 3, (("X", 4), ("-", 1), ("é", 1)))


def test_text_cannot_fake_the_end_of_a_document(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(BPE.to_json(), encoding="utf-8")
    for tokenizer in (BPE, Tokenizer.from_file(tmp_path / "tokenizer.json"), prefixed()):
        assert tokenizer.eos_id == tokenizer.backend.token_to_id(BPE_EOS_TOKEN) == 0
        text = f"one{BPE_EOS_TOKEN}two {BPE_EOS_TOKEN}"
        for ids in (tokenizer.encode(text), tokenizer.encode_batch([text])[0].tolist()):
            assert tokenizer.eos_id not in ids
            assert tokenizer.decode(ids).strip() == text
    assert BPE.decode([0]) == BPE_EOS_TOKEN


def test_bpe_is_the_same_in_every_process() -> None:
    code = (
        "import sys; from unmask.data.tokenizers import Tokenizer;"
        "print(Tokenizer.train_bpe(iter(sys.argv[1:]), 400).digest)"
    )
    texts = [PROSE, "another text"]
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, *texts],
            env={**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed, threads in (("1", "1"), ("2", "3"))
    }
    assert digests == {Tokenizer.train_bpe(iter(texts), 400).digest}


def test_bpe_learns_what_is_frequent() -> None:
    assert BPE.vocab_size <= 400
    assert " quick" in [BPE.decode([i]) for i in range(BPE.vocab_size)]
    assert len(BPE.encode(PROSE)) < len(PROSE) / 2


def test_bpe_needs_a_token_for_every_byte() -> None:
    with pytest.raises(ValueError, match=r"^a BPE vocabulary needs at least 257 tokens; got 256$"):
        Tokenizer.train_bpe(iter(["a"]), 256)
    smallest = Tokenizer.train_bpe(iter(["aaaa"]), 257)
    assert smallest.decode(smallest.encode("é\0")) == "é\0"


@pytest.mark.parametrize(
    ("tokenizer", "separator"),
    [
        (BYTES, 0),
        (Tokenizer.characters("ab\n"), 0),
        (Tokenizer.characters("ab"), None),
        (Tokenizer.dna(), 1),
        (Tokenizer.protein(), None),
        (BPE, 0),
        (
            Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "[SEP]": 1, "</s>": 2}, unk_token="a"))),
            2,
        ),
        (Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))), 1),
        (Tokenizer(tokenizers.Tokenizer(models.WordLevel({"aa": 0}, unk_token="aa"))), None),
    ],
)
def test_what_ends_a_document(tokenizer: Tokenizer, separator: int | None) -> None:
    assert tokenizer.eos_id == separator


@pytest.mark.parametrize(("ids", "unknown"), [([256], 256), ([65, -1], -1), ([1000, 65], 1000)])
def test_an_id_that_is_not_there_is_not_decoded(ids: list[int], unknown: int) -> None:
    with pytest.raises(ValueError, match=rf"^the tokenizer has no token {unknown}; its ids are 0\.\.255$"):
        BYTES.decode(ids)


def test_numpy_ids_are_decoded() -> None:
    assert BYTES.decode(np.array([104, 105], np.uint16)) == "hi"


def test_the_mask_comes_after_the_largest_id() -> None:
    gaps = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")))
    assert gaps.vocab_size == 8
    with pytest.raises(ValueError, match="has no token 3"):
        gaps.decode([3])


@pytest.mark.parametrize(("size", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_the_mask_fits_into_the_dtype(size: int, dtype: type) -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": size - 1}, unk_token="a")))
    assert tokenizer.dtype == dtype
    assert tokenizer.encode_batch(["a"])[0].tolist() == [size - 1]


def test_nothing_is_cut_padded_or_added() -> None:
    inner = tokenizers.Tokenizer.from_str(BPE.to_json())
    inner.enable_truncation(4)
    inner.enable_padding(length=100)
    inner.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[(BPE_EOS_TOKEN, 0)])
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode(PROSE) == tokenizer.encode_batch([PROSE])[0].tolist() == BPE.encode(PROSE)


def test_different_tokenizers_have_different_digests(tmp_path: Path) -> None:
    every = [BYTES, BPE, prefixed(), Tokenizer.dna(), Tokenizer.characters("ab"), Tokenizer.characters("ac")]
    assert len({tokenizer.digest for tokenizer in every}) == len(every)
    for tokenizer in every:
        (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        assert Tokenizer.from_file(tmp_path / "tokenizer.json").digest == tokenizer.digest


def test_names(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(BPE.to_json(), encoding="utf-8")
    assert get_tokenizer("bytes").digest == BYTES.digest
    assert get_tokenizer("dna").digest == Tokenizer.dna().digest
    assert get_tokenizer("text8").vocab_size == 27
    for name in (tmp_path / "tokenizer.json", tmp_path, f"hub:{tmp_path}"):
        assert get_tokenizer(str(name)).digest == BPE.digest


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("byte", r"^there is no tokenizer 'byte'; known are bytes, dna, .* \(did you mean bytes\?\)$"),
        (
            "zzz",
            r"^there is no tokenizer 'zzz'; known are bytes, dna, protein, text8, bpe:SIZE, hub:NAME, ",
        ),
        ("no/such.json", r"^no/such\.json is not a tokenizer\.json that can be read: "),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_tokenizer(name)


def hub(home: Path, code: str) -> str:
    """Run code where the hub is a folder."""
    done = subprocess.run(
        [sys.executable, "-c", f"from unmask.data.tokenizers import get_tokenizer\n{code}"],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def test_a_tokenizer_from_the_hub(tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--something"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots" / revision).mkdir(parents=True)
    (repository / "snapshots" / revision / "tokenizer.json").write_text(BPE.to_json(), encoding="utf-8")
    assert hub(tmp_path, "print(get_tokenizer('hub:someone/something').digest)") == BPE.digest


def test_a_tokenizer_that_the_hub_does_not_have(tmp_path: Path) -> None:
    code = "try:\n  get_tokenizer('hub:someone/nothing')\nexcept ValueError as error:\n  print(error)"
    said = hub(tmp_path, code)
    assert said.startswith("the tokenizer 'someone/nothing' is neither a folder nor available from the hub: ")
    assert "\n" not in said
