"""Export to GGUF, and the file in llama.cpp: token ids first, then vectors."""

import copy
import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from packaging.version import Version
from programs import run
from tiny import save_tiny_adapter, save_tiny_base, tiny_backbone, tiny_encoder
from tiny_tokenizers import TOKENIZERS, VOCABULARY, markup
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModel, Gemma3TextConfig, LlamaConfig, Qwen3Config

from angle_llm import PromptTemplate, SentenceEncoder, load_prompt
from angle_llm.export.comparison import Comparison
from angle_llm.export.formats import gguf_file, llama_cpp
from angle_llm.export.formats.llama_cpp import GGUF_NAME, USAGE_NAME, Usage, is_gguf_export
from angle_llm.export.texts import SENTENCES
from angle_llm.export.verify import VerifyOptions, verify
from angle_llm.model.source.checks import ArtifactError
from angle_llm.prompts import SidePrompts

export_gguf = partial(gguf_file.export_gguf, check=False)
LENGTH = 80
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
PLAIN = {"rope_type": "default", "rope_theta": 30_000.0}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 30_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 30_000.0, "factor": 2.0}


def gemma(**changed: Any) -> Gemma3TextConfig:
    layers = ["sliding_attention", "full_attention"] * 2
    theta = {"sliding_attention": PLAIN, "full_attention": LINEAR}
    values = SIZES | {"num_hidden_layers": 4, "sliding_window": 16, "query_pre_attn_scalar": 48}
    return Gemma3TextConfig(**values | {"layer_types": layers, "rope_parameters": theta} | changed)


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "llama, sentencepiece": (lambda: LlamaConfig(**SIZES, rope_parameters=PLAIN), "llama2"),
    "llama, llama3 scaling and biases": (
        lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA_3, attention_bias=True),
        "llama3",
    ),
    "llama, gpt-2 split": (lambda: LlamaConfig(**SIZES, rope_parameters=LINEAR), "smollm2"),
    "qwen3": (lambda: Qwen3Config(**SIZES, rope_parameters=PLAIN), "qwen"),
    "gemma-3": (gemma, "gemma"),
}
ONE_WORD = load_prompt("summarize_one_word")


def save(folder: Path, config: Any, tokenizer: str, **options: Any) -> Path:
    """Save an encoder with random weights, also of norms and biases."""
    torch.manual_seed(0)
    backbone: Any = AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    encoder = SentenceEncoder(
        backbone.eval(), TOKENIZERS[tokenizer](), **{"max_length": LENGTH, "prompt": ONE_WORD} | options
    )
    encoder.save_pretrained(folder)
    return folder


