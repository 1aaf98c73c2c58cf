"""Evaluate encoders on STS, retrieval and MTEB tasks. Importing this package does not import torch."""

from angle_llm.evaluate.bootstrap import Interval, PairScores, UndefinedCorrelationError, compare, pearson, spearman
from angle_llm.evaluate.retrieval import evaluate_retrieval
from angle_llm.evaluate.retrieval_tasks import read_groups
from angle_llm.evaluate.sts import PUBLISHED, evaluate, sts_score
from angle_llm.evaluate.sts_tasks import PUBLISHED_TASKS, StsPair, StsTask, read_pairs, read_task, select_tasks

__all__ = [
    "PUBLISHED",
    "PUBLISHED_TASKS",
    "Interval",
    "PairScores",
    "StsPair",
    "StsTask",
    "UndefinedCorrelationError",
    "compare",
    "evaluate",
    "evaluate_retrieval",
    "pearson",
    "read_groups",
    "read_pairs",
    "read_task",
    "select_tasks",
    "spearman",
    "sts_score",
]
