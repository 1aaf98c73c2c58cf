"""Training on texts without labels: masked next-token prediction as in llm2vec, and unsupervised SimCSE."""

import copy
import importlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from programs import run
from runs import outcome, read_metrics, use_float64_norm
from test_distributed import program
from tiny import KINDS, micro_batches_of, save_tiny_base
from tiny_tokenizers import TOKENIZERS
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from angle_llm import SentenceEncoder, fine_tune
from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import PositivePair
from angle_llm.losses import AngleObjective, Relation
from angle_llm.model.layout.micro_batches import LayoutSupport
from angle_llm.model.source.resolve import resolve_model
from angle_llm.settings.parsing import SettingsError, load_settings
from angle_llm.settings.train import LoraSettings, PretrainingSettings, TrainSettings
from angle_llm.train.batches import PlannedBatch
from angle_llm.train.objectives import task_of
from angle_llm.train.pretraining import MaskedTokenLoss, TokenMasker, TwoViews
from angle_llm.train.step import group_step

TEXTS = [f"A man number {n} eats {'very ' * (n % 4)}slowly, and a dog runs." for n in range(24)]


def save_language_model(folder: Path, kind: str = "llama", **changed: Any) -> Path:
    """Write a causal language model with its output layer; the tiny models of other tests have none."""
    config = KINDS[kind].config()
    config.update(changed)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    TOKENIZERS[KINDS[kind].tokenizer]().save_pretrained(folder)
    return folder


def encoder_of(folder: Path, **options: Any) -> SentenceEncoder:
    encoder = SentenceEncoder.from_pretrained(
        folder, device="cpu", dtype="float32", attention="bidirectional", **options
    )
    return with_task("mntp", encoder, folder)


def with_task(name: Any, encoder: SentenceEncoder, folder: Path) -> SentenceEncoder:
    task = task_of(TrainSettings(pretraining=PretrainingSettings(task=name)))
    return encoder.changed(model=encoder.model.changed(task.head(encoder, resolve_model(str(folder)))))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("graph_tokens", [0, 10**6])
