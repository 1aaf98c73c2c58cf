"""How good is it: functions from an `encode` callable to numbers. This room knows no model."""

from angle_llm.evaluation.command import StsEvalSettings, select_tasks, sts_main
from angle_llm.evaluation.published import PUBLISHED, PublishedRow
from angle_llm.evaluation.report import markdown_report, results_dict, write_json
from angle_llm.evaluation.sts import (
    Encode,
    Encoder,
    Figures,
    StsResults,
    TaskResult,
    UndefinedCorrelationError,
    evaluate,
    pair_cosines,
    pearson,
    spearman,
    sts_score,
)
from angle_llm.evaluation.tasks import (
    PUBLISHED_TASKS,
    TASKS,
    StsPair,
    StsTask,
    TextVariant,
    available_tasks,
    read_pairs,
    read_task,
)

__all__ = [
    "PUBLISHED",
    "PUBLISHED_TASKS",
    "TASKS",
    "Encode",
    "Encoder",
    "Figures",
    "PublishedRow",
    "StsEvalSettings",
    "StsPair",
    "StsResults",
    "StsTask",
    "TaskResult",
    "TextVariant",
    "UndefinedCorrelationError",
    "available_tasks",
    "evaluate",
    "markdown_report",
    "pair_cosines",
    "pearson",
    "read_pairs",
    "read_task",
    "results_dict",
    "select_tasks",
    "spearman",
    "sts_main",
    "sts_score",
    "write_json",
]