def in_llama_cpp(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that opens a file in llama.cpp."""
    return pytest.mark.slow(pytest.mark.needs("xllamacpp")(test))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of llama.cpp wait actively, so that several tests at the same time would take minutes."""
    monkeypatch.setattr(llama_cpp, "_THREADS", 1)


def compared(saved: Path, folder: Path, side: Any = None) -> Comparison:
    """Compare an exported folder in llama.cpp with the encoder it was made from, by `verify`."""
    return verify([saved, folder], VerifyOptions(device="cpu", side=side)).comparisons[0]


@in_llama_cpp
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_the_token_ids_and_vectors_of_the_encoder(name: str, tmp_path: Path) -> None:
    config, tokenizer = MODELS[name]
    saved = save(tmp_path / "model", config(), tokenizer)
    export_gguf(saved, tmp_path / "out")
    found = compared(saved, tmp_path / "out")
    assert found.problems == ()
    assert found.largest_difference <= 1e-6  # measured: 4e-11 at most, 2e-7 for Gemma, whose GELU is a table in float16
    (found,) = verify([saved, tmp_path / "out"], VerifyOptions(texts=markup(), device="cpu")).comparisons
    assert found.problems == (), "names of added tokens"
    assert found.largest_difference <= 1e-6
    usage = Usage.read(tmp_path / "out")
    assert (usage.prompt, usage.max_length, usage.normalize) == (SidePrompts(ONE_WORD, ONE_WORD), LENGTH, False)
    assert is_gguf_export(tmp_path / "out")


@in_llama_cpp
def test_a_text_can_have_as_many_tokens_as_the_model_has_positions(tmp_path: Path) -> None:
    """llama.cpp refuses a text that fills the context."""
    config, tokenizer = MODELS["qwen3"]
    saved = save(tmp_path / "model", config(), tokenizer, max_length=SIZES["max_position_embeddings"])
    export_gguf(saved, tmp_path / "out")
    assert verify([saved, tmp_path / "out"], VerifyOptions(texts=["one two " * 200, "short"], device="cpu")).holds
    assert len(SentenceEncoder.from_pretrained(saved, device="cpu").tokenize(["one two " * 200])[0]) == 256


@pytest.mark.parametrize(("max_length", "context"), [(LENGTH, 256), (255, 256), (256, 257)])
def test_the_context_of_a_file_has_a_position_more_than_the_longest_text(
    max_length: int, context: int, tmp_path: Path
) -> None:
    config, tokenizer = MODELS["qwen3"]
    export_gguf(save(tmp_path / "model", config(), tokenizer, max_length=max_length), tmp_path / "out")
    assert gguf.GGUFReader(tmp_path / "out" / GGUF_NAME).fields["qwen3.context_length"].contents() == context


@in_llama_cpp
def test_normalisation_mean_pooling_edits_and_tokens_at_both_ends(tmp_path: Path) -> None:
    """A Qwen3-Embedding-like encoder: EOS after the text, here by the prompt; two sides; mean pooling."""
    query = PromptTemplate(
        "q", 'Find "{text}" now', edits=("append_full_stop", "double_quotes_to_single"), append="eos"
    )
    document = PromptTemplate("d", 'Find "{text}" now', tokenization="segments", append="eos")
    prompts = SidePrompts(query, document)
    config, tokenizer = MODELS["llama, llama3 scaling and biases"]
    saved = save(tmp_path / "model", config(), tokenizer, prompt=prompts, pooling="mean")
    card = json.loads((saved / "angle_llm.json").read_text())
    (saved / "angle_llm.json").write_text(json.dumps(card | {"normalize": True}))
    export_gguf(saved, tmp_path / "out")
    usage = Usage.read(tmp_path / "out")
    assert [usage.requests[side].as_text for side in ("query", "document")] == [True, False]
    for side in ("query", "document"):
        assert compared(saved, tmp_path / "out", side).problems == ()


@in_llama_cpp
def test_names_of_special_tokens_in_a_prompt_are_plain_characters(tmp_path: Path) -> None:
    config, tokenizer = MODELS["llama, sentencepiece"]
    saved = save(tmp_path / "model", config(), tokenizer, prompt=PromptTemplate("p", 'After </s> comes "{text}"'))
    export_gguf(saved, tmp_path / "out")
    usage = Usage.read(tmp_path / "out")
    assert not usage.requests["query"].as_text
    assert "Send token ids" in usage.described()
    assert compared(saved, tmp_path / "out").problems == ()


@in_llama_cpp
def test_most_names_of_special_tokens_in_a_text_are_plain_characters_for_all_clients(tmp_path: Path) -> None:
    """A client that sends texts, whatever they contain: `<s>` is no special token for llama.cpp, because its type is UNUSED."""
    config, tokenizer = MODELS["llama, sentencepiece"]
    saved = save(tmp_path / "model", config(), tokenizer)
    export_gguf(saved, tmp_path / "out")
    set_usage(tmp_path / "out", special_names=[])
    assert verify([saved, tmp_path / "out"], VerifyOptions(texts=["one <s> two", "<unk>"], device="cpu")).holds


@in_llama_cpp
@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
def test_a_merged_adapter_in_a_smaller_dtype(dtype: Any, tmp_path: Path) -> None:
    base = save_tiny_base("llama-tied", tmp_path / "base")
    saved = save_tiny_adapter(base, tmp_path / "adapter", max_length=LENGTH)
    sizes = {}
    for stored in ("float32", dtype):
        export_gguf(saved, tmp_path / stored, dtype=stored)
        sizes[stored] = (tmp_path / stored / GGUF_NAME).stat().st_size
    assert sizes[dtype] < 0.75 * sizes["float32"]
    assert compared(saved, tmp_path / dtype).problems == ()


# --- wrong artefacts --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("right")
    save_tiny_base("llama", folder / "base")
    return save_tiny_adapter(folder / "base", folder / "adapter", max_length=LENGTH), folder / "base"


def set_field(folder: Path, key: str, value: Any) -> None:
    """Change a value in the header of a GGUF file, as `gguf_set_metadata` of llama.cpp does."""
    field = gguf.GGUFReader(folder / GGUF_NAME, "r+").fields[key]
    field.parts[field.data[0]][0] = value


def set_usage(folder: Path, **changed: Any) -> None:
    path = folder / USAGE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def set_requests(folder: Path, **changed: Any) -> None:
    requests = json.loads((folder / USAGE_NAME).read_text())["requests"]
    longer = {side: {**request, "most": request["most"] + 20} for side, request in requests.items()}
    set_usage(folder, requests={side: request | changed for side, request in longer.items()})


def cut_longer(folder: Path) -> None:
    set_requests(folder)
    set_usage(folder, max_length=LENGTH + 20)


IDS, COSINE = "different token ids", "exceeds"
WRONG: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "no prompt": (
        "adapter",
        lambda folder: set_usage(folder, prompt=load_prompt("plain").to_dict()),
        ("prompt '{text}'", IDS, COSINE),
    ),
    "wrong pooling": (
        "adapter",
        lambda folder: set_field(folder, "llama.pooling_type", 1),
        (COSINE,),
    ),
    "no BOS": ("adapter", lambda folder: set_field(folder, "tokenizer.ggml.add_bos_token", False), (IDS, COSINE)),
    "extra EOS": ("adapter", lambda folder: set_field(folder, "tokenizer.ggml.add_eos_token", True), (IDS, COSINE)),
    "wrong rotary base": ("adapter", lambda folder: set_field(folder, "llama.rope.freq_base", 20_000.0), (COSINE,)),
    "another maximum length": ("adapter", cut_longer, ("max_length 100, expected 80", IDS, COSINE)),
    "end of the prompt is cut": ("adapter", lambda folder: set_requests(folder, after=[]), (IDS, COSINE)),
    "names of special tokens as text": ("adapter", lambda folder: set_usage(folder, special_names=[]), (IDS, COSINE)),
    "normalised": ("adapter", lambda folder: set_usage(folder, normalize=True), ("normalize True, expected False",)),
    "no Unicode normalisation": ("qwen3", lambda folder: set_usage(folder, unicode=None), (IDS, COSINE)),
    "no space before a text": (
        "llama, sentencepiece",
        lambda folder: set_field(folder, "tokenizer.ggml.add_space_prefix", False),
        (IDS, COSINE),
    ),
    "no rotary scaling": (
        "llama, gpt-2 split",
        lambda folder: set_field(folder, "llama.rope.scaling.factor", 1.0),
        (COSINE,),
    ),
    "wrong rotary base in windows": (
        "gemma-3",
        lambda folder: set_field(folder, "gemma3.rope.freq_base_swa", 10_000.0),
        (COSINE,),
    ),
    "longer windows": ("gemma-3", lambda folder: set_field(folder, "gemma3.attention.sliding_window", 64), (COSINE,)),
}
"""Model, change of its exported folder, and what the comparison reports."""