def test_loss_and_gradient_are_those_of_the_language_model(
    tied: bool, layout: str, graph_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels are shifted as transformers shifts them; the mean is over the masked tokens of the batch, in float64."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", LlamaRMSNorm.forward)
    use_float64_norm()
    folder = save_language_model(tmp_path / "base", tie_word_embeddings=tied)
    encoder = encoder_of(folder)
    encoder.model.double()
    if layout == "padded":
        encoder.layouts = LayoutSupport("padded", "test")
    batch = TextBatch.from_examples([PositivePair(text, text) for text in TEXTS])
    codes = encoder.model.head.input_ids(encoder.tokenize(batch.texts), 0)
    plan = encoder.plan_ids(codes, 200)
    assert len(micro_batches_of(plan)) > 2
    inputs = micro_batches_of(plan)[0].inputs(torch.device("cpu"))
    assert (inputs.get("sequence") is None) == (layout == "padded")
    encoder.model.train()
    result = group_step(encoder.model, plan, [PlannedBatch(batch, MaskedTokenLoss(), {})], graph_tokens=graph_tokens)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.config.is_causal = False
    vocabulary, longest = len(model.get_input_embeddings().weight), max(map(len, codes))
    rows = [[code % vocabulary for code in text] + [0] * (longest - len(text)) for text in codes]
    labels = [[code // vocabulary - 1 for code in text] + [-1] * (longest - len(text)) for text in codes]
    masks = [[1] * len(text) + [0] * (longest - len(text)) for text in codes]
    label_BT = torch.tensor(labels)
    assert 30 < int((label_BT >= 0).sum()) < 200
    labels_BT = label_BT.masked_fill(label_BT < 0, -100)
    given = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}
    found = model(**given, labels=labels_BT)
    loss = nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
    assert float(found.loss.detach()) == pytest.approx(float(loss.detach()), abs=1e-5)  # it computes in float32
    loss.backward()
    assert result.losses[0].parts == {"mntp": pytest.approx(float(loss.detach()), abs=1e-12)}
    expected = {name.removeprefix("model."): weight.grad for name, weight in model.named_parameters()}
    for name, weight in encoder.model.backbone.named_parameters():
        assert weight.grad is not None
        assert_close(weight.grad, expected[name], rtol=1e-9, atol=1e-12)
    causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert abs(causal(**given, labels=labels_BT).loss - loss) > 1e-3


class Collator:
    """The tokenizer of `DataCollatorForLanguageModeling` in llm2vec: "_" is the mask token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        own = copy.deepcopy(tokenizer)
        own.mask_token = "_"
        own.pad_token = own.eos_token
        self.call = DataCollatorForLanguageModeling(own, mlm_probability=0.2)
        self.own = own

    def __call__(self, ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        made = self.call([{"input_ids": list(text)} for text in ids])
        return made["input_ids"], made["labels"]


def test_masks_are_those_of_llm2vec() -> None:
    """Shares of masked, replaced, random and kept tokens on 200,000 tokens; special tokens are never masked."""
    tokenizer = TOKENIZERS["smollm2"]()
    vocabulary = len(tokenizer)
    ids = np.random.default_rng(0).integers(3, vocabulary, size=(2000, 100))
    ids[:, 0] = tokenizer.eos_token_id
    ids[:, 1] = tokenizer.convert_tokens_to_ids("_")
    masker = TokenMasker.of(tokenizer, vocabulary, 0.2, seed=1)
    code = np.array(masker.codes(ids.tolist(), 0))
    ours, labels = code % vocabulary, code // vocabulary - 1
    theirs, due = (made.numpy() for made in Collator(tokenizer)(ids.tolist()))
    due[:, 0] = -100  # the language model shifts this label out

    def shares(made: Any, masked: Any) -> list[float]:
        return [
            masked.mean(),
            (made[masked] == masker.mask_id).mean(),
            (made[masked] == ids[masked]).mean(),
            len(np.unique(made[masked])) / vocabulary,
        ]

    assert masker.mask_id == tokenizer.convert_tokens_to_ids("_")
    assert not (labels[:, 0] >= 0).any()
    assert (ids == masker.mask_id).sum() > 100
    assert not any((found == masker.mask_id).any() for found in (labels, due))
    assert np.array_equal(labels[labels >= 0], ids[labels >= 0])
    assert np.array_equal(ours[labels < 0], ids[labels < 0])
    assert shares(ours, labels >= 0) == pytest.approx(shares(theirs, due >= 0), abs=0.01)  # 40,000 masked tokens: 0.002
    assert masker.codes(ids[:5].tolist(), 0) == code[:5].tolist()
    assert masker.codes(ids[:5].tolist(), 1) != code[:5].tolist()


def test_a_mask_token_without_an_embedding_is_not_used() -> None:
    tokenizer = copy.deepcopy(TOKENIZERS["smollm2"]())
    vocabulary = len(tokenizer)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert TokenMasker.of(tokenizer, vocabulary, 0.2, seed=1).mask_id == tokenizer.convert_tokens_to_ids("_")
    assert TokenMasker.of(tokenizer, vocabulary + 1, 0.2, seed=1).mask_id == vocabulary


def test_a_text_without_a_masked_token_is_no_zero_row(tmp_path: Path) -> None:
    """Its row has a 1, as a zero row stops the run; a batch without a masked token has loss 0."""
    encoder = encoder_of(save_language_model(tmp_path / "base"))
    plan = encoder.plan(TEXTS, 200)  # ids, whose label is -1
    batch = TextBatch.from_examples([PositivePair(text, text) for text in TEXTS])
    encoder.model.train()
    result = group_step(encoder.model, plan, [PlannedBatch(batch, MaskedTokenLoss(), {})], graph_tokens=0)
    assert result.losses[0].loss == 0


@pytest.mark.needs("sentence_transformers")
def test_two_views_equal_the_slow_formula_and_the_library() -> None:
    """Two columns of `MultipleNegativesRankingLoss`; a text with two prompts is no negative of itself."""
    x_N2D = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = AngleObjective(contrastive_form="forward")
    none = torch.zeros(0, dtype=torch.long)

    def ours(x: Tensor, text: list[int] | None = None) -> Tensor:
        return TwoViews(plain)(
            x, Relation(none, none, none.double(), text=None if text is None else torch.tensor(text))
        ).loss

    def slow(x: Tensor, text: list[int] | None = None) -> Tensor:
        rows = reference.rows_of(torch.cat(x.chunk(2, dim=1)))
        return reference.forward_loss(rows, [(n, n + 6, 1.0) for n in range(6)], 0.05, 0.5, text and text * 2)

    for text in (None, [0, 1, 2, 0, 4, 5]):
        assert_close(
            reference.value_and_gradient(lambda x, t=text: ours(x, t), x_N2D),
            reference.value_and_gradient(lambda x, t=text: slow(x, t), x_N2D),
            rtol=1e-10, atol=1e-10,
        )  # fmt: skip
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    theirs = losses.MultipleNegativesRankingLoss(nn.Identity(), scale=20.0)
    views = list(x_N2D.chunk(2, dim=1))
    assert_close(ours(x_N2D), theirs.compute_loss_from_embeddings(views, None))


def test_views_differ_by_dropout_in_training_only(tmp_path: Path) -> None:
    """Texts in a trie and padded texts; a batch of 24 texts is encoded once or twice with the same gradient."""
    folder = save_tiny_base("llama", tmp_path / "base")
    for layout in ("auto", "padded"):
        encoder = SentenceEncoder.from_pretrained(folder, device="cpu", dtype="float32", layout=layout)  # type: ignore[arg-type]
        encoder.add_lora(LoraSettings(rank=4, dropout=0.2))
        for name, weight in encoder.model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight)
        encoder = with_task("simcse", encoder, folder)
        assert encoder.encode(TEXTS).shape == (24, 32)
        assert encoder.layouts.layout == ("trie" if layout == "auto" else "padded")
        batch = TextBatch.from_examples([PositivePair(text, text) for text in TEXTS])
        plan = encoder.plan(batch.texts, 300)
        encoder.model.train()
        first, second = encoder.model(**micro_batches_of(plan)[0].inputs(torch.device("cpu"))).chunk(2, dim=1)
        assert (first - second).norm(dim=1).min() > 1e-3 * first.norm(dim=1).max()
        gradients = []
        for graph_tokens in (0, 10**6):
            torch.manual_seed(0)
            encoder.model.zero_grad()
            group_step(
                encoder.model, plan, [PlannedBatch(batch, TwoViews(AngleObjective()), {})], graph_tokens=graph_tokens
            )
            gradients.append([weight.grad.clone() for weight in encoder.model.parameters() if weight.grad is not None])
        assert_close(gradients[0], gradients[1])


def run_file(folder: Path, task: str, base: Path, **changed: Any) -> Path:
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    values: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "resume": "auto",
        "model": {"path": str(base), "dtype": "float32", **({"attention": "bidirectional"} if task == "mntp" else {})},
        "lora": {"rank": 2, **({"dropout": 0.1} if task == "simcse" else {})},
        "data": {"path": str(folder / "texts.txt"), "format": "text"},
        "pretraining": {"task": task},
        "batch_size": 8,
        "epochs": 2,
        "checkpoint": {"every_steps": 2},
    }
    (folder / "config.yaml").write_text(json.dumps(values | changed))
    return folder / "config.yaml"


@pytest.mark.parametrize("task", ["mntp", "simcse"])
def test_a_run_resumes_and_its_adapter_is_trained_further(task: str, tmp_path: Path) -> None:
    base = save_language_model(tmp_path / "base")
    settings = load_settings(TrainSettings, run_file(tmp_path, task, base))
    fine_tune(settings)
    lines = read_metrics(settings.run_path)
    assert len(lines) == 6
    assert {"loss", f"loss/{'mntp' if task == 'mntp' else 'in_batch'}"} <= lines[0].keys()
    assert ("cosine/in_batch" in lines[0]) == (task == "simcse")
    if task == "simcse":
        assert all(line["cosine/positives"] > 0.99 and line["cosine/margin"] > 0 for line in lines)  # of two views
    expected = outcome(settings.run_path)
    (settings.run_path / "result.json").unlink()
    shutil.rmtree(max((settings.run_path / "checkpoints").glob("step-*")))
    fine_tune(settings)
    assert outcome(settings.run_path) == expected

    encoder = SentenceEncoder.from_pretrained(settings.run_path / "model", device="cpu")
    assert encoder.attention == ("bidirectional" if task == "mntp" else None)
    assert encoder.pooling == ("mean" if task == "mntp" else "last")
    further = replace(
        settings,
        model=replace(settings.model, path=str(settings.run_path / "model"), attention=None),
        data=replace(settings.data, path="starter:nli_triples.jsonl.gz", format="auto", limit=16),
        pretraining=PretrainingSettings(),
        run_dir=str(tmp_path / "further"),
    )
    assert SentenceEncoder.from_pretrained(fine_tune(further).folder, device="cpu").attention == encoder.attention


def test_a_first_step_without_a_masked_token_is_allowed(tmp_path: Path) -> None:
    base = save_language_model(tmp_path / "base")
    rare = {"task": "mntp", "mask_fraction": 0.02}
    config = run_file(tmp_path, "mntp", base, pretraining=rare, batch_size=1, epochs=1, seed=3)
    settings = load_settings(TrainSettings, config)
    fine_tune(settings)
    first, *others = read_metrics(settings.run_path)
    assert first["loss/mntp"] == first["gradient_norm"] == 0
    assert any(line["loss/mntp"] > 0 for line in others)


def test_the_command_trains_on_lines_of_text(tmp_path: Path) -> None:
    """A settings file with one value of a group keeps the other defaults of the command."""
    base = save_language_model(tmp_path / "base")
    run_file(tmp_path, "mntp", base)
    (tmp_path / "part.yaml").write_text("pretraining: {mask_fraction: 0.3}\ndata: {path: texts.txt}\nbatch_size: 8\n")
    words = ["--model.path", str(base), "--model.attention", "bidirectional", "--run-dir", "run"]
    done = run("angle-llm", "pretrain", "--config", "part.yaml", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "24 of 24 rows used as text" in done.stdout
    assert "texts/s" in done.stderr
    assert "angle-llm train --model.path run/model --data.path pairs.jsonl" in done.stdout
    assert (tmp_path / "run/model/adapter_model.safetensors").is_file()
    settings = load_settings(TrainSettings, tmp_path / "run/settings.yaml")
    assert (settings.pretraining, settings.data.format) == (PretrainingSettings("mntp", 0.3), "text")


@pytest.mark.parametrize("strategies", [[], pytest.param(["ZeRO-2"], marks=pytest.mark.slow)])
def test_masked_tokens_do_not_depend_on_the_number_of_processes(strategies: list[str], tmp_path: Path) -> None:
    base = save_language_model(tmp_path / "base")
    run_file(tmp_path, "mntp", base)
    more = "\n".join(f"{text} Then it sleeps." for text in TEXTS)
    (tmp_path / "more.txt").write_text(more)
    sets = [{"path": str(tmp_path / name), "format": "text"} for name in ("texts.txt", "more.txt")]
    config = run_file(tmp_path, "mntp", base, data={"sets": sets}, resume="never")
    printed = program("distributed_runs.py", str(tmp_path), "mixture", str(config), *strategies)
    assert printed.count("losses differ by") == 2 + len(strategies)


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("llama", {"model": {"attention": None}}, "Set --model.attention bidirectional"),
        ("gemma2", {}, "gemma2 changes them"),
        ("llama", {"nested": {"dimensions": [8]}}, "--pretraining.task and --nested exclude"),
        ("llama", {"objective": {"angle_weight": 1}}, r"--pretraining.task and --objective\.\* exclude"),
        (
            "llama",
            {"pretraining": {"task": "simcse"}, "objective": {"kl_weight": 1}},
            "--pretraining.task and --objective.kl-weight exclude",
        ),
        (
            "llama",
            {"pretraining": {"task": "simcse"}, "objective": {"cosine_weight": 1}},
            "--pretraining.task and --objective.cosine-weight exclude",
        ),
        (
            "llama",
            {"pretraining": {"task": "simcse"}, "objective": {"class_weight": 1}},
            "--pretraining.task and --objective.class-weight exclude",
        ),
        ("llama", {"pretraining": {"task": "simcse"}}, "Set --lora.dropout 0.1"),
    ],
)
def test_refused_settings(kind: str, changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = save_language_model(
        tmp_path / "base", kind, **({"final_logit_softcapping": 1.0} if kind == "gemma2" else {})
    )
    model = {"path": str(base), "dtype": "float32", "attention": "bidirectional"} | changed.pop("model", {})
    config = run_file(tmp_path, "mntp", base, model=model, **changed)
    with pytest.raises(SettingsError, match=message):
        fine_tune(load_settings(TrainSettings, config))


def test_a_model_without_an_output_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a language model with its output layer.*lm_head"):
        encoder_of(save_tiny_base("llama", tmp_path / "base"))


def test_single_texts_are_refused_without_pretraining(tmp_path: Path) -> None:
    config = run_file(tmp_path, "mntp", save_tiny_base("llama", tmp_path / "base"), pretraining={"task": None})
    with pytest.raises(RuntimeError, match="all pair a text with itself"):
        fine_tune(load_settings(TrainSettings, config))
