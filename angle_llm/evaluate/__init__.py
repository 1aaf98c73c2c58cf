"""Evaluation of an encoder: STS, transfer, retrieval, fewer layers and dimensions, MTEB. Imports no model."""

from angle_llm.evaluate.bootstrap import Interval, compare
from angle_llm.evaluate.correlation import PairScores, UndefinedCorrelationError, pearson, spearman
from angle_llm.evaluate.retrieval import evaluate_retrieval
from angle_llm.evaluate.retrieval_tasks import read_flickr30k, read_groups
from angle_llm.evaluate.sts import StsEvalSettings, evaluate, sts_main, sts_score
from angle_llm.evaluate.sts_report import PUBLISHED
from angle_llm.evaluate.sts_tasks import PUBLISHED_TASKS, StsPair, StsTask, read_pairs, read_task, select_tasks
from angle_llm.evaluate.transfer import evaluate_transfer
from angle_llm.evaluate.transfer_tasks import read_transfer_task

__all__ = [
    "PUBLISHED",
    "PUBLISHED_TASKS",
    "Interval",
    "PairScores",
    "StsEvalSettings",
    "StsPair",
    "StsTask",
    "UndefinedCorrelationError",
    "compare",
    "evaluate",
    "evaluate_retrieval",
    "evaluate_transfer",
    "pearson",
    "read_flickr30k",
    "read_groups",
    "read_pairs",
    "read_task",
    "read_transfer_task",
    "select_tasks",
    "spearman",
    "sts_main",
    "sts_score",
]
