"""Insert faults into the code, one at a time, and check that the tests detect them.

    python tests/faults.py                     # all faults, about a minute each
    python tests/faults.py --list
    python tests/faults.py partner-as-negative cut-prompt-tail

A fault is a snippet of a function and what replaces it. The function is found by its qualified name in any file of
`angle_llm/`, so that files can move; a snippet that does not occur exactly once must be updated. The tests
run in a temporary git worktree of HEAD; they must pass without the fault, and fail with it.
"""

import argparse
import ast
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTEST = f"{shlex.quote(sys.executable)} -m pytest -n 0 -q -p no:cacheprovider"


class Fault(NamedTuple):
    """A fault: its place, its change, and the tests that detect it: FILE or FILE::NAME or FILE -k EXPRESSION."""

    name: str
    function: str
    old: str
    new: str
    tests: str


def contract(file: str, expression: str) -> str:
    """Selection of tests in a contract file."""
    return f"tests/contract/test_contract_{file}.py -k {expression}"


LOSSES = "tests/losses/test_angle.py -k slow_formula"
NEGATIVES = "tests/losses/test_negatives.py -k slow_formula"
STOPPED, TWO = contract("resume", "same_bytes"), "tests/train/test_distributed.py -k 'same_adapter and short'"
MERGED = "tests/model/test_lora.py -k update_equals"
TRIE = "tests/model/test_token_sequence.py -k rows_equal"

