"""The transfer command: settings, and what happens between them and the printed table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from angle_llm.evaluate.opening import EncoderSettings, OpenEncoder, encode_with, open_from, remark_on, used_by
from angle_llm.evaluate.transfer import TransferResults, evaluate_transfer
from angle_llm.evaluate.transfer_classifiers import FOLD_SEED, FOLDS
from angle_llm.evaluate.transfer_report import transfer_dict, transfer_report
from angle_llm.evaluate.transfer_tasks import TransferTask, available_transfer_tasks, read_transfer_task
from angle_llm.io import write_json


@dataclass(frozen=True, kw_only=True)
class TransferSettings(EncoderSettings):
    """Accuracy of a linear classifier on frozen vectors, on SentEval's transfer tasks, beside the published figures."""

    data_dir: Path
    """Directory with transfer/ and mrpc/, or SentEval's own download (data/downstream, with MR/, CR/, …)."""

    tasks: tuple[str, ...] = ()
    """mr, cr, subj, mpqa, sst2, trec, mrpc. Empty: every one that is there."""

    limit_train: int | None = None
    """Take at most this many training examples of a task, at random (of all its examples where folds are tested).
    Quicker, and another figure: the table says so."""

    drop_repeated: bool = False
    """Leave out training examples whose exact text is tested elsewhere. SentEval keeps them; they are counted either way."""

    folds: int = FOLDS
    """Folds of every cross-validation; the published tables have 10."""

    seed: int = FOLD_SEED
    """Seed of the folds and of the sample. SentEval's is 1111."""


def transfer_main(settings: TransferSettings, open_encoder: OpenEncoder) -> TransferResults:
    """Read the tasks, open the encoder, evaluate, print the report and write the JSON file where one is asked for.

    Data and output are checked before the model is opened, so that a typing mistake costs no waiting.
    """
    tasks = select_transfer_tasks(settings.tasks, settings.data_dir)
    if settings.json is not None:
        settings.json.parent.mkdir(parents=True, exist_ok=True)
    encoder = open_from(settings, open_encoder)
    results = evaluate_transfer(
        encode_with(encoder, settings.micro_batch_tokens),
        tasks,
        limit_train=settings.limit_train,
        drop_repeated=settings.drop_repeated,
        folds=settings.folds,
        seed=settings.seed,
    )
    print(transfer_report(results, settings.model, [remark_on(encoder)]), end="")
    if settings.json is not None:
        content = transfer_dict(results, settings.model, settings=asdict(settings), encoder=used_by(encoder))
        write_json(settings.json, content)
    return results


def select_transfer_tasks(names: tuple[str, ...], data_dir: Path) -> list[TransferTask]:
    """The tasks called `names`, or every one whose files are below `data_dir`."""
    names = names or tuple(available_transfer_tasks(data_dir))
    if not names:
        raise FileNotFoundError(
            f"no transfer task below {data_dir}. Needed: transfer/mr.tsv, transfer/sst2.train.tsv …, mrpc/train.tsv, or "
            "SentEval's own folders MR/, CR/, SST/binary/ …"
        )
    return [read_transfer_task(data_dir, name) for name in names]
