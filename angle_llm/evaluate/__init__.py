"""Evaluation of an encoder: STS, transfer, retrieval, fewer layers and dimensions, MTEB. Imports no model."""

from angle_llm.evaluate.bootstrap import (
    Comparison,
    Difference,
    Interval,
    compare,
    mean_interval,
    percentile_interval,
    resampled_means,
    resampled_spearman,
    two_sided_p,
)
from angle_llm.evaluate.correlation import PairScores, UndefinedCorrelationError, pair_cosines, pearson, spearman
from angle_llm.evaluate.encoding import Encode, Encoder
from angle_llm.evaluate.retrieval import RetrievalResults, evaluate_retrieval
from angle_llm.evaluate.retrieval_tasks import RetrievalTask, groups_task, read_flickr30k, read_groups, read_judged
from angle_llm.evaluate.sts import StsEvalSettings, evaluate, sts_main, sts_score
from angle_llm.evaluate.sts_report import PUBLISHED, PublishedRow, markdown_report, read_scores, results_dict
from angle_llm.evaluate.sts_results import Correlations, Means, StsResults, TaskResult
from angle_llm.evaluate.sts_tasks import (
    PUBLISHED_TASKS,
    TASKS,
    StsPair,
    StsTask,
    TextVariant,
    available_tasks,
    edited,
    read_pairs,
    read_task,
    select_tasks,
    variant_of,
)
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
    "Correlations",
    "Difference",
    "Encode",
    "Encoder",
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