FAULTS = [
    # losses
    Fault("swapped-halves", "_complex_halves", "return x_PD[:, : columns // 2], x_PD[:, columns // 2 :]",
          "return x_PD[:, columns // 2 :], x_PD[:, : columns // 2]", LOSSES),
    Fault("ties-are-ranked", "ranking_loss", "searchsorted(score_P, score_P)",
          "searchsorted(score_P, score_P, right=True)", LOSSES),
    Fault("wrong-temperature", "AngleObjective.terms", "self.in_batch_temperature", "self.cosine_temperature", LOSSES),
    Fault("signed-phase", "angle_phase", "torch.atan2(imaginary_PH.abs(), real_PH)",
          "torch.atan2(imaginary_PH, real_PH)", LOSSES),
    Fault("partner-as-negative", "_partners", "key = torch.unique(text * texts + partner)",
          "key = torch.unique((text * texts + partner)[2 * len(edges.anchor_M) :])", LOSSES),
    Fault("mean-over-edges", "contrastive_loss", "loss_M.div(divisor_M).sum()", "loss_M.mean()", LOSSES),
    Fault("margin-added", "FalseNegatives.threshold", "positive - (self.margin or 0)", "positive + (self.margin or 0)",
          NEGATIVES),
    Fault("own-negatives-left-out", "NegativeLogSum._false_mask", 'scope == "in_batch"', 'scope == ""', NEGATIVES),
    Fault("single-score-as-group", "kl_loss", "size_Q >= 2", "size_Q >= 1",
          "tests/losses/test_teachers.py -k different_sizes"),
    Fault("text-itself-taught", "_TeacherExpectation._blocks", "p_ac[self.skips.inside(a, c, x_ND.device)] = 0", "pass",
          "tests/losses/test_teachers.py -k slow_formula"),
    Fault("text-of-views-forgotten", "TwoViews.views", "text=torch.cat((text_N, text_N))", "text=None",
          "tests/train/test_pretraining.py -k slow_formula"),
    Fault("mask-token-masked", "TokenMasker.of", "{*tokenizer.all_special_ids, int(mask_id)}", "tokenizer.all_special_ids",
          "tests/train/test_pretraining.py -k llm2vec"),
    Fault("one-causal-layer", "check_and_simplify_bidirectional",
          "probes_as_causal(backbone) or other_layers(config)", "probes_as_causal(backbone)",
          "tests/model/test_bidirectional.py -k refused_by_name"),
    Fault("first-task-only", "HeldOutEvaluation.verdict", "for task in self.tasks.values():",
          "for task in list(self.tasks.values())[:1]:", "tests/train/test_trainer.py -k covers_all_tasks"),
    # compiled functions of a GPU
    Fault("lost-nan", "largest", "float(torch.tensor(list(values), dtype=torch.float64, device=\"cpu\").max())",
          "max(values)",
          "tests/model/test_layers.py -k differ_when_compiled"),
    Fault("few-tokens-in-the-probe", "_probe", "states(full * -(-len(padded_RD) // sum(map(len, full))), _PADDING)",
          "states(full, _PADDING)",
          "tests/model/test_attention.py -k kernels_that"),
    Fault("no-padding-in-the-probe", "_probe", "sum(map(len, full))), _PADDING)",
          "sum(map(len, full))))",
          "tests/model/test_attention.py -k kernels_that"),
    Fault("compiled-rotary-kept", "load_encoder", 'kernel = "attention of the library"',
          'kernel = "attention of the library"; use_compiled_rotary(encoder.model)',
          "tests/train/test_trainer.py -k padded_texts_use_no_compiled"),
    # texts and tokens
    Fault("missing-deduplication", "plan_micro_batches", "texts = list(row_of_ids)",
          "row_of, texts = list(range(len(ids))), [tuple(text) for text in ids]",
          "tests/model/test_micro_batches.py -k share_a_row"),
    Fault("cut-prompt-tail", "SentenceTokenizer._apply", "[before + ids + after for ids in ids_of_texts]",
          "[(before + ids + after)[: self._text_tokens] for ids in ids_of_texts]",
          "tests/model/test_tokenizer.py -k prompt_is_complete"),
    Fault("special-tokens-parsed", "plain_ids", "split_special_tokens=True", "split_special_tokens=False",
          "tests/model/test_tokenizer.py -k inert"),
    Fault("edits-skipped", "SentenceTokenizer.__call__", "self.prompt.edit(texts[position])", "texts[position]",
          "tests/model/test_chat_template.py -k head_and_tail"),
    Fault("sides-are-two-texts", "relations", "text = text_of_row(batch.texts, row_of_N)", "text = None",
          "tests/train/test_two_sides.py -k slow_formulas"),
    Fault("documents-read-as-queries", "SideTokenizers.selected", 'self.side == "document"', "False",
          "tests/test_sides.py -k each_side"),
    # encoding
    Fault("padding-on-the-left", "_padded_group", "pad_sequence(ids, batch_first=True)",
          'pad_sequence(ids, batch_first=True, padding_side="left")',
          "tests/model/test_micro_batches.py -k padded_micro_batches"),
    Fault("last-column-pooled", "last_position",
          "position_B = (mask_BT * torch.arange(1, tokens + 1, device=mask_BT.device)).argmax(dim=1)",
          "position_B = torch.full((texts,), tokens - 1, device=mask_BT.device)", "tests/model/test_pooling.py -k loop_over"),
    Fault("trie-sees-the-next-token", "_SequenceContext.mask", "hidden_UQL = key_L > (", "hidden_UQL = key_L > 1 + (",
          TRIE),
    Fault("trie-position-from-branch", "build_sequence", "np.arange(common, len(text))", "np.arange(len(text) - common)",
          TRIE),
    Fault("packed-sees-padding", "_SequenceContext.mask", "key_L >= group.length_U", "key_L > group.length_U",
          "tests/model/test_attention.py -k packed_texts_equal"),
    Fault("blocks-too-few", "mask_blocks", "(end_JB.max(axis=1) > first_I)", "(end_JB.max(axis=1) > first_I + 1)",
          "tests/model/test_attention.py -k block_masks"),
    Fault("order-not-restored", "encode_blocks", "copied_UD.numpy()[plan.row_of]",
          "copied_UD.numpy()[sorted(plan.row_of)]",
          "tests/model/test_encoder.py -k equals_the_plain_model_alone"),
    Fault("length-of-the-folder-ignored", "SentenceTransformersFolder.length_for",
          "self.max_length or tokenizer.model_max_length", "tokenizer.model_max_length",
          "tests/model/test_sentence_transformers_folder.py -k saved_encoders"),
    Fault("adapter-not-continued", "load_encoder", "make_trainable(encoder.model.backbone)", "encoder.model.requires_grad_()",
          "tests/train/test_continued.py -k in_memory"),
    Fault("wrong-base-accepted", "EncoderCard.check_base", "self.base_fingerprint not in (None, fingerprint)",
          "self.base_fingerprint == ''",
          "tests/model/test_depth.py -k fingerprint_of_the_whole"),
    Fault("label-not-shifted", "TokenPrediction.sums", "[index_M - 1]", "[index_M]",
          "tests/train/test_pretraining.py -k language_model"),
    Fault("masks-of-the-first-epoch", "TokenMasker._codes", "[self.seed, epoch,", "[self.seed, 0,",
          "tests/train/test_pretraining.py -k llm2vec"),
    Fault("views-share-dropout", "TwoViewsHead.outputs", "[model.pooled(batch), model.pooled(batch)]",
          "[model.pooled(batch)] * 2", "tests/train/test_pretraining.py -k differ_by_dropout"),
    # training
    Fault("cached-step-drops-texts", "RecomputedGraphs.backward", "zip(self._micro_batches, self._states, strict=True)",
          "zip(self._micro_batches[:1], self._states[:1], strict=True)", contract("train", "plain_transformers")),
    Fault("weight-ignored", "loss_and_gradient", "value.loss * weight", "value.loss",
          "tests/train/test_batches.py -k mixed_batch"),
    Fault("rows-of-the-first-batch", "relations", "plan.row_of[first : first + len(batch)]",
          "plan.row_of[: len(batch)]", "tests/train/test_groups.py -k batches_together"),
    Fault("guide-rows-of-texts", "relations", "tensor[first_text]", "tensor[: len(first_text)]",
          "tests/train/test_precomputed_vectors.py -k its_side"),
    Fault("warm-up-from-zero", "rate_share", "lr_lambdas[0](step)", "lr_lambdas[0](step - 1)",
          contract("train", "a_run_leaves")),
    Fault("remainder-dropped", "Draws.batches", "-(-count // batch_size)", "count // batch_size", STOPPED),
    Fault("worst-model-kept", "BestModel.evaluate", "score > best", "score < best",
          "tests/train/test_trainer.py -k best_model_is_kept"),
    Fault("random-state-not-restored", "Checkpoints.resume", "processes.rank < len(states)", "not states", STOPPED),
    Fault("gradient-scale-kept", "DataParallelStrategy.update", "weight.grad.div_(scale.factor)", "weight.grad.div_(1)",
          "tests/train/test_float16.py -k clipping"),
    Fault("gradient-scale-not-restored", "Checkpoints.resume", "GradientScale(**values[\"scale\"])", "strategy.scale",
          "tests/train/test_float16.py -k resumes"),
    Fault("optimizer-not-restored", "DataParallelStrategy.load_state", "= tensor.clone()", "= torch.zeros_like(tensor)",
          STOPPED),
    Fault("epoch-restarted-on-resume", "StepSchedule.after", "first=first", "first=0", STOPPED),
    Fault("checksum-ignored", "check_files", 'sha256_of(path) != entry["sha256"]', "not sha256_of(path)",
          "tests/train/test_checkpoint.py -k damage_is_reported"),
    Fault("wrong-rank-slice", "group_step", "plan.share(strategy.processes.rank)", "plan.share(0)", TWO),
    Fault("gradients-not-summed", "DataParallelStrategy._sum_gradients", "self.processes.world_size == 1",
          "self.processes.world_size >= 1", TWO),
    # data
    Fault("quarantined-rows-kept", "write_fixed", "report.removed.get(", "{}.get(", contract("data", "fix_keeps")),
    Fault("swapped-pair-missed", "pair_key", "key(*sorted((left, right)))", "key(left, right)",
          "tests/tools/test_check.py -k two_labels"),
    Fault("cluster-not-refused", "refused_candidates", "cluster_T[window.text_W] == cluster_T[window.query.text]",
          "cluster_T[window.text_W] < 0", "tests/tools/test_mine.py -k rule_refuses"),
    # files and vectors
    Fault("skipped-fsync", "write_file", "sync(temporary)", "pass", "tests/test_io.py"),
    Fault("damaged-shard-kept", "ResumableFolder.is_whole", "self.check(name)", "self.manifest(name)",
          contract("embed", "killed")),
    Fault("scaled-before-the-cut", "VectorForm.stored", "np.linalg.norm(rows, axis", "np.linalg.norm(rows_ND, axis",
          "tests/model/test_vectors.py -k cut_before"),
    Fault("farthest-found", "best", "np.argsort(-score_QC", "np.argsort(score_QC",
          "tests/tools/test_search.py -k brute_force"),
    # export
    Fault("dense-not-merged", "_write_usage", "dense_folders(source, card.dense)", "()",
          "tests/model/test_dense.py -k keeps_or_trains"),
    Fault("dense-of-any-weights", "_facts", "read_dense(source.dense, ", "read_dense(source.dense[:0], ",
          "tests/model/test_dense.py -k not_merged"),
    Fault("merged-in-bfloat16", "LoraUpdate.merged", "weight_OI.addmm_(self.b_OR, self.a_RI, alpha=self.scaling)",
          "weight_OI.add_(self.scaling * (self.b_OR.bfloat16() @ self.a_RI.bfloat16()).float())", MERGED),
    Fault("scale-without-rank", "read_adapter", "/ (math.sqrt(rank) if", "/ (1.0 if True else math.sqrt(rank) if", MERGED),
    Fault("verify-always-holds", "verify_main", "0 if result.holds else 1", "0", contract("export", "verify")),
]  # fmt: skip