def saved_model(name: str, right: tuple[Path, Path], tmp_path: Path) -> Path:
    """An encoder of `MODELS`, or an adapter."""
    return right[0] if name == "adapter" else save(tmp_path / "model", MODELS[name][0](), MODELS[name][1])


@in_llama_cpp
@pytest.mark.parametrize("name", WRONG)
def test_verify_finds_a_wrong_file(name: str, right: tuple[Path, Path], tmp_path: Path) -> None:
    model, spoil, messages = WRONG[name]
    saved = saved_model(model, right, tmp_path)
    export_gguf(saved, tmp_path / "out")
    assert compared(saved, tmp_path / "out").problems == ()
    spoil(tmp_path / "out")
    problems = compared(saved, tmp_path / "out").problems
    print(problems)
    for message in messages:
        assert any(message in problem for problem in problems), problems


def unchanged(source: str, values: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    return values


def without_one(source: str, values: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    return CONVERTED(source, values, config, architecture) - (1 if source.endswith("norm.weight") else 0)


def without_scale_of_queries(source: str, values: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    return values + 1 if source.endswith("norm.weight") else values


def without_factors(writer: Any, name: str, *values: Any, **options: Any) -> None:
    if name != "rope_freqs.weight":
        ADD_TENSOR(writer, name, *values, **options)


CONVERTED, ADD_TENSOR = gguf_file._converted, gguf.GGUFWriter.add_tensor
BROKEN: dict[str, tuple[str, Any, str, Any, str]] = {
    "rows of q and k are not permuted": ("adapter", gguf_file, "_converted", unchanged, COSINE),
    "norms of Gemma without 1": ("gemma-3", gguf_file, "_converted", without_one, COSINE),
    "no query_pre_attn_scalar of Gemma": ("gemma-3", gguf_file, "_converted", without_scale_of_queries, COSINE),
    "no factors of llama3 scaling": (
        "llama, llama3 scaling and biases",
        gguf.GGUFWriter,
        "add_tensor",
        without_factors,
        COSINE,
    ),
}
"""Model, part of the export that is broken, and what the comparison reports."""


@in_llama_cpp
@pytest.mark.parametrize("name", BROKEN)
def test_verify_finds_a_wrong_conversion(
    name: str, right: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, module, function, broken, message = BROKEN[name]
    saved = saved_model(model, right, tmp_path)
    monkeypatch.setattr(module, function, broken)
    export_gguf(saved, tmp_path / "out")
    problems = compared(saved, tmp_path / "out").problems
    print(problems)
    assert any(message in problem for problem in problems), problems


@in_llama_cpp
def test_verify_finds_another_split_of_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that joins the digits of a number (`gpt-2`), which the tokenizer splits (`smollm`)."""
    tokenizer = copy.deepcopy(TOKENIZERS["smollm2"]())
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, merges = spec["model"]["vocab"], spec["model"]["merges"]
    vocabulary["20"] = vocabulary.pop("".join(merges[-1]))
    merges[-1] = ["2", "0"]
    digits = {"type": "Digits", "individual_digits": True}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, spec["pre_tokenizer"]]}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(spec))
    monkeypatch.setitem(TOKENIZERS, "digits", lambda: tokenizer)
    saved = save(tmp_path / "model", MODELS["llama, gpt-2 split"][0](), "digits")
    export_gguf(saved, tmp_path / "right")
    assert compared(saved, tmp_path / "right").problems == ()
    monkeypatch.setattr(gguf_file, "_split_name", lambda spec: "gpt-2")
    export_gguf(saved, tmp_path / "wrong")
    problems = compared(saved, tmp_path / "wrong").problems
    assert any(IDS in problem for problem in problems), problems


@in_llama_cpp
def test_verify_finds_the_base_in_place_of_the_merged_model(right: tuple[Path, Path], tmp_path: Path) -> None:
    SentenceEncoder.from_pretrained(right[1], device="cpu", max_length=LENGTH).save_pretrained(tmp_path / "whole")
    export_gguf(tmp_path / "whole", tmp_path / "out")
    problems = compared(right[0], tmp_path / "out").problems
    assert any(COSINE in problem for problem in problems), problems


@in_llama_cpp
def test_verify_finds_texts_that_llama_cpp_pools_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several slots and no common store of keys, llama.cpp pools only a part of a text. `--kv-unified` prevents it."""
    library = importlib.import_module("xllamacpp")
    config, tokenizer = MODELS["llama, gpt-2 split"]
    saved = save(tmp_path / "model", config(), tokenizer, pooling="mean")
    export_gguf(saved, tmp_path / "out")
    assert compared(saved, tmp_path / "out").problems == ()
    start = library.Server

    def apart(parameters: Any) -> Any:
        parameters.kv_unified = False
        return start(parameters)

    monkeypatch.setattr(library, "Server", apart)
    (problem,) = compared(saved, tmp_path / "out").problems
    assert COSINE in problem


# --- without llama.cpp ------------------------------------------------------------------------------------------------


def needs_tokenizers_of_files() -> None:
    """Skip a test that opens a file whose tokenizer is refused with older versions of `transformers`."""
    if Version(metadata.version("transformers")) < Version("5.23"):
        pytest.skip("transformers before 5.23 gives other token ids")


PUBLISHED_3 = LLAMA_3 | {"factor": 32.0, "original_max_position_embeddings": 8192}
SIX_LAYERS = ["sliding_attention"] * 5 + ["full_attention"]
LAYERS_27B = SIX_LAYERS * 10 + ["sliding_attention"] * 2
GEMMA_ROPE = {"sliding_attention": PLAIN | {"rope_theta": 10_000.0}, "full_attention": LINEAR}


@pytest.mark.parametrize(
    ("make", "tokenizer"),
    [
        (lambda: LlamaConfig(**SIZES, rope_parameters=PLAIN, attention_bias=True), "smollm2"),
        (lambda: LlamaConfig(**SIZES | {"max_position_embeddings": 16_384}, rope_parameters=PUBLISHED_3), "llama3"),
        (lambda: LlamaConfig(**SIZES, rope_parameters=LINEAR), "smollm2"),
        (lambda: gemma(num_hidden_layers=6, layer_types=SIX_LAYERS, rope_parameters=GEMMA_ROPE), "gemma"),
        (lambda: gemma(num_hidden_layers=62, layer_types=LAYERS_27B, rope_parameters=GEMMA_ROPE), "gemma"),
    ],
    ids=["plain, biases", "llama-3", "linear", "gemma-3, linear", "gemma-3, layers of 27B"],
)
def test_this_package_opens_the_file_as_a_backbone(make: Callable[[], Any], tokenizer: str, tmp_path: Path) -> None:
    """With the scaling of rotary embeddings, which `transformers` 5.23 does not read. Texts are padded: a probe of other
    layouts would take most of the time."""
    if tokenizer != "smollm2":
        needs_tokenizers_of_files()
    padded: dict[str, Any] = {"layout": "padded"}
    saved = save(tmp_path / "model", make(), tokenizer, **padded)
    export_gguf(saved, tmp_path / "out")
    ours = SentenceEncoder.from_pretrained(saved, device="cpu", **padded)
    usage = {"max_length": LENGTH, "prompt": ours.prompt.name, "pooling": ours.pooling}
    theirs = SentenceEncoder.from_pretrained(tmp_path / "out" / GGUF_NAME, device="cpu", **usage, **padded)
    ids = zip(SENTENCES, ours.tokenize(SENTENCES), theirs.tokenize(SENTENCES), strict=True)
    texts = [text for text, our_ids, their_ids in ids if our_ids == their_ids]
    # The tiny vocabulary of Gemma has merges that GGUF cannot hold.
    assert len(texts) >= len(SENTENCES) - 10 * (tokenizer == "gemma")
    # Float32, values of up to 5.
    np.testing.assert_allclose(theirs.encode(texts), ours.encode(texts), rtol=0, atol=1e-5)


def test_words_and_the_start_token_of_llama_3_are_as_in_llama_cpp(tmp_path: Path) -> None:
    """Without `ignore_merges`, a word whose merges are missing has several tokens; older files do not name the start."""
    needs_tokenizers_of_files()
    saved = save(tmp_path / "model", LlamaConfig(**SIZES, rope_parameters=PLAIN), "llama3")
    tokenizer = json.loads((saved / "tokenizer.json").read_text())
    words = {
        pair for pair in map(tuple, tokenizer["model"]["merges"]) if "".join(pair) in ("Ġman", "Ġwoman", "Ġeating")
    }
    assert words
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if tuple(pair) not in words]
    (saved / "tokenizer.json").write_text(json.dumps(tokenizer))
    export_gguf(saved, tmp_path / "out")
    file = tmp_path / "out" / GGUF_NAME
    for flag in (b"add_bos_token", b"add_bos_tokem"):  # the second name means nothing
        file.write_bytes(file.read_bytes().replace(b"add_bos_token", flag))
        ours, theirs = (
            SentenceEncoder.from_pretrained(path, device="cpu", max_length=LENGTH, prompt="plain", pooling="last")
            for path in (saved, file)
        )
        ids = ours.tokenize(SENTENCES)
        assert theirs.tokenize(SENTENCES) == ids
        assert {text[0] for text in ids} == {ours.tokenizer.bos_token_id}
    ours.tokenizer.backend_tokenizer.model.ignore_merges = False
    assert ours.tokenize(SENTENCES) != ids


def test_digits_are_split_as_in_llama_cpp_and_unknown_splits_are_refused(tmp_path: Path) -> None:
    """The split of SmolLM2; `transformers` has the split of GPT-2 for it, which joins line ends before a digit."""
    saved = save(tmp_path / "model", LlamaConfig(**SIZES, rope_parameters=PLAIN), "smollm2")
    tokenizer = json.loads((saved / "tokenizer.json").read_text())
    split = tokenizer["pre_tokenizer"]
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, split]}
    merges, vocabulary = tokenizer["model"]["merges"], tokenizer["model"]["vocab"]
    vocabulary["ĊĊ"] = vocabulary.pop("".join(merges.pop()))
    merges.append(["Ċ", "Ċ"])
    (saved / "tokenizer.json").write_text(json.dumps(tokenizer))
    export_gguf(saved, tmp_path / "out")
    file = tmp_path / "out" / GGUF_NAME
    ours, theirs = (
        SentenceEncoder.from_pretrained(path, device="cpu", max_length=LENGTH, prompt="plain", pooling="last")
        for path in (saved, file)
    )
    texts = ["List:\n\n1. one\n\n2. two", "in  2024", *SENTENCES]
    assert theirs.tokenize(texts) == ours.tokenize(texts)
    ours.tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    assert theirs.tokenize(texts) != ours.tokenize(texts)
    file.write_bytes(file.read_bytes().replace(b"smollm", b"viking"))
    with pytest.raises(ArtifactError, match=r"viking"):
        SentenceEncoder.from_pretrained(file, device="cpu")


def test_older_transformers_open_no_file_whose_token_ids_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {name: metadata.version(name) for name in ("gguf", "tokenizers", "accelerate")}
    monkeypatch.setattr(metadata, "version", lambda name: "5.22.2" if name == "transformers" else versions[name])
    for tokenizer in ("llama3", "smollm2"):
        export_gguf(save(tmp_path / tokenizer, LlamaConfig(**SIZES), tokenizer), tmp_path / f"{tokenizer}-out")
    with pytest.raises(ArtifactError, match=r"transformers 5\.22\.2 gives wrong token ids .* \(llama-bpe\)"):
        SentenceEncoder.from_pretrained(tmp_path / "llama3-out" / GGUF_NAME, device="cpu")
    SentenceEncoder.from_pretrained(tmp_path / "smollm2-out" / GGUF_NAME, device="cpu")


def test_other_scalings_of_a_file_are_refused(tmp_path: Path) -> None:
    needs_tokenizers_of_files()
    other = save(tmp_path / "model", LlamaConfig(**SIZES, rope_parameters=LLAMA_3), "llama3")
    export_gguf(other, tmp_path / "out")
    with pytest.raises(ArtifactError, match="rotary scaling of unknown parameters"):
        SentenceEncoder.from_pretrained(tmp_path / "out" / GGUF_NAME, device="cpu")
    linear = save(tmp_path / "linear", LlamaConfig(**SIZES, rope_parameters=LINEAR), "smollm2")
    export_gguf(linear, tmp_path / "yarn")
    file = tmp_path / "yarn" / GGUF_NAME
    file.write_bytes(file.read_bytes().replace(b"linear", b"yarn64"))
    with pytest.raises(ArtifactError, match="rotary scaling yarn64"):
        SentenceEncoder.from_pretrained(file, device="cpu")


def test_nothing_is_written_if_the_check_fails(
    right: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def refuse(folder: Path, *_: Any, **__: Any) -> None:
        seen.extend(sorted(path.name for path in folder.iterdir()))
        raise ValueError("differs")

    monkeypatch.setattr(gguf_file, "finish_folder", refuse)
    with pytest.raises(ValueError, match="differs"):
        export_gguf(right[0], tmp_path / "out")
    assert seen == [GGUF_NAME, USAGE_NAME, "merge.json"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gpt2", {}, "this model has type 'gpt2'"),
        ("mistral", {}, "this model has type 'mistral'"),
        ("bert", {}, "this tokenizer is WordPiece"),
        ("llama", {"pooling": "weightedmean"}, "pooling 'weightedmean'"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_name(kind: str, options: Any, message: str, tmp_path: Path) -> None:
    tiny_encoder(kind, max_length=LENGTH, **options).save_pretrained(tmp_path / "model")
    with pytest.raises(ArtifactError, match=message):
        export_gguf(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "tokenizer", "message"),
    [
        (
            lambda: LlamaConfig(**SIZES, rope_parameters={**PLAIN, "rope_type": "dynamic", "factor": 2.0}),
            "smollm2",
            "dynamic",
        ),
        (
            lambda: LlamaConfig(**SIZES, rope_parameters=YARN),
            "smollm2",
            "yarn",
        ),
        (
            lambda: Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=0),
            "qwen",
            "windows",
        ),
        (lambda: LlamaConfig(**SIZES, is_causal=False), "smollm2", "bidirectional"),
        (lambda: LlamaConfig(**SIZES, hidden_act="gelu_pytorch_tanh"), "smollm2", "activation gelu_pytorch_tanh"),
        (lambda: gemma(hidden_activation="silu"), "gemma", "activation silu"),
        (lambda: gemma(layer_types=["full_attention", "sliding_attention"] * 2), "gemma", "every n-th layer"),
    ],
)
def test_a_configuration_that_llama_cpp_does_not_have_is_refused_by_name(
    config: Callable[[], Any], tokenizer: str, message: str, tmp_path: Path
) -> None:
    saved = save(tmp_path / "model", config(), tokenizer)
    with pytest.raises(ArtifactError, match=message):
        export_gguf(saved, tmp_path / "out")


def test_usage_names_the_prompt_the_length_and_special_names(tmp_path: Path) -> None:
    tiny_encoder("qwen2", max_length=LENGTH, prompt=replace(ONE_WORD, tokenization="segments")).save_pretrained(
        tmp_path / "model"
    )
    export_gguf(tmp_path / "model", tmp_path / "out")
    text = Usage.read(tmp_path / "out").described()
    for part in (ONE_WORD.template, f"at most {LENGTH} tokens", "<|im_end|>", "llama-server -m", "Send token ids"):
        assert part in text
    assert tiny_backbone("qwen2").config.model_type in gguf_file.ARCHITECTURES


def test_a_damaged_usage_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / USAGE_NAME).write_text("{}")
    with pytest.raises(ArtifactError, match=USAGE_NAME):
        Usage.read(tmp_path)


@in_llama_cpp
@pytest.mark.parametrize("dtype", ["float32", "float16", "q8_0"])
def test_the_commands_export_and_verify(dtype: str, tmp_path: Path) -> None:
    base = AutoModel.from_config(MODELS["llama, gpt-2 split"][0]())
    base.save_pretrained(tmp_path / "base")
    TOKENIZERS["smollm2"]().save_pretrained(tmp_path / "base")
    save_tiny_adapter(tmp_path / "base", tmp_path / "adapter", max_length=LENGTH)
    done = run("angle-llm", "export", tmp_path / "adapter", tmp_path / "out", "--to", "gguf", "--dtype", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: the same encoder" in done.stdout
    assert "llama-server -m" in done.stdout
    report = json.loads((tmp_path / "out" / "verification.json").read_text())
    assert (report["holds"], report["comparisons"][0]["form"]["dtype"]) == (True, dtype)
    assert "llama-server -m encoder.gguf" in (tmp_path / "out" / "README.md").read_text()
    done = run("angle-llm", "verify", tmp_path / "adapter", tmp_path / "out", "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stdout
