"""How good is it: functions from an `encode` callable to numbers. This room knows no model."""

from angle_llm.evaluate.command import StsEvalSettings, select_tasks, sts_main
from angle_llm.evaluate.comparison import Comparison, Difference, compare
from angle_llm.evaluate.correlation import UndefinedCorrelationError, pair_cosines, pearson, spearman
from angle_llm.evaluate.encoding import Encode, Encoder
from angle_llm.evaluate.pairs import StsPair, StsTask, edited, read_pairs
from angle_llm.evaluate.published import PUBLISHED, PublishedRow
from angle_llm.evaluate.report import markdown_report
from angle_llm.evaluate.resampling import (
    Interval,
    mean_interval,
    percentile_interval,
    resampled_means,
    resampled_spearman,
    two_sided_p,
)
from angle_llm.evaluate.retrieval import RetrievalResults, evaluate_retrieval
from angle_llm.evaluate.retrieval_tasks import RetrievalTask, groups_task, read_flickr30k, read_groups, read_judged
from angle_llm.evaluate.sts import Figures, Means, PairScores, StsResults, TaskResult, evaluate, sts_score
from angle_llm.evaluate.sts_files import read_scores, results_dict
from angle_llm.evaluate.tasks import PUBLISHED_TASKS, TASKS, TextVariant, available_tasks, read_task, variant_of
from angle_llm.evaluate.transfer import TransferResults, evaluate_transfer
from angle_llm.evaluate.transfer_tasks import (
    TRANSFER_TASKS,
    TransferTask,
    available_transfer_tasks,
    read_transfer_task,
)

__all__ = [
    "PUBLISHED",
    "PUBLISHED_TASKS",
    "TASKS",
    "TRANSFER_TASKS",
    "Comparison",
    "Difference",
    "Encode",
    "Encoder",
    "Figures",
    "Interval",
    "Means",
    "PairScores",
    "PublishedRow",
    "RetrievalResults",
    "RetrievalTask",
    "StsEvalSettings",
    "StsPair",
    "StsResults",
    "StsTask",
    "TaskResult",
    "TextVariant",
    "TransferResults",
    "TransferTask",
    "UndefinedCorrelationError",
    "available_tasks",
    "available_transfer_tasks",
    "compare",
    "edited",
    "evaluate",
    "evaluate_retrieval",
    "evaluate_transfer",
    "groups_task",
    "markdown_report",
    "mean_interval",
    "pair_cosines",
    "pearson",
    "percentile_interval",
    "read_flickr30k",
    "read_groups",
    "read_judged",
    "read_pairs",
    "read_scores",
    "read_task",
    "read_transfer_task",
    "resampled_means",
    "resampled_spearman",
    "results_dict",
    "select_tasks",
    "spearman",
    "sts_main",
    "sts_score",
    "two_sided_p",
    "variant_of",
]