def place(tree: Path, fault: Fault) -> tuple[Path, str]:
    """File of a fault's function below a tree, and the text of the file with the fault."""
    found = []
    for path in sorted((tree / "angle_llm").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for first, last in functions(ast.parse(text), fault.function) if fault.old in text else ():
            lines = text.splitlines(keepends=True)
            body = "".join(lines[first:last])
            if fault.old in body:
                found.append((path, "".join([*lines[:first], body.replace(fault.old, fault.new), *lines[last:]])))
    if len(found) != 1:
        raise LookupError(f"{fault.name}: expected {fault.old!r} in one function {fault.function}, found {len(found)}")
    return found[0]


def functions(node: ast.AST, name: str) -> list[tuple[int, int]]:
    """First and last line, as a slice, of each function of a qualified name."""
    head, _, rest = name.partition(".")
    found: list[tuple[int, int]] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name == head:
            found += functions(child, rest) if rest else [(child.lineno - 1, child.end_lineno or child.lineno)]
        elif isinstance(child, ast.If | ast.Try):
            found += functions(child, name)
    return found


def run(tree: Path, pytest: str, tests: list[str]) -> int:
    """Exit code of the tests of this checkout on the package of a tree; 1 if they hang."""
    words = [str(ROOT / word) if word.startswith("tests/") else word for test in tests for word in shlex.split(test)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "ANGLE_LLM_TREE": str(tree), "OMP_NUM_THREADS": "1"}
    command = [*shlex.split(pytest), "-x", "--no-header", "--tb=no", *words]
    try:
        return subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=900, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return 1


def main() -> None:
    """Reports for each fault whether it was caught; exit code 1 if one was not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults to try (default: all)")
    parser.add_argument("--list", action="store_true", help="print the faults and whether their snippets are found")
    parser.add_argument("--ref", default="HEAD", help="the commit whose package gets the faults")
    parser.add_argument("--pytest", default=PYTEST, help="the command that runs the tests")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a fault first")
    given = parser.parse_args()
    if unknown := set(given.names) - {fault.name for fault in FAULTS}:
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}")
    chosen = [fault for fault in FAULTS if fault.name in (given.names or fault.name)]
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), given.ref], check=True)
        try:
            sys.exit(1 if try_all(tree, chosen, given) else 0)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def try_all(tree: Path, chosen: list[Fault], given: argparse.Namespace) -> int:
    """Number of faults that were not caught or not found."""
    missed = 0
    if not (given.list or given.no_baseline) and run(
        tree, given.pytest, sorted({fault.tests.split(" ")[0] for fault in chosen})
    ):
        sys.exit("the tests fail without a fault")
    for fault in chosen:
        try:
            path, text = place(tree, fault)
        except LookupError as error:
            print(error, flush=True)
            missed += 1
            continue
        if given.list:
            print(f"{fault.name:28} {path.relative_to(tree)}: {fault.function}")
            continue
        whole = path.read_bytes()
        path.write_text(text, encoding="utf-8")
        code = run(tree, given.pytest, [fault.tests])
        path.write_bytes(whole)
        verdict = {0: "NOT CAUGHT", 1: "caught"}.get(code, f"pytest ended with {code}: no verdict")
        print(f"{fault.name:28} {verdict}", flush=True)
        missed += code != 1
    return missed


if __name__ == "__main__":
    main()
